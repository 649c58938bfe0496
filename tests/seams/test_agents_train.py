"""Episodes of several turns with tools, paid by turn, are trained on with and without a critic, from settings; and are shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain.cli import main
from posttrain.collect import Collected, Rollouts
from posttrain.commands.show import show
from posttrain.runs.read import Run

TASK = """from dataclasses import dataclass

from posttrain.tasks.base import EpisodeEnd, Limits
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.toolbox import Toolbox
from posttrain.types import Message, Score


@dataclass(frozen=True)
class Talk(Arithmetic):
    alphabet = "0123456789+-*/()=# adegiklmnorstuwz:;hpb,c'>."

    def limits(self, problem):
        return Limits(turns=3)

    async def run(self, problem, generate):
        box = Toolbox([Calculator("calc")], generate, "call")
        reply = await generate()
        while len(reply.text) < 60:
            generate.reward(sum(c.isdigit() for c in reply.text) / max(1, len(reply.text)))
            reply = await generate(await box.answer("calc(12+3)=") or [Message("user", "go")])
        return generate.rollout()
"""


@pytest.mark.parametrize(
    "algorithm", [{"name": "grpo", "group": 2}, {"name": "ppo", "group": 2, "credit": "turn", "epochs": 1}]
)
def test_turns_are_trained_on_and_shown(algorithm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Collected] = []
    collect = Rollouts.collect
    monkeypatch.setattr(Rollouts, "collect", lambda *given: steps.append(collect(*given)) or steps[-1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TASK)
    stage = {"stage": "rl", "name": "rl", "model": "tiny:nano", "task": "talk.py:Talk", "steps": 2, "prompts": 2,
             "algorithm": algorithm, "sampling": {"max_new_tokens": 6}, "evaluate_every": 0, "rollouts_every": 1}  # fmt: skip
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"stages": [stage]}))
    assert main(["run", "my.yaml", "out=run", "threads=1", "device=cpu", "--allow-code"]) == 0
    figures = Run(tmp_path / "run").metrics("rl")[-1].figures
    assert figures["turns"] == 3 and figures["ended/turn_limit"] == 1 and figures["tool/calls"] == 3 and figures["failed"] == 0
    assert figures["reward/turns"] == pytest.approx(figures["reward"] - figures["reward/answer"]) and figures["grad_norm"] > 0
    batch = steps[0].batch
    assert "paid_T" in batch.columns and not bool((batch.paid_T[~batch.mask_T] != 0).any())
    rollout = steps[1].groups[0].rollouts[0]
    lines = show(tmp_path / "run", "rl/2/0")
    table = "\n".join(lines)
    assert (
        table.count("given: ") == 2
        and "<|user|>15" in table
        and lines[1] == "tool/calls 3"
        and "outcome turn limit" in lines[-1]
    )
    rewards = [re.split(r"\s+", line)[-2] for line in lines if re.match(r"\s+\d+  ", line)]
    assert [r for r in rewards if r != "0"] == [f"{s.reward:.2f}" for s in rollout.segments if s.sampled]
    assert " | > " in show(tmp_path / "run", "rl/2")[1]
