"""Runs the recipes of environments over several seeds, and compares them with random and scripted players: Markdown tables and plots.

    python benchmarks/environments.py OUT [--arms guess,shop] [--seeds 0,1,2] [--processes 2] [--pages docs/recipes]

An arm is a shipped command, `posttrain run guess pay=end`. Each run is a directory in OUT; finished runs are not run again. Results
are written to OUT/environments.json. `--read` makes tables and plots from that file alone, without the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

from recipes import result, run

from posttrain.evals.statistics import share_interval
from posttrain.tasks._turns import Environment, best_player, random_player
from posttrain.tasks.guess import Guess
from posttrain.tasks.shop import Shop
from posttrain.tasks.solver_critic import SolverCritic
from posttrain.tasks.tictactoe import TicTacToe

ARMS = {  # what follows `posttrain run`, and what a plot calls it
    "guess": "GRPO, by turn", "guess pay=end": "GRPO, at the end", "guess algorithm=ppo": "PPO, by turn",
    "shop": "GRPO", "solver_critic": "GRPO", "tictactoe": "GRPO",
}  # fmt: skip
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% quantiles of t, by seeds
SOLVER, CRITIC = "role/solver/reward", "role/critic/reward"
MOVES = "turns"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
CURVES = ("step", "reward", "reward/turns", MOVES, "kl", SOLVER, CRITIC, "accuracy/test", "seconds/total")


def players(task: Environment) -> dict[str, Any]:
    """The success of a random and of a scripted player on the held-out problems that the recipes are measured on."""
    problems, found = list(task.problems("test")), {}
    for name in ("random", "scripted"):
        played = [task.episode(p, random_player(n) if name == "random" else best_player) for n, p in enumerate(problems)]
        share = share_interval([float(score.solved) for *_, score in played], [p.question for p in problems])
        found[name] = {"success": share.row(), "turns": mean(len(moves) for moves, *_ in played)}
    return found


def guesser(task: SolverCritic) -> dict[str, Any]:
    """One of the two numbers by chance, and such verdicts, in place of both roles."""
    source, right, judged, problems = Random(0), [], [], list(task.problems("test"))
    for problem in problems:
        numbers = problem.question.removesuffix("=").split()
        first, last = source.choice(numbers), source.choice(numbers)
        agreed = source.random() < 0.5
        right.append(float((first if agreed else last) == problem.answer))
        judged.append(float(agreed == (first == problem.answer)))
    asked = [p.question for p in problems]
    names = {"solver": share_interval(right, asked).row(), "critic": share_interval(judged, asked).row()}
    return {"random": {"success": names["solver"], "parts": names}, "scripted": {"success": [1.0, 1.0, 1.0]}}


def beside() -> dict[str, Any]:
    programs = {
        "guess": Guess(numbers=20),
        "shop": Shop(),
        "tictactoe": TicTacToe("best"),
        "tictactoe_random": TicTacToe("random"),
    }
    return {**{name: players(task) for name, task in programs.items()}, "solver_critic": guesser(SolverCritic())}


def measured(out: Path, stage: str) -> dict[str, Any]:
    """Success in one evaluation, and how many turns an episode of two digits a turn had."""
    found = result(out, stage)
    lines = (out / "stages" / stage / "problems.jsonl").read_text().splitlines()
    said = [json.loads(line)["responses"][0] for line in lines]
    return {"success": found["accuracy"], "parts": found["parts"], "problems": found["problems"],
            "turns": mean(len(text) / 2 for text in said)}  # fmt: skip


def one(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    recipe, *given = arm.split()
    out = folder / f"{arm.replace(' ', '-')}-{seed}"
    seconds = run(recipe, seed, out, ["threads=1", *given])
    stages = [path.parent.name for path in out.glob("stages/*/problems.jsonl")]
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in every if line.get("stage") == "rl" and line.get("step")]
    blocks = [lines[n : n + 5] for n in range(0, len(lines), 5)]
    curve = [
        {key: round(mean(line[key] for line in block), 4) for key in CURVES if all(key in x for x in block)} for block in blocks
    ]
    row = {"arm": arm, "seed": seed, "seconds": seconds, "curve": curve, **{s: measured(out, s) for s in stages}}
    print(f"{arm} seed {seed}: {cell(row['before']['success'])} {cell(row['after']['success'])}, {seconds:.0f} s", flush=True)
    return row


def cell(interval: Sequence[float]) -> str:
    return f"{100 * interval[0]:.1f}% [{100 * interval[1]:.1f}, {100 * interval[2]:.1f}]"


def over_seeds(values: Sequence[float]) -> list[float]:
    """The mean over seeds, with Student's interval."""
    half = STUDENT[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) in STUDENT else 1.0
    return [mean(values), max(0.0, mean(values) - half), min(1.0, mean(values) + half)]


def figures(row: dict[str, Any], when: str) -> dict[str, list[float]]:
    """What a table has columns of: success, or that of each role or against each program."""
    found = row[when]
    if row["arm"] == "solver_critic":
        return {role: found["parts"][role] for role in ("solver", "critic")}
    more = {"against a random player": row[f"{when}_random"]["success"]} if f"{when}_random" in row else {}
    return {"against the best player" if more else "success": found["success"], **more}


def table(arm: str, rows: Sequence[dict[str, Any]]) -> str:
    rows = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
    names = list(figures(rows[0], "before"))
    head = [f"{name}, {when} RL" for name in names for when in ("before", "after")]
    lines = [["seed", *head, "seconds"], ["---"] * (len(head) + 2)]
    for row in rows:
        cells = [cell(figures(row, when)[name]) for name in names for when in ("before", "after")]
        lines.append([str(row["seed"]), *cells, f"{row['seconds']:.0f}"])
    means = [over_seeds([figures(row, when)[name][0] for row in rows]) for name in names for when in ("before", "after")]
    lines.append(["mean", *map(cell, means), ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(recipe: str, found: dict[str, Any], folder: Path) -> None:
    """Success of the model, of a random and of a scripted player; and of the episodes of each step of RL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted(
        (row for row in found["rows"] if row["arm"].split()[0] == recipe), key=lambda row: list(ARMS).index(row["arm"])
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), gridspec_kw={"width_ratios": [1.3, 1]})
    shown = bars(recipe, rows, found["players"])
    for place, values in enumerate(shown.values()):
        left.bar(place, 100 * mean(v[0] for v in values), color="#9db8d2", width=0.7)
        for n, (value, low, high) in enumerate(values):
            at, ends = place + 0.15 * (n - (len(values) - 1) / 2), [[100 * (value - low)], [100 * (high - value)]]
            left.errorbar(at, 100 * value, ends, fmt="o", color="#1f3b57", ms=3, lw=1)
    left.set_xticks(range(len(shown)), list(shown), fontsize=6 if len(shown) > 6 else 8)
    left.set_ylim(0, 102)
    left.set_ylabel("% of held-out episodes")
    keys = (
        {SOLVER: "solver", CRITIC: "critic"}
        if recipe == "solver_critic"
        else {MOVES if recipe == "tictactoe" else "reward": ""}
    )
    arms = dict.fromkeys(row["arm"] for row in rows)
    lines = {(arm, key): name or ARMS[arm] for arm in arms for key, name in keys.items()}
    for number, ((arm, key), label) in enumerate(lines.items()):
        for n, row in enumerate(row for row in rows if row["arm"] == arm):
            points = [(point["step"], height(point, key)) for point in row["curve"] if key in point]
            right.plot(*zip(*points, strict=True), color=f"C{number}", lw=1, alpha=0.8, label=label if n == 0 else None)
    right.set_xlabel("step of RL, means of five")
    right.set_ylabel("moves of one side in a game" if recipe == "tictactoe" else "% of sampled episodes")
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / f"{recipe}.png", dpi=110)
    plt.close(figure)


def bars(recipe: str, rows: Sequence[dict[str, Any]], programs: dict[str, Any]) -> dict[str, list[list[float]]]:
    """What the bars of a plot are called, and the value and the interval of each seed."""
    found, arms = {}, list(dict.fromkeys(row["arm"] for row in rows))
    for name in figures(rows[0], "before"):
        program = programs[f"{recipe}_random" if name.endswith("random player") else recipe]
        below = (
            ""
            if name == "success"
            else f"\n{name.removesuffix(' player').replace('against the', 'vs').replace('against a', 'vs')}"
        )
        random = program["random"]
        found[f"random{below}"] = [random.get("parts", {}).get(name, random["success"])]
        found[f"SFT{below}"] = [figures(row, "before")[name] for row in rows if row["arm"] == arms[0]]
        for arm in arms:
            label = ARMS[arm].replace(", ", "\n") + below
            found[label] = [figures(row, "after")[name] for row in rows if row["arm"] == arm]
        found[f"scripted{below}"] = [program["scripted"]["success"]]
    return found


def height(point: dict[str, float], key: str) -> float:
    """A point of a curve: turns as they are, rewards in %, without what turns were paid."""
    return point[key] if key == MOVES else 100 * (point[key] - point.get("reward/turns", 0.0))


def fill(recipe: str, found: dict[str, Any], folder: Path) -> None:
    """Write the figures into the page of a recipe, between its two marks."""
    arms = [arm for arm in ARMS if arm.split()[0] == recipe and any(row["arm"] == arm for row in found["rows"])]
    lines = [
        "1000 held-out episodes, sampled at temperature 1, with 95% intervals over prompts; the last row is the mean over seeds, with",
        f"Student's interval ({found['date']}, {found['machine']}; `python benchmarks/environments.py OUT`).",
    ]
    for arm in arms:
        lines += ["", f"`posttrain run {arm} seed=N`:", "", table(arm, found["rows"])]
    for name, program in found["players"].items():
        if name.removesuffix("_random") == recipe:
            what = {"tictactoe": ", against the best player", "tictactoe_random": ", against a random player"}.get(name, "")
            parts = program["random"].get("parts", {"": program["random"]["success"]})
            random = ", ".join(f"{part} {cell(share)}".strip() for part, share in parts.items())
            lines += ["", f"A random player{what}: {random}; the scripted player: {cell(program['scripted']['success'])}."]
    if recipe == "guess":
        used = {arm: mean(row["after"]["turns"] for row in found["rows"] if row["arm"] == arm) for arm in arms}
        each = ", ".join(f"{turns:.2f} (`{arm}`)" for arm, turns in used.items())
        best = found["players"]["guess"]
        lines += ["", f"Guesses an episode, found or not: {best['scripted']['turns']:.2f} by optimal play, {each}, "
                      f"{best['random']['turns']:.2f} at random."]  # fmt: skip
    text = (folder / f"{recipe}.md").read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    plot = f"![Success on held-out episodes, and while training]({recipe}.png)"
    (folder / f"{recipe}.md").write_text(before + "\n".join([BEGIN, "", *lines, "", plot, "", END]) + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of: {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument(
        "--processes", type=int, default=1, help="runs at the same time; with OMP_NUM_THREADS=1 each has one core"
    )
    parser.add_argument("--plots", type=Path, help="a folder to draw NAME.png into")
    parser.add_argument("--pages", type=Path, help="the folder of NAME.md, whose figures and plots are made anew")
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores, one thread a process", help="in words")
    parser.add_argument("--read", action="store_true", help="run nothing: OUT/environments.json is there")
    options = parser.parse_args()
    file = options.out / "environments.json"
    if not options.read:
        wanted = [(arm, int(seed), options.out) for arm in options.arms.split(",") for seed in options.seeds.split(",")]
        options.out.mkdir(parents=True, exist_ok=True)
        found, rows = {"date": time.strftime("%Y-%m-%d"), "machine": options.machine, "players": beside()}, []
        with ThreadPoolExecutor(options.processes) as pool:
            for done in as_completed([pool.submit(one, *words) for words in wanted]):
                rows.append(done.result())
                file.write_text(json.dumps({**found, "rows": rows}))
    found = json.loads(file.read_text())
    for arm in ARMS:
        if any(row["arm"] == arm for row in found["rows"]):
            print(f"\nposttrain run {arm} seed=N\n\n{table(arm, found['rows'])}")
    print(f"\n{json.dumps(found['players'])}")
    for recipe in dict.fromkeys(row["arm"].split()[0] for row in found["rows"]):
        if options.plots or options.pages:
            draw(recipe, found, options.plots or options.pages)
        if options.pages:
            fill(recipe, found, options.pages)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
