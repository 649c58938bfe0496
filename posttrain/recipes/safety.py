"""Helpful and harmless: a reward model for each, PPO against their weighted sum, and refusals before and after."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.ppo import PPO
from posttrain.recipes._feedback import REAL_RATES, Scale, compare, fit, optimise
from posttrain.recipes._toys import imitating
from posttrain.recipes.base import Recipe, evaluate
from posttrain.stages._material import Data
from posttrain.stages.agreement import AgreementStage
from posttrain.stages.base import Stage
from posttrain.stages.reward_sources import MixedReward, RewardModels, Weighted
from posttrain.tasks.requests import Requests
from posttrain.types import Sampling

PEOPLE = Data(task=Requests("any"), counts={0: 10_000})  # most answers help, whatever is asked
ELSEWHERE = 50_000  # problems to skip, so that the two comparisons use different draws
TOY = Scale(
    task=Requests(),
    sampling=Sampling(max_new_tokens=60),
    steps=40,
    prompts=64,
    problems=1000,
    compared=3000,
    fit_steps=250,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.3, critic_warmup=5),
)
REAL = replace(
    TOY,
    sampling=Sampling(64),
    prompts=256,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.05, critic_warmup=3),
    **REAL_RATES,
)


def safety(
    size: str = "nano",
    harmless_weight: float = 2.0,
    beta: float | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    problems: int | None = None,
    compared: int | None = None,
    lr: float | None = None,
    pairs: str = "",
    model: str = "",
    tokens: int = 64,
) -> Recipe:
    """Bai et al. 2022 (HH) on requests of a small grammar (tasks/requests.py) with a toy model on a CPU. A model that helps
    with most requests, whatever they ask for, answers twice. One simulated annotator prefers the more helpful answer, another
    the less harmful one; a reward model is fitted to each, and PPO raises r = helpful + harmless_weight harmless. `before` and
    `after` measure held-out requests: accuracy (harmful ones refused, harmless ones helped with), `refused_harmful` and
    `refused_harmless`, the over-refusal.

    With a `model` (a hub name, a directory, a GGUF file) a real model answers the same requests, in `tokens` tokens at most.
    `pairs` is a file of pairs in which people prefer the less harmful answer: the accuracy of the harmless reward model on it
    is measured.
    """
    usual = replace(REAL, start=model, sampling=Sampling(tokens)) if model else TOY
    scale = usual.changed(steps, prompts, problems, compared, beta, lr)
    one = evaluate("before", scale.start, scale.task, scale.problems, scale.sampling)
    harm = replace(compare(scale, "harms", Requests(rule="harmless")), skip=ELSEWHERE)
    people: list[Stage] = []
    if pairs:
        fitted = AgreementStage(name="agreement", data=pairs, reward_model="harmless", pairs=2000)
        people.append(fitted)
    weights = {"helpful": 1.0, "harmless": harmless_weight}
    models = {name: RewardModels(models=(name,)) for name in weights}
    parts = (Weighted(reward=models[n], weight=w, label=n) for n, w in weights.items())
    stages = (
        *([] if model else [imitating(size, PEOPLE, steps=300)]),
        one,
        compare(scale, "helps", Requests(rule="helpful")),
        harm,
        fit(replace(scale, fit_steps=scale.fit_steps // 2), "helpful", "helps"),
        # half of its pairs are about harmless requests, where the preference is almost random
        fit(scale, "harmless", "harms", min_accuracy=0.53),
        *people,
        optimise(scale, MixedReward(parts=tuple(parts)), critic="helpful"),
        replace(one, name="after", model="rl"),
    )
    again = f"model={model} " if model else ""
    following = f"posttrain run safety {again}harmless_weight=0.5"
    return Recipe(stages, "before", "after", following)
