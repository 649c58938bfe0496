"""The first stages of the alignment recipes' real models, which are asked for sentences.

Without demonstrations or ordinary text written by people, the model's own text is used: the answers that the annotator scores
best, and its ordinary conversation.
"""

from __future__ import annotations

from posttrain.stages.sample import SampleStage
from posttrain.tasks.base import Task
from posttrain.tasks.sentiment import Sentiment
from posttrain.types import Sampling

SENTENCES = Sentiment()
TALK = Sentiment("continue")  # ordinary conversation, which no stage trains


def favourites(name: str, model: str, tokens: int, task: Task = SENTENCES) -> SampleStage:
    """Keep the best of four answers of `model` to each prompt, if the simulated annotator gives it at least 0.7."""
    sampling = Sampling(max_new_tokens=tokens)
    return SampleStage(
        name=name, model=model, task=task, prompts=600, min_score=0.7, sampling=sampling
    )


def talk(name: str, model: str, prompts: int, skip: int = 0) -> SampleStage:
    """Sample ordinary text of `model`, good or bad; only unfinished text is left out."""
    return SampleStage(
        name=name,
        model=model,
        task=TALK,
        prompts=prompts,
        keep=4,
        min_score=0.0,
        skip=skip,
        sampling=Sampling(256),
    )
