"""What the real models of the alignment recipes begin with: one is asked for sentences, and what it writes itself.

Where no person has written demonstrations or ordinary text, the model's own stand in: of its answers those that the annotator likes
best, and what it says in conversation.
"""

from __future__ import annotations

from posttrain.stages.sample import SampleStage
from posttrain.tasks.base import Task
from posttrain.tasks.sentiment import Sentiment
from posttrain.types import Sampling

SENTENCES = Sentiment()
TALK = Sentiment("continue")  # ordinary conversation: what no stage tunes


def favourites(name: str, model: str, tokens: int, task: Task = SENTENCES) -> SampleStage:
    """The best of four answers of `model` to each prompt, where the simulated annotator gives it 0.7 or more."""
    sampling = Sampling(max_new_tokens=tokens)
    return SampleStage(
        name=name, model=model, task=task, prompts=600, min_score=0.7, sampling=sampling
    )


def talk(name: str, model: str, prompts: int, skip: int = 0) -> SampleStage:
    """What `model` says, good or bad, as it comes; only what does not end is left out."""
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
