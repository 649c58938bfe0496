"""Held-out evaluation: answer problems the policy never trained on, and say how sure the figure is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.evals.statistics import Interval, mean_interval, mean_pass_at_k, wilson
from posttrain.types import Group


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Scores of a set of problems, several samples each."""

    groups: tuple[Group, ...]

    @property
    def problems(self) -> int:
        return len(self.groups)

    @property
    def accuracy(self) -> Interval:
        """Share of samples that solve their problem, averaged over problems (avg@k); the interval is over problems."""
        return self.passed(1)

    def passed(self, k: int) -> Interval:
        """pass@k, unbiased, over the problems whose samples were all scored."""
        counts = [(len(g.rollouts), sum(solved(g))) for g in self.groups if all(r.score.valid for r in g.rollouts)]
        if all(n == 1 for n, _ in counts):  # 0 or 1 each: Wilson's interval holds at 0% and 100%, the normal one does not
            return wilson(sum(c for _, c in counts), len(counts))
        return mean_pass_at_k(counts, k)

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
        """The share of solved samples of each problem, for a paired comparison."""
        return [sum(solved(g)) / len(g.rollouts) for g in self.groups]


def solved(group: Group) -> Sequence[bool]:
    """Which samples solve the problem."""
    return [r.score.solved for r in group.rollouts]
