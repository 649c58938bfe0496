"""Iterative DPO: rounds of fresh comparisons of the current policy, each with the last round's policy as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from posttrain.algorithms.dpo import DPO
from posttrain.errors import require
from posttrain.recipes._feedback import prefer
from posttrain.recipes._reviews import beginning, comparisons, versus
from posttrain.recipes.base import Recipe, best_round, given, repeat
from posttrain.stages.base import Stage
from posttrain.tasks.prompts import Prompts
from posttrain.types import Sampling

PROMPTS = 1000  # a round


def iterative_dpo(
    size: str = "nano",
    rounds: int = 3,
    beta: float | None = None,
    steps: int | None = None,
    model: str = "",
    data: str = "",
    reward: str = "",
    reward_model: str = "",
    prompts: int = PROMPTS,
    style: str = "",
    answer_after: str = "",
    samples: int = 4,
    tokens: int = 512,
    problems: int = 500,
    lr: float | None = None,
) -> Recipe:
    """Each round uses new prompts, answered by the current policy: the data stays on-policy. It trains a toy model on tiny
    reviews and comparisons by a simulated annotator (the rules of tasks/reviews.py).

    With a `model` (a hub name, a directory, a GGUF file) and `data`, a JSONL file of prompts (tasks/prompts.py), it trains a
    real model: its `samples` answers of at most `tokens` tokens to each of `prompts` prompts a round are ranked by a `reward`
    (a name of `posttrain list rewards`, or FILE.py:FUNCTION; the rows hold the answers that it needs, after `answer_after` if
    they hold more text) or by a `reward_model`. `style` is how questions are asked, such as boxed; by default, in the form that
    the reward reads. At most `problems` prompts, a tenth of the file, are held out; on these each round is compared with the
    first model.
    """
    asked, play = comparisons("comparisons", "previous dpo", prompts), versus("versus_sft", "dpo")
    algorithm, rate = DPO(beta=given(beta, 0.1 if model else 1.0)), 1e-6 if model else 1e-4
    train = prefer(algorithm, "comparisons", given(steps, 80), given(lr, rate), "previous dpo")
    if not model:
        alone = not (data or reward or reward_model)
        require(alone, "iterative_dpo: data and rewards are for a real model: give one as model")
        stages = [*beginning(size), *in_rounds([asked, train, play], rounds, "sft", prompts)]
        return Recipe(tuple(stages), next_command="posttrain run iterative_dpo rounds=5")
    require(bool(data), "iterative_dpo: give prompts as data, a JSONL file")
    decides = "iterative_dpo: give what ranks answers: reward or reward_model, one of them"
    require(bool(reward) != bool(reward_model), decides)
    task = Prompts(data, reward=reward, style=style, answer_after=answer_after, held_out=0.1)
    how: dict[str, Any] = {"task": task, "sampling": Sampling(tokens), "reward_model": reward_model}
    asked = replace(asked, samples=samples, noise=0.0, **how)
    play = replace(play, against=model, problems=problems, text=(), **how)
    stages = in_rounds([asked, train, play], rounds, model, prompts)
    return Recipe(tuple(stages), next_command=f"posttrain run iterative_dpo model={model} rounds=5")


def in_rounds(one: Sequence[Stage], rounds: int, start: str, prompts: int) -> list[Stage]:
    """The rounds, and the choice of the best one."""
    advance = {"comparisons.skip": prompts}
    made = repeat(one, rounds, first={"dpo": start}, advance=advance)
    return [*made, best_round("dpo", "versus_sft", rounds, "win_rate")]
