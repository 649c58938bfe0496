"""On-policy distillation: a student learns from a larger teacher on its own samples, against SFT on the teacher's samples."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.distillation import Distillation, Divergence
from posttrain.errors import require
from posttrain.recipes._toys import SUMS, imitating
from posttrain.recipes.base import Recipe, evaluate, falling, given
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.rl import RLStage
from posttrain.stages.sample import SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling


def distill(
    model: str = "",
    teacher: str = "",
    data: str = "",
    steps: int | None = None,
    prompts: int | None = None,
    lr: float | None = None,
    divergence: Divergence = "forward",
    tokens: int | None = None,
    problems: int | None = None,
) -> Recipe:
    """Two students start equal and take the same number of steps at the same learning rate, each on responses to `prompts`
    prompts a step: `distill` on its own responses, with the teacher's distribution at every token, `sft` on the teacher's.
    Held-out greedy accuracy is measured for both, for the start and for the teacher.

    With a `model` and a larger `teacher` of the same tokenizer (hub names or directories) it trains on GSM8K, on one GPU.
    `data` is a folder with gsm8k-train.jsonl and gsm8k-test.jsonl; without it the hub's copy is read. Without them it trains
    toys on a CPU: a model of 0.9 million weights that learned three-digit sums from 6,000 demonstrations teaches one of 0.2
    million that saw only those in which no digit carries.
    """
    paired = bool(model) == bool(teacher)
    require(paired, "distill: model and teacher go together; give both, or none for the toy")
    if model:
        rate = falling(given(lr, 1e-5), 5, token_budget=32768)
        real = Gsm8k(data=data), model, teacher, given(steps, 100), given(prompts, 64), rate
        stages = compared(*real, divergence, given(tokens, 320), given(problems, 1319))
    else:
        rate = falling(given(lr, 1e-3))
        task = Arithmetic(level=3, min_level=3)
        shown = Data(task=Arithmetic(level=3), counts={1: 200, 2: 1000, 3: 6000})
        toy = task, "start", "teacher", given(steps, 150), given(prompts, 32), rate
        stages = [
            replace(imitating("micro", shown, steps=500), name="teacher"),
            replace(imitating("nano", *SUMS, steps=800), name="start"),
            *compared(*toy, divergence, given(tokens, 40), given(problems, 1000)),
        ]
    following = "posttrain run distill divergence=jensen_shannon"
    return Recipe(tuple(stages), "before", "after", following)


def compared(
    task: Task,
    start: str,
    teacher: str,
    steps: int,
    prompts: int,
    optimizer: Optimization,
    divergence: Divergence,
    tokens: int,
    problems: int,
) -> list[Stage]:
    """SFT on the teacher's samples and distillation on the student's own, from the same start, with their evaluations."""
    sampling, alone = Sampling(tokens), Sampling(tokens, temperature=0.0)
    greedy = evaluate("before", start, task, problems, alone)
    samples = SampleStage(
        name="samples",
        model=teacher,
        task=task,
        prompts=steps * prompts,
        samples=1,
        min_score=0.0,
        sampling=sampling,
    )
    sft = SFTStage(
        name="sft",
        model=start,
        data=(Data(file="samples"),),
        steps=steps,
        batch=prompts,
        optimizer=optimizer,
    )
    distill = RLStage(
        name="distill",
        model=start,
        teacher=teacher,
        task=task,
        steps=steps,
        prompts=prompts,
        optimizer=optimizer,
        algorithm=Distillation(divergence=divergence),
        sampling=sampling,
        evaluate_every=50,
        evaluate_problems=200,
        checkpoint_every=100,
    )
    return [
        greedy,
        replace(greedy, name="of_teacher", model=teacher),
        samples,
        sft,
        replace(greedy, name="after_sft", model="sft"),
        distill,
        replace(greedy, name="after", model="distill"),
    ]
