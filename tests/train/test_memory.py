"""Memory in the loop: what is said when it runs out, what a resumed run remembers of it, and when the sampler's cache is given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernels_for_tests import decode_in_pages
from material_for_tests import small_policy, trainer_for
from test_loop import make, make_again

from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.ppo import PPO
from posttrain.engine.cuda import CUDABackend
from posttrain.errors import GuardStop
from posttrain.loop import Loop
from posttrain.runs.read import Run
from posttrain.runs.write import RunWriter
from posttrain.stages.base import Context, run_stages
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.memory import activation_bytes
from posttrain.train.optimizer import Optimization
from posttrain.types import Batch, Metric, Sampling


def limited(folder: Path, most: int, budget: int = 80, steps: int = 4) -> Loop:
    """A loop on steps of 160 tokens, in micro-batches of `budget`, whose device has room for `most` at a time from step 2 on."""
    loop = make(folder, steps=steps)
    trainer = loop.trainer
    trainer.settings = replace(trainer.settings, token_budget=budget)
    trainer.token_budget = budget
    plain = trainer.forward_backward

    def forward_backward(piece: Batch) -> list[Metric]:
        if loop.step > 0 and piece.tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(piece)

    trainer.forward_backward = forward_backward  # type: ignore[method-assign, assignment]
    return loop


def test_models_that_learn_one_after_the_other_need_the_activations_of_one() -> None:
    """A critic as large as the policy leaves half of what both together would need."""
    found = {}
    for name, settings in {"apart": {}, "warming up": {"critic_warmup": 1}, "again": {"epochs": 2}}.items():
        algorithm = PPO(group=4, **{"epochs": 1, **settings})
        trainer = trainer_for(algorithm, small_policy(), Optimization())
        found[name] = trainer._need(False, 4000)
    policy = small_policy()
    assert found["warming up"] == found["again"] == found["apart"] + activation_bytes(policy, 4000)


def said(folder: Path) -> list[tuple[str, int]]:
    return [(e.kind, int(e.details["step"])) for e in Run(folder / "run").events() if e.kind in ("memory", "alarm")]


def test_a_halved_budget_is_said_once_and_the_run_learns_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, other = limited(tmp_path / "full", 40), limited(tmp_path / "half", 10**9, budget=40)
    loop.run()
    lines = [line for line in "".join(capsys.readouterr()).splitlines() if "token_budget is halved to 40" in line]
    assert len(lines) == 1 and "the gradient is the same" in lines[0]
    assert said(tmp_path / "full") == [("memory", 2)]
    other.run()
    assert said(tmp_path / "half") == []
    for mine, expected in zip(loop.trainer.weights().values(), other.trainer.weights().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=2e-5)


def test_the_second_time_stops_with_advice(tmp_path: Path) -> None:
    loop = limited(tmp_path, 39)
    with pytest.raises(GuardStop, match=r"memory: step 2: out of memory .*token_budget \(now 40: the gradient stays the same\), "
                       r"set optimizer.checkpointing=layer .*the checkpoint step-1 is intact"):  # fmt: skip
        loop.run()
    assert said(tmp_path) == [("memory", 2), ("alarm", 2)]


@pytest.mark.parametrize(("budget", "expected"), [(80, 40), (60, 60)])
def test_a_resumed_run_goes_on_with_the_budget_that_fits(tmp_path: Path, budget: int, expected: int) -> None:
    """Unless the user has chosen another one since."""
    first = limited(tmp_path, 40, steps=2)
    first.run()
    first.save()
    first.writer.close()
    again = make_again(tmp_path, 2)
    again.trainer.settings = replace(again.trainer.settings, token_budget=budget)
    again.trainer.token_budget = budget
    again.run()
    assert again.step == 2 and again.trainer.token_budget == expected


def test_the_cache_is_given_back_between_sampling_and_learning(tmp_path: Path) -> None:
    order: list[str] = []
    loop = make(tmp_path, steps=2, release=lambda: order.append("release"))
    collect, update = loop.source.collect, loop.trainer.update
    loop.source.collect = lambda *a: (order.append("collect"), collect(*a))[1]  # type: ignore[method-assign]
    loop.trainer.update = lambda *a: (order.append("update"), update(*a))[1]  # type: ignore[method-assign]
    loop.run()
    assert order == ["collect", "release", "update"] * 2


@pytest.mark.parametrize("release", [False, True])
def test_the_setting_of_the_stage(release: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`release_cache` gives the engine's pool back in every step, and is off unless asked for; the end of the stage always does."""
    decode_in_pages(monkeypatch)
    held: list[bool] = []
    plain = CUDABackend.release

    def watched(one: CUDABackend) -> None:
        before = bool(one.stores)
        plain(one)
        held.append(before and not one.stores)

    monkeypatch.setattr(CUDABackend, "release", watched)
    stage = RLStage(name="rl", model="tiny:nano", task=Arithmetic(), steps=2, prompts=1, algorithm=GRPO(beta=0.0, group=2),
                    sampling=Sampling(3), evaluate_every=0, release_cache=release)  # fmt: skip
    with RunWriter.create(tmp_path / "run", {}) as writer:
        run_stages([stage], Context(writer, 0, say=False, threads=1))
    assert held == ([True, True, False] if release else [True])


def test_a_model_that_does_not_name_its_feed_forward_width_can_be_priced() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from posttrain.models.policy import wrap_model
    from posttrain.models.tiny import character_tokenizer
    from posttrain.train.memory import activation_bytes

    tokenizer = character_tokenizer("0123456789+=")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    policy = wrap_model(GPT2LMHeadModel(config), tokenizer, (tokenizer.eos_token_id,))
    layer = 9 * 16 + 4 * 64 + 2 * 16  # the inner width is 4 times the hidden one
    assert activation_bytes(policy, 10) == 4 * 10 * (2 * layer + 4 * (16 + 64))
