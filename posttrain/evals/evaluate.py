"""Held-out evaluation: answer problems the policy never trained on, and say how sure the figure is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan

from posttrain.errors import require
from posttrain.evals.statistics import Interval, majority_at_k, mean_interval, pass_at_k, share_interval, wilson
from posttrain.types import JSON, Group


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Scores of a set of problems, several samples each. `finals` are the final answers of each problem's samples, where the task
    finds them: what a majority is counted over."""

    groups: tuple[Group, ...]
    finals: tuple[tuple[str | None, ...], ...] = ()

    @property
    def problems(self) -> int:
        return len(self.groups)

    @property
    def accuracy(self) -> Interval:
        """Share of samples that solve their problem, averaged over problems (avg@k); the interval is over problems."""
        return self.passed(1)

    def passed(self, k: int) -> Interval:
        """pass@k, unbiased, over the problems whose samples were all scored."""
        counts = [(len(g.rollouts), sum(solved(g))) for g in self.groups if scored(g)]
        require(bool(counts), "every problem has a sample that could not be scored; see the failures in problems.jsonl")
        return share_interval([pass_at_k(n, c, k) for n, c in counts])

    @property
    def has_finals(self) -> bool:
        return any(final is not None for finals in self.finals for final in finals)

    def majority(self, k: int) -> Interval | None:
        """majority@k: how often the most frequent final answer of k samples is right, m tied ones sharing 1/m each. A problem's n
        samples are n // k votes, whose mean counts. None where the task finds no final answers, or nothing was scored."""
        means = []
        for group, finals in zip(self.groups, self.finals, strict=True) if self.has_finals else ():
            if scored(group):
                right = list(solved(group))
                votes = [_vote(finals[at : at + k], right[at : at + k]) for at in range(0, len(right) - k + 1, k)]
                means.append(sum(votes) / len(votes))
        return share_interval(means) if means else None

    def without(self, left_out: Sequence[bool]) -> Evaluation | None:
        """The evaluation on the other problems, or None where none is left."""
        kept = [n for n, out in enumerate(left_out) if not out]
        finals = tuple(self.finals[n] for n in kept) if self.finals else ()
        return Evaluation(tuple(self.groups[n] for n in kept), finals) if kept else None

    @property
    def reward(self) -> Interval | None:
        """The mean score over problems; None where nothing was scored."""
        means = [sum(g.rewards) / len(g.rewards) for g in self.groups if g.rewards]
        return mean_interval(means) if means else None

    @property
    def failed(self) -> int:
        """Samples without a score. They are in no average."""
        return sum(not r.score.valid for g in self.groups for r in g.rollouts)

    @property
    def length(self) -> float:
        lengths = [r.length for g in self.groups for r in g.rollouts]
        return sum(lengths) / max(1, len(lengths))

    def part(self, name: str) -> Interval | None:
        """One named part of the score, such as format, averaged over problems."""
        means = []
        for group in self.groups:
            values = [r.score.parts[name] for r in group.rollouts if name in r.score.parts]
            if values:
                means.append(sum(values) / len(values))
        if means and set(means) <= {0.0, 1.0}:
            return wilson(int(sum(means)), len(means))
        return mean_interval(means) if means else None

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(sorted({name for g in self.groups for r in g.rollouts for name in r.score.parts}))

    def solved(self) -> list[float]:
        """The share of solved samples of each problem, for a paired comparison; NaN where one could not be scored."""
        return [sum(solved(g)) / len(g.rollouts) if scored(g) else nan for g in self.groups]


def solved(group: Group) -> Sequence[bool]:
    """Which samples solve the problem."""
    return [r.score.solved for r in group.rollouts]


def scored(group: Group) -> bool:
    """Whether every sample has a score: pass@k and majorities need them all."""
    return all(r.score.valid for r in group.rollouts)


def _vote(finals: Sequence[str | None], right: Sequence[bool]) -> float:
    """Samples that say the same and were judged differently (a score may look at more than the answer) vote apart."""
    judged = {(final, verdict) for final, verdict in zip(finals, right, strict=True) if final is not None}
    both = {final for final, verdict in judged if (final, not verdict) in judged}
    named = [(final, verdict) if final in both else final for final, verdict in zip(finals, right, strict=True)]
    return majority_at_k(named, right, len(named))


def solved_marks(row: Mapping[str, JSON]) -> list[bool]:
    """Which samples of a saved row of per-problem results are solved."""
    return [bool(mark) for mark in row.get("solved") or [outcome in ("correct", "pass") for outcome in row["outcomes"]]]


def solved_share(row: Mapping[str, JSON]) -> float:
    """The share of solved samples in a saved row of per-problem results; NaN where one could not be scored.

    >>> solved_share({"outcomes": ["correct", "wrong"]}), solved_share({"outcomes": ["", ""], "solved": [True, True]})
    (0.5, 1.0)
    >>> solved_share({"outcomes": ["correct", "timeout"], "solved": [True, False], "values": [1.0, None]})
    nan
    """
    marks = solved_marks(row)
    return nan if None in row.get("values", ()) else sum(marks) / len(marks)
