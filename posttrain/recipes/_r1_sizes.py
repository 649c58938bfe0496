"""The two scales of R1: a toy model of 0.2M parameters, trained on a CPU, and a real model, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from posttrain.recipes._sentences import SENTENCES, favourites
from posttrain.recipes._toys import GENTLE, pretrained
from posttrain.recipes.base import falling
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.tasks.base import Task
from posttrain.tasks.bilingual import Bilingual
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

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
