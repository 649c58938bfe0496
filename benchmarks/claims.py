"""Claims about RL for language models, measured with toy models: every arm is a run of `posttrain`, over several seeds.

    python benchmarks/claims.py OUT [--claims 1,2,7] [--seeds 0,1,2] [--processes 12] [--scale 1] [--until 480]
    python benchmarks/claims.py docs/claims --read benchmarks/results/claims.json --page docs/experiments.md      # tables and plots

An arm is `posttrain run benchmarks/claim_arms.py:FUNCTION arm=ARM seed=SEED`, on one core. Finished runs in OUT are not run again;
unfinished ones are resumed. Writes OUT/claims.json (each seed with its 95% interval over prompts), OUT/claims.md (the mean over seeds
with Student's interval, and each seed) and OUT/claim_N.png; --read prints tables and draws plots. --scale multiplies all steps and
counts; 0.01 is a smoke test. --until ends unfinished runs after this many seconds; the table has the results so far. Claim 4 needs a
real model and a GPU: benchmarks/real_models.py run benchmarks/claim_arms.py:thoughts (docs/experiments.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from environments import STUDENT, over_seeds
from recipes import result

from posttrain.runs import plot

POINTS = 50
ARMS = Path(__file__).with_name("claim_arms.py")


@dataclass(frozen=True)
class Column:
    """A figure of a stage's result, `pass_at.8` one within another; `median NAME` is of the metrics of RL, `models` of its settings."""

    title: str
    stage: str
    figure: str = "accuracy"


@dataclass(frozen=True)
class Claim:
    title: str
    function: str  # in claim_arms.py
    arms: tuple[str, ...]
    columns: tuple[Column, ...]
    curves: tuple[str, ...] = ()  # figures over the steps of the stage rl
    along: str = ""  # the columns are points along this axis, those of the same first word one line
    over_time: bool = False  # curves over seconds


def both(*figures: str) -> tuple[Column, ...]:
    return tuple(
        Column(f"{figure.replace('_at.', '@')} {when}", when, figure) for figure in figures for when in ("before", "after")
    )


def rounds(title: str, stage: str, figure: str, count: int) -> tuple[Column, ...]:
    return tuple(Column(f"{title} {n}", f"{stage}_{n}", figure) for n in range(count + 1))


HABITS = ("check", "back_track", "sub_goal", "backward")
CLAIMS = {
    1: Claim("RL amplifies SFT", "amplify", ("weak", "middling", "strong"), both("accuracy", "pass_at.8"), ("reward",)),
    2: Claim(
        "SFT memorises, RL generalises",
        "memorise",
        ("sft", "rl"),
        (*rounds("same rule", "same", "accuracy", 3), *rounds("changed rule", "changed", "accuracy", 3)),
        along="round",
    ),
    3: Claim(
        "RL needs the pattern in the base",
        "pattern",
        ("unprimed", "primed", "primed_wrong"),
        both("accuracy", "pass_at.8"),
        ("reward", "length", *(f"reward/{habit}" for habit in HABITS)),
    ),
    5: Claim(
        "PPO against GRPO",
        "memory",
        ("ppo", "grpo", "grpo_no_kl"),
        (
            Column("models", "rl", "models"),
            Column("seconds a step", "rl", "median seconds/total"),
            Column("steps", "rl", "steps"),
            *both("accuracy"),
        ),
        ("reward", "accuracy/test"),
        over_time=True,
    ),
    6: Claim(
        "Chains of thought and budgets",
        "thinking",
        ("direct", "chain", "budgets", "budgets_sums"),
        (
            *both("accuracy"),
            *(Column(f"budget {n}", f"budget_{n}") for n in (16, 32, 48, 64, 80)),
            *(Column(f"sums: budget {n}", f"budget_{n}") for n in (5, 11, 17, 23, 29)),
        ),
        along="tokens of thinking",
    ),
    7: Claim("DPO cannot explore", "explore", ("dpo", "iterative_dpo", "grpo"), both("accuracy", "pass_at.8")),
    8: Claim(
        "Weak judge, strong policy",
        "judged",
        ("weak", "strong"),
        (*rounds("agreement", "agreement", "agreement", 4), *rounds("annotator", "gold", "reward", 4)),
        along="round",
    ),
    9: Claim(
        "Alignment tax",
        "tax",
        ("plain", "ptx", "kl"),
        tuple(
            Column(f"{title} {when}", f"{stage}_{when}", figure)
            for title, stage, figure in (
                ("reviews", "reviews", "reward"),
                ("sums", "sums", "accuracy"),
                ("perplexity", "reviews", "perplexity"),
            )
            for when in ("before", "after")
        ),
        ("reward",),
    ),
    10: Claim(
        "Entropy: clip-higher against plain",
        "entropy",
        ("plain", "clip_higher", "clip_half"),
        both("accuracy", "pass_at.16"),
        ("entropy", "reward", "accuracy/test"),
    ),
    11: Claim(
        "RL needs the pattern in the base: written work",
        "work",
        ("unprimed", "primed", "primed_wrong"),
        both("accuracy", "pass_at.8"),
        ("reward", "length", "reward/steps"),
    ),
}


def one(number: int, arm: str, seed: int, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Run or resume an arm, and read what it found; one that stopped has the figures until then."""
    claim, out = CLAIMS[number], options.out / f"claim_{number}-{arm}-{seed}"
    row: dict[str, Any] = {"claim": number, "arm": arm, "seed": seed, "scale": options.scale, "stopped": ""}
    if not (out / "summary.json").is_file():
        again = (out / "config.yaml").is_file()
        settings = [f"arm={arm}", f"scale={options.scale}", f"seed={seed}", f"out={out}", "threads=1", "device=cpu"]
        words = ["resume", str(out), "--allow-code"] if again else ["run", f"{ARMS}:{claim.function}", *settings]
        left = deadline - time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        try:
            if left <= 0:
                raise TimeoutError("no time was left")
            subprocess.run(
                [sys.executable, "-m", "posttrain", *words],
                check=True,
                capture_output=True,
                text=True,
                timeout=left,
                env=environment,
            )
        except subprocess.CalledProcessError as error:  # one that a monitor stopped must not end the others
            row["stopped"] = (error.stderr.strip() or error.stdout.strip())[-300:]
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            row["stopped"] = type(error).__name__
    summary = out / "summary.json"
    row["seconds"] = json.loads(summary.read_text()).get("seconds") if summary.is_file() else None
    row["figures"] = {column.title: found for column in claim.columns if (found := figure(out, claim, arm, column)) is not None}
    row["curves"] = {name: points for name in claim.curves if (points := curve(out, name, claim.over_time))}
    said = ", ".join(f"{name} {first(value):.3g}" for name, value in row["figures"].items())
    print(f"claim {number} {arm} {seed}: {said} {row['seconds'] or 0:.0f} s {row['stopped']}", flush=True)
    return row


def first(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def metrics(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row for row in rows if row.get("stage") == "rl"]


def figure(out: Path, claim: Claim, arm: str, column: Column) -> Any:
    """None where the arm has none, or none yet."""
    if column.figure == "models":
        return models(claim.function, arm)
    if column.figure.startswith("median "):
        found = [row[name] for row in metrics(out) if (name := column.figure.split()[1]) in row]
        return median(found) if found else None
    if not (out / "stages" / column.stage / "result.json").is_file():
        return None
    value: Any = result(out, column.stage)
    for key in column.figure.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def models(function: str, arm: str) -> int:
    """How many models are in memory while RL runs: the policy and the roles of its algorithm."""
    import claim_arms

    (rl,) = (stage for stage in getattr(claim_arms, function)(arm=arm).stages if stage.name == "rl")
    return 1 + len(rl.algorithm.roles)


def curve(out: Path, name: str, over_time: bool) -> list[list[float]]:
    """Means of as many steps in a row as leave about POINTS points."""
    rows = metrics(out)
    passed = accumulate(row.get("seconds/total", 0.0) for row in rows)
    points = [(at if over_time else row["step"], row[name]) for row, at in zip(rows, passed, strict=True) if name in row]
    some = max(1, len(points) // POINTS)
    means = [tuple(map(mean, zip(*points[n : n + some], strict=True))) for n in range(0, len(points), some)]
    return [[round(x, 2), round(y, 5)] for x, y in means]


def split(title: str) -> tuple[str, str]:
    """A column's title as (figure, point): before and after, a round or a budget; a figure without points has the point ""."""
    figure, _, point = title.rpartition(" ")
    return (figure, point) if point in ("before", "after") or point.isdigit() else (title, "")


def table(number: int, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: one line an arm and figure, one column a point, its mean over seeds before the seeds; then how far the last points lie
    from the first arm's. Figures of other points have a table of their own."""
    claim, seeds = CLAIMS[number], sorted({row["seed"] for row in rows})
    points: dict[str, list[str]] = {}
    for figure, point in (split(c.title) for c in claim.columns if any(by_seed(rows, arm, c.title) for arm in claim.arms)):
        points.setdefault(figure, []).append(point)
    lines: list[str] = []
    for same in dict.fromkeys(map(tuple, points.values())):
        heads = [f"{claim.along.split()[0]} {point}" if point.isdigit() else point or "mean" for point in same]
        lines += [f"| arm | figure | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
        figures = [figure for figure, own in points.items() if tuple(own) == same]
        for arm in claim.arms:
            for figure in figures:
                found = [by_seed(rows, arm, f"{figure} {point}".strip()) for point in same]
                if any(found):
                    cells = [over(values, seeds, around=values is found[-1]) for values in found]
                    lines.append(f"| {arm} | {figure} | {' | '.join(cells)} |")
        for arm in claim.arms[1:]:
            for title in (f"{figure} {same[-1]}".strip() for figure in figures):
                one, other = (by_seed(rows, name, title) for name in (arm, claim.arms[0]))
                apart = {s: first(one[s]) - first(other[s]) for s in seeds if s in one and s in other}
                if len(apart) > 1 and " " in title:
                    cells = [*[""] * (len(same) - 1), differences(apart, seeds)]
                    lines.append(f"| {arm} - {claim.arms[0]} | {split(title)[0]} | {' | '.join(cells)} |")
        lines.append("")
    stopped = [f"- {row['arm']}, seed {row['seed']} stopped: {row['stopped']}" for row in rows if row["stopped"]]
    return [*lines, *stopped, *([""] if stopped else [])]


def over(values: dict[int, Any], seeds: Sequence[int], around: bool) -> str:
    """A cell: the mean over seeds, with Student's interval where it is asked for and values are shares, then each seed."""
    if not values:
        return ""
    share = all(isinstance(value, list) for value in values.values())
    form, numbers = ".3f" if share else ".3g", {seed: first(value) for seed, value in values.items()}
    each = ", ".join(format(numbers[s], form) if s in numbers else "none" for s in seeds)
    interval = " [{1:.3f}, {2:.3f}]".format(*over_seeds([*numbers.values()])) if around and share and len(numbers) > 1 else ""
    return f"{mean(numbers.values()):{form}}{interval} ({each})"


def differences(apart: dict[int, float], seeds: Sequence[int]) -> str:
    half, middle = STUDENT[len(apart)] * stdev(apart.values()) / len(apart) ** 0.5, mean(apart.values())
    each = ", ".join(f"{apart[s]:+.3f}" if s in apart else "none" for s in seeds)
    return f"{middle:+.3f} [{middle - half:+.3f}, {middle + half:+.3f}] ({each})"


def by_seed(rows: Sequence[dict[str, Any]], arm: str, title: str) -> dict[int, Any]:
    return {row["seed"]: row["figures"][title] for row in rows if row["arm"] == arm and title in row["figures"]}


def paste(page: Path, tables: dict[int, list[str]]) -> None:
    """Put each table into the page, where it has the two marks of the claim."""
    text = page.read_text()
    for number, lines in tables.items():
        before, begin, rest = text.partition(f"<!-- claim {number} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if begin and end:
            text = before + begin + "\n" + "\n".join(lines) + "\n" + end + after
    page.write_text(text)


def draw(number: int, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The columns as bars, or as lines where they lie along an axis, points or thin lines for seeds; then the curves."""
    claim = CLAIMS[number]
    there = {title for row in rows for title in row["figures"]}
    words = {title.rpartition(" ")[0] for title in there} if claim.along else {""}
    panels = [
        plot.Panel(
            word or "held-out prompts", "mean over seeds; points are seeds", partial(columns, claim=claim, rows=rows, word=word)
        )
        for word in sorted(words)
    ]
    panels += [
        plot.Panel(
            name.removeprefix("reward/").replace("_", " "),
            "one line a seed",
            partial(lines, claim=claim, rows=rows, name=name),
        )
        for name in claim.curves
    ]
    plot.save_panels(panels, f"{number}. {claim.title}", path)


def columns(axes: Any, claim: Claim, rows: Sequence[dict[str, Any]], word: str) -> None:
    titles = [c.title for c in claim.columns if not claim.along or c.title.rpartition(" ")[0] == word]
    titles = [
        t for t in titles if claim.along or max((first(r["figures"][t]) for r in rows if t in r["figures"]), default=2) <= 1
    ]
    for place, arm in enumerate(claim.arms):
        found = {t: [first(r["figures"][t]) for r in rows if r["arm"] == arm and t in r["figures"]] for t in titles}
        if not (found := {t: values for t, values in found.items() if values}):
            continue
        at = [titles.index(t) + (0.0 if claim.along else 0.25 * (place - 1)) for t in found]
        middle = [mean(values) for values in found.values()]
        if claim.along:
            axes.plot(at, middle, ".-", color=plot.COLOURS[place], label=arm)
        else:
            axes.bar(at, middle, 0.22, color=plot.COLOURS[place], alpha=0.7, label=arm)
        for x, values in zip(at, found.values(), strict=True):
            axes.plot([x] * len(values), values, "k.", markersize=3)
    axes.set_xlabel(claim.along if all(t[-1].isdigit() for t in titles) else "")
    axes.set_xticks(range(len(titles)), [t.rpartition(" ")[2] if claim.along else t for t in titles], fontsize=7)


def lines(axes: Any, claim: Claim, rows: Sequence[dict[str, Any]], name: str) -> None:
    axes.set_xlabel("seconds" if claim.over_time else "step of RL")
    for place, arm in enumerate(claim.arms):
        own = [row["curves"][name] for row in rows if row["arm"] == arm and name in row["curves"]]
        for n, points in enumerate(own):
            axes.plot(*zip(*points, strict=True), color=plot.COLOURS[place], linewidth=0.9, alpha=0.7, label=None if n else arm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--claims", default=",".join(map(str, CLAIMS)), help="in the order in which they are begun")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time; each has one core")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--until", type=float, default=86_400.0, help="seconds after which running arms are ended")
    parser.add_argument("--read", type=Path, help="run nothing: a claims.json, of which plots are drawn into OUT")
    parser.add_argument("--page", type=Path, help="a page with the marks of the claims, into which the tables are put")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file, deadline = options.read or options.out / "claims.json", time.monotonic() + options.until
    if not options.read:
        numbers = [int(word) for word in options.claims.split(",")]
        wanted = [(n, arm, int(seed)) for n in numbers for seed in options.seeds.split(",") for arm in CLAIMS[n].arms]
        with ThreadPoolExecutor(options.processes) as pool:
            found = list(pool.map(lambda words: one(*words, options, deadline), wanted))
        stamp = {"date": time.strftime("%Y-%m-%d"), "processes": options.processes}
        lines = ",\n".join(json.dumps({**stamp, **row}) for row in found)
        file.write_text(f'{{"rows": [\n{lines}\n]}}\n')
    rows = json.loads(file.read_text())["rows"]
    tables = {}
    for number in sorted({row["claim"] for row in rows}):
        own = [row for row in rows if row["claim"] == number]
        tables[number] = table(number, own)
        if not any(row["figures"] or row["curves"] for row in own):
            raise SystemExit(f"claim {number}: no run came to a figure; the first said: {own[0]['stopped']}")
        draw(number, own, options.out / f"claim_{number}.png")
    text = "\n".join("\n".join([f"## Claim {number}: {CLAIMS[number].title}", "", *lines]) for number, lines in tables.items())
    if not options.read:
        (options.out / "claims.md").write_text(text)
    if options.page:
        paste(options.page, tables)
    print(text)
    print(json.dumps({"runs": len(rows), "stopped": sum(bool(row["stopped"]) for row in rows)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
