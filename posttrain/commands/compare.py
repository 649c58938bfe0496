"""Compares two runs: held-out results problem by problem, other results of their stages, curves in one plot, and changed settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from posttrain.errors import UserError, many, refuse_unknown, require
from posttrain.evals import evaluate
from posttrain.evals.statistics import Comparison, Interval
from posttrain.runs import html
from posttrain.runs.layout import decode_number
from posttrain.runs.plot import draw_together
from posttrain.runs.read import Run
from posttrain.runs.resume_policy import flatten, short
from posttrain.types import JSON

PROBLEMS, RESULT = "problems.jsonl", "result.json"
MAX_TEXT = 20_000  # characters of a report in a notebook
ROUTINE = ("out", "next_command", "trackers")  # settings that do not affect what was learned


@dataclass(frozen=True, slots=True)
class Matched:
    """One evaluation in both runs: the share of solved samples over the problems that both answered, or their mean reward if
    no score tells right from wrong, and the paired difference."""

    stage: str
    other_stage: str
    problems: int  # answered by both
    left_out: int  # answered by only one
    first: Interval
    second: Interval
    paired: Comparison
    verifiable: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """A result with an interval that a stage of both runs measured, each on its own: a win rate, an accuracy on held-out
    pairs."""

    stage: str
    figure: str
    first: Interval
    second: Interval


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs; None if a run does not have it."""

    key: str
    first: JSON
    second: JSON


@dataclass(frozen=True, slots=True)
class Report:
    """All results of `posttrain compare`."""

    first: str
    second: str
    evaluations: tuple[Matched, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]  # what could not be compared
    settings: tuple[Difference, ...]
    figures: tuple[str, ...]  # titles of the panels that were drawn
    picture: str  # "" if no metric was recorded by both

    def __str__(self) -> str:
        return "\n".join(lines(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the lines, and the plot if its file still exists."""
        said = f"<pre style='{html.WRAP}'>{html.text(str(self)[:MAX_TEXT])}</pre>"
        if self.picture and Path(self.picture).is_file():
            said += html.picture(Path(self.picture), "both runs")
        return html.PLAIN.format(said)


def compare_runs(first: Path, second: Path, picture: Path | None = None, stage: str = "") -> Report:
    """Compare two runs. `stage` selects one evaluation, or `ONE:OTHER` two of different names; without it, all that both runs
    have are compared."""
    runs = Run(first), Run(second)
    require(first.resolve() != second.resolve(), f"{first} and {second} are the same run")
    results = tuple(evaluations(run) for run in runs)
    matched, notes = [], []
    for one, other in _pairs(runs, results, stage):
        both = evaluate.same_problems(results[0][one], results[1][other])
        names = f"{one} is" if one == other else f"{one} and {other} are"
        words = f"{names} about different problems{' in each' if one == other else ''}"
        require(both or not stage, f"{words}: they cannot be compared in pairs")
        if both:
            count = len(results[0][one]) + len(results[1][other])
            found = [*runs[0].stage_rows(one, RESULT), *runs[1].stage_rows(other, RESULT)]
            right = all(row.get("verifiable", True) for row in found)
            matched.append(_match(both, count, one, other, right))
        else:
            notes.append(f"{words}, and cannot be compared in pairs")
    for run, have in zip(runs, results, strict=True):
        notes += [] if have else [f"{run.directory} has no held-out answers of an evaluate stage"]
    names = "-".join(re.sub(r"[^A-Za-z0-9._-]+", "_", run.name) for run in runs)
    target = picture or Path(f"compare-{names}.png")
    drawn = draw_together(runs, target)
    return Report(
        first=str(first),
        second=str(second),
        evaluations=tuple(matched),
        measured=_measured(runs, [m.stage for m in matched if m.stage == m.other_stage]),
        notes=tuple(notes),
        settings=tuple(differences(runs[0].config, runs[1].config)),
        figures=tuple(drawn),
        picture=str(target) if drawn else "",
    )


def evaluations(run: Run) -> dict[str, list[dict[str, JSON]]]:
    """Return the rows of problems of each finished evaluation of a run, in the order of its stages."""
    found = {name: run.stage_rows(name, PROBLEMS) for name in run.configured}
    return {k: rows for k, rows in found.items() if rows and all("outcomes" in r for r in rows)}


def _measured(runs: Sequence[Run], known: Sequence[str]) -> tuple[Measured, ...]:
    """Return the results with intervals of stages that both runs have finished, except those that are compared in pairs."""
    found = []
    for name in runs[0].configured:
        results = [run.stage_rows(name, RESULT) for run in runs]
        if name not in known and all(results):
            first, second = (rows[0] for rows in results)
            pairs = ((k, interval_of(v), interval_of(second.get(k))) for k, v in first.items())
            found += [Measured(name, key, one, two) for key, one, two in pairs if one and two]
    return tuple(found)


def interval_of(value: JSON) -> Interval | None:
    """Return a result as an estimate with its bounds; None if it is not one. A run stores a non-finite number as text.

    >>> interval_of([0.5, "-inf", "inf"]), interval_of(["gsm8k", "math", "code"])
    (Interval(value=0.5, low=-inf, high=inf), None)
    """
    try:
        return Interval(*map(decode_number, value)) if isinstance(value, list) else None
    except (TypeError, ValueError):  # another count of numbers, or no numbers
        return None


def _pairs(
    runs: Sequence[Run], results: Sequence[Mapping[str, JSON]], stage: str
) -> list[tuple[str, str]]:
    """Return which evaluation of the first run is compared with which of the second."""
    if stage:
        one, _, other = stage.partition(":")
        for run, have, name in zip(runs, results, (one, other or one), strict=True):
            refuse_unknown(f"evaluation in {run.directory}:", [name], have)
        return [(one, other or one)]
    both = [(name, name) for name in results[0] if name in results[1]]
    if both or not all(results):
        return both
    both_runs = zip(runs, results, strict=True)
    one, other = (str(run.config.get("after") or list(have)[-1]) for run, have in both_runs)
    named = " and ".join(", ".join(have) for have in results)
    absent = f"the runs have no evaluation of the same name ({named})"
    found = one in results[0] and other in results[1]
    require(found, f"{absent}; say which with --stage ONE:OTHER")
    return [(one, other)]


def _match(
    pairs: Sequence[evaluate.Pair], rows: int, one: str, other: str, verifiable: bool
) -> Matched:
    scored = [pair for pair in pairs if not any(isnan(evaluate.solved_share(row)) for row in pair)]
    paired = evaluate.compare_rows(pairs, verifiable)
    if paired is None:
        raise UserError(f"{one} and {other}: no problem was scored in both runs")
    sides = ([pair[side] for pair in scored] for side in (0, 1))
    first, second = (evaluate.rows_interval(own, verifiable) for own in sides)
    left_out = rows - 2 * len(pairs)
    return Matched(one, other, len(scored), left_out, first, second, paired, verifiable)


def differences(first: Mapping[str, JSON], second: Mapping[str, JSON]) -> list[Difference]:
    """Return the settings that differ, stages by their names. A stage that only one run has is one line."""
    ours, theirs = flatten(first), flatten(second)
    stages = [{str(stage["name"]) for stage in tree.get("stages", [])} for tree in (first, second)]
    single = stages[0] ^ stages[1]
    marks = {name: ["a stage" if name in have else None for have in stages] for name in single}
    found = [Difference(name, *marks[name]) for name in sorted(single)]
    changed = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
    settings = [k for k in changed if k not in ROUTINE and k.split(".")[0] not in single]
    return [*found, *(Difference(key, ours.get(key), theirs.get(key)) for key in settings)]


def lines(report: Report) -> list[str]:
    """Return the report as plain text."""
    text = [f"A: {report.first}", f"B: {report.second}", ""]
    for one in report.evaluations:
        same = one.stage == one.other_stage
        name = one.stage if same else f"{one.stage} against {one.other_stage}"
        more = f"; {one.left_out} that only one run answered are left out" if one.left_out else ""
        what = "share solved of" if one.verifiable else "mean reward on"
        text.append(f"{name}: {what} {many(one.problems, 'held-out problem')}{more}")
        text += [f"  A        {one.first}", f"  B        {one.second}"]
        text.append(f"  B less A {one.paired}")
    for figure in report.measured:
        name = f"{figure.stage}: {figure.figure.replace('_', ' ')}"
        text.append(f"{name}  A {figure.first}  B {figure.second}")
    text += report.notes
    text += ["", "settings that differ:" if report.settings else "the settings are the same"]
    width = max((len(d.key) for d in report.settings), default=0)
    for d in report.settings:
        first, second = ("-" if value is None else short(value) for value in (d.first, d.second))
        text.append(f"  {d.key:<{width}}  {first} | {second}")
    drawn = f"picture: {report.picture} ({', '.join(report.figures)})"
    return [*text, "", drawn if report.picture else "no figure was recorded by both runs"]
