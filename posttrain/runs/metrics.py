"""Metrics that merge: totals and counts are summed over micro-batches and ranks, then divided; and the metrics of rollouts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from posttrain.types import ENDINGS, Group, Metric, Rollout, Score

# words with which a model questions its own text: R1-Zero's "aha"
REFLECTION = re.compile(
    r"\b(?:wait|hmm+|mistake|(?:re|double)-?check|let me (?:check|verify|re-?\w+)|on second thought)\b"
)
# every match contains one of these
STEMS = ("wait", "hmm", "mistake", "check", "let me", "on second thought")


def merge(metrics: Iterable[Metric]) -> dict[str, float]:
    """Merge metrics by name into figures, in order of first appearance.

    >>> merge([Metric("kl", 6.0, 3), Metric("kl", 2.0, 1)])  # (6 + 2) / (3 + 1), not the mean of 2 and 2
    {'kl': 2.0}
    >>> merge([Metric("clip", 1.0, 10), Metric("clip", 3.0, 2)])["clip"]  # 4 / 12, not the mean of 0.1 and 1.5
    0.3333333333333333
    >>> merge([Metric("worst", 1.0, None, largest=True), Metric("worst", 0.5, None, largest=True)])["worst"]
    1.0
    """
    return {name: metric.value for name, metric in merged(metrics).items()}


def merged(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Sum totals and counts by name, in double precision; these can be merged further without loss.

    A count of None marks a plain sum. A name whose counts are all 0 is NaN: nothing was measured, which is not a
    measurement of 0.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        total, count = float(metric.total), None if metric.count is None else float(metric.count)
        before = found.get(metric.name)
        if before is not None:
            ranks = (before.largest, before.smallest) == (metric.largest, metric.smallest)
            if (before.count is None) != (count is None) or not ranks:
                kinds = "a sum in one place and a mean or a maximum in another"
                raise ValueError(f"metric {metric.name!r} is {kinds}")
            total = _joined(before, metric)
            count = None if count is None or before.count is None else float(before.count) + count
        found[metric.name] = Metric(metric.name, total, count, metric.largest, metric.smallest)
    return found


def _joined(before: Metric, metric: Metric) -> float:
    """Return the joint total. A metric with count 0 is neither largest nor smallest; NaN stays NaN."""
    one, other = float(before.total), float(metric.total)
    if not (metric.largest or metric.smallest):
        return one + other
    counts = [count for count in (before.count, metric.count) if count is not None]
    if len(counts) == 2 and not all(counts):
        return one if before.count else other
    return math.nan if math.isnan(one + other) else (max if metric.largest else min)(one, other)


# parts of a score that say what the reward stands for, and their metrics; the first that was measured counts
GOLD_PARTS = ("task", "gold", "answer")
GOLD = tuple(f"reward/{part}" for part in GOLD_PARTS)
# the first of these that was measured counts; -1: lower is better
SCORES = {"accuracy/test": 1.0, "reward/test": 1.0, "accuracy/held_out": 1.0, "loss/held_out": -1.0}


@dataclass(frozen=True, slots=True)
class Best:
    """The best held-out score of a stage, and the step after which it was measured."""

    figure: str
    score: float
    step: int


def best_score(best: Best | None, step: int, figures: Mapping[str, float]) -> Best | None:
    """Return the better of the best score so far and the new one; the earlier one if they are equal. The first score of the figures
    counts. Accuracy and reward can be compared: a task with both has only the accuracy where every score is 0 or 1.

    >>> first = best_score(None, 10, {"accuracy/test": 0.4, "accuracy/test_low": 0.3})
    >>> best_score(best_score(first, 20, {"accuracy/test": 0.6}), 30, {"accuracy/test": 0.6})
    Best(figure='accuracy/test', score=0.6, step=20)
    >>> points = best_score(None, 10, {"reward/test": 6.0, "accuracy/test": 1.0})
    >>> best_score(best_score(points, 20, {"reward/test": 7.0, "accuracy/test": 1.0}), 30, {"accuracy/test": 1.0})
    Best(figure='reward/test', score=7.0, step=20)
    """
    name = next((name for name in figures if name in SCORES), "")
    value = float(figures.get(name, float("nan")))
    alike = best is not None and {best.figure, name} <= {"accuracy/test", "reward/test"}
    same = best if best is not None and (alike or best.figure == name) else None
    worse = same is not None and SCORES[name] * (value - same.score) <= 0
    return best if value != value or worse else Best(name, value, step)


def failure_kind(score: Score) -> str:
    """Return the class of a failure, for a column's name: the text before the first colon.

    >>> failure_kind(Score.failed("ValueError: no such file")), failure_kind(Score.failed("timeout: no score within 5 s"))
    ('ValueError', 'timeout')
    """
    return "_".join(str(score.failure).split(":")[0].split())[:40] or "unnamed"


def reflects(response: str) -> bool:
    """Whether a response questions itself. A plain substring search comes first: it decides for most responses, in a fifth of
    the time.

    >>> reflects("12. Wait, let me check."), reflects("the waiter checked")
    (True, False)
    """
    text = response.lower()
    return any(stem in text for stem in STEMS) and REFLECTION.search(text) is not None


def group_metrics(groups: Sequence[Group], greedy: Collection[int] = ()) -> tuple[Metric, ...]:
    """Compute metrics over all rollouts, except samples that are `greedy`, a baseline. Tasks with roles get the reward of each role,
    tasks with several turns the number of turns. A count of an episode is averaged over all rollouts, under its own name;
    `ended/NAME` is the share of episodes with that outcome."""
    rollouts = [r for g in groups for r in g.rollouts if r.sample not in greedy]
    scored = [r for r in rollouts if r.score.valid]
    count, tokens = len(rollouts), sum(r.length for r in rollouts)
    logprobs = (s.logprobs for r in rollouts for s in r.segments if s.logprobs is not None)
    metrics = [
        _mean_reward("reward", scored),
        Metric("length", tokens, count),
        # the mean of -log p over the sampled tokens is an unbiased estimate of the entropy per token
        Metric("entropy", -sum(float(logprob_T.sum()) for logprob_T in logprobs), tokens),
        Metric("truncated", sum(r.finish == "length" for r in rollouts), count),
        Metric("failed", count - len(scored), count),
        Metric("reflection", sum(reflects(r.response) for r in rollouts), count),
    ]
    if any(r.turns > 1 for r in rollouts):
        metrics.append(Metric("turns", sum(r.turns for r in rollouts), count))
    kinds = Counter(failure_kind(r.score) for r in rollouts if not r.score.valid)
    metrics += [Metric(f"failed/{kind}", number, count) for kind, number in sorted(kinds.items())]
    ends = Counter(r.score.outcome for r in rollouts if r.score.outcome in ENDINGS)
    metrics += [Metric(f"ended/{'_'.join(end.split())}", ends[end], count) for end in sorted(ends)]
    for name in sorted({name for r in rollouts for name in r.counts}):
        metrics.append(Metric(name, sum(r.counts.get(name, 0.0) for r in rollouts), count))
    for part in sorted({name for r in scored for name in r.score.parts}):
        values = [value for r in scored if (value := r.part(part)) is not None]
        metrics.append(Metric(f"reward/{part}", sum(values), len(values)))
    for role in sorted({r.role for r in rollouts} - {""}):
        metrics.append(_mean_reward(f"role/{role}/reward", [r for r in scored if r.role == role]))
    return tuple(metrics)


def _mean_reward(name: str, scored: Sequence[Rollout]) -> Metric:
    values = [r.score.value for r in scored if r.score.value is not None]
    return Metric(name, sum(values), len(values))
