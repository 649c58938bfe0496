"""The first stages of the alignment recipes' toy models: a small model that writes tiny reviews as people do, good and bad."""

from __future__ import annotations

from posttrain.algorithms.base import Algorithm
from posttrain.recipes._toys import GENTLE, pretrained
from posttrain.stages._material import Data
from posttrain.stages.base import Stage
from posttrain.stages.comparisons import ComparisonsStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.stages.versus import VersusStage
from posttrain.tasks.reviews import Reviews
from posttrain.train.optimizer import Optimization
from posttrain.types import Sampling

TASK = Reviews()
SAMPLING = Sampling(max_new_tokens=120)
PEOPLE = Data(task=Reviews("any"), counts={0: 20_000})  # reviews as people write them
KIND = Data(task=TASK, counts={0: 200}, weight=0.3)
ORDINARY = Data(task=Reviews("any"), counts={0: 2000}, weight=0.7)
UNSEEN = Data(task=Reviews("any"), counts={0: 500})


def beginning(size: str) -> list[Stage]:
    """Pretraining on ordinary reviews, then a little imitation of kind ones: the model from which alignment starts."""
    return [
        pretrained(size, PEOPLE),
        SFTStage(name="sft", model="pretrain", data=(KIND, ORDINARY), steps=80, optimizer=GENTLE),
    ]


def best_samples(size: str, algorithm: Algorithm, steps: int) -> list[Stage]:
    """From that model, learn from the policy's own best samples by the score of the simulated annotator."""
    return [
        *beginning(size),
        RLStage(
            name="rl",
            model="sft",
            task=TASK,
            steps=steps,
            prompts=16,
            algorithm=algorithm,
            sampling=SAMPLING,
            optimizer=Optimization(lr=3e-4, warmup=5),
            watch_kl=True,
            evaluate_every=0,
        ),
        versus("versus_sft", "rl"),
    ]


def comparisons(name: str, model: str, prompts: int) -> ComparisonsStage:
    """The simulated annotator compares two answers of `model` to each prompt."""
    return ComparisonsStage(name=name, model=model, task=TASK, prompts=prompts, sampling=SAMPLING)


def versus(name: str, model: str, against: str = "sft") -> VersusStage:
    """Measure which model the simulated annotator prefers on held-out prompts, and the cost in perplexity."""
    return VersusStage(
        name=name, model=model, against=against, task=TASK, sampling=SAMPLING, text=(UNSEEN,)
    )
