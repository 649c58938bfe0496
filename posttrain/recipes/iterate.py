"""Iterate: rounds of mining problems the model fails, RL on these with the reference moved along, and keeping the best round."""

from __future__ import annotations

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes._toys import SHOWN, imitating
from posttrain.recipes.base import Recipe, best_round, evaluate, falling, repeat
from posttrain.stages.mine import MineStage
from posttrain.stages.rl import RLStage
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Sampling

PROMPTS = 400  # fresh prompts per round
KEPT = 200  # at least: a round on the few that fail late would unlearn the others


def iterate(size: str = "nano", rounds: int = 3, steps: int = 30, beta: float = 0.02) -> Recipe:
    """Trains on three-digit sums, on a CPU, from SFT on demonstrations that forget four carries in five. A round answers fresh
    problems and those that the last round kept, scores the answers, trains on the hardest of them, and evaluates on
    held-out problems; KL is measured from the model at the start of the round. The best round is chosen on separate problems,
    so that the final comparison does not use the problems that chose it.
    """
    task, apart = Arithmetic(level=3), Arithmetic(level=3, seed=1)
    greedy = Sampling(40, temperature=0.0)
    stages = [
        imitating(size, *SHOWN, steps=1000),
        evaluate("before", "sft", task, 1000, greedy),
        *repeat(
            [
                MineStage(
                    name="mine",
                    model="previous train",
                    task=task,
                    prompts=PROMPTS,
                    again="previous mine",
                    min_problems=KEPT,
                    sampling=Sampling(32),
                ),
                RLStage(
                    name="train",
                    model="previous train",
                    task=task,
                    problems="mine",
                    steps=steps,
                    prompts=32,
                    algorithm=GRPO(beta=beta, reduction="token_mean"),
                    sampling=Sampling(32),
                    evaluate_every=0,
                    optimizer=falling(1e-4),
                ),
                evaluate("check", "train", apart, 500, greedy),
            ],
            rounds,
            first={"train": "sft", "mine": ""},
            advance={"mine.skip": PROMPTS},
        ),
        best_round("train", "check", rounds, "accuracy"),
        evaluate("after", "best", task, 1000, greedy),
    ]
    return Recipe(tuple(stages), "before", "after", "posttrain run iterate rounds=5")
