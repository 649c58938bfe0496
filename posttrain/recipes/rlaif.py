"""RL from AI feedback: a judge compares answers, a reward model learns its verdicts, PPO, and the judge's agreement with people."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from posttrain.errors import require
from posttrain.recipes._feedback import compare, fit, optimise, versus
from posttrain.recipes._posts import beginning
from posttrain.recipes.base import Recipe, given
from posttrain.stages._judged import JudgeSettings
from posttrain.stages.agreement import AgreementStage
from posttrain.stages.base import Stage
from posttrain.tasks.posts import Posts

# the toy's judge: preferences other than people's, errors, and a bias for the answer that is shown first
JUDGE = JudgeSettings(rules=Posts(annotator="reader"), noise=0.1, position_bias=0.1)
# problems to skip, so that people compare answers to other posts than the judge does
ELSEWHERE = 50_000


def rlaif(
    size: str = "nano",
    labels: Literal["judge", "people"] = "judge",
    beta: float | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    problems: int | None = None,
    compared: int | None = None,
    lr: float | None = None,
    pairs: str = "",
    min_agreement: float = 0.0,
    model: str = "",
    questions: str = "",
    judge: str = "",
    url: str = "",
    rubric: str = "",
    evaluator: str = "",
    tokens: int = 128,
) -> Recipe:
    """Bai et al. 2022 and Lee et al. 2023 on short posts (tasks/posts.py) with a toy model on a CPU. The judge, here rules with
    their own preferences, errors and position bias, is first compared with people on 300 pairs. Then it compares the model's
    summaries, each pair in both orders; a pair whose verdict depends on the order is left out. A reward model learns from its
    verdicts and PPO from the reward model. People, here the writer of the post, judge the result and have labelled none of it.
    With labels=people they compare in place of the judge: RLHF, for comparison. `pairs` is a file of people's pairs to compare
    the judge with.

    With a `model` (a hub name, a directory, a GGUF file) it trains a real model: `questions` is a JSONL file of prompts,
    `judge` a model in this process or, with `url`, behind an OpenAI-compatible address, and `evaluator` another one that judges
    the result (by default the judge itself); the judge is compared with people if `pairs` are given.
    """
    first, scale = beginning("rlaif", size, model, questions, "", tokens, sft_steps=1000)
    require(not model or bool(judge), "rlaif: a real model needs questions and a judge")
    fine = bool(model) or not (judge or evaluator)
    require(fine, "rlaif: a judge is for a real model: give one as model")
    people = labels == "people"
    hint = "see instructgpt for a file of people's comparisons"
    require(not (model and people), f"rlaif: labels=people is for the toy; {hint}")
    beta = given(beta, 1.0) if not model else beta
    scale = scale.changed(steps, prompts, problems, compared, beta, lr)
    asked = JudgeSettings(model=judge, url=url, rubric=rubric) if model else JUDGE
    known: list[Stage] = []
    if not model and not pairs:
        other = replace(compare(scale, "people"), prompts=300, skip=ELSEWHERE, noise=0.0)
        known.append(other)
    if pairs or known:
        data = pairs or "people"
        known.append(
            AgreementStage(
                name="agreement", data=data, judge=asked, pairs=300, min_agreement=min_agreement
            )
        )
    second = JudgeSettings(model=evaluator or judge, url=url, rubric=rubric) if model else None
    labelled = compare(scale, judge=None if people else asked)
    stages = (*first, *known, labelled, fit(scale), optimise(scale), versus(scale, judge=second))
    real = f"model={model} questions={questions} judge={judge} beta=0.1"
    again = real if model else "labels=people"
    return Recipe(stages, next_command=f"posttrain run rlaif {again}")
