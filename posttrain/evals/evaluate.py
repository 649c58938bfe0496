"""Held-out evaluation: scores of answers to problems that were not trained on, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan

from posttrain.errors import require
from posttrain.evals import statistics
from posttrain.evals.statistics import Comparison, Interval
from posttrain.rewards.compose import JUDGED
from posttrain.types import COUNTED, JSON, Group, Rollout

Row = Mapping[str, JSON]  # the saved result of one problem
Pair = tuple[Row, Row]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The scores of a set of problems, several samples each. `finals` are the final answers of each problem's samples, for majority
    votes, if the task can extract them."""

    groups: tuple[Group, ...]
    finals: tuple[tuple[str | None, ...], ...] = ()

    @property
    def problems(self) -> int:
        return len(self.groups)

    @property
    def accuracy(self) -> Interval:
        """The share of samples that solve their problem, averaged over problems (avg@k). The interval is over prompts."""
        return self.passed(1)

    def passed(self, k: int) -> Interval:
        """Unbiased pass@k over the problems whose samples were all scored."""
        kept = [g for g in self.groups if scored(g)]
        hint = "see the failures in problems.jsonl"
        require(kept, f"every problem has a sample that could not be scored; {hint}")
        values = [statistics.pass_at_k(len(g.rollouts), sum(solved(g)), k) for g in kept]
        several = any(len(g.rollouts) > k for g in kept)
        return statistics.share_interval(values, prompts(kept), several)

    @property
    def has_finals(self) -> bool:
        return any(final is not None for finals in self.finals for final in finals)

    def majority(self, k: int) -> Interval | None:
        """majority@k: how often the most frequent final answer of k samples is right; m tied answers share 1/m each. A problem's n
        samples make n // k votes, whose mean counts. None if the task finds no final answers, or nothing was scored."""
        if not self.has_finals:
            return None
        pairs = zip(self.groups, self.finals, strict=True)
        kept = [(group, finals) for group, finals in pairs if scored(group)]
        votes = []
        for group, finals in kept:
            right, starts = solved(group), range(0, len(finals) - k + 1, k)
            votes.append([_vote(finals[at : at + k], right[at : at + k]) for at in starts])
        asked = prompts([group for group, _ in kept])
        return _mean_interval(votes, asked, statistics.share_interval)

    def without(self, left_out: Sequence[bool]) -> Evaluation | None:
        """The evaluation on the other problems, or None if there are none."""
        kept = [n for n, out in enumerate(left_out) if not out]
        finals = tuple(self.finals[n] for n in kept) if self.finals else ()
        return Evaluation(tuple(self.groups[n] for n in kept), finals) if kept else None

    @property
    def roles(self) -> dict[str, Interval]:
        """The accuracy of each role, if episodes have several."""
        names = sorted({group.role for group in self.groups if scored(group)})
        own = {name: self.without([group.role != name for group in self.groups]) for name in names}
        return {name: part.accuracy for name, part in own.items() if part and len(names) > 1}

    @property
    def reward(self) -> Interval | None:
        """The mean score over problems; None if nothing was scored."""
        return self._averaged([g.rewards for g in self.groups])

    def tells(self, verifiable: bool) -> bool:
        """Whether scores tell right from wrong: by the task, or by the outcomes that they name."""
        return verifiable or any(r.score.outcome in JUDGED for g in self.groups for r in g.rollouts)

    def headlines(self, verifiable: bool) -> dict[str, Interval]:
        """The figures that a stage reports while it trains: accuracy if scores tell right from wrong, and the mean reward if a task
        does not, or has scores between and beyond 0 and 1. The first decides which step is the best: the reward if scores are
        points, of which the accuracy tells only how many reach 1."""
        found = {"accuracy": self.accuracy} if self.tells(verifiable) else {}
        rollouts = [r for g in self.groups for r in g.rollouts if r.score.valid]
        if (verifiable and not any(map(_points, rollouts))) or self.reward is None:
            return found
        both = {"reward": self.reward, **found}
        return both if verifiable else {**found, **both}

    @property
    def failed(self) -> int:
        """The number of samples without a score. They are in no average."""
        return sum(not r.score.valid for g in self.groups for r in g.rollouts)

    @property
    def length(self) -> float:
        lengths = [r.length for g in self.groups for r in g.rollouts]
        return sum(lengths) / max(1, len(lengths))

    def part(self, name: str) -> Interval | None:
        """The mean of one named part of the score, such as format, over problems or, if it is a share of several items of each
        problem (IFEval's instructions), over the items."""
        parts = [[r.part(name) for r in group.rollouts] for group in self.groups]
        counts = [int(g.problem.facts.get(COUNTED, {}).get(name, 1)) for g in self.groups]
        return self._averaged([[own for own in ps if own is not None] for ps in parts], counts)

    def _averaged(
        self, values: Sequence[Sequence[float]], counts: Sequence[int] | None = None
    ) -> Interval | None:
        """The mean over problems of each one's mean value, weighted by `counts` if given; None if there are no values."""
        keyed = zip(values, prompts(self.groups), counts or [1] * self.problems, strict=True)
        kept = [(own, key) for own, key, count in keyed if own for _ in range(count)]
        own_values, keys = [own for own, _ in kept], [key for _, key in kept]
        return _mean_interval(own_values, keys, statistics.score_interval)

    @property
    def part_names(self) -> tuple[str, ...]:
        parts = (r.score.parts for g in self.groups for r in g.rollouts)
        return tuple(sorted({name for own in parts for name in own}))

    def by_problem(self, verifiable: bool = True) -> list[float]:
        """The share of solved samples of each problem, for a paired comparison, or the mean reward if no score tells right from
        wrong; NaN if a sample has no score."""
        values = [solved(g) if verifiable else g.rewards for g in self.groups]
        pairs = zip(self.groups, values, strict=True)
        return [sum(own) / len(own) if scored(group) else nan for group, own in pairs]


def _points(rollout: Rollout) -> bool:
    """Whether a score is not a mark of right and wrong: neither 0 nor 1, nor a grade beside such an outcome. An outcome that an episode
    named when it ended is none, if turns were paid or the value is beyond 0 and 1."""
    value, outcome = rollout.score.value, rollout.score.outcome
    graded = outcome in JUDGED or (outcome and value is not None and 0 <= value <= 1)
    return value not in (0, 1) and (bool(rollout.paid) or not graded)


def _mean_interval(
    values: Sequence[Sequence[float]], keys: Sequence[str], interval: Callable[..., Interval]
) -> Interval | None:
    """The interval of the means of each problem's values; None if there are none."""
    means = [sum(own) / len(own) for own in values]
    return interval(means, keys, any(len(own) > 1 for own in values)) if means else None


def prompts(groups: Sequence[Group]) -> list[str]:
    """The prompt of each group as one text: problems with the same prompt count as one observation."""
    found = []
    for group in groups:
        given = [s.text for s in group.rollouts[0].segments[:1] if not s.sampled]
        texts = [group.problem.question, *given]
        found.append("\0".join(texts) if any(texts) else group.problem.id)
    return found


def solved(group: Group) -> Sequence[bool]:
    """Which samples solved the problem."""
    return [r.score.solved for r in group.rollouts]


def scored(group: Group) -> bool:
    """Whether every sample has a score: pass@k and majorities need them all."""
    return all(r.score.valid for r in group.rollouts)


def _vote(finals: Sequence[str | None], right: Sequence[bool]) -> float:
    """Samples with equal answers but different verdicts (a score may look at more than the answer) vote separately."""
    judged = zip(finals, right, strict=True)
    named = [None if final is None else (final, verdict) for final, verdict in judged]
    return statistics.majority_at_k(named, right, len(named))


def solved_marks(row: Mapping[str, JSON]) -> list[bool]:
    """Which samples of a saved row of per-problem results are solved."""
    marks = row.get("solved")
    return [bool(m) for m in marks or (o in ("correct", "pass") for o in row["outcomes"])]


def solved_share(row: Mapping[str, JSON]) -> float:
    """The share of solved samples in a saved row of per-problem results; NaN if one has no score.

    >>> solved_share({"outcomes": ["correct", "wrong"]}), solved_share({"outcomes": ["", ""], "solved": [True, True]})
    (0.5, 1.0)
    >>> solved_share({"outcomes": ["correct", "timeout"], "solved": [True, False], "values": [1.0, None]})
    nan
    """
    marks = solved_marks(row)
    return nan if None in row.get("values", ()) else sum(marks) / len(marks)


def same_problems(first: Sequence[Row], second: Sequence[Row]) -> list[Pair]:
    """Saved rows of the problems that both have, matched by id, question and role, in the order of the first."""
    other = {_place(row): row for row in second}
    return [(row, other[key]) for row in first if (key := _place(row)) in other]


def _place(row: Row) -> tuple[JSON, ...]:
    return row["problem"], row["question"], row.get("role", "")


def row_value(row: Row, verifiable: bool = True) -> float:
    """The share of solved samples of a saved row or, if no score tells right from wrong, their mean reward; NaN if one has none."""
    share, values = solved_share(row), row.get("values", ())
    return share if verifiable or isnan(share) else sum(values) / len(values)


def compare_rows(pairs: Sequence[Pair], verifiable: bool = True) -> Comparison | None:
    """Compare the second of two models with the first, on saved rows of the same problems; None if none was scored on both sides."""
    first, second = ([row_value(pair[side], verifiable) for pair in pairs] for side in (0, 1))
    if all(isnan(a) or isnan(b) for a, b in zip(first, second, strict=True)):
        return None
    return statistics.compare(first, second, [_asked(row) for row, _ in pairs])


def rows_interval(rows: Sequence[Row], verifiable: bool = True) -> Interval:
    """The accuracy, or the mean reward, over saved rows that were all scored."""
    several = any(len(row["outcomes"]) > 1 for row in rows)
    values, asked = [row_value(row, verifiable) for row in rows], [_asked(row) for row in rows]
    return statistics.score_interval(values, asked, several)


def _asked(row: Row) -> str:
    return str(row.get("prompt") or row["problem"])
