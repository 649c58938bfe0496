"""R1: cold start, reasoning RL, rejection sampling into SFT data, and a final RL with verifiable and preference rewards together."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.errors import require
from posttrain.recipes._r1_sizes import Scale, nano, real
from posttrain.recipes.base import Recipe, evaluate, with_given
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.reward_sources import RewardModels
from posttrain.stages.rl import RLStage
from posttrain.stages.sample import SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.requests import Requests

MODELS = ("base", "cold_start", "reasoning", "mixture", "final")


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
    return [
        SFTStage(
            name="cold_start",
            model=scale.base,
            steps=scale.cold_steps,
            optimizer=scale.begin,
            # well-formed, right, in either language
            data=(Data(task=replace(scale.sums, language_mix="mixed"), counts={2: scale.cold}),),
        ),
        RLStage(
            name="reasoning",
            model="cold_start",
            task=scale.sums,
            steps=scale.reasoning_steps,
            prompts=scale.prompts,
            algorithm=GRPO(group=scale.group, beta=0.0, reduction="token_mean"),
            watch_kl=True,
            evaluate_every=0,
            sampling=scale.think,
            optimizer=scale.explore,
            checkpoint_every=scale.checkpoint_every,
        ),
        SampleStage(
            name="sampled",
            model="reasoning",
            task=scale.sums,
            prompts=scale.sampled,
            samples=2,
            sampling=scale.think,
        ),
    ]


def alignment(scale: Scale, restart: str) -> list[Stage]:
    """Stages 3 and 4: SFT on reasoning and general data, and RL with verifiable and preference rewards together."""
    sources = [("sums", scale.sums), ("general", scale.general), ("requests", scale.requests)]
    both = Mixed(tuple(Source(name=name, task=task) for name, task in sources if task))
    return [
        SFTStage(
            name="mixture",
            model=scale.base if restart == "base" else restart,
            steps=scale.mixture_steps,
            batch=scale.batch,
            data=(
                Data(file="sampled", weight=1 - sum(data.weight for data in scale.mixed)),
                *scale.mixed,
            ),
            optimizer=scale.imitate,
        ),
        ComparisonsStage(
            name="comparisons",
            model="mixture",
            task=scale.general,
            prompts=scale.compared,
            sampling=scale.speak,
        ),
        RewardModelStage(
            name="preferences",
            model="mixture",
            data=("comparisons",),
            steps=scale.fit_steps,
            batch=32,
            min_accuracy=0.6,
            evaluate_every=100,
            optimizer=scale.fit,
        ),
        RLStage(
            name="final",
            model="mixture",
            task=both,
            steps=scale.final_steps,
            prompts=scale.prompts,
            reward=RewardModels(models=("preferences",), rated="general"),
            evaluate_every=0,
            algorithm=GRPO(
                group=scale.group, beta=0.1, reduction="token_mean", truncated=scale.truncated
            ),
            sampling=scale.speak,
            optimizer=scale.explore,
            checkpoint_every=scale.checkpoint_every,
        ),
    ]


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
