"""What a run is doing, and whether it is learning, in words for a person who has never trained a model.

    status(Run("runs/quickstart"), events).kind     # live, finished, waiting, stopped, interrupted or crashed
    verdict(index).headline                         # "Yes: held-out accuracy rose from 51.5% to 99.1% ..."

A verdict is based on measurements: the first and the last held-out score with their 95% intervals or, without these, two
windows of the reward or of the loss and the standard error of their difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from posttrain.errors import many
from posttrain.runs import layout
from posttrain.runs.index import Index
from posttrain.runs.layout import EventRow
from posttrain.runs.lock import live_owner
from posttrain.runs.metrics import SCORES
from posttrain.runs.read import Run
from posttrain.types import JSON

Kind = Literal["live", "finished", "waiting", "stopped", "interrupted", "crashed"]
Answer = Literal["yes", "careful", "unclear", "early", "no"]
# a larger difference between held-out scores, in standard errors, counts as a change
STANDARD_ERRORS = 2.0
# the same for two windows of training metrics, whose steps are not independent
WINDOW_ERRORS = 4.0
MIN_STEPS = 10  # with fewer steps a curve shows no trend
NAMES = {
    "accuracy/test": "held-out accuracy",
    "reward/test": "held-out reward",
    "accuracy/held_out": "accuracy on held-out pairs",
    "loss/held_out": "held-out loss",
}
# training metrics, the most informative first, and whether they should rise
TRENDS = {
    "reward": ("the reward", 1.0),
    "margin": ("the margin between better and worse answers", 1.0),
    "nll": ("the loss", -1.0),
    "loss": ("the loss", -1.0),
}
WAITING = "waiting"  # the kind of event of a stage that ends until people have labelled


@dataclass(frozen=True, slots=True)
class Status:
    """`said` is one line: why a run stopped, or what it waits for."""

    kind: Kind
    said: str = ""
    process: int | None = None  # the pid that writes the run, if it is on this machine


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to "is my run learning?", in one line, and the evidence for it."""

    answer: Answer
    headline: str
    because: tuple[str, ...] = ()
    stage: str = ""
    figure: str = ""


def status(run: Run, events: Sequence[EventRow]) -> Status:
    """Derive the status from the lock, the summary and the last attempt's events."""
    owner = live_owner(run.directory / layout.LOCK)
    if owner is not None:
        return Status("live", process=owner)
    if run.summary is not None:
        return Status("finished")
    last = max((event.attempt for event in events), default=0)
    recent = [event for event in events if event.attempt == last]
    said = {event.kind: str(event.details.get("text", "")) for event in recent}
    if WAITING in said:
        return Status("waiting", said[WAITING])
    stops = [str(e.details.get("text", "")) for e in recent if e.details.get("level") == "stop"]
    if stops:
        return Status("stopped", stops[-1])
    ends = [str(e.details.get("error", "")) for e in recent if e.kind == "ended"]
    if ends and ends[-1] in ("Interrupted", "KeyboardInterrupt"):
        return Status("interrupted", "stopped by a person; it can be resumed")
    return Status("crashed", ends[-1] if ends else "its process ended without a word")


def alarms(events: Sequence[EventRow]) -> list[EventRow]:
    """Return the alarms of the last attempt of each stage."""
    found = [event for event in events if event.kind == "alarm"]
    latest = {str(e.details.get("stage", "")): e.attempt for e in events if "stage" in e.details}
    return [e for e in found if e.attempt >= latest.get(str(e.details.get("stage", "")), 0)]


def verdict(index: Index) -> Verdict:
    """Judge whether the last training stage is learning."""
    stages = index.stage_names()
    if not stages:
        return Verdict("early", "Too early to say: nothing has been measured yet.")
    stage = stages[-1]
    figures = index.figures(stage)
    if broken := _broken(index, stage, figures):
        return broken
    score = held_out_score(index, stage)
    found = _held_out(index, stage, score) if score else None
    if found is None or found.answer == "early":
        found = _trend(index, stage, figures) or found
    if found is None:
        return Verdict("unclear", f"{stage} has no score that could rise.", stage=stage)
    warned = [e for e in alarms(index.events()) if e.details.get("stage") == stage]
    if warned and found.answer != "no":
        last = str(warned[-1].details.get("text", ""))
        headline = found.headline[:1].lower() + found.headline[1:]
        said = f"Careful: {headline} But an alarm was raised."
        return Verdict("careful", said, (last, *found.because), stage, found.figure)
    return found


def _broken(index: Index, stage: str, figures: dict[str, list[str]]) -> Verdict | None:
    for name in ("loss", "grad_norm", "reward"):
        last = index.points(stage, name, 1) if name in figures else []
        if last and (last[0][1] is None or math.isinf(last[0][1] or 0.0)):
            said = f"No: {name.replace('_', ' ')} is not a number at step {last[0][0]} of {stage}."
            why = "Numbers overflowed. Lower the learning rate, and look for an alarm about it."
            return Verdict("no", said, (why,), stage, name)
    return None


def held_out_score(index: Index, stage: str) -> str:
    """The held-out score that decides which step is the best (`metrics.best_score`): the first of its row. A task with graded scores
    has the reward before the accuracy, and the accuracy alone where every score is 0 or 1, which may be so at first. "" if none."""
    found = [name for name in index.figures(stage) if name in SCORES]
    firsts = [index.points(stage, name)[0][0] for name in found[:2]]
    later = found[:2] == ["accuracy/test", "reward/test"] and firsts[1] > firsts[0]
    return found[later] if found else ""


def score_points(index: Index, stage: str, score: str, end: str = "") -> dict[int, float]:
    """The values of a held-out score, or with `end` those of its interval, by step. The accuracy of a step without a reward is it."""
    names = ("accuracy/test", score) if score == "reward/test" else (score,)
    found = [point for name in names for point in index.points(stage, f"{name}{end}")]
    return dict(sorted((step, value) for step, value in dict(found).items() if value is not None))


def last_score(index: Index, stage: str) -> JSON:
    """The last held-out score with its interval: value, low, high, name; None if there is none."""
    if not (name := held_out_score(index, stage)):
        return None
    ends = [score_points(index, stage, name, end) for end in ("", "_low", "_high")]
    return [[*end.values()][-1] if end else None for end in ends] + [name]


def _held_out(index: Index, stage: str, score: str) -> Verdict:
    """Compare the first and the last held-out score by their intervals."""
    values = [*score_points(index, stage, score).items()]
    name, sign = NAMES[score], SCORES[score]
    if len(values) < 2:
        said = f"Too early to say: {name} of {stage} was measured once."
        return Verdict("early", said, (), stage, score)
    (first_step, first), (last_step, last) = values[0], values[-1]
    error = math.hypot(*(_error(index, stage, score, step) for step in (first_step, last_step)))
    percent = score.startswith("accuracy")
    change = f"from {_number(first, percent)} to {_number(last, percent)}"
    because = [f"measured on problems it does not train on, at steps {first_step} to {last_step}"]
    if error:
        because.append(f"the change is known to within ±{_number(1.96 * error, percent)} (95%)")
    answer, said = _answer(name, change, sign, sign * (last - first), STANDARD_ERRORS * error)
    best_step, best = max(values, key=lambda point: sign * point[1])
    fell = sign * (best - last) > STANDARD_ERRORS * max(error, 1e-12) and best_step != last_step
    if answer == "yes" and fell:
        was = f"Careful: {name} was {_number(best, percent)} at step {best_step} and is now"
        answer, said = "careful", f"{was} {_number(last, percent)}: the best lies behind."
    return Verdict(answer, said, tuple(because), stage, score)


def _answer(name: str, change: str, sign: float, rise: float, bound: float) -> tuple[Answer, str]:
    """Return the answer for a metric that should rise (or fall, if the sign is negative) and improved by `rise`."""
    if rise > bound:
        return "yes", f"Yes: {name} {'rose' if sign > 0 else 'fell'} {change}."
    if -rise > bound:
        return "no", f"No: {name} went {change}."
    return "unclear", f"Not clear yet: {name} went {change}, which may be chance."


def _error(index: Index, stage: str, score: str, step: int) -> float:
    """Return the standard error of a score, from its interval; 0 if it has none."""
    low, high = [score_points(index, stage, score, end).get(step) for end in ("_low", "_high")]
    return 0.0 if low is None or high is None else (high - low) / (2 * 1.96)


def _trend(index: Index, stage: str, figures: dict[str, list[str]]) -> Verdict | None:
    """Compare the first and the last fifth of a training metric."""
    name = next((name for name in TRENDS if name in figures), "")
    if not name:
        return None
    words, sign = TRENDS[name]
    values = [value for _, value in index.points(stage, name) if value is not None]
    if len(values) < MIN_STEPS:
        said = f"Too early to say: {many(len(values), 'step')} of {stage} cannot show a trend."
        return Verdict("early", said, (), stage, name)
    fifth = max(5, len(values) // 5)
    head, tail = values[:fifth], values[-fifth:]
    error = math.sqrt(sum(_noise(part) / fifth for part in (head, tail)))
    first, last = statistics.fmean(head), statistics.fmean(tail)
    change = f"from {_number(first)} to {_number(last)}"
    because = [f"means of the first and the last {fifth} of {len(values)} steps of {stage}"]
    because += _gold(index, stage, figures) if name == "reward" else []
    answer, said = _answer(words, change, sign, sign * (last - first), WINDOW_ERRORS * error)
    return Verdict(answer, said, tuple(because), stage, name)


def _gold(index: Index, stage: str, figures: dict[str, list[str]]) -> list[str]:
    """Return what is known of the true reward, if it is measured too."""
    name = next((name for name in ("reward/task", "reward/gold") if name in figures), "")
    values = [value for _, value in index.points(stage, name) if value is not None] if name else []
    fifth = max(5, len(values) // 5)
    if len(values) < 2 * fifth:
        return []
    first, last = statistics.fmean(values[:fifth]), statistics.fmean(values[-fifth:])
    return [f"what the reward stands for went from {_number(first)} to {_number(last)}"]


def _noise(values: Sequence[float]) -> float:
    """Return the variance of a curve around its trend, from the differences of neighbours.

    >>> _noise([1.0, 2.0, 3.0, 4.0]), _noise([0.0, 1.0, 0.0, 1.0])
    (0.5, 0.5)
    """
    return statistics.fmean((b - a) ** 2 for a, b in pairwise(values)) / 2


def _number(value: float, percent: bool = False) -> str:
    return f"{100 * value:.1f}%" if percent else f"{value:.3g}"
