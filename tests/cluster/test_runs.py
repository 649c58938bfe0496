"""Whole runs in several processes: the same samples and weights as in one, resumed at another number, and after one was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_for_tests as ranks
import torch
from material_for_tests import widen
from safetensors.torch import load_file

from posttrain import pipeline
from posttrain.loop import Stop
from posttrain.models import scorer
from posttrain.runs.read import Run
from posttrain.stages import base
from posttrain.train.trainer import Trainer
from tests.faults import harness

TIMES = ("seconds", "tokens_per_second")


def in_float64() -> None:
    """Have every model of this process in float64, where sums of other shapes differ by 1e-16."""
    make, wrap, wrap_scorer = base.tiny_model, base.wrap_model, scorer.wrap_scorer

    def wide(model: Any) -> Any:
        widen(model)
        return model

    base.tiny_model = lambda *given: make(*given).double()
    base.wrap_model = lambda model, *given: wrap(wide(model), *given)
    scorer.wrap_scorer = lambda model, *given: wrap_scorer(wide(model), *given)
    base._dtype = lambda context: "float64"


def go(kind: str, directory: Path, wide: bool = True, parallel: str = "ddp", on_step: Any = None) -> Callable[[], str]:
    """Start the run, or resume it, in one process of several."""

    def work() -> str:
        pipeline.draw = lambda *_: None  # a picture takes as long as the training here
        if wide:
            in_float64()
        if (directory / "config.yaml").is_file():
            return str(pipeline.resume(directory, allow_code=True, arguments=[f"parallel={parallel}"]))
        settings = replace(harness.settings(kind.removeprefix("wide_"), directory), parallel=parallel)
        if kind.startswith("wide_"):  # for more than 3 processes
            stages = tuple(replace(stage, batch=6) for stage in settings.recipe.stages)
            settings = replace(settings, recipe=replace(settings.recipe, stages=stages))
        return str(pipeline.start(settings, on_step))

    return work


def made(count: int, work: Callable[[], str]) -> Run:
    (found, *_) = ranks.finished(ranks.start(count, work))
    return Run(Path(found))


def ids(run: Run) -> dict[tuple[str, int], np.ndarray]:
    """What was sampled and trained on, by stage and step."""
    found = {}
    for stage in run.stages():
        for step in run.rollout_steps(stage):
            arrays = run.arrays(stage, step)
            if arrays is not None:
                found[stage, step] = arrays.arrays["ids"]
    return found


def figures(run: Run) -> list[dict[str, float]]:
    rows = [{k: v for k, v in row.figures.items() if not k.startswith(TIMES)} for row in run.metrics()]
    return [{"step": row.step, **found} for row, found in zip(run.metrics(), rows, strict=True)]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "export" / "model.safetensors")


def assert_same_run(found: Run, expected: Run, close: float = 1e-6) -> None:
    own, others = ids(found), ids(expected)
    assert own.keys() == others.keys()
    assert all(np.array_equal(own[key], others[key]) for key in own), "other ids were sampled"
    for row, wanted in zip(figures(found), figures(expected), strict=True):
        assert row == pytest.approx(wanted, rel=close, abs=close)
    pair = weights(found), weights(expected)
    assert pair[0].keys() == pair[1].keys()
    assert max(float((a - pair[1][name]).abs().max()) for name, a in pair[0].items()) < close


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    runs: dict[str, Run] = {}

    def of(kind: str) -> Run:
        if kind not in runs:
            runs[kind] = made(1, go(kind, tmp_path_factory.mktemp(kind) / "run"))
        return runs[kind]

    return of


SLOW = pytest.mark.cluster
CASES = [
    pytest.param("pipeline", "fsdp", 2),  # a reward model rates, and is where the critic of PPO starts
    pytest.param("dapo", "ddp", 2),  # refills, scores in worker processes, watches KL
    pytest.param("pipeline", "ddp", 2, marks=SLOW),
    pytest.param("lora", "ddp", 2, marks=SLOW),
    pytest.param("lora", "fsdp", 2, marks=SLOW),
    pytest.param("sft", "fsdp", 3, marks=SLOW),
]


@pytest.mark.parametrize(("kind", "parallel", "count"), CASES)
def test_a_run_is_the_same_in_several_processes(
    kind: str, parallel: str, count: int, alone: Callable[[str], Run], tmp_path: Path
) -> None:
    """In float64: the same ids to the last step, and figures and weights but for rounding."""
    assert_same_run(made(count, go(kind, tmp_path / "run", parallel=parallel)), alone(kind))


def test_all_processes_end_a_stage_at_the_same_step_and_keep_the_same_weights(tmp_path: Path) -> None:
    """A plateau is seen by all of them; the weights of the best step, sharded again, are those of one process."""

    def work(directory: Path) -> Callable[[], str]:
        def inner() -> str:
            pipeline.draw = lambda *_: None
            in_float64()
            settings = replace(harness.settings("sft", directory), parallel="fsdp")
            (sft,) = settings.recipe.stages
            rising = replace(sft.optimizer, lr=0.5, warmup=0, clip_norm=100.0)
            sft = replace(sft, held_out=0.25, evaluate_every=1, keep="best", stop=Stop(plateau=2), optimizer=rising)
            return str(pipeline.start(replace(settings, recipe=replace(settings.recipe, stages=(sft,)))))

        return inner

    two, one = (made(count, work(tmp_path / str(count) / "run")) for count in (2, 1))
    assert_same_run(two, one)
    assert two.metrics()[-1].step == one.metrics()[-1].step < 6


def stop_after(step: int) -> Callable[[Any, Any], None]:
    """Ask the first process to stop, as Ctrl-C does: all of them stop after the same step, with a checkpoint."""

    def on_step(loop: Any, row: Any) -> None:
        if loop.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


@pytest.mark.parametrize(
    ("first", "then"), [(("fsdp", 2), ("ddp", 1)), pytest.param(("ddp", 2), ("fsdp", 4), marks=SLOW)], ids=str
)
def test_a_run_is_resumed_by_another_number_of_processes(
    first: tuple[str, int], then: tuple[str, int], alone: Callable[[str], Run], tmp_path: Path
) -> None:
    """Interrupted in all processes after the same step; its checkpoint has whole weights and moments, which others divide anew."""
    kind = "sft" if max(first[1], then[1]) <= 3 else "wide_sft"
    ended = ranks.start(first[1], go(kind, tmp_path / "run", parallel=first[0], on_step=stop_after(3)))
    assert all("Interrupted: stopped after step 3" in text for text in ended.raised) and len(ended.raised) == first[1]
    assert_same_run(made(then[1], go(kind, tmp_path / "run", parallel=then[0])), alone(kind))


def killed_at(step: int, victim: int, work: Callable[[], str]) -> Callable[[], str]:
    """The same, but one process kills itself in the middle of a step."""

    def dying() -> str:
        update, count = Trainer.update, [0]

        def counted(self: Trainer, *given: Any) -> Any:
            count[0] += 1
            if count[0] == step and os.environ["RANK"] == str(victim):
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, *given)

        Trainer.update = counted
        return work()

    return dying


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=SLOW)])
def test_after_a_kill_the_others_end_and_the_run_resumes_exactly(victim: int, tmp_path: Path) -> None:
    left_alone = made(2, go("sft", tmp_path / "alone" / "run", wide=False))
    work = go("sft", tmp_path / "killed" / "run", wide=False)
    began = time.monotonic()
    ended = ranks.start(2, killed_at(4, victim, work))
    assert ended.codes[victim] == -signal.SIGKILL and time.monotonic() - began < 60
    assert "PeerFailed: process" in ended.raised[0], "the other one says what happened"
    resumed = made(2, work)
    assert figures(resumed) == figures(left_alone)
    pair = weights(resumed), weights(left_alone)
    assert all(torch.equal(tensor, pair[1][name]) for name, tensor in pair[0].items())


def test_in_float32_the_first_log_probs_are_those_of_one_process(tmp_path: Path) -> None:
    """Decoding is not invariant to its batch in the last bits, and half of the rows are in another process."""
    one, two = (made(count, go("ppo", tmp_path / str(count) / "run", wide=False)) for count in (1, 2))
    first, second = (run.arrays("rl", 1) for run in (one, two))
    assert first is not None and second is not None
    assert np.array_equal(first.arrays["ids"], second.arrays["ids"])
    assert np.abs(first.arrays["logprob"] - second.arrays["logprob"]).max() < 1e-5
