"""A reward of one's own, `file.py:name`, in a real run: what it raises is shown with the sample, counted by kind, and never a 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain import config, pipeline
from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe
from posttrain.runs.metrics import failure_kind
from posttrain.runs.read import Run
from posttrain.stages.rl import RLStage
from posttrain.tasks.jsonl import Jsonl
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling, Score

MINE = """
async def picky(prompt, response, answer):
    if "3" in response:
        raise ValueError(f"a three in {response!r}")
    return float("7" in response)
"""


KINDS = [("timeout: 5 s", "timeout"), ("KeyError: 'x'", "KeyError"), ("no reply", "no_reply"), (" : ", "unnamed")]


@pytest.mark.parametrize(("failure", "kind"), KINDS)
def test_kinds(failure: str, kind: str) -> None:
    assert failure_kind(Score.failed(failure)) == kind


def test_what_a_reward_raises_is_shown_and_masked(tmp_path: Path) -> None:
    file, own = tmp_path / "sums.jsonl", tmp_path / "mine.py"
    file.write_text("".join(f'{{"question": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    own.write_text(MINE)
    stage = RLStage(
        name="rl", model="tiny:nano", task=Jsonl(str(file), reward=f"{own}:picky"), steps=2, prompts=4, evaluate_every=0,
        algorithm=GRPO(group=4, beta=0.0), sampling=Sampling(6), optimizer=Optimization(lr=1e-3), rollouts_every=1,
    )  # fmt: skip
    directory = pipeline.start(config.Settings(Recipe((stage,)), "test", threads=1, device="cpu", out=str(tmp_path / "run")))
    found = Run(directory)
    rows = [row for step in (1, 2) for row in found.rollouts("rl", step)]
    failed = [row for row in rows if "3" in row.response]
    assert failed and len(failed) < len(rows), "the seed should bring both"
    for row in rows:
        wanted = None if "3" in row.response else float("7" in row.response)
        assert row.reward == wanted and (row.failure is None) == (wanted is not None)
    figures = [row.figures for row in found.metrics("rl")]
    assert sum(f.get("failed/ValueError", 0.0) for f in figures) == pytest.approx(sum(f["failed"] for f in figures)) != 0
    said = (directory / "events.jsonl").read_text()
    assert said.count("could not be scored: ValueError: a three in") == 1  # once a kind, with problem and response
    assert f"problem {failed[0].problem}" in said
