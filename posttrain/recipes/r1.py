"""R1: cold start, reasoning RL, rejection sampling into SFT data, and a final RL with verifiable and preference rewards together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.algorithms.grpo import GRPO
from posttrain.errors import require
from posttrain.recipes._sentences import SENTENCES, favourites
from posttrain.recipes._toys import GENTLE, pretrained
from posttrain.recipes.base import (
    Recipe,
    comparisons,
    evaluate,
    falling,
    grpo,
    reward_model,
    rl,
    sample,
    sft,
    with_given,
)
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.stages.versus import VersusStage
from posttrain.tasks.base import Task
from posttrain.tasks.bilingual import Bilingual
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.requests import Requests
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

MODELS = ("base", "cold_start", "reasoning", "mixture", "final")
# no tags, two languages at random, forgotten carries
WEB = Bilingual(style="plain", language_mix="mixed", error_rate=0.7)
TAGGED = replace(WEB, style="tagged")  # the few demonstrations with tags
KIND, ORDINARY = Reviews(), Reviews("any")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The settings that differ between a toy model and a real one."""

    before: tuple[Stage, ...]  # stages that come first: the base model, general data
    base: str
    sums: Bilingual
    general: Task
    requests: Task | None = None  # for the last stage, in which harmful ones should be refused
    think: Sampling  # for sums
    speak: Sampling  # for general answers, and for both together
    cold: int  # demonstrations of the cold start
    cold_steps: int = 60
    begin: Optimization  # for the cold start
    sampled: int  # sums that the model of stage 2 answers for stage 3
    mixed: tuple[Data, ...]  # the general data mixed with them, with its share
    mixture_steps: int = 250
    batch: int  # examples per step of supervised stages
    imitate: Optimization  # for stage 3
    compared: int  # prompts whose two answers the simulated annotator compares
    fit: Optimization  # for the reward model
    fit_steps: int
    reasoning_steps: int
    final_steps: int
    prompts: int
    group: int = 8
    explore: Optimization  # for both RL stages
    truncated: Literal["keep", "mask"] = "keep"  # for answers that were cut off, in the last stage
    checkpoint_every: int = 25


def nano(size: str) -> Scale:
    made = pretrained(
        size,
        Data(task=WEB, counts={2: 9000}, weight=0.6),
        Data(task=TAGGED, counts={2: 1500}, weight=0.1),
        Data(task=ORDINARY, counts={0: 4000}, weight=0.3),
    )
    return Scale(
        before=(replace(made, name="base", steps=1000),),
        base="base",
        sums=Bilingual(),
        general=KIND,
        think=Sampling(60),
        speak=Sampling(110),
        cold=100,
        sampled=1500,
        batch=32,
        compared=3000,
        fit_steps=250,
        mixed=(
            Data(task=ORDINARY, counts={0: 2000}, weight=0.35),
            Data(task=KIND, counts={0: 200}, weight=0.15),
        ),
        begin=GENTLE,
        imitate=GENTLE,
        fit=Optimization(lr=1e-3, warmup=20, schedule="cosine"),
        reasoning_steps=80,
        final_steps=24,
        prompts=32,
        explore=falling(3e-4),
    )


def real(model: str) -> Scale:
    """The sums are asked in words. The general answers are sentences; the data are those of the model's own answers that the
    annotator scores best."""
    tokens, budget = 64, 16384
    return Scale(
        before=(favourites("favourites", model, tokens),),
        base=model,
        sums=Bilingual(wording="words"),
        general=SENTENCES,
        think=Sampling(tokens),
        speak=Sampling(tokens),
        cold=300,
        sampled=3000,
        batch=64,
        compared=2000,
        fit_steps=100,
        mixed=(Data(file="favourites", weight=0.3),),
        begin=Optimization(lr=2e-4, warmup=5, schedule="cosine", token_budget=budget),
        imitate=Optimization(lr=1e-4, warmup=5, schedule="cosine", token_budget=budget),
        fit=Optimization(lr=2e-5, warmup=10, schedule="cosine", token_budget=budget),
        reasoning_steps=40,
        final_steps=30,
        prompts=64,
        group=16,
        truncated="mask",
        checkpoint_every=1000,
        explore=falling(3e-5, 5, token_budget=budget),
    )


def r1(
    size: str = "nano",
    reasoning_steps: int | None = None,
    final_steps: int | None = None,
    restart: str = "base",
    model: str = "",
    lr: float | None = None,
    problems: int = 1000,
    harmless: bool = False,
) -> Recipe:
    """DeepSeek-R1 (Guo et al. 2025) on two-digit sums and tiny reviews, on a CPU; docs/recipes/r1.md has what each stage did.

    The stages fix the base model's errors: hardly any tags, words of two languages, forgotten carries, reviews of any mood.
    Stage 3 starts again from `restart`, the base model as in the paper; "reasoning" continues from stage 2. The last stage is
    short: its reward model is right only near the answers that it has seen, and more steps raise its score and not the
    simulated annotator's.

    With a `model` (a hub name, a directory, a GGUF file) it trains a real model, which is the base: it is asked sums in words,
    and its general answers are sentences that the VADER lexicon scores (tasks/sentiment.py). `lr` is that of both RL stages.
    With `harmless` the last stage also has requests, half of them harmful (tasks/requests.py), and rewards helping with the
    harmless ones only.
    """
    scale = real(model) if model else nano(size)
    scale = with_given(scale, reasoning_steps=reasoning_steps, final_steps=final_steps)
    scale = replace(scale, explore=with_given(scale.explore, lr=lr))
    if harmless:
        scale = with_requests(scale, toy=not model)
    made = [*scale.before, *measures(scale, "base", problems)]
    for stage in [*reasoning(scale), *alignment(scale, restart)]:
        made += [stage, *measures(scale, stage.name, problems)]
    again = f"posttrain run r1 {f'model={model} ' if model else ''}restart=reasoning"
    return Recipe(tuple(made), "base_sums", "final_sums", again)


def with_requests(scale: Scale, toy: bool) -> Scale:
    """Return these settings with requests in the last stage. A toy model must first learn how to answer one."""
    shown = Data(task=Requests("any"), counts={0: 2000}, weight=0.15)
    scale = replace(scale, requests=Requests())
    if not toy:
        return scale
    (base,) = scale.before
    assert isinstance(base, PretrainStage)
    base = replace(base, data=(*base.data, shown))
    return replace(scale, before=(base,), mixed=(*scale.mixed, shown))


def reasoning(scale: Scale) -> list[Stage]:
    """Stages 1 and 2: a cold start, RL on sums, and the model's right answers as data."""
    # well-formed, right, in either language
    shown = Data(task=replace(scale.sums, language_mix="mixed"), counts={2: scale.cold})
    steps, algorithm = scale.reasoning_steps, grpo(scale.group)
    reasoned = learned(scale, "cold_start", scale.sums, steps, scale.think, algorithm)
    answers = sample("sampled", "reasoning", scale.sums, scale.sampled, scale.think)
    return [
        sft("cold_start", scale.base, [shown], scale.cold_steps, scale.begin),
        replace(reasoned, name="reasoning", watch_kl=True),
        replace(answers, samples=2),
    ]


def alignment(scale: Scale, restart: str) -> list[Stage]:
    """Stages 3 and 4: SFT on reasoning and general data, and RL with verifiable and preference rewards together."""
    sources = [("sums", scale.sums), ("general", scale.general), ("requests", scale.requests)]
    both = Mixed(tuple(Source(name=name, task=task) for name, task in sources if task))
    own = Data(file="sampled", weight=1 - sum(data.weight for data in scale.mixed))
    model, data = scale.base if restart == "base" else restart, [own, *scale.mixed]
    imitated = sft("mixture", model, data, scale.mixture_steps, scale.imitate)
    fitted = reward_model("preferences", "mixture", "comparisons", scale.fit_steps, scale.fit)
    algorithm = grpo(scale.group, beta=0.1, truncated=scale.truncated)
    final = learned(scale, "mixture", both, scale.final_steps, scale.speak, algorithm)
    return [
        replace(imitated, batch=scale.batch),
        comparisons("comparisons", "mixture", scale.general, scale.compared, scale.speak),
        replace(fitted, min_accuracy=0.6, evaluate_every=100),
        replace(final, name="final", reward=RewardModels(models=("preferences",), rated="general")),
    ]


def learned(
    scale: Scale, model: str, task: Task, steps: int, sampling: Sampling, algorithm: GRPO
) -> RLStage:
    """RL at the rate of both RL stages."""
    stage = rl(model, task, steps, scale.prompts, sampling, algorithm, scale.explore)
    return replace(stage, evaluate_every=0, checkpoint_every=scale.checkpoint_every)


def measures(scale: Scale, stage: str, problems: int) -> list[Stage]:
    """The evaluations of a model for the table: its held-out sums, and its general answers against those of the base model."""
    require(problems >= 4, f"r1: problems must be at least 4, not {problems}")
    if stage not in MODELS:
        return []
    model, general = scale.base if stage == "base" else stage, 29 * problems // 50
    judged = evaluate(f"{stage}_sums", model, scale.sums, problems, scale.think)
    compared = VersusStage(
        name=f"{stage}_general",
        model=model,
        against=scale.base,
        task=scale.general,
        problems=general,
        sampling=scale.speak,
    )
    asked: list[Stage] = [] if stage == "base" else [compared]
    if scale.requests:
        asked.append(
            replace(judged, name=f"{stage}_requests", task=scale.requests, sampling=scale.speak)
        )
    return [judged, *asked]
