"""Summaries from human feedback: SFT, comparisons, a reward model, PPO, and the win rate by a held-out judge at equal length."""

from __future__ import annotations

from dataclasses import replace

from posttrain.errors import require
from posttrain.recipes._feedback import compare, fit, optimise, versus
from posttrain.recipes._posts import beginning
from posttrain.recipes.base import Recipe
from posttrain.stages._judged import JudgeSettings
from posttrain.stages.base import Stage
from posttrain.tasks.posts import Posts


def summarize(
    size: str = "nano",
    beta: float | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    problems: int | None = None,
    compared: int | None = None,
    lr: float | None = None,
    model: str = "",
    posts: str = "",
    demonstrations: str = "",
    data: str = "",
    judge: str = "",
    url: str = "",
    tokens: int = 64,
) -> Recipe:
    """Stiennon et al. 2020 on short posts (tasks/posts.py) with a toy model on a CPU. A model that imitates people's summaries
    answers twice, the writer of the post prefers one of the two, and PPO raises the score of a reward model of these
    comparisons. A judge that took no part in training evaluates the result: a reader with other rules (`versus_sft`;
    `versus_writer` is by the writer). Both win rates are also given at equal length, since a longer summary states more.

    With a `model` (a hub name, a directory, a GGUF file) it trains a real model: `posts` is a JSONL file of prompts, `data` one
    of people's comparisons of their summaries, `demonstrations` one of reference summaries to imitate first, and `judge` a
    model, in this process or behind `url`, that compares the result with the first model.
    """
    first, scale = beginning("summarize", size, model, posts, demonstrations, tokens)
    needs = "summarize: a real model needs posts, data (comparisons that people made) and judge"
    require(not model or bool(data and judge), needs)
    require(bool(model) or not judge, "summarize: a judge is for a real model: give one as model")
    if not model:
        slow = replace(scale.policy, lr=1e-4)
        scale = replace(scale, steps=60, compared=6000, fit_steps=600, policy=slow)
    scale = scale.changed(steps, prompts, problems, compared, beta, lr)
    learned = (*first, *(() if data else (compare(scale),)), fit(scale, data=data or "comparisons"))
    if model:
        judged: list[Stage] = [versus(scale, judge=JudgeSettings(model=judge, url=url))]
    else:
        reader = Posts(annotator="reader")
        judged = [versus(scale, task=reader), versus(scale, "versus_writer")]
    again = f"model={model} posts={posts} data={data} judge={judge} " if model else ""
    stages = (*learned, optimise(scale), *judged)
    return Recipe(stages, next_command=f"posttrain run summarize {again}beta=0.1")
