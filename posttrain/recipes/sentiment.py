"""Fine-tuning from preferences: PPO against a reward model of few comparisons, over-optimised, then refitted in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from posttrain.algorithms.ppo import PPO
from posttrain.recipes import _reviews
from posttrain.recipes._feedback import Scale, compare, fit, optimise, versus
from posttrain.recipes._toys import imitating
from posttrain.recipes.base import Recipe, repeat, with_given
from posttrain.stages.base import Stage
from posttrain.stages.overoptimisation import OveroptimisationStage
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.sentiment import Sentiment, Style
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

SKIP = 10_000  # problems between the first ones of two rounds, so that no two rounds share any
CURVE = 8  # points of a round's curve
ALGORITHM = PPO(epochs=2, mini_batches=2, critic_warmup=3, missing_eos=1.0)


@dataclass(frozen=True, kw_only=True)
class RoundScale(Scale):
    """The settings of a round that differ between a toy model and a real one."""

    fit_more: int  # more steps of the reward model in each further round, which has more rankings
    measured: int  # held-out problems of each point of the curve
    best_of: int  # held-out problems of best of n


TOY = RoundScale(
    task=Reviews(strict=True),
    sampling=_reviews.SAMPLING,
    algorithm=ALGORITHM,
    steps=36,
    prompts=64,
    measured=200,
    best_of=40,
    fit=Optimization(lr=1e-3, warmup=10, schedule="cosine"),
    fit_steps=60,
    fit_more=100,
    policy=Optimization(lr=2e-4, warmup=5),
    unseen=(_reviews.UNSEEN,),
    checkpoint_every=100,
)
REAL = replace(
    TOY,
    task=Sentiment(strict=True),
    sampling=Sampling(64),
    prompts=256,
    best_of=100,
    fit=Optimization(lr=2e-5, warmup=5, schedule="cosine"),
    fit_steps=40,
    fit_more=40,
    policy=Optimization(lr=1e-5, warmup=5),
    critic=Optimization(lr=2e-5),
    unseen=(),
)


def sentiment(
    size: str = "nano",
    model: str = "",
    rounds: int = 3,
    comparisons: int = 40,
    fresh: int = 400,
    beta: float = 0.02,
    beta_increment: float = 0.06,
    steps: int = 36,
    prompts: int | None = None,
    lr: float | None = None,
    reward_lr: float | None = None,
    style: Style = "sentence",
    tokens: int = 64,
    problems: int = 500,
) -> Recipe:
    """Ziegler et al. 2019 and Stiennon et al. 2020 on tiny reviews, on a CPU. A toy model of what people write is trained; a
    simulated annotator (the rules of tasks/reviews.py) ranks four of its answers to each of `comparisons` prompts; a reward
    model is fitted to the rankings; and PPO raises its score at a KL coefficient, `beta`, that is too low for so weak a reward
    model. Each further round ranks two answers of the latest policy and two of the first model, for `fresh` more prompts than
    the round before. It fits the reward model to all rankings so far (Christiano et al. 2017), and raises beta by
    `beta_increment`.

    With a `model` (a directory, a GGUF file, a hub name) it trains a real model, which writes sentences (tasks/sentiment.py) of
    at most `tokens` tokens. The simulated annotator is the VADER lexicon, strict: it wants the subject named, and gives less
    for flattery. Reward model and critic learn at `reward_lr`.
    """
    usual = REAL if model else TOY
    fitted, critic = (with_given(one, lr=reward_lr) for one in (usual.fit, usual.critic))
    scale = usual.changed(steps, prompts, problems, comparisons, beta, lr)
    scale = replace(scale, fit=fitted, critic=critic)
    first, again = [imitating(size, _reviews.PEOPLE)], "beta=0.2"
    if model:
        task, sampling = Sentiment(style, strict=True), Sampling(tokens)
        scale = replace(scale, start=model, task=task, sampling=sampling, measured=problems)
        scale = replace(scale, best_of=min(scale.best_of, problems))
        first, again = [], f"model={model} beta=0.1"
    stages = (*first, *optimised(scale, one_round(scale), rounds, fresh, beta_increment))
    return Recipe(stages, next_command=f"posttrain run sentiment {again}")


def one_round(scale: RoundScale) -> list[Stage]:
    """Compare, fit and optimise, always from the first model."""
    return [
        replace(
            compare(scale),
            model="previous rl",
            against=scale.start,
            before="previous comparisons",
            samples=4,
        ),
        replace(fit(scale, min_accuracy=0.0), batch=16, evaluate_every=0),
        replace(
            optimise(scale),
            evaluate_every=max(1, scale.steps // CURVE),
            evaluate_problems=0,
            measure_problems=scale.measured,
        ),
        versus(scale),
    ]


def optimised(
    scale: RoundScale, one: Sequence[Stage], rounds: int, fresh: int, beta_increment: float
) -> list[Stage]:
    """The rounds, and the curves of all of them."""
    stages = repeat(
        one,
        rounds,
        first={"rl": scale.start, "comparisons": ""},
        advance={
            "comparisons.skip": SKIP,
            "comparisons.prompts": fresh,
            "reward.steps": scale.fit_more,
            "rl.algorithm.beta": beta_increment,
        },
    )
    numbers = range(1, rounds + 1)
    curves = OveroptimisationStage(
        name="overoptimisation",
        model=scale.start,
        task=scale.task,
        trained=tuple(f"rl_{n}" for n in numbers),
        reward_models=tuple(f"reward_{n}" for n in numbers),
        problems=scale.best_of,
        sampling=scale.sampling,
    )
    return [*stages, curves]
