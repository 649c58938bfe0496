"""Models as rewards: reward models, process reward models and DPO-trained models rate packed batches of rollouts without gradient."""

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
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.ops.weights import sequence_sums
from posttrain.rewards import _models as ensemble
from posttrain.rewards._models import implicit_reward
from posttrain.train.forward import forward, scores
from posttrain.train.pack import micro_batches, pack_examples, pack_groups
from posttrain.types import Batch, Example, Group, Rollout, Score

TOKEN = "token:"


@dataclass(eq=False)
class ModelRating:
    """Scores a rollout by a scorer's output at its last token, over the exact sampled ids: prompt, response and the token that
    ended it. Several scorers are combined by `combine` with `weights` (see rewards/_models.py); the parts then hold the score of
    each member as `member/0`, `member/1`, ... and their standard deviation as `disagreement`.

    Ids are passed on as they are, so policy and scorers must have one vocabulary: it is checked between the members, and against
    the policy's where its `tokenizer` is given. A member whose number is not finite makes the score a failure, never a 0.
    """

    scorers: Sequence[Scorer]
    combine: str = "mean"
    k: float = 1.0
    token_budget: int = 8192
    tokenizer: Any = None
    weights: Sequence[float] = field(default=(), kw_only=True)  # one for each scorer; (): equal

    def __post_init__(self) -> None:
        require(len(self.scorers) > 0, "a rating needs at least one reward model")
        budget = self.token_budget
        require(budget > 0, f"a rating's token_budget must be positive, not {budget}")
        ensemble.check(self.combine, self.k)
        policy = Reader(self.tokenizer, "the policy")
        member = Reader(self.scorers[0].tokenizer, "another member of the ensemble")
        advice = "train the reward model from the same model"
        for scorer in self.scorers:
            for own in (member, policy):
                same_vocabulary("reward model", own, scorer, advice)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks; a checkpoint records a checksum of their weights."""
        return tuple(scorer.model for scorer in self.scorers)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return one score for each rollout, in order."""
        if not rollouts:
            return []
        ids = [rollout.ids for rollout in rollouts]
        by_member = [token_scores(scorer, ids, self.token_budget) for scorer in self.scorers]
        return list(map(self.rated, rollouts, zip(*by_member, strict=True)))

    def rated(self, rollout: Rollout, by_member: Sequence[np.ndarray]) -> Score:
        """The score of a rollout from the outputs of each member at its tokens."""
        return self.score([float(score_T[-1]) for score_T in by_member])

    def score(self, values: Sequence[float]) -> Score:
        """Combine the outputs of the members into a score."""
        bad = [f"{number}: {value}" for number, value in enumerate(values) if not isfinite(value)]
        if bad:
            return Score.failed(f"reward model {', '.join(bad)} is not a finite score")
        parts: dict[str, float] = {}
        if len(values) > 1:
            parts = {f"member/{number}": value for number, value in enumerate(values)}
            parts["disagreement"] = ensemble.disagreement(values, self.weights)
        return Score(ensemble.combine(values, self.combine, self.k, self.weights), parts)


@dataclass(eq=False)
class ProcessRating(ModelRating):
    """Process reward models as a reward. The value of a step is the probability sigmoid(score) that it is right, read at its last
    token; the value of a response is that of its worst step (Lightman et al. 2023 find that, or the product, best). The values of
    steps are the score's `steps`, from which `supervision=process` learns. A response without text is one step.

    Steps are split by rule, at every `separator` (a text or pattern:REGEX, see data/steps.py), or by token: `token:TEXT` ends a step
    in each token of that very text, as process reward models with a mark of their own have it, and reads their score there.
    """

    separator: str = "\n"
    token: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator.startswith(TOKEN):
            tokenizer = self.tokenizer or self.scorers[0].tokenizer
            self.token = token_id(tokenizer, self.separator.removeprefix(TOKEN))

    def rated(self, rollout: Rollout, by_member: Sequence[np.ndarray]) -> Score:
        """Score a response by its steps, each combined over the members."""
        by_rule, token = self.token < 0, self.token
        try:
            steps = steps_of(rollout, self.separator) if by_rule else marked_steps(rollout, token)
        except TimeoutError as error:
            return Score.failed(str(error))
        ends = [step.end for step in steps] or [len(rollout.ids) - 1]
        if not all(np.isfinite(score_T[ends]).all() for score_T in by_member):
            return Score.failed("a reward model's score of a step is not finite")
        with np.errstate(over="ignore"):  # e^1000 is infinite, 1 / (1 + infinity) is the right 0
            chance_MS = 1 / (1 + np.exp(-np.stack([score_T[ends] for score_T in by_member])))
        chance_SM = chance_MS.T.tolist()
        how = (self.combine, self.k, self.weights)
        chances = [ensemble.combine(chance_M, *how) for chance_M in chance_SM]
        parts = {}
        if len(by_member) > 1:
            by_step = [ensemble.disagreement(chance_M, self.weights) for chance_M in chance_SM]
            parts["disagreement"] = max(by_step)
        placed = zip((step.position for step in steps), chances, strict=False)
        return Score(min(chances), parts, tuple(placed))


def token_id(tokenizer: Any, text: str) -> int:
    """The id of the one token that spells `text`."""
    found: Any = None if tokenizer is None else tokenizer.get_vocab().get(text)
    none = f"process reward model: {text!r} is no token of its vocabulary; name one that ends its steps"
    require(found is not None, none)
    return int(found)


def marked_steps(rollout: Rollout, token: int) -> list[Step]:
    """The steps of a rollout that end with a token and, for each turn, the text after the last of them."""
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
    """The scorer's output at every token of each sequence. Neighbours with a common prefix, such as those of a group, share its
    computation."""
    check_fits(scorer, sequences)
    scorer.model.eval()
    examples = [Example(ids, np.zeros(len(ids), bool)) for ids in sequences]
    batch = pack_examples(examples, scorer.device)
    found = torch.cat([scores(scorer, piece) for piece in micro_batches(batch, token_budget)])
    score_T = found.double().cpu().numpy()
    return [score_T[start:end] for start, end in pairwise(batch.starts)]


def last_scores(
    scorer: Scorer, sequences: Sequence[np.ndarray], token_budget: int = 8192
) -> list[float]:
    """The scorer's output at the last token of each sequence."""
    return [float(score_T[-1]) for score_T in token_scores(scorer, sequences, token_budget)]


def check_fits(scorer: Scorer, sequences: Sequence[np.ndarray]) -> None:
    """Raise an error for ids without an embedding in the scorer, and for sequences longer than its positions: it would fail or
    return nonsense."""
    config = scorer.model.config.get_text_config()
    where = scorer.source or "the reward model"
    highest, longest = max(int(ids.max()) for ids in sequences), max(map(len, sequences))
    strange = f"token id {highest} is unknown to {where}, which has {config.vocab_size}"
    known = highest < config.vocab_size
    require(known, f"{strange}: policy and reward model must share a vocabulary")
    limit = getattr(config, "max_position_embeddings", None)
    long = f"a rollout of {longest} tokens is too long for {where}, which has {limit} positions"
    require(limit is None or longest <= limit, f"{long}; lower max_new_tokens")


class ImplicitRating:
    """r(x, y) = beta [ log pi(y | x) - log ref(y | x) ], summed over the tokens that were sampled, under two frozen models.

    `policy` is one that DPO or a relative trained, with `beta` as it was then, and `reference` the one it started from. Both are asked
    at temperature 1, the distribution that their training was about. A log-prob that is not finite is a failure, not a score.
    """

    def __init__(self, policy: Policy, reference: Policy, beta: float, token_budget: int = 8192):
        require(beta > 0, f"implicit reward: beta must be positive, not {beta}")
        advice = "the reference must be the model that the policy was trained from"
        same_vocabulary("implicit reward", policy, reference, advice)
        self.policy, self.reference = policy, reference
        self.beta, self.token_budget = beta, token_budget
        # the networks, for a checkpoint to name them by their weights
        self.models = (policy.model, reference.model)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return one score for each rollout, with both log-probs as parts."""
        if not rollouts:
            return []
        own, others = (self.logprobs(model, rollouts) for model in (self.policy, self.reference))
        scores = []
        for logprob, reference in zip(own, others, strict=True):
            if not (isfinite(logprob) and isfinite(reference)):
                scores.append(Score.failed(f"log-probs of {logprob} and {reference}"))
                continue
            value = implicit_reward(logprob, reference, self.beta)
            scores.append(Score(value, parts={"logprob": logprob, "reference": reference}))
        return scores

    def logprobs(self, policy: Policy, rollouts: Sequence[Rollout]) -> list[float]:
        """log p(y | x) of the sampled tokens of each rollout."""
        groups = [Group(rollout.problem, (rollout,)) for rollout in rollouts]
        return sequence_logprobs(policy, pack_groups(groups, 1.0, policy.device), self.token_budget)


@torch.no_grad()
def sequence_logprobs(policy: Policy, batch: Batch, token_budget: int) -> list[float]:
    """sum_t log p(y_t | x, y_<t) over the loss tokens of each sequence."""
    policy.model.eval()
    found: list[float] = []
    for piece in micro_batches(batch, token_budget):
        logprob_T, sequences = forward(policy, piece).logprob_T, piece.sequences
        found += sequence_sums(logprob_T, piece.mask_T, piece.sequence_T, sequences).tolist()
    return found


@torch.no_grad()
def token_logprobs(
    policy: Policy, rollouts: Sequence[Rollout], token_budget: int = 8192
) -> list[np.ndarray]:
    """log p(y_t | x, y_<t) of every sampled token of each rollout, at temperature 1."""
    policy.model.eval()
    batch = pack_examples([Example(r.ids, r.mask) for r in rollouts], policy.device)
    pieces = [forward(policy, piece).logprob_T for piece in micro_batches(batch, token_budget)]
    logprob_T = torch.cat(pieces).double().cpu().numpy()
    spans = zip(rollouts, pairwise(batch.starts), strict=True)
    return [logprob_T[start:end][rollout.mask] for rollout, (start, end) in spans]
