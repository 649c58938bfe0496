"""The rl stage with a teacher: another size, another prompt, the policy's own frozen weights; and what is refused before it begins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain import config, pipeline
from posttrain.algorithms.distillation import Distillation
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.models.lora import Lora
from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.recipes.base import Recipe
from posttrain.runs.read import Run
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Generate
from posttrain.train.optimizer import Optimization
from posttrain.types import Problem, Rollout, Sampling

HINT = "{answer}=#"  # of the characters that the tiny models know


def stage(**settings: Any) -> RLStage:
    small: dict[str, Any] = {
        "steps": 2, "prompts": 4, "sampling": Sampling(6), "optimizer": Optimization(lr=1e-3, token_budget=64),
        "evaluate_every": 0, "algorithm": Distillation(group=2),
    }  # fmt: skip
    return RLStage(**({"name": "rl", "model": "tiny:nano", "task": Arithmetic(level=1)} | small | settings))


def model(folder: Path, alphabet: str = Arithmetic.alphabet, size: str = "nano") -> str:
    tokenizer = character_tokenizer("".join(sorted(alphabet)))
    return str(save(tiny_model(tokenizer, size, 1), tokenizer, folder))


def run(directory: Path, one: RLStage) -> list[float]:
    """The divergence of each step."""
    pipeline.start(config.Settings(Recipe((one,)), "test", threads=1, device="cpu", out=str(directory)))
    return [row.figures["divergence"] for row in Run(directory).metrics("rl") if row.step]


@pytest.mark.parametrize("divergence", ["jensen_shannon", "sampled"])
def test_a_larger_teacher_that_reads_the_answer_before_the_prompt(tmp_path: Path, divergence: str) -> None:
    teacher = model(tmp_path / "teacher", size="micro")
    one = stage(algorithm=Distillation(group=2, divergence=divergence), teacher=teacher, teacher_prompt=HINT)
    hinted = run(tmp_path / "hinted", one)
    assert len(hinted) == 2 and all(abs(value) > 1e-3 for value in hinted)
    plain = run(tmp_path / "plain", stage(algorithm=one.algorithm, teacher=teacher))
    assert plain[0] != hinted[0], "the hint matters"
    result = json.loads((tmp_path / "hinted" / "stages" / "rl" / "result.json").read_text())
    assert result["steps"] == 2


def test_with_lora_the_starting_model_teaches_by_its_own_frozen_weights(tmp_path: Path) -> None:
    """Before the first update the student is its teacher: what there is between them is the hint."""
    one = stage(teacher_prompt=HINT, lora=Lora(rank=2))
    assert run(tmp_path / "hinted", one)[0] > 1e-4
    found = run(tmp_path / "own", stage(teacher=model(tmp_path / "m"), model=str(tmp_path / "m"), lora=Lora(rank=2)))
    assert max(map(abs, found)) < 1e-6, "a student that is its teacher has nothing to learn"


@dataclass(frozen=True)
class Twice(Arithmetic):
    """Asks a second time."""

    async def run(self, problem: Problem, generate: Generate) -> Rollout:
        await generate()
        await generate("1+1=", last=True)
        return generate.rollout()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "distillation needs a teacher: name a model, or give the starting model a teacher_prompt"),
        ({"algorithm": GRPO(), "teacher": "tiny:nano"}, "are given, but this algorithm has no teacher; use distillation"),
        ({"task": Twice(level=1), "teacher_prompt": "1"}, "teacher_prompt needs a task of one turn"),
    ],
)
def test_a_stage_that_cannot_teach_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=f"^rl: .*{why}"):
        stage(**settings)


def test_a_teacher_with_another_tokenizer_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    strange = model(tmp_path / "strange", "0123456789+-=,#x")
    with pytest.raises(UserError, match=r"^rl: .*strange has another vocabulary than tiny:nano .* tokens differ"):
        run(tmp_path / "run", stage(teacher=strange))
    assert not (tmp_path / "run" / "stages").exists()


@dataclass(frozen=True)
class Unanswered(Arithmetic):
    """Problems without an answer of their own."""

    def _problem(self, split: str, level: int, count: int, index: int) -> Problem:
        return Problem(f"{split}/{index}", "1+1=", "", level, {"a": 1, "b": 1})


def test_a_hint_that_no_problem_has_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^rl: teacher_prompt names \{answer\}, and problem train/0 has none"):
        run(tmp_path / "run", stage(task=Unanswered(level=1), teacher_prompt=HINT))
    assert not (tmp_path / "run" / "stages").exists()
