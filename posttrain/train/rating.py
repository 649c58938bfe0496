"""Reward models as a reward: whole batches of rollouts, packed, without gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.data.steps import Step, steps_of, turns_of
from posttrain.errors import require
from posttrain.models.load import Reader, same_vocabulary
from posttrain.models.scorer import Scorer
from posttrain.rewards import _models as ensemble
from posttrain.train.forward import scores
from posttrain.train.pack import micro_batches, pack_examples
from posttrain.types import Example, Rollout, Score

TOKEN = "token:"


@dataclass(eq=False)
class ModelRating:
    """The score of a rollout is a scorer's number at its last token, which has seen all of it: prompt, response and the token
    that ended it, exactly as they were sampled. Several scorers are combined by `combine` (see rewards/_models.py); then the
    parts hold each member's score as `member/0`, `member/1`, ... and their standard deviation as `disagreement`.

    Ids are passed on as they are, so policy and scorers must have one vocabulary: it is checked between the members, and against
    the policy's where its `tokenizer` is given. A member whose number is not finite makes the score a failure, never a 0.
    """

    scorers: Sequence[Scorer]
    combine: str = "mean"
    k: float = 1.0
    token_budget: int = 8192
    tokenizer: Any = None

    def __post_init__(self) -> None:
        require(len(self.scorers) > 0, "a rating needs at least one reward model")
        require(
            self.token_budget > 0,
            f"a rating's token_budget must be positive, not {self.token_budget}",
        )
        ensemble.check(self.combine, self.k)
        policy = Reader(self.tokenizer, "the policy")
        member = Reader(self.scorers[0].tokenizer, "another member of the ensemble")
        advice = "train the reward model from the same model"
        for scorer in self.scorers:
            for own in (member, policy):
                same_vocabulary("reward model", own, scorer, advice)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks, for a checkpoint to name them by their weights."""
        return tuple(scorer.model for scorer in self.scorers)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score for each rollout, in order."""
        if not rollouts:
            return []
        by_member = [
            last_scores(scorer, [r.ids for r in rollouts], self.token_budget)
            for scorer in self.scorers
        ]
        return [self.score(values) for values in zip(*by_member, strict=True)]

    def score(self, values: Sequence[float]) -> Score:
        """What the members' numbers say together."""
        bad = [f"{number}: {value}" for number, value in enumerate(values) if not isfinite(value)]
        if bad:
            return Score.failed(f"reward model {', '.join(bad)} is not a finite score")
        parts: dict[str, float] = {}
        if len(values) > 1:
            parts = {f"member/{number}": value for number, value in enumerate(values)}
            parts["disagreement"] = ensemble.disagreement(values)
        return Score(ensemble.combine(values, self.combine, self.k), parts)


@dataclass(eq=False)
class ProcessRating(ModelRating):
    """Process reward models as a reward: a step is worth the chance sigmoid(score) that it is right, read at the token in which it
    ends, and a response as much as its worst step (Lightman et al. 2023 find that, or the product, best). The steps' values are
    the score's `steps`, which `supervision=process` learns from. A response without text is one step, which ends with it.

    Steps are split by rule, at every `separator`, or by token: `token:TEXT` ends a step in each token of that very text, as process
    reward models with a mark of their own have it, and reads their score there.
    """

    separator: str = "\n"
    token: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator.startswith(TOKEN):
            self.token = token_id(
                self.tokenizer or self.scorers[0].tokenizer, self.separator.removeprefix(TOKEN)
            )

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        if not rollouts:
            return []
        by_member = [
            token_scores(scorer, [r.ids for r in rollouts], self.token_budget)
            for scorer in self.scorers
        ]
        return [
            self.score_steps(rollout, [m[n] for m in by_member])
            for n, rollout in enumerate(rollouts)
        ]

    def score_steps(self, rollout: Rollout, by_member: Sequence[np.ndarray]) -> Score:
        """A response by its steps, each combined over the members."""
        steps = (
            steps_of(rollout, self.separator)
            if self.token < 0
            else marked_steps(rollout, self.token)
        )
        ends = [step.end for step in steps] or [len(rollout.ids) - 1]
        if not all(np.isfinite(score_T[ends]).all() for score_T in by_member):
            return Score.failed("a reward model's score of a step is not finite")
        with np.errstate(
            over="ignore"
        ):  # e^1000 is infinite, and 1 / (1 + infinity) is the right 0
            chance_MS = 1 / (1 + np.exp(-np.stack([score_T[ends] for score_T in by_member])))
        chances = [
            ensemble.combine(chance_M.tolist(), self.combine, self.k) for chance_M in chance_MS.T
        ]
        parts = (
            {"disagreement": max(ensemble.disagreement(c.tolist()) for c in chance_MS.T)}
            if len(by_member) > 1
            else {}
        )
        placed = tuple(
            (step.position, chance) for step, chance in zip(steps, chances, strict=False)
        )
        return Score(min(chances), parts, placed)


def token_id(tokenizer: Any, text: str) -> int:
    """The id of the one token that spells `text`."""
    found: Any = None if tokenizer is None else tokenizer.get_vocab().get(text)
    require(
        found is not None,
        f"process reward model: {text!r} is no token of its vocabulary; name one that ends its steps",
    )
    return int(found)


def marked_steps(rollout: Rollout, token: int) -> list[Step]:
    """The steps of a rollout that end in a token, and of each turn what follows the last of them."""
    found = []
    for turn in turns_of(rollout):
        steps = [
            Step(turn.written + int(turn.offsets[n]), turn.tokens + n, turn.tokens + n)
            for n in np.flatnonzero(turn.ids == token).tolist()
            if turn.offsets[n] > 0
        ]
        rest = turn.text[steps[-1].position - turn.written :] if steps else turn.text
        if rest.strip():
            end = int(np.searchsorted(turn.offsets, len(turn.text)))
            steps.append(Step(turn.written + len(turn.text), turn.tokens + end, turn.last))
        found += steps
    return found


@torch.no_grad()
def token_scores(
    scorer: Scorer, sequences: Sequence[np.ndarray], token_budget: int = 8192
) -> list[np.ndarray]:
    """A scorer's number at every token of each sequence. Neighbours that begin alike, as those of a group, share that part."""
    check_fits(scorer, sequences)
    scorer.model.eval()
    batch = pack_examples(
        [Example(ids, np.zeros(len(ids), bool)) for ids in sequences], scorer.device
    )
    score_T = (
        torch.cat([scores(scorer, piece) for piece in micro_batches(batch, token_budget)])
        .double()
        .cpu()
        .numpy()
    )
    return [score_T[start:end] for start, end in pairwise(batch.starts)]


def last_scores(
    scorer: Scorer, sequences: Sequence[np.ndarray], token_budget: int = 8192
) -> list[float]:
    """A scorer's number at the last token of each sequence."""
    return [float(score_T[-1]) for score_T in token_scores(scorer, sequences, token_budget)]


def check_fits(scorer: Scorer, sequences: Sequence[np.ndarray]) -> None:
    """Refuse ids that the scorer has no embedding for, and lengths beyond its positions: it would fail, or write nonsense."""
    config = scorer.model.config.get_text_config()
    where = scorer.source or "the reward model"
    highest = max(int(ids.max()) for ids in sequences)
    require(
        highest < config.vocab_size,
        f"token id {highest} is unknown to {where}, which has {config.vocab_size}: policy and "
        "reward model must share a vocabulary",
    )
    longest, limit = (
        max(len(ids) for ids in sequences),
        getattr(config, "max_position_embeddings", None),
    )
    require(
        limit is None or longest <= limit,
        f"a rollout of {longest} tokens is too long for {where}, which has {limit} positions; "
        "lower max_new_tokens",
    )
