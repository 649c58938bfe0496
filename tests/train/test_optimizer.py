"""AdamW against NumPy, the schedule, clipping, gradients that are not finite, float32 masters of bf16."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posttrain import cli, config
from posttrain.algorithms.ppo import PPO
from posttrain.commands import plan
from posttrain.errors import UserError
from posttrain.runs.write import RunWriter
from posttrain.stages import base
from posttrain.stages._material import Data
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train import optimizer as optimizer_module
from posttrain.train.optimizer import Learner, Optimization, Optimizer

WIDE = torch.float64


class Small(nn.Module):
    """A matrix, a vector and a number."""

    def __init__(self, dtype: torch.dtype = WIDE):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("matrix", (3, 2)), ("vector", (4,)), ("number", ())):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)))


def put(module: nn.Module, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype).clone()


def random_gradients(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, dtype=WIDE, generator=generator) for p in Small().parameters()]


def numpy_adamw(
    weights: list[np.ndarray], gradients: list[list[np.ndarray]], rates: list[float], s: Optimization
) -> list[np.ndarray]:
    """Loshchilov and Hutter's algorithm 2, with clipping by the norm of the whole gradient; vectors are not decayed."""
    first, second = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    weights = [w.copy() for w in weights]
    for t, (step, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float((g**2).sum()) for g in step))
        for i, g in enumerate(step):
            g = g * min(1.0, s.clip_norm / norm)
            first[i] = s.beta1 * first[i] + (1 - s.beta1) * g
            second[i] = s.beta2 * second[i] + (1 - s.beta2) * g**2
            corrected = first[i] / (1 - s.beta1**t) / (np.sqrt(second[i] / (1 - s.beta2**t)) + s.epsilon)
            decay = s.weight_decay if weights[i].ndim >= 2 else 0.0
            weights[i] = weights[i] - rate * decay * weights[i] - rate * corrected
    return weights


@pytest.mark.parametrize(
    "settings",
    [Optimization(lr=0.1, clip_norm=math.inf), Optimization(lr=0.1, weight_decay=0.3, clip_norm=1.0, beta2=0.95, epsilon=1e-6)],
)
def test_adamw_is_that_of_the_paper(settings: Optimization) -> None:
    module = Small()
    start = [p.detach().numpy().copy() for p in module.parameters()]
    optimizer = Optimizer(module, settings)
    rates = [settings.rate(step, 5) * (1 + step) for step in range(5)]
    steps = [random_gradients(seed) for seed in range(5)]
    for gradients, rate in zip(steps, rates, strict=True):
        put(module, gradients)
        optimizer.step(rate)
    expected = numpy_adamw(start, [[g.numpy() for g in step] for step in steps], rates, settings)
    for parameter, weight in zip(module.parameters(), expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-6)  # the norm is taken in float32


def test_schedules_by_hand() -> None:
    def rates(steps: int, **settings: object) -> list[float]:
        return [Optimization(lr=2.0, **settings).rate(step, steps) for step in range(steps)]

    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(4, warmup=4) == [0.5, 1.0, 1.5, 2.0]
    assert rates(4, schedule="linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates(4, schedule="linear", final=0.5) == [2.0, 1.75, 1.5, 1.25]
    assert rates(6, schedule="cosine", warmup=2) == pytest.approx([1.0, 2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert rates(1, schedule="cosine") == [2.0]
    assert rates(2, warmup=5) == pytest.approx([0.4, 0.8]), "a run shorter than its warm-up"


REFUSALS = [
    ({"lr": 0.0}, "lr must be above 0, not 0.0"),
    ({"warmup": -1}, "warmup must be a number of steps, not -1"),
    ({"schedule": "step"}, "schedule must be constant, linear or cosine, not 'step'"),
    ({"final": 2.0}, "final must be in [0, 1], not 2.0"),
    ({"beta1": 1.0}, "beta1 must be in [0, 1), not 1.0"),
    ({"weight_decay": -1.0}, "weight_decay must be at least 0, not -1.0"),
    ({"clip_norm": 0.0}, "clip_norm must be positive (inf for none), not 0.0"),
    ({"token_budget": 0}, "token_budget must be at least 1, not 0"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_refusals(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        Optimization(**settings)
    assert str(refusal.value) == message


def test_a_model_without_trainable_weights_is_refused() -> None:
    with pytest.raises(UserError, match="the model has no trainable parameters"):
        Optimizer(Small().requires_grad_(False), Optimization())


@pytest.mark.parametrize("clip", [0.1, 1.0, 50.0, math.inf])
def test_gradient_norm_clipping(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the norm of the whole gradient: at most `clip` after it, the direction unchanged, and no-op above the norm."""
    module = Small()
    optimizer = Optimizer(module, Optimization(clip_norm=clip))
    gradients = [3.0 * g for g in random_gradients(1)]
    put(module, gradients)
    seen: list[Tensor] = []
    monkeypatch.setattr(optimizer.adam, "step", lambda: seen.extend(p.grad.clone() for p in module.parameters()))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    assert optimizer.step(0.1) == pytest.approx(norm, rel=1e-6), "the norm before clipping is what is reported"
    after = math.sqrt(sum(float((g**2).sum()) for g in seen))
    assert after <= clip * (1 + 1e-6)
    factor = min(1.0, clip / norm)
    for clipped, gradient in zip(seen, gradients, strict=True):
        torch.testing.assert_close(clipped, factor * gradient, rtol=1e-6, atol=0)
        assert factor < 1 or torch.equal(clipped, gradient)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [WIDE, torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    """Weights, moments and step counts stay as they were, bit for bit, and the next good step is as if it had not been."""
    module, untouched = Small(dtype), Small(dtype)
    optimizer, other = (Optimizer(m, Optimization(lr=0.1, weight_decay=0.1)) for m in (module, untouched))
    for m, o in ((module, optimizer), (untouched, other)):
        backward(m, random_gradients(0))
        o.step(0.1)
    weights = [p.detach().clone() for p in module.parameters()]
    state = {name: t.clone() for name, t in optimizer.state().items()}
    gradients = random_gradients(1)
    gradients[1][2] = bad
    backward(module, gradients)
    assert not math.isfinite(optimizer.step(0.1))
    assert all(torch.equal(p, w) for p, w in zip(module.parameters(), weights, strict=True))
    assert all(torch.equal(t, state[name]) for name, t in optimizer.state().items())
    for m, o in ((module, optimizer), (untouched, other)):
        backward(m, random_gradients(2))
        o.step(0.1)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), untouched.parameters(), strict=True))


def backward(module: nn.Module, gradients: Sequence[Tensor]) -> None:
    """Give the parameters these gradients through autograd, as a micro-batch does."""
    torch.stack(
        [(p * g.to(p.dtype)).sum().double() for p, g in zip(module.parameters(), gradients, strict=True)]
    ).sum().backward()


def test_bf16_weights_have_float32_masters() -> None:
    """Sixteen micro-batches are summed in float32, and steps too small for bf16 are not lost."""
    module, wide = Small(torch.bfloat16), Small(torch.bfloat16).float()
    settings = Optimization(lr=1e-4, weight_decay=0.1)
    optimizer, reference = Optimizer(module, settings), Optimizer(wide, settings)
    start = [p.detach().clone() for p in module.parameters()]
    for step in range(20):
        for micro in range(16):
            gradients = [g.bfloat16().float() for g in random_gradients(100 * (micro % 4) + step % 3)]
            backward(module, gradients)
            assert all(p.grad is None for p in module.parameters()), "a bf16 gradient is handed over at once"
            for parameter, gradient in zip(wide.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        optimizer.step(1e-4)
        reference.step(1e-4)
    for name, parameter in wide.named_parameters():
        assert torch.equal(optimizer.masters[name], parameter)
        assert torch.equal(module.get_parameter(name), parameter.bfloat16())
    moved = [
        float((optimizer.masters[n] - s.float()).abs().max())
        for (n, _), s in zip(module.named_parameters(), start, strict=True)
    ]
    assert min(moved) > 1e-4


def test_all_bf16_weights_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call: the norm has been read, and a GPU waits for the host here."""
    own, written = torch._foreach_copy_, list[int]()
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, source: (written.append(len(to)), own(to, source))[1])
    for dtype in (torch.bfloat16, torch.float32):  # whose masters are the weights
        module = Small(dtype)
        optimizer = Optimizer(module, Optimization(lr=0.1))
        backward(module, random_gradients(1))
        optimizer.step(0.1)
    assert written == [len(list(module.parameters()))]


def test_a_second_stage_takes_over_bf16_gradients() -> None:
    """Two stages train the same model one after the other: the first one's optimizer must not swallow the gradients."""
    module = Small(torch.bfloat16)
    first = Optimizer(module, Optimization(lr=0.1))
    backward(module, random_gradients(0))
    first.step(0.1)
    second = Optimizer(module, Optimization(lr=0.1))
    before = [p.detach().clone() for p in module.parameters()]
    backward(module, random_gradients(1))
    assert second.step(0.1) > 0
    assert any(not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
    assert all(master.grad is None for master in first.masters.values())


def test_only_matrices_decay() -> None:
    module = Small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = Optimizer(module, Optimization(weight_decay=0.5))
    put(module, [torch.zeros(p.shape) for p in module.parameters()])
    optimizer.step(0.1)
    torch.testing.assert_close(module.get_parameter("matrix").data, 0.95 * before["matrix"])
    assert torch.equal(module.get_parameter("vector"), before["vector"])
    assert torch.equal(module.get_parameter("number"), before["number"])


def test_frozen_weights_stay() -> None:
    module = Small()
    module.get_parameter("vector").requires_grad_(False)
    optimizer = Optimizer(module, Optimization())
    assert list(optimizer.masters) == ["matrix", "number"]


@pytest.mark.parametrize("dtype", [WIDE, torch.float32, torch.bfloat16])
def test_state_and_restore_are_exact(dtype: torch.dtype) -> None:
    """Interrupted after three steps and taken up in a new process: the next three are the same to the last bit."""
    straight = Small(dtype)
    optimizer = Optimizer(straight, Optimization(lr=0.01, weight_decay=0.1))
    for seed in range(3):
        backward(straight, random_gradients(seed))
        optimizer.step(0.01)
    saved = {name: t.clone() for name, t in optimizer.state().items()}
    weights = {name: p.detach().clone() for name, p in straight.named_parameters()}

    resumed = Small(dtype)
    taken_up = Optimizer(resumed, Optimization(lr=0.01, weight_decay=0.1))
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(weights[name])
    taken_up.restore(saved)
    assert taken_up.state().keys() == saved.keys()
    assert all(torch.equal(t, saved[name]) for name, t in taken_up.state().items())
    for seed in range(3, 6):
        for module, one in ((straight, optimizer), (resumed, taken_up)):
            backward(module, random_gradients(seed))
            one.step(0.01)
    assert all(torch.equal(p, q) for p, q in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_run_goes_on_in_another_precision(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """As on another device: a GPU has weights of 16 bits, a CPU float32. The next step starts from what was trained."""
    settings = Optimization(lr=0.01)
    before, after = (Learner("policy", SimpleNamespace(model=Small(kind), sharded=None), settings) for kind in kinds)  # type: ignore[arg-type]
    for seed in range(3):
        backward(before.network.model, random_gradients(seed))
        before.optimizer.step(0.01)
    after.restore(before.weights(), before.moments())
    start = {name: m.detach().clone() for name, m in before.optimizer.masters.items()}
    assert all(torch.equal(m, start[name]) for name, m in after.optimizer.masters.items())
    for learner in (before, after):
        backward(learner.network.model, [g.bfloat16().float() for g in random_gradients(3)])
        learner.optimizer.step(0.01)
    assert all(torch.equal(m, before.optimizer.masters[n]) for n, m in after.optimizer.masters.items())


def test_the_state_names_every_tensor() -> None:
    module = Small(torch.bfloat16)
    optimizer = Optimizer(module, Optimization())
    assert set(optimizer.state()) == {"master.matrix", "master.vector", "master.number"}
    backward(module, random_gradients(0))
    optimizer.step(0.1)
    kinds = ("master", "step", "exp_avg", "exp_avg_sq")
    assert set(optimizer.state()) == {f"{kind}.{name}" for kind in kinds for name in ("matrix", "vector", "number")}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its update; here that would take a minute, and the same code runs uncompiled."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def wide_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(128, 64, dtype=dtype)  # 8,192 weights, which are quantised, and 64 biases, which are not


def moved(optimizer: Optimizer, module: nn.Module, seeds: Sequence[int]) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for master in optimizer.masters.values():
            master.grad = torch.randn(master.shape, generator=generator) * (1 + torch.arange(master.shape[-1]) % 7)
        optimizer.step(1e-2)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_8_bits_move_weights_nearly_as_those_of_32(dtype: torch.dtype) -> None:
    found = []
    for moments in ("float32", "int8"):
        module = wide_module(dtype)
        optimizer = Optimizer(module, Optimization(lr=1e-2, weight_decay=0.1, moments=moments))
        before = [m.detach().clone() for m in optimizer.masters.values()]
        moved(optimizer, module, range(20))
        found.append([m.detach() - b for m, b in zip(optimizer.masters.values(), before, strict=True)])
    (exact, exact_bias), (narrow, narrow_bias) = found
    assert torch.allclose(exact_bias, narrow_bias, rtol=1e-4, atol=1e-7)  # below 4,096 numbers nothing is rounded
    distance = float((exact - narrow).norm() / exact.norm())
    assert 1e-4 < distance < 0.05, "rounded, and by little"


@pytest.mark.usefixtures("eager")
def test_moments_of_8_bits_go_on_bit_for_bit_and_take_a_quarter() -> None:
    settings = Optimization(lr=1e-2, moments="int8")
    module = wide_module(torch.bfloat16)
    optimizer = Optimizer(module, settings)
    moved(optimizer, module, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert all(type(tensor) is Tensor for tensor in saved.values()), "plain tensors, as safetensors keeps them"
    size = sum(
        t.numel() * t.element_size() for name, t in saved.items() if name.startswith("exp_avg") and name.endswith("weight")
    )
    assert size == settings.moment_bytes * 8192
    other_module = wide_module(torch.bfloat16)
    other = Optimizer(other_module, settings)
    other.restore(saved)
    for one, its in ((optimizer, module), (other, other_module)):
        moved(one, its, range(3, 6))
    for name, tensor in optimizer.state().items():
        assert torch.equal(tensor, other.state()[name]), name


def test_moments_of_8_bits_without_torchao_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"optimizer.moments=int8 needs torchao: pip install 'posttrain\[int8\]'"):
        Optimizer(Small(torch.float32), Optimization(moments="int8"))
    with pytest.raises(UserError, match="moments must be float32 or int8, not 'int4'"):
        Optimization(moments="int4")


NO_COMPILER = (
    r"optimizer.moments=int8 needs a compiler for C and C\+\+ on this machine, .*leave optimizer.moments out: there is no "
)


@pytest.mark.parametrize(("device", "variables", "missing"), [
    ("cpu", {}, optimizer_module.DEFAULT_CXX), ("cpu", {"CXX": "nosuch++ -O2", "CC": "cc"}, "nosuch++"),
    ("cuda", {}, "gcc or clang"), ("cuda:1", {"CC": "/nowhere/cc"}, "/nowhere/cc"),
])  # fmt: skip
def test_moments_of_8_bits_without_a_compiler_are_refused_before_the_run(
    device: str, variables: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchao's step is made by torch.compile at the first update, perhaps after hours of other stages."""
    pytest.importorskip("torchao")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=NO_COMPILER + re.escape(missing)):
        Optimization(moments="int8").ready(device)
    Optimization().ready(device)
    for name in ("g++", "clang++", "gcc", "cc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name in variables:
        monkeypatch.setenv(name, str(tmp_path / "cc") + " -O2")
    Optimization(moments="int8").ready(device)


@pytest.mark.usefixtures("eager")
def test_a_compiler_that_fails_in_the_first_step_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = Optimizer(wide_module(torch.float32), Optimization(moments="int8"))

    def step() -> None:
        raise torch._dynamo.exc.TorchDynamoException("CppCompileError: C++ compile error\nfatal error: Python.h: No such file")

    monkeypatch.setattr(optimizer.adam, "step", step)
    with pytest.raises(UserError, match=r"needs a compiler .*\(CppCompileError: C\+\+ compile error\)$"):
        moved(optimizer, wide_module(torch.float32), [0])


STAGES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "data": [{"task": {"name": "arithmetic"}, "counts": {"2": 50}}], "batch": 4},
    "rl": {"stage": "rl", "task": {"name": "arithmetic"}, "prompts": 2, "algorithm": {"name": "ppo"}},
    "preference": {"stage": "preference", "data": ["pairs.jsonl"], "batch": 4},
    "reward_model": {"stage": "reward_model", "data": ["pairs.jsonl"], "batch": 4},
}


@pytest.mark.parametrize("kind", STAGES)
def test_a_warm_up_longer_than_its_stage_is_said_before_the_first_stage(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the second stage, before the first has done anything, and in the plan; as many steps as the stage has are enough."""
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(8))
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = {**STAGES["sft"], "name": "begin", "model": "tiny:nano", "steps": 3, "optimizer": {"warmup": 3}}
    second = {**STAGES[kind], "name": "two", "model": "begin", "steps": 4, "optimizer": {"lr": 1e-4, "warmup": 5}}
    settings = config.from_config({"stages": [first, second]}, "test")
    line = ("two.optimizer.warmup is 5 steps and the stage has 4: the learning rate ends at 8e-05 and never reaches 0.0001; "
            "lower it to 4, or raise the steps")  # fmt: skip
    stages = settings.recipe.stages
    assert stages[0].warnings() == [] and stages[1].warnings() == [line]
    monkeypatch.setattr(SFTStage, "run", lambda self, context: sys.exit("the first stage"))
    with RunWriter(tmp_path / "run", config={}) as writer, pytest.raises(SystemExit, match="the first stage"):
        base.run_stages(stages, base.Context(writer, 0))
    assert capsys.readouterr().out == f"two: warning: {line}\n"
    monkeypatch.setattr(plan, "stage_lines", lambda *_: [])
    assert plan.describe(settings)[-2:] == [f"two ({type(stages[1]).__name__})", f"  warning: {line}"]


def test_the_critic_follows_the_schedule_of_the_policy() -> None:
    """So a warm-up of its own has no effect, short or long, and that is said; the same as the policy's needs no words."""

    def stage(critic: Optimization) -> RLStage:
        policy = Optimization(warmup=4)
        return RLStage(
            name="rl", model="x", task=Arithmetic(), steps=8, algorithm=PPO(), optimizer=policy, critic_optimizer=critic
        )

    for warmup in (2, 9):
        (line,) = stage(Optimization(lr=1e-3, warmup=warmup)).warnings()
        assert line == ("rl.critic_optimizer.warmup has no effect: the critic follows the warm-up and the schedule of "
                        "rl.optimizer at a rate of its own")  # fmt: skip
    (line,) = stage(Optimization(lr=1e-3, schedule="cosine")).warnings()
    assert line.startswith("rl.critic_optimizer.schedule has no effect")
    assert stage(Optimization(lr=1e-3)).warnings() == stage(Optimization(lr=1e-3, warmup=4)).warnings() == []


def test_only_stages_that_will_run_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [SFTStage(name=name, model="tiny:nano", data=(Data(task=Arithmetic(), counts={1: 4}),), steps=1,
                       optimizer=Optimization(warmup=2)) for name in ("one", "two")]  # fmt: skip
    monkeypatch.setattr(SFTStage, "run", lambda self, context: {})
    with RunWriter(tmp_path / "run", config={}) as writer:
        base.run_stages(stages, base.Context(writer, 0), only=["two"])
    out = capsys.readouterr().out
    assert "two.optimizer.warmup" in out and "one.optimizer" not in out


def test_a_run_without_a_compiler_ends_before_its_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert cli.main(["run", "quickstart", "device=cpu", "rl.optimizer.moments=int8", "out=run"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(NO_COMPILER, line) and not list(tmp_path.iterdir())


@pytest.mark.usefixtures("eager")
def test_a_run_may_go_over_to_8_bits_and_is_told_that_it_cannot_go_back() -> None:
    module = wide_module(torch.float32)
    plain = Optimizer(module, Optimization(lr=1e-2))
    moved(plain, module, range(3))
    saved = {name: tensor.clone() for name, tensor in plain.state().items()}
    narrow = Optimizer(wide_module(torch.float32), Optimization(lr=1e-2, moments="int8"))
    narrow.restore(saved)
    found = narrow.state()
    assert (
        "exp_avg_codes.weight" in found
        and "exp_avg.weight" not in found
        and torch.equal(found["exp_avg.bias"], saved["exp_avg.bias"])
    )
    moments = [narrow.adam.state[narrow.masters["weight"]][key].dequantize() for key in ("exp_avg", "exp_avg_sq")]
    for moment, key in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        assert 0 < float((moment - saved[f"{key}.weight"]).norm() / saved[f"{key}.weight"].norm()) < 0.05
    with pytest.raises(UserError, match="the checkpoint has moments of 8 bits: go on with optimizer.moments=int8"):
        Optimizer(wide_module(torch.float32), Optimization(lr=1e-2)).restore(found)
