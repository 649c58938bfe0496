"""STaR: a model learns from its own right answers, and from those that it finds with the right answer as a hint."""

from __future__ import annotations

from dataclasses import replace

from posttrain.recipes._toys import GENTLE, SHOWN, forgetful, imitating
from posttrain.recipes.base import Recipe, evaluate, repeat
from posttrain.stages._material import Data
from posttrain.stages.sample import SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.hinted import Hinted
from posttrain.types import Sampling

HINT = "{answer}="  # 47+85= becomes 47+85=132=
PROMPTS = 1000  # per round


def star(
    size: str = "nano", rounds: int = 3, steps: int = 150, samples: int = 1, hint: bool = True
) -> Recipe:
    """Zelikman et al. 2022, on three-digit sums, on a CPU. In each round the current model answers fresh problems; those that
    it fails it answers again with the right answer in the prompt (hint=false leaves them out). The right answers then train the
    first model anew, on prompts without the hint. The first model has seen both kinds of prompts: its demonstrations of
    three-digit sums forget four carries in five, and every other carry where the prompt has the hint.
    """
    task, greedy = Arithmetic(level=3), Sampling(40, temperature=0.0)
    hinted = [replace(data, task=Hinted(data.task, HINT)) for data in forgetful(0.5) if data.task]
    last = f"train_{rounds}"
    stages = [
        imitating(size, *SHOWN, *hinted, steps=1000),
        evaluate("before", "sft", task, 1000, greedy),
        *repeat(
            [
                SampleStage(
                    name="sample",
                    model="previous train",
                    task=task,
                    prompts=PROMPTS,
                    samples=samples,
                    hint=HINT if hint else "",
                    sampling=Sampling(40),
                ),
                SFTStage(
                    name="train",
                    model="sft",
                    data=(Data(file="sample"),),
                    steps=steps,
                    optimizer=GENTLE,
                ),
            ],
            rounds,
            first={"train": "sft"},
            advance={"sample.skip": PROMPTS},
        ),
        evaluate("after", last, task, 1000, greedy),
    ]
    return Recipe(tuple(stages), "before", "after", "posttrain run star hint=false")
