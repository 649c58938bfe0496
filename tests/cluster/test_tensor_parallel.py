"""Layers that are divided over processes by torch's own plans: the gradient, the norm and the files of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_for_tests as ranks
import torch
from material_for_tests import DEFAULTS, STOP, VOCABULARY, material, shared_policy, trainer_for, widen

from posttrain import pipeline
from posttrain.algorithms.sft import SFT
from posttrain.cli import main
from posttrain.errors import UserError
from posttrain.models import tiny
from posttrain.models.policy import Policy, wrap_model
from posttrain.runs.read import Run
from posttrain.system.world import ALONE
from posttrain.train.optimizer import Optimization
from posttrain.train.sharding import tensor_plan
from posttrain.train.trainer import Trainer
from posttrain.types import Batch
from tests.cluster.test_gradients import CLOSE, found_gradients, odd_vocabulary, prepared_cases, trained, worst
from tests.cluster.test_runs import assert_same_run, in_float64, made, stop_after
from tests.faults import harness

SLOW = pytest.mark.cluster
FEW = [case for case in DEFAULTS if case.id in ("grpo", "ppo", "dpo")]


def distances(world: Any, cases: list[Any], budget: int) -> list[float]:
    found = []
    for algorithm, prepared, expected in cases:
        trainer = trainer_for(algorithm, copy.deepcopy(shared_policy()), Optimization(token_budget=budget))
        found.append(worst(trainer, prepared, expected))
    return found


@pytest.mark.parametrize(
    ("count", "cases"),
    [(2, FEW), pytest.param(2, DEFAULTS, marks=SLOW), pytest.param(4, DEFAULTS, marks=SLOW)],
    ids=["few", "2", "4"],
)
def test_the_gradient_of_every_algorithm_is_that_of_one_process(count: int, cases: list[Any]) -> None:
    """Two processes divide the layers; of four, two pairs divide them and each pair has half of a step."""
    names = [case.id for case in cases]
    for found in ranks.run(count, distances, prepared_cases(cases), 24, tensor=2):
        assert dict(zip(names, found, strict=True)) == pytest.approx(dict.fromkeys(names, 0.0), abs=CLOSE)


def family(name: str, dtype: torch.dtype) -> Policy:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.25}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **heads), dtype=dtype)
        for parameter in model.parameters():  # norms and biases would begin at 1 and 0
            torch.nn.init.normal_(parameter, 0.1, 0.25)
    if dtype == torch.float64:
        widen(model)
    return wrap_model(model.eval(), None, (STOP,))


def family_distance(world: Any, policy: Policy, batch: Batch, expected: Any) -> list[Any]:
    trainer = Trainer(policy, SFT(), Optimization(token_budget=24))
    weight = trainer.policy.model.model.layers[0].self_attn.q_proj.weight
    return [worst(trainer, batch, expected), list(weight.to_local().shape), list(weight.shape)]


@pytest.mark.parametrize(
    ("name", "dtype", "close"),
    [
        ("qwen3", torch.float64, CLOSE),
        pytest.param("qwen2", torch.float64, CLOSE, marks=SLOW),
        pytest.param("qwen3", torch.float32, 1e-4, marks=SLOW),
    ],
)
def test_biases_and_norms_of_heads_have_the_gradient_of_one_process(name: str, dtype: torch.dtype, close: float) -> None:
    """A norm of the heads is whole in each process and sees some heads: its gradient is a sum over the processes."""
    batch = SFT().prepare(material(SFT()), {})
    expected = found_gradients(Trainer(family(name, dtype), SFT(), Optimization()), batch)
    for distance, own, shape in ranks.run(2, family_distance, family(name, dtype), batch, expected, tensor=2):
        assert distance < close and own == [8, 16] and shape == [16, 16], "each has half of the heads"


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=SLOW)])
def test_divided_weights_learn_as_those_of_one_process(count: int) -> None:
    """Two updates: the norm of the gradient, in which what several have counts once, whole weights and moments."""
    batch = SFT().prepare(material(SFT()), {})
    expected = trained(ALONE, odd_vocabulary, batch)
    found, *others = ranks.run(count, trained, odd_vocabulary, batch, tensor=2)
    assert found[0] == pytest.approx(expected[0], rel=1e-6) and all(found[0] == other[0] for other in others)
    for own, wanted in zip(found[1:], expected[1:], strict=True):
        assert own.keys() == wanted.keys()
        assert all(np.allclose(own[name], wanted[name], rtol=0, atol=1e-9) for name in own)


def go(kind: str, directory: Path, tensor: int, on_step: Any = None) -> Callable[[], str]:
    def work() -> str:
        pipeline.draw = lambda *_: None
        in_float64()
        tiny.SIZES["nano"] = (32, 2, 4, 2, 64)  # heads that two processes divide
        if (directory / "config.yaml").is_file():
            return str(pipeline.resume(directory, allow_code=True, arguments=[f"tensor_parallel={tensor}"]))
        settings = replace(harness.settings(kind, directory), tensor_parallel=tensor)
        return str(pipeline.start(settings, on_step))

    return work


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return lambda kind: made(1, go(kind, tmp_path_factory.mktemp(kind) / "run", 1))


@pytest.mark.parametrize(("first", "then"), [((2, 2), (1, 1)), pytest.param((1, 1), (2, 2), marks=SLOW)], ids=str)
def test_a_run_is_resumed_with_layers_divided_otherwise(
    first: tuple[int, int], then: tuple[int, int], alone: Callable[[str], Run], tmp_path: Path
) -> None:
    """Processes, and how many of them divide a layer. The files of a checkpoint are those of any other sharded run."""
    directory = tmp_path / "run"
    ended = ranks.start(first[0], go("sft", directory, first[1], stop_after(3)))
    assert all("Interrupted: stopped after step 3" in text for text in ended.raised) and len(ended.raised) == first[0]
    (saved,) = directory.glob("**/step-3")
    assert (saved / "model-1.safetensors").exists() == (first[0] > 1)
    assert_same_run(made(then[0], go("sft", directory, then[1])), alone("sft"))


@SLOW
@pytest.mark.parametrize("kind", ["pipeline", "dapo"])
def test_a_whole_run_samples_and_learns_as_in_one_process(kind: str, alone: Callable[[str], Run], tmp_path: Path) -> None:
    """A reward model, PPO with a critic from it, DPO; DAPO with refills: ids are the same to the last step."""
    assert_same_run(made(2, go(kind, tmp_path / "run", 2)), alone(kind))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tensor_parallel=2"], "tensor_parallel=2: 1 process(es) are not a multiple of it; use processes=2"),
        (["tensor_parallel=2", "processes=3"], "3 process(es) are not a multiple of it; use processes=4"),
        (
            ["tensor_parallel=2", "processes=2", "parallel=ddp"],
            "and parallel=ddp has all of them in each process; leave one out",
        ),
        (["tensor_parallel=2", "processes=2", "rl.lora.rank=4"], "those with adapters (rl) are not divided yet; leave one out"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "quickstart", "device=cpu", f"out={tmp_path / 'run'}", *words]) == 2
    said, printed = capsys.readouterr()[::-1]
    assert line in said and said.count("\n") == 1 and not printed and not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_divided_says_why() -> None:
    model = shared_policy().model
    with pytest.raises(UserError, match="num_attention_heads=4, which 3 processes do not divide"):
        tensor_plan(model, 3)
    other = copy.copy(model)
    other.config = copy.copy(model.config)
    other.config.base_model_tp_plan = {"layers.*.mlp.experts": "moe_tp_experts"}
    with pytest.raises(UserError, match="has no layers that can be divided by rows and columns; use parallel=fsdp"):
        tensor_plan(other, 2)


def over_a_sequence(world: Any, kernel: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parts = [torch.randn(1, 2, 32, 16) for _ in range(3)]
    places = {"buffers": parts, "buffer_seq_dims": [2, 2, 2]}
    with sdpa_kernel(getattr(SDPBackend, kernel)), context_parallel(init_device_mesh("cpu", (2,)), **places):
        try:
            torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        except (NotImplementedError, RuntimeError) as error:
            return str(error)
    return ""


@SLOW
@pytest.mark.parametrize(
    ("kernel", "said"),
    [("FLASH_ATTENTION", "does not have a sharding strategy registered"), ("MATH", "mixed torch.Tensor and DTensor")],
)
def test_torch_has_no_context_parallelism_on_a_cpu_yet(kernel: str, said: str) -> None:
    """The reason that there is none here: it cannot be compared with one process. Once this fails, it can."""
    assert all(said in found for found in ranks.run(2, over_a_sequence, kernel))
