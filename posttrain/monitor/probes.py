"""What is measured of a step's rollouts for the rules, in addition to the usual figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.monitor.series import START
from posttrain.types import Group, Rollout

SHORT = 16  # tokens; shorter responses do not count in the mean repetition
HEAD = 64  # tokens of a response in which distinct 2-grams are counted, so that length alone does not move the figure
COMMON = 0.2  # share of responses with a word
LARGEST = 1e6  # a larger reward would outweigh every other one
WORD = 3  # letters, at least
# every byte but the letters as a space
LETTERS = bytes(b if chr(b).isalpha() and b < 128 else 32 for b in range(256))
MULTIPLIERS = 2_654_435_761 * np.array([1_000_003, 10_000_019, 100_000_007, 1_000_000_007])


def rollout_figures(groups: Sequence[Group]) -> dict[str, float]:
    """The spread of rewards, the share of groups with equal rewards, repetition within and distinct 2-grams over responses."""
    figures: dict[str, float] = {}
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [value for g in groups for value in g.rewards]
    if len(rewards) > 1:
        figures["reward_spread"] = float(np.std(rewards))
    compared = [g.rewards for g in groups if len(g.rollouts) > 1]
    if compared:
        equal = sum(not r or max(r) == min(r) for r in compared)
        figures["groups/zero_variance"] = equal / len(compared)
    long_N = np.array([r.length >= SHORT for r in rollouts], dtype=bool)
    if long_N.any():
        figures["repetition"] = float(np.mean(repetition(rollouts)[long_N]))
    heads = [_sampled(r)[:HEAD] for r in rollouts]
    pairs = np.concatenate([np.zeros(0, np.int64), *(h[:-1] * 2**32 + h[1:] for h in heads)])
    if len(pairs):
        figures["distinct"] = len(np.unique(pairs)) / len(pairs)
    return figures


def repetition(rollouts: Sequence[Rollout], n: int = 4) -> np.ndarray:
    """Of each response, 1 - (distinct n-grams / n-grams) of its token ids: [N]; 0 where it has none.

    "abcabcabc..." of 30 tokens has 27 4-grams, 3 of them distinct: 24/27.
    """
    share_N = np.zeros(len(rollouts))
    for number, ids in enumerate(map(_sampled, rollouts)):
        if len(ids) >= n:
            hashed = np.sort(np.convolve(ids, MULTIPLIERS[:n], "valid"))  # wraps round
            distinct = 1 + np.count_nonzero(np.diff(hashed))
            share_N[number] = 1.0 - distinct / len(hashed)
    return share_N


def words(rollouts: Sequence[Rollout]) -> dict[str, list[int]]:
    """Which responses have a word."""
    having: dict[str, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        text = rollout.response.lower().encode("ascii", "replace").translate(LETTERS).decode()
        for word in set(text.split()):
            if len(word) >= WORD:
                having.setdefault(word, []).append(number)
    return having


@dataclass(eq=False)
class Keywords:
    """The words that many responses had in the first steps."""

    common: list[str] = field(default_factory=list)
    steps: int = 0

    def share(self, having: Mapping[str, Sequence[int]], responses: int) -> float:
        """The share of responses that have the most widespread word that few had at first."""
        if self.steps < START:
            often = (word for word, at in having.items() if len(at) > COMMON * responses)
            self.common = sorted({*self.common, *often})
        self.steps += 1
        counts = (len(at) for word, at in having.items() if word not in self.common)
        return max(counts, default=0) / responses


def unusable(rollout: Rollout) -> bool:
    """Whether a rollout holds what no update may see: a log-prob that is not finite, or a reward out of all proportion."""
    logprobs = [s.logprobs for s in rollout.segments if s.logprobs is not None]
    far = abs(rollout.score.value or 0.0) > LARGEST
    return far or not all(np.isfinite(one).all() for one in logprobs)


def _sampled(rollout: Rollout) -> np.ndarray:
    """The ids of a response."""
    parts = [s.ids for s in rollout.segments if s.sampled]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])
