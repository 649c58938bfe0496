"""InstructGPT: SFT, a reward model from comparisons, then PPO against it with a KL anchor and the pretraining mix."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from posttrain.algorithms.ppo import PPO
from posttrain.errors import require
from posttrain.recipes import _reviews
from posttrain.recipes._feedback import Scale, compare, fit, imitate_file, optimise, versus
from posttrain.recipes._sentences import favourites, talk
from posttrain.recipes.base import Recipe, given
from posttrain.stages._judged import JudgeSettings
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.tasks.reviews import Reviews
from posttrain.tasks.sentiment import Sentiment
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

TOY = Scale(
    task=_reviews.TASK,
    sampling=_reviews.SAMPLING,
    steps=50,
    prompts=128,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.1, critic_warmup=5),
    ordinary=(_reviews.PEOPLE,),
    unseen=(_reviews.UNSEEN,),
)
REAL = Scale(
    task=Sentiment(strict=True),
    sampling=Sampling(64),
    steps=40,
    prompts=256,
    compared=4000,
    algorithm=PPO(epochs=2, mini_batches=2, beta=0.05, critic_warmup=3, missing_eos=1.0),
    fit=Optimization(lr=5e-5, warmup=10, schedule="cosine"),
    policy=Optimization(lr=1e-5, warmup=5),
    critic=Optimization(lr=2e-5),
    ordinary=(Data(file="ordinary"),),
    unseen=(Data(file="unseen"),),
    checkpoint_every=1000,
    max_kl=10.0,
)


def instructgpt(
    size: str = "nano",
    beta: float | None = None,
    ptx: float = 0.2,
    steps: int | None = None,
    model: str = "",
    lr: float | None = None,
    prompts: int | None = None,
    problems: int = 500,
    tokens: int = 64,
    demonstrations: str = "",
    data: str = "",
    ordinary: str = "",
    unseen: str = "",
    annotator: Literal["simulated", "people"] = "simulated",
    compared: int | None = None,
    strict: bool | None = None,
    max_kl: float | None = None,
    judge: str = "",
) -> Recipe:
    """On tiny reviews with a simulated annotator (the rules of tasks/reviews.py), with a toy model on a CPU.

    Ouyang et al. 2022: a policy is optimised against a Bradley-Terry model of people's comparisons. KL in the reward keeps it
    near the SFT model, and gradients of the likelihood of its old text keep it good at that. The reward model must pass an
    accuracy gate first.

    With a `model` (a hub name, a directory, a GGUF file) it trains a real model, which writes sentences of at most `tokens`
    tokens (tasks/sentiment.py), and the simulated annotator is the VADER lexicon. People's JSONL files can replace its parts:
    `demonstrations` for the annotator's favourites, `data` for its comparisons, `ordinary` for text of the pretraining mix and
    `unseen` for text whose perplexity is measured; without them the model writes the last two itself.

    With `annotator=people` the run ends when there are answers to compare (`compared` of them, 200 by default). After people
    have compared them, in the studio or with `posttrain label`, `posttrain resume` trains the reward model on their
    preferences.

    `strict` chooses the stricter annotator, by default with a real model and not with the toy. For a real model it wants the
    subject named and little flattery; strict=false is the lexicon alone, which rewards flattery about anything. PPO ends at a
    KL of `max_kl` nats a response from SFT (0: never; 10 with a real model). The annotator gives two win rates, against SFT and
    against the model before SFT. A second judge, which has labelled nothing, gives a third: `judge`, a model that compares;
    without one, the other of the two annotators.
    """
    alone = not model and any((demonstrations, data, ordinary, unseen))
    require(not alone, "instructgpt: files are for a real model: give one as model")
    require(bool(model) or not judge, "instructgpt: a judge is for a real model: give one as model")
    usual, people = REAL if model else TOY, annotator == "people"
    compared = given(compared, 200) if people else compared
    scale = usual.changed(steps, prompts, problems, compared, beta, lr)
    strict = given(strict, bool(model))
    task, other = ((Sentiment if model else Reviews)(strict=s) for s in (strict, not strict))
    algorithm, max_kl = replace(scale.algorithm, ptx=ptx), given(max_kl, scale.max_kl)
    scale = replace(scale, task=task, data=data, algorithm=algorithm, max_kl=max_kl)
    first, again = _reviews.beginning(size), ""
    if model:
        own = [(Data(file=file),) for file in (ordinary or "ordinary", unseen or "unseen")]
        scale = replace(scale, sampling=Sampling(tokens), ordinary=own[0], unseen=own[1])
        first, again = real(model, demonstrations, scale), f"model={model} "
    # it has labelled nothing: a model that compares, or the other annotator
    second = JudgeSettings(model=judge) if judge else JudgeSettings(rules=other)
    stages = (*first, *aligned(scale, annotator, model or "pretrain", second))
    return Recipe(stages, next_command=f"posttrain run instructgpt {again}beta=0.02 ptx=0")


def real(model: str, demonstrations: str, scale: Scale) -> list[Stage]:
    """The first stages of a real model: it writes the text for which no file was given, then learns the demonstrations."""
    made = {"ordinary": talk("ordinary", model, 240), "unseen": talk("unseen", model, 60, skip=240)}
    needed = (*(scale.ordinary if scale.algorithm.ptx else ()), *scale.unseen)
    stages: list[Stage] = [stage for name, stage in made.items() if Data(file=name) in needed]
    if not demonstrations:
        tokens = scale.sampling.max_new_tokens
        stages.append(favourites("demonstrations", model, tokens, task=scale.task))
    return [*stages, imitate_file(model, demonstrations or "demonstrations", steps=40)]


def aligned(
    scale: Scale, annotator: Literal["simulated", "people"], base: str, second: JudgeSettings
) -> list[Stage]:
    """From the SFT model: comparisons, a reward model, PPO, and the evaluations."""
    untaxed = replace(scale, unseen=())
    return [
        *([] if scale.data else [compare(scale, annotator=annotator)]),
        fit(scale, data=scale.data or "comparisons"),
        optimise(scale),
        versus(scale),
        versus(untaxed, "versus_base", against=base),
        versus(untaxed, "second_judge", judge=second),
    ]
