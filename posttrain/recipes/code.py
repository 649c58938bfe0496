"""RL with unit tests: a model writes programs, and a sandbox runs their tests. It trains on MBPP; HumanEval is held out."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes._toys import imitating
from posttrain.recipes.base import Recipe, evaluate, falling, given
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.rl import RLStage
from posttrain.tasks.base import Task
from posttrain.tasks.humaneval import HumanEval
from posttrain.tasks.mbpp import Mbpp
from posttrain.tasks.programs import Programs
from posttrain.types import Sampling

SYSTEM = "You write Python. Answer with one program in a code block, without explanation."


def code(
    model: str = "",
    data: str = "",
    size: str = "nano",
    steps: int | None = None,
    prompts: int | None = None,
    group: int = 16,
    lr: float | None = None,
    tokens: int | None = None,
    problems: int | None = None,
    samples: int = 16,
    seconds: float = 0.0,
    wall: float | None = None,
    sandbox: str = "auto",
) -> Recipe:
    """With a `model` (a hub name, a directory) and `data` (a folder with mbpp-sanitized.json and humaneval.jsonl, also as .gz;
    without it the hub's copies are read) it needs one GPU with 80 GB or more and 16 cores for the sandbox, about 6 minutes: 32
    problems x 16 programs a step. 15% of MBPP is held out to tune settings, and its greedy accuracy is the curve
    `accuracy/test`; HumanEval is measured before and after, with `samples` programs a problem (pass@1, pass@10) and greedily,
    and decides nothing. `seconds` ends RL early. A program has `wall` seconds for all of its tests in `sandbox`
    (docs/rewards-code.md). Without a model it trains a toy on a CPU: a small model that has learned to write three-line
    functions from demonstrations, half of which have a bug.

    The reward is 1 if every test passes, else 0; for a real model it is also 0 for an answer that does not end (`truncated =
    "zero"`). The prompt shows one assertion of an MBPP problem, for the form of the arguments; the others are hidden.
    """
    held_out: Task
    real, made = bool(model), list[Stage]()
    wall = given(wall, 4.0 if real else 2.0)
    if real:
        options = {"sandbox": sandbox, "wall": wall}
        task: Task = Mbpp(
            data=data, test_split="", held_out=0.15, shown=1, system=SYSTEM, options=options
        )
        held_out = HumanEval(data=data, held_out=1.0, system=SYSTEM, options=options)
    else:
        task = held_out = Programs(sandbox=sandbox, wall=wall)
        made = [imitating(size, Data(task=task, counts={0: 8000}), steps=1000)]
    first, tokens = model or "sft", given(tokens, 384 if real else 48)
    problems, greedy = given(problems, 164 if real else 50), Sampling(tokens, temperature=0.0)
    once = evaluate("before_greedy", first, held_out, problems, greedy)
    measured = replace(once, name="before", samples=samples, sampling=Sampling(tokens))
    algorithm = GRPO(group=group, beta=0.0, clip_high=0.28, reduction="token_mean")
    rl = RLStage(
        name="rl",
        model=first,
        task=task,
        steps=given(steps, 40 if real else 50),
        seconds=seconds,
        prompts=given(prompts, 32 if real else 8),
        sampling=Sampling(tokens),
        algorithm=replace(algorithm, truncated="zero") if real else algorithm,
        optimizer=falling(given(lr, 8e-6 if real else 1e-3), 3, 0.25, token_budget=32768),
        evaluate_every=10,
        evaluate_problems=100 if real else 50,
        checkpoint_every=0,
    )
    after = replace(measured, name="after", model="rl")
    after_once = replace(once, name="after_greedy", model="rl")
    again = "posttrain run code model=DIR data=FOLDER device=cuda"
    return Recipe((*made, measured, once, rl, after, after_once), "before", "after", again)
