"""An agent: GRPO on a real instruct model with a Python interpreter, compared with the same model without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes._toys import pretrained
from posttrain.recipes.base import Recipe, evaluate, falling, given
from posttrain.stages._material import Data
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.base import Task
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.tasks.tool_use import ToolUse
from posttrain.tasks.tools.python import Python
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

INSTRUCTION = (
    "Write a Python program that computes the answer and run it with the tool python. "
    "When you have read its result, give the final answer in \\boxed{}."
)
# without it the untrained model repeats its call
REMINDER = "Give the final answer in \\boxed{}."


def agent(
    model: str = "",
    data: str = "",
    size: str = "nano",
    steps: int | None = None,
    prompts: int | None = None,
    group: int = 8,
    lr: float | None = None,
    tokens: int | None = None,
    turns: int = 4,
    problems: int | None = None,
    demonstrations: int = 2400,
    calls: Literal["auto", "tag"] = "tag",
    seconds: float = 0.0,
    sandbox: str = "auto",
) -> Recipe:
    """With a `model` (a hub name, a directory) and `data` (a folder with gsm8k-train.jsonl and gsm8k-test.jsonl; without it the
    hub's copy is read) it trains on GSM8K, on one GPU with 80 GB or more, in about 5 minutes. SFT shows `demonstrations` calls,
    made from the calculator notes in GSM8K's own solutions. Then RL runs on 64 problems x 8 episodes a step, each of at most
    `turns` turns of `tokens` tokens. Greedy answers to `problems` held-out problems are measured without the tool, with it,
    with it after SFT, and after RL. `seconds` ends RL early; `calls` is how a call is written: `tag` in plain text, `auto` as
    in the chat template; `sandbox` is that of the interpreter (docs/rewards-code.md). Without a model it trains a toy on a CPU:
    a small model pretrained on sums, which does not know how to call the tool.

    The reward is the right number in the last turn, and nothing else: neither calls nor programs that run are rewarded. Without
    and with the tool, the answer is the content of the last box, else the last number.
    """
    real = bool(model)
    alone, task = _tasks(real, data, sandbox, calls, turns)
    made = [] if real else [pretrained(size, Data(task=alone, counts={1: 200, 2: 1000}))]
    shown = [_demonstrated(model, task, demonstrations)] if real and demonstrations else []
    first, before = model or "pretrain", "sft" if shown else model or "pretrain"
    tokens, problems = given(tokens, 320 if real else 24), given(problems, 600 if real else 100)
    greedy = Sampling(tokens, temperature=0.0)
    measured = evaluate("alone", first, alone, problems, greedy)
    stages = [
        *made,
        measured,
        *([replace(measured, name="untrained", task=task), *shown] if shown else []),
        replace(measured, name="before", model=before, task=task),
        RLStage(
            name="rl",
            model=before,
            task=task,
            steps=given(steps, 60 if real else 20),
            seconds=seconds,
            prompts=given(prompts, 64 if real else 8),
            sampling=Sampling(tokens),
            algorithm=GRPO(group=group, beta=0.0, reduction="token_mean"),
            optimizer=falling(given(lr, 5e-6 if real else 3e-4), 2, 0.25, token_budget=32768),
            evaluate_every=0,
            checkpoint_every=0,
        ),
        replace(measured, name="after", model="rl", task=task),
    ]
    again = "posttrain run agent model=DIR data=FOLDER device=cuda"
    return Recipe(tuple(stages), "before", "after", again)


def _tasks(
    real: bool, data: str, sandbox: str, calls: Literal["auto", "tag"], turns: int
) -> tuple[Task, ToolUse]:
    """Return the problems without the tool, and with it."""
    tools = (Python(sandbox),)
    if not real:
        sums = Arithmetic(level=2)
        return sums, ToolUse(sums, tools, format="call", max_turns=turns)
    alone, asked = Gsm8k(data=data, style="thinking"), Gsm8k(data=data, style="direct")
    tool_use = ToolUse(asked, tools, calls, INSTRUCTION, REMINDER, max_turns=turns, max_output=500)
    return alone, tool_use


def _demonstrated(model: str, task: Task, count: int) -> SFTStage:
    """One pass over calls that lead to the answer: without it RL learns first that answering without a call is rewarded."""
    return SFTStage(
        name="sft",
        model=model,
        data=(Data(task=task, counts={0: count}),),
        epochs=1.0,
        optimizer=Optimization(lr=2e-5, warmup=5, schedule="cosine", token_budget=32768),
        checkpoint_every=0,
    )
