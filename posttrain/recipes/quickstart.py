"""A small model learns to carry: SFT on demonstrations that mostly forget it, then GRPO with a verifiable reward."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.data.curriculum import Curriculum
from posttrain.recipes._toys import SHOWN, imitating
from posttrain.recipes.base import Recipe, evaluate, falling
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Sampling


def quickstart(size: str = "nano", control: bool = False) -> Recipe:
    """Three-digit sums with a written scratchpad, from nothing, on a CPU.

    The demonstrations of one- and two-digit sums are right; those of three-digit sums forget four carries in five. So SFT learns
    the format, to copy digits and to add them, and forgets as often as it was shown. GRPO, rewarded only for right answers,
    becomes better than its demonstrations. `control` continues SFT for as long as RL took, to show that time alone does not do
    it.
    """
    task = Arithmetic(level=3)
    sft, greedy = imitating(size, *SHOWN, steps=1500), Sampling(40, temperature=0.0)
    before = evaluate("before", "sft", task, 1000, greedy)
    stages = [
        sft,
        before,
        RLStage(
            name="rl",
            model="sft",
            task=task,
            steps=120,
            prompts=32,
            algorithm=GRPO(beta=0.0, reduction="token_mean"),
            sampling=Sampling(max_new_tokens=32),
            curriculum=Curriculum(start=2, review=0.1),
            watch_kl=True,
            evaluate_every=20,
            optimizer=falling(3e-4),
        ),
        replace(before, name="after", model="rl"),
    ]
    if control:
        longer = replace(sft, name="control", model="sft", steps=20_000, as_long_as="rl")
        stages += [longer, replace(before, name="after_control", model="control")]
    return Recipe(tuple(stages), "before", "after", "posttrain run quickstart rl.lr=1e-4 seed=1")
