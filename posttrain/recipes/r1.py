"""R1: cold start, reasoning RL, rejection sampling into SFT data, and a final RL over verifiable and preference rewards together."""

from __future__ import annotations

from dataclasses import replace

from posttrain.algorithms.grpo import GRPO
from posttrain.recipes.base import Recipe
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.pretrain import PretrainStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sample import SampleStage
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage
from posttrain.tasks.bilingual import Bilingual
from posttrain.tasks.mixed import Mixed, Source
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

SUMS, REVIEWS = Bilingual(), Reviews()
WEB = Bilingual(style="plain", tongues="mixed", slips=0.7)  # no tags, two languages at random, carries forgotten
TAGGED = replace(WEB, style="tagged")  # the few who do write tags
COLD = Bilingual(tongues="mixed")  # well-formed and right, in either language
ORDINARY = Reviews("any")
BOTH = Mixed((Source(name="sums", task=SUMS), Source(name="reviews", task=REVIEWS)))
MODELS = ("base", "cold_start", "reasoning", "mixture", "final")
THINK, SPEAK = Sampling(max_new_tokens=60), Sampling(max_new_tokens=110)


def r1(size: str = "nano", reasoning_steps: int = 80, final_steps: int = 24, restart: str = "base") -> Recipe:
    """DeepSeek-R1 (Guo et al. 2025) on two-digit sums and tiny reviews, on a CPU; docs/recipes/r1.md has what each stage did.

    The base model's habits are what the stages mend: hardly any tags, words of two languages, forgotten carries, reviews of any mood.
    Stage 3 begins again at `restart`, the base as in the paper; "reasoning" goes on from stage 2. The last stage is short: its reward
    model is right only near the answers that it has seen, and more steps please it and not the annotator.
    """
    stages: list[Stage] = [
        PretrainStage(
            name="base", model=f"tiny:{size}", steps=1000, batch=32,
            data=(
                Data(task=WEB, counts={2: 9000}, weight=0.6),
                Data(task=TAGGED, counts={2: 1500}, weight=0.1),
                Data(task=ORDINARY, counts={0: 4000}, weight=0.3),
            ),
            optimizer=Optimization(lr=3e-3, warmup=20, schedule="cosine"),
        ),
        SFTStage(
            name="cold_start", model="base", data=(Data(task=COLD, counts={2: 100}),), steps=60, batch=32,
            optimizer=Optimization(lr=1e-3, warmup=10, schedule="cosine"),
        ),
        RLStage(
            name="reasoning", model="cold_start", task=SUMS, steps=reasoning_steps, prompts=32, sampling=THINK,
            algorithm=GRPO(group=8, beta=0.0, reduction="token_mean"), watch_kl=True, evaluate_every=0,
            optimizer=Optimization(lr=3e-4, warmup=10, schedule="linear", final=0.1),
        ),
        SampleStage(name="sampled", model="reasoning", task=SUMS, prompts=1500, samples=2, sampling=THINK),
        SFTStage(
            name="mixture", model=restart, steps=250, batch=32,
            data=(
                Data(file="sampled", weight=0.5),
                Data(task=ORDINARY, counts={0: 2000}, weight=0.35),
                Data(task=REVIEWS, counts={0: 200}, weight=0.15),
            ),
            optimizer=Optimization(lr=1e-3, warmup=10, schedule="cosine"),
        ),
        ComparisonsStage(name="comparisons", model="mixture", task=REVIEWS, prompts=3000, noise=0.1, sampling=SPEAK),
        RewardModelStage(
            name="preferences", model="mixture", data=("comparisons",), steps=250, batch=32, least_accuracy=0.6, evaluate_every=100,
            optimizer=Optimization(lr=1e-3, warmup=20, schedule="cosine"),
        ),
        RLStage(
            name="final", model="mixture", task=BOTH, steps=final_steps, prompts=32, sampling=SPEAK, evaluate_every=0,
            reward_models=("preferences",), rated="reviews", algorithm=GRPO(group=8, beta=0.1, reduction="token_mean"),
            optimizer=Optimization(lr=3e-4, warmup=10, schedule="linear", final=0.1),
        ),
    ]  # fmt: skip
    measured = [each for stage in stages for each in (stage, *measures(stage.name))]
    return Recipe(tuple(measured), "base_sums", "final_sums", "posttrain run r1 restart=reasoning")


def measures(stage: str) -> list[Stage]:
    """What the table says of a model: its sums, and its reviews against those of the base model."""
    sums = EvaluateStage(name=f"{stage}_sums", model=stage, task=SUMS, problems=1000, sampling=THINK)
    reviews = VersusStage(name=f"{stage}_reviews", model=stage, against="base", task=REVIEWS, problems=580, sampling=SPEAK)
    return [] if stage not in MODELS else [sums] if stage == "base" else [sums, reviews]
