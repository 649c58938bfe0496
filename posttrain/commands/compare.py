"""Two runs side by side: their held-out results problem by problem, what else their stages measured, their curves in one picture, and
the settings that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from posttrain.errors import UserError, require, unknown
from posttrain.evals.evaluate import (
    Pair,
    compare_rows,
    same_problems,
    shares_interval,
    solved_share,
)
from posttrain.evals.statistics import Comparison, Interval
from posttrain.runs.plot import draw_together
from posttrain.runs.read import Run
from posttrain.runs.resume_policy import flatten
from posttrain.types import JSON

PROBLEMS, RESULT = "problems.jsonl", "result.json"
ROUTINE = ("out", "next_command", "trackers")  # settings that say nothing of what was learned


@dataclass(frozen=True, slots=True)
class Matched:
    """One evaluation in both runs: the share of solved samples over the problems that both answered, and the paired difference."""

    stage: str
    other_stage: str
    problems: int  # that both answered
    left_out: int  # that only one of them did
    first: Interval
    second: Interval
    paired: Comparison


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure with an interval that a stage of both runs found, each on its own: a win rate, an accuracy on held-out pairs."""

    stage: str
    figure: str
    first: Interval
    second: Interval


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs; None where a run does not have it."""

    key: str
    first: JSON
    second: JSON


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that `posttrain compare` says."""

    first: str
    second: str
    evaluations: tuple[Matched, ...]
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]  # what could not be compared
    settings: tuple[Difference, ...]
    figures: tuple[str, ...]  # titles of the panels that were drawn
    picture: str  # "" where no figure was recorded by both


def compare_runs(first: Path, second: Path, picture: Path | None = None, stage: str = "") -> Report:
    """Compare two runs. `stage` picks one evaluation, or `ONE:OTHER` two of different names; else all that both runs have are taken."""
    runs = Run(first), Run(second)
    require(first.resolve() != second.resolve(), f"{first} and {second} are the same run")
    results = tuple(evaluations(run) for run in runs)
    matched, notes = [], []
    for one, other in _pairs(runs, results, stage):
        both = same_problems(results[0][one], results[1][other])
        words = (
            f"{one} and {other} are about different problems"
            if one != other
            else f"{one} is about different problems in each"
        )
        require(bool(both) or not stage, f"{words}: they cannot be compared in pairs")
        if both:
            matched.append(_match(both, len(results[0][one]) + len(results[1][other]), one, other))
        else:
            notes.append(f"{words}, and cannot be compared in pairs")
    notes += [
        f"{run.directory} has no held-out answers of an evaluate stage"
        for run, have in zip(runs, results, strict=True)
        if not have
    ]
    target = picture or Path(f"compare-{_plain(runs[0].name)}-{_plain(runs[1].name)}.png")
    drawn = draw_together(runs, target)
    differ = tuple(differences(runs[0].config, runs[1].config))
    measured = _measured(
        runs, [found.stage for found in matched if found.stage == found.other_stage]
    )
    return Report(
        str(first),
        str(second),
        tuple(matched),
        measured,
        tuple(notes),
        differ,
        tuple(drawn),
        str(target) if drawn else "",
    )


def evaluations(run: Run) -> dict[str, list[dict[str, JSON]]]:
    """For each finished evaluation of a run, in the order of its stages: the rows of its problems."""
    stages = [
        str(stage.get("name")) for stage in run.config.get("stages", []) if isinstance(stage, dict)
    ]
    found: dict[str, list[dict[str, JSON]]] = {}
    for name in stages:
        file = run.directory / "stages" / name / PROBLEMS
        rows = (
            [_row(line, file) for line in file.read_text("utf-8").splitlines()]
            if file.is_file()
            else []
        )
        if rows and all("outcomes" in row for row in rows):
            found[name] = rows
    return found


def _measured(runs: Sequence[Run], known: Sequence[str]) -> tuple[Measured, ...]:
    """Figures with intervals in the results of stages that both runs have finished, but for those that are compared in pairs."""
    found = []
    for stage in runs[0].config.get("stages", []):
        name = str(stage.get("name"))
        files = [run.directory / "stages" / name / RESULT for run in runs]
        if name not in known and all(file.is_file() for file in files):
            first, second = (_row(file.read_text("utf-8"), file) for file in files)
            found += [
                Measured(name, key, Interval(*first[key]), Interval(*second[key]))
                for key in first
                if _bounded(first[key]) and _bounded(second.get(key))
            ]
    return tuple(found)


def _bounded(value: JSON) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(part, int | float) for part in value)
    )


def _row(line: str, file: Path) -> dict[str, JSON]:
    try:
        row = json.loads(line)
    except ValueError:
        raise UserError(f"{file} is damaged: a line of it is not JSON") from None
    require(isinstance(row, dict), f"{file} is damaged: a line of it is not an object")
    return dict(row)


def _pairs(
    runs: Sequence[Run], results: Sequence[Mapping[str, JSON]], stage: str
) -> list[tuple[str, str]]:
    """Which evaluation of the first run is held against which of the second."""
    if stage:
        one, _, other = stage.partition(":")
        for run, have, name in zip(runs, results, (one, other or one), strict=True):
            if name not in have:
                raise unknown(f"evaluation in {run.directory}:", name, have)
        return [(one, other or one)]
    both = [(name, name) for name in results[0] if name in results[1]]
    if both or not all(results):
        return both
    last = [
        str(run.config.get("after") or list(have)[-1])
        for run, have in zip(runs, results, strict=True)
    ]
    if all(name in have for name, have in zip(last, results, strict=True)):
        return [(last[0], last[1])]
    named = " and ".join(", ".join(have) for have in results)
    raise UserError(
        f"the runs have no evaluation of the same name ({named}); say which with --stage ONE:OTHER"
    )


def _match(pairs: Sequence[Pair], rows: int, one: str, other: str) -> Matched:
    scored = [pair for pair in pairs if not any(isnan(solved_share(row)) for row in pair)]
    paired = compare_rows(pairs)
    if paired is None:
        raise UserError(f"{one} and {other}: no problem was scored in both runs")
    first, second = (shares_interval([pair[side] for pair in scored]) for side in (0, 1))
    return Matched(one, other, len(scored), rows - 2 * len(pairs), first, second, paired)


def differences(first: Mapping[str, JSON], second: Mapping[str, JSON]) -> list[Difference]:
    """Settings that differ, stages by their names. A stage that only one run has is one line."""
    ours, theirs = flatten(first), flatten(second)
    stages = [{str(stage["name"]) for stage in tree.get("stages", [])} for tree in (first, second)]
    found = []
    for name in sorted(stages[0] ^ stages[1]):
        found.append(Difference(name, *("a stage" if name in have else None for have in stages)))
    for key in dict.fromkeys([*ours, *theirs]):
        whole = key.split(".")[0] in stages[0] ^ stages[1]
        if not whole and key not in ROUTINE and ours.get(key) != theirs.get(key):
            found.append(Difference(key, ours.get(key), theirs.get(key)))
    return found


def lines(report: Report) -> list[str]:
    """The report as plain text."""
    said = [f"A: {report.first}", f"B: {report.second}", ""]
    for found in report.evaluations:
        name = (
            found.stage
            if found.stage == found.other_stage
            else f"{found.stage} against {found.other_stage}"
        )
        more = (
            f"; {found.left_out} that only one run answered are left out" if found.left_out else ""
        )
        said.append(f"{name}: share solved of {found.problems} held-out problems{more}")
        said += [
            f"  A        {found.first}",
            f"  B        {found.second}",
            f"  B less A {found.paired}",
        ]
    said += [
        f"{one.stage}: {one.figure.replace('_', ' ')}  A {one.first}  B {one.second}"
        for one in report.measured
    ]
    said += report.notes
    said += ["", "settings that differ:" if report.settings else "the settings are the same"]
    width = max((len(d.key) for d in report.settings), default=0)
    said += [f"  {d.key:<{width}}  {_short(d.first)} | {_short(d.second)}" for d in report.settings]
    drawn = f"picture: {report.picture} ({', '.join(report.figures)})"
    return [*said, "", drawn if report.picture else "no figure was recorded by both runs"]


def _short(value: JSON) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 50 else text[:47] + "..."


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)
