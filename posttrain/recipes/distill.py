"""On-policy distillation: a smaller student learns from a larger teacher on its own samples, against SFT on the teacher's samples."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.distillation import Distillation, Divergence
from posttrain.errors import require
from posttrain.recipes._toys import imitating
from posttrain.recipes.base import Recipe, given
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sample import SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

SHOWN = 1500  # worked sums that the student begins with


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
    """Two students begin alike and take the same number of steps at the same rate, each on as many responses of `prompts` a step:
    `distill` on its own, with the teacher's distribution at every token, `sft` on the teacher's. Held-out greedy accuracy of both,
    of the start and of the teacher.

    With a `model` and a larger `teacher` of the same tokenizer (hub names or directories) GSM8K on one GPU; `data` is a folder with
    gsm8k-train.jsonl and gsm8k-test.jsonl, without which the hub's copy is read. Without them a toy on a CPU: a model of 0.9 million
    weights that learned three-digit sums from 6,000 demonstrations teaches one of 0.2 million that saw 1,500 of them.
    """
    require(
        bool(model) == bool(teacher),
        "distill: model and teacher go together; give both, or none for the toy",
    )
    task: Task
    made = list[Stage]()
    if model:
        task, start, taught = Gsm8k(data=data), model, teacher
        steps, prompts, tokens = given(steps, 100), given(prompts, 64), given(tokens, 320)
        optimizer = Optimization(
            lr=given(lr, 1e-5), warmup=5, schedule="linear", final=0.1, token_budget=32768
        )
        problems = given(problems, 1319)
    else:
        task, start, taught = Arithmetic(level=3, min_level=3), "start", "teacher"
        steps, prompts, tokens = given(steps, 150), given(prompts, 32), given(tokens, 40)
        optimizer = Optimization(lr=given(lr, 2e-3), warmup=10, schedule="linear", final=0.1)
        problems = given(problems, 1000)
        shown = Data(task=Arithmetic(level=3), counts={1: 200, 2: 1000, 3: 6000})
        few = Data(task=task, counts={3: SHOWN})
        made = [
            replace(imitating("micro", shown, steps=350), name="teacher"),
            replace(imitating("nano", few, steps=250), name="start"),
        ]
    greedy = EvaluateStage(
        name="before",
        model=start,
        task=task,
        problems=problems,
        sampling=Sampling(tokens, temperature=0.0),
    )
    made += [
        greedy,
        replace(greedy, name="of_teacher", model=taught),
        SampleStage(
            name="samples",
            model=taught,
            task=task,
            prompts=steps * prompts,
            samples=1,
            min_score=0.0,
            sampling=Sampling(tokens),
        ),
        SFTStage(
            name="sft",
            model=start,
            data=(Data(file="samples"),),
            steps=steps,
            batch=prompts,
            optimizer=optimizer,
        ),
        replace(greedy, name="after_sft", model="sft"),
        RLStage(
            name="distill",
            model=start,
            teacher=taught,
            task=task,
            steps=steps,
            prompts=prompts,
            algorithm=Distillation(divergence=divergence),
            sampling=Sampling(tokens),
            optimizer=optimizer,
            evaluate_every=50,
            evaluate_problems=200,
            checkpoint_every=100,
        ),
        replace(greedy, name="after", model="distill"),
    ]
    return Recipe(
        tuple(made), "after_sft", "after", "posttrain run distill divergence=jensen_shannon"
    )
