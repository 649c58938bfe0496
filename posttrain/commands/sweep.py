"""Sweeps: one run for every combination of settings and seeds, one after another, and a table of their results.

    posttrain run quickstart seeds=0,1,2 --sweep rl.lr=1e-4,3e-4

A sweep is a directory with one run directory per member and the aggregate as sweep.json and sweep.md. The same command with the
same `out=`, or 'posttrain resume DIR', continues it. A member that fails is reported and does not stop the others.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import stdev

from posttrain import config, config_tree, pipeline
from posttrain.commands.compare import interval_of
from posttrain.config import PASSING
from posttrain.errors import Interrupted, UserError, require
from posttrain.evals.statistics import mean_interval
from posttrain.events import printable
from posttrain.runs.console import write_text
from posttrain.runs.layout import CONFIG, LOCK, encode
from posttrain.runs.lock import Lock
from posttrain.runs.metrics import SCORES
from posttrain.runs.read import Run
from posttrain.stages.base import temporary_context, unfinished
from posttrain.system.files import atomic_write, check_tree, explained, read_json, read_text
from posttrain.types import JSON

RECORD, TABLE, FAILURE = "sweep.json", "sweep.md", "failure.txt"
LONGEST_NAME = 120  # characters of a member's directory; a longer name is cut and gets a hash
CLOCKS = ("seconds", "attempts", "train_seconds")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A result over seeds: its mean, standard deviation (n - 1) and 95% interval, mean +- t_(n-1) s / sqrt(n)."""

    mean: float
    deviation: float | None
    low: float | None
    high: float | None
    count: int

    def __str__(self) -> str:
        """Format the estimate as cells of a table."""
        spread = "- | -"
        if self.deviation is not None:
            spread = f"{self.deviation:.4g} | [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.mean:.4g} | {spread} | {self.count}"


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep: its own settings, its seed, its directory, and how it ended ("" until then)."""

    setting: tuple[str, ...]
    seed: int | None
    directory: str
    outcome: str = ""
    reason: str = ""

    @property
    def arguments(self) -> list[str]:
        return [*self.setting, *([] if self.seed is None else [f"seed={self.seed}"])]


def axes(
    arguments: Sequence[str], swept: Sequence[str] = ()
) -> tuple[list[str], dict[str, list[str]]]:
    """Return (plain arguments, the values of each key that has several): `seeds=0,1`, and the arguments after --sweep. Values
    in brackets or quotes may contain commas.

    >>> axes(["seeds=0,1", "rl.levels=1,2"], ["rl.lr=1e-6,3e-6", "x=[1,2],[3]"])
    (['rl.levels=1,2'], {'seed': ['0', '1'], 'rl.lr': ['1e-6', '3e-6'], 'x': ['[1,2]', '[3]']})
    """
    plain = [argument for argument in arguments if not argument.startswith("seeds=")]
    seeds = [argument for argument in arguments if argument.startswith("seeds=")]
    found: dict[str, list[str]] = {}
    for argument in (*seeds, *swept):
        key, _, text = argument.partition("=")
        values = _split(text)
        key = "seed" if key == "seeds" else key
        whole = bool(key) and all(values)
        require(whole, f"{argument!r}: give KEY=VALUE,VALUE with commas between the values")
        require(len(set(values)) == len(values), f"{argument!r} names a value twice")
        twice = key in found or any(a.partition("=")[0] == key for a in plain)
        require(not twice, f"{key} is given twice")
        require(key not in PASSING, f"{key} belongs to the whole sweep, and has one value")
        found[key] = values
    return plain, found


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if sign == quote:
            quote = ""
        elif not quote and sign in "\"'":
            quote = sign
        depth += 0 if quote else (sign in "[{") - (sign in "]}")
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def members(directory: Path, found: Mapping[str, Sequence[str]]) -> list[Member]:
    """Return every combination, seeds innermost."""
    settings = [[f"{key}={v}" for v in values] for key, values in found.items() if key != "seed"]
    given = found.get("seed", [])
    whole = all(re.fullmatch(r"\d+", value) for value in given)
    require(whole, f"seeds={','.join(given)}: seeds are whole numbers, 0 or more")
    seeds: list[int | None] = [int(value) for value in given] or [None]
    require(len({*seeds}) == len(seeds), f"seeds={','.join(given)} names a seed twice")
    made: dict[str, Member] = {}
    for setting, seed in itertools.product(itertools.product(*settings), seeds):
        member = Member(setting, seed, "")
        words = "_".join(member.arguments)
        name = re.sub(r"[^A-Za-z0-9._=+-]", "-", words)
        # a/b and a-b would get the same name: each gets its own
        if name in made or len(name) > LONGEST_NAME:
            name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"
        made[name] = replace(member, directory=str(directory / name))
    return list(made.values())


def check(settings: config.Settings) -> None:
    """Raise an error for settings that the runs of a sweep cannot have."""
    whole = not settings.only and not settings.again
    require(whole, "a sweep runs whole pipelines: leave out only and again")
    single = "the runs of a sweep have one process each: leave out processes"
    require(settings.processes == 1, f"{single}, or start them one by one")


def run(
    recipe: str,
    arguments: Sequence[str],
    swept: Sequence[str] = (),
    allow_code: bool = False,
    source: str = "",
) -> int:
    """Run a sweep, or continue one; returns the number of members that failed. `source` is the file that the settings come
    from, if they were not typed."""
    plain, found = axes(arguments, swept)
    common = [argument for argument in plain if not argument.startswith("out=")]
    settings = config.parse(recipe, common, allow_code, source)
    check(settings)
    out = dict(map(config_tree.pair, plain)).get("out")
    directory = Path(str(out or pipeline.fresh(Path("runs"), f"{settings.name}-sweep")))
    check_tree(directory)
    planned = members(directory, found)
    for member in planned:  # find every mistake in a setting before the first run
        config.parse(recipe, [*common, *member.arguments], allow_code, source)
    given = [argument for argument in arguments if not argument.startswith("out=")]
    record = Record(recipe, given, list(swept))
    _check_same(directory, record)
    done: list[Member] = []
    with explained(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(Lock(directory / LOCK).release)
        _write(directory, record, planned)
        for number, member in enumerate(planned):
            place = f"sweep {number + 1}/{len(planned)}"
            write_text(f"\n{place}: {', '.join(member.arguments)}\n", sys.stdout)
            try:
                done.append(_run_member(record.recipe, common, member, allow_code, source))
            except (Interrupted, KeyboardInterrupt) as error:
                error.directory = directory  # type: ignore[union-attr]
                raise
            _write(directory, record, [*done, *planned[number + 1 :]])
    write_text("\n" + read_text(directory / TABLE) + f"\nsweep: {directory}\n", sys.stdout)
    return sum(member.outcome == "failed" for member in done)


def resume(directory: Path, allow_code: bool = False) -> int:
    """Continue a sweep."""
    path = directory / RECORD
    record = Record.read(path)
    arguments = [*record.arguments, f"out={directory}"]
    return run(record.recipe, arguments, record.sweep, allow_code, str(path))


@dataclass(frozen=True, slots=True)
class Record:
    """The command of a sweep, as stored in sweep.json."""

    recipe: str
    arguments: list[str]
    sweep: list[str]  # the arguments after --sweep

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            tree = read_json(path)
            record = cls(tree["recipe"], tree["arguments"], tree.get("sweep", []))
            words = [record.recipe, *record.arguments, *record.sweep]
            listed = type(record.arguments) is type(record.sweep) is list
            whole = listed and all(type(word) is str for word in words)
        except (OSError, UserError, KeyError, TypeError):
            whole = False
        require(whole, f"{path} is damaged: no recipe and arguments in it")
        return record

    def __str__(self) -> str:
        return " ".join([self.recipe, *self.arguments, *(f"--sweep {s}" for s in self.sweep)])


def _check_same(directory: Path, record: Record) -> None:
    if (directory / RECORD).is_file():
        before = Record.read(directory / RECORD)
        ours, theirs = ([r.recipe, sorted(r.arguments), sorted(r.sweep)] for r in (record, before))
        other = f"{directory} holds another sweep ({before}); continue that with 'posttrain resume"
        require(ours == theirs, f"{other} {directory}', or choose another out=")
    used = (directory / CONFIG).exists()
    require(not used, f"{directory} already holds a run; choose another directory for the sweep")


def _run_member(
    recipe: str, common: Sequence[str], member: Member, allow_code: bool, source: str
) -> Member:
    """Run, resume or skip one member. An error in it does not stop the others; an interrupt does."""
    directory = Path(member.directory)
    try:
        # again: continue an earlier attempt, with the settings of this command line
        words = [*common, *member.arguments, f"out={directory}", "again=true"]
        settings = config.parse(recipe, words, allow_code, source)
        if _is_complete(directory, settings):
            write_text(f"{directory} is complete\n", sys.stdout)
        else:
            pipeline.start(settings)
        (directory / FAILURE).unlink(missing_ok=True)
        return replace(member, outcome="done")
    except (Interrupted, KeyboardInterrupt):
        raise
    except Exception as error:
        atomic_write(directory / FAILURE, traceback.format_exc(), folder=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        write_text(f"failed: {printable(reason)}\n", sys.stderr)
        return replace(member, outcome="failed", reason=reason)


def _is_complete(directory: Path, settings: config.Settings) -> bool:
    """Whether a member has ended, and with the settings, data and code of now: the table has the mean over all members."""
    if not (directory / CONFIG).is_file() or Run(directory).summary is None:
        return False
    with temporary_context(settings.seed, "cpu") as context:
        context = replace(context, place=directory)
        return not unfinished(settings.recipe.stages, context, (), again=True)


def figures(summary: Mapping[str, JSON]) -> dict[str, float]:
    """Return every number of a summary's results by its path; an interval counts by its estimate.

    >>> figures({"stages": {"rl": {"steps": 3, "seconds": 9.0}, "after": {"accuracy": [0.5, 0.4, 0.6], "parts": {"a": [1, 1, 1]}}}})
    {'rl.steps': 3.0, 'after.accuracy': 0.5, 'after.parts.a': 1.0}
    """
    found: dict[str, float] = {}

    def walk(name: str, value: JSON) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key not in CLOCKS:
                    walk(f"{name}.{key}" if name else str(key), inner)
        elif interval := interval_of(value):
            walk(name, interval.value)
        elif type(value) in (int, float) and math.isfinite(value):
            found[name] = float(value)

    walk("", summary.get("stages", {}))
    return found


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of a result over seeds with its spread.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, deviation=1.0, low=-0.4841..., high=4.4841..., count=3)
    """
    if len(values) < 2:
        return Estimate(values[0], None, None, None, 1)
    found = mean_interval(values)
    return Estimate(found.value, stdev(values), found.low, found.high, len(values))


def aggregate(
    runs: Sequence[tuple[tuple[str, ...], Mapping[str, JSON]]],
) -> dict[str, dict[str, Estimate]]:
    """Return setting -> result -> its estimate over the runs (setting, summary) that have it."""
    collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for setting, summary in runs:
        for name, value in figures(summary).items():
            collected[" ".join(setting) or "all"][name].append(value)
    return {s: {name: estimate(v) for name, v in of.items()} for s, of in collected.items()}


def _results(run: Run) -> Mapping[str, JSON]:
    """A run's summary, with the last held-out scores of its training stages, whose results name only the best one."""
    stages = dict((run.summary or {}).get("stages", {}))
    for row in run.metrics():
        if scores := {name: row.figures[name] for name in SCORES if name in row.figures}:
            stages[row.stage] = {**stages.get(row.stage, {}), "last": scores}
    return {**(run.summary or {}), "stages": stages}


def _write(directory: Path, record: Record, made: Sequence[Member]) -> None:
    done = [member for member in made if member.outcome == "done"]
    summaries = [(member.setting, _results(Run(member.directory))) for member in done]
    found = aggregate(summaries)
    table = {s: {name: asdict(value) for name, value in of.items()} for s, of in found.items()}
    tree = {**asdict(record), "members": list(map(asdict, made)), "aggregate": table}
    measured = {
        f"{name}.{key}"
        for _, summary in summaries
        for name, result in summary.get("stages", {}).items()
        for key, value in result.items()
        if interval_of(value)
    }
    atomic_write(directory / TABLE, markdown(record, made, found, measured), folder=True)
    atomic_write(directory / RECORD, json.dumps(encode(tree), indent=2) + "\n")


def markdown(
    record: Record,
    made: Sequence[Member],
    found: Mapping[str, Mapping[str, Estimate]],
    measured: Collection[str],
) -> str:
    """Return the results that were measured with an interval (all, if none was), and how each member ended."""
    lines = [f"# posttrain run {record}", ""]
    rows = [
        f"| {setting} | {name} | {value} |"
        for setting, of in found.items()
        for name, value in of.items()
        if name in measured or not measured
    ]
    if rows:
        heads = "| setting | figure | mean | standard deviation | 95% interval | seeds |"
        lines += [heads, "|---|---|---|---|---|---|", *rows]
    lines += ["", "| run | outcome |", "|---|---|"]
    for member in made:
        reason = f": {printable(member.reason)}".replace("|", "/") if member.reason else ""
        name = Path(member.directory).name
        lines.append(f"| {name} | {member.outcome or 'not run yet'}{reason} |")
    return "\n".join(lines) + "\n"
