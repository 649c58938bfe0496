"""RL as in nanochat: GSM8K with a calculator, pass or fail, and REINFORCE with the mean of a group as its baseline."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes._toys import SHOWN, imitating
from posttrain.recipes.base import Recipe, evaluate, falling, given
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.tasks.gsm8k import Gsm8k
from posttrain.tasks.tool_use import ToolUse
from posttrain.tasks.tools.calculator import Calculator
from posttrain.types import Sampling


def nanochat_rl(
    model: str = "",
    data: str = "",
    size: str = "nano",
    steps: int | None = None,
    prompts: int | None = None,
    group: int = 16,
    lr: float | None = None,
    problems: int | None = None,
) -> Recipe:
    """With a `model` (a hub name, a directory) and `data` (a folder with gsm8k-train.jsonl and gsm8k-test.jsonl; without it the
    hub's copy is read) it is the real setup, for a GPU: 16 questions x 16 answers a step, one epoch, pass@1 to pass@8 on 400
    test questions before and after. Without a model it trains a toy on a CPU: a small model whose demonstrations of three-digit
    sums forget four carries in five, for 200 steps with the same loss and the same tool, which it does not know how to call.
    nanochat itself uses another optimizer (Muon; `lr` is AdamW's), and samples with top_k = 50.
    """
    if not model:
        sums = Arithmetic(level=3, min_level=3)
        tools = (Calculator("calc"),)
        task = ToolUse(sums, tools, format="call", max_turns=4)
        before, tokens = "sft", 32
        shown = [replace(data, task=ToolUse(data.task, tools)) for data in SHOWN if data.task]
        made = [imitating(size, *shown, steps=2000)]
        chosen = given(steps, 200), given(prompts, 16), given(lr, 3e-4)
    else:
        task = ToolUse(Gsm8k(data=data, style="marked"), (Calculator(),), max_turns=8)
        before, tokens, made = model, 256, []
        chosen = given(steps, 467), given(prompts, 16), given(lr, 3e-6)
    steps, prompts, lr = chosen
    problems = given(problems, 400 if model else 200)
    sampling = Sampling(tokens)
    measured = evaluate("before", before, task, problems, sampling, samples=8)
    stages = [
        *made,
        measured,
        RLStage(
            name="rl",
            model=before,
            task=task,
            steps=steps,
            prompts=prompts,
            sampling=sampling,
            algorithm=nanochat_loss(group),
            optimizer=falling(lr, 0 if model else min(10, steps), 0.0, token_budget=32768),
            evaluate_every=60,
            evaluate_problems=problems,
            checkpoint_every=60,
        ),
        replace(measured, name="after", model="rl"),
    ]
    again = "posttrain run nanochat_rl model=DIR data=FOLDER device=cuda"
    return Recipe(tuple(stages), "before", "after", again)


def nanochat_loss(group: int = 16) -> GRPO:
    """A_i = r_i - mean(r), L = -1/T sum_i sum_t A_i log pi(y_it): no KL, no division by the standard deviation, the same weight
    for every token of the step. Each rollout is used for one update, where rho is exactly 1 (`proximal`), so nothing is
    clipped, and the gradient is REINFORCE's."""
    return GRPO(group=group, scale="none", beta=0.0, reduction="token_mean", correction="proximal")
