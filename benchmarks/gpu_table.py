"""Writes the tables and the plot of docs/benchmarks.md from the output of the GPU benchmarks.

    python benchmarks/gpu_table.py benchmarks/results/h200.jsonl docs

The file holds the last lines of gpu_generate.py and gpu_grpo_step.py, one a line. A figure of a case in a later line replaces the
same figure in an earlier line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpu_cases import CASES, decode_bound

START, END = "<!-- drawn by benchmarks/gpu_table.py -->", "<!-- end -->"
NAMES = {"a": "0.5B", "b": "1.5B", "c": "7B", "d": "30M", "e": "0.5B, long"}
INK, MUTED, OURS, BOUND = "#1b1b1b", "#8a8a8a", "#2f6fb0", "#d9d9d9"
KINDS = ("gpu_generate", "gpu_grpo_step")


def work(name: str) -> str:
    case = CASES[name]
    return f"{name}: {NAMES[name]}, {case.prompts} x {case.group}, {case.prompt} + {case.new}"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(figures: dict[str, Any], key: str) -> str:
    return f"{figures[key]:.2f} s ({figures['fastest']:.2f} to {figures['slowest']:.2f})"


def merged(runs: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What the runs say of each case, the last word of each figure, in the order of the cases. A figure keeps the day and the GPU's
    rates of its own run; TRL's keeps what our step took in that run."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        about = {"date": run["date"], "rates": (run["bytes_s"], run["flops_s"])}
        for result in run["results"] if run["benchmark"] == kind else ():
            kept = {
                key: value | about if key in ("shared", "plain", "trl") and value else value for key, value in result.items()
            }
            if kept.get("trl"):
                kept["trl"]["ours"] = {way: result[way]["step"] for way in ("shared", "plain") if way in result}
            way = "fp8" if kept.get("quantization") == "fp8" else "faster" if kept.get("hopper") else ""
            found[result["case"]] = found.get(result["case"], {}) | ({way: kept | about} if way else kept | about)
    return [found[name] for name in sorted(found)]


def of_steps(trained: list[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Generation as it was in a step, for cases that were not measured by itself."""
    rows = []
    for r in (r for r in trained if "shared" in r and r["case"] not in {m["case"] for m in made}):
        case, seconds, rates = CASES[r["case"]], r["shared"]["generate"], r["shared"]["rates"]
        rows.append({"case": r["case"], "tokens_s": case.rows * case.new / seconds, "seconds": seconds, "fastest": seconds,
                     "slowest": seconds, "share_of_bound": decode_bound(case, *rates) / seconds, "rates": rates,
                     "date": r["shared"]["date"]})  # fmt: skip
    return rows


def generation(results: list[dict[str, Any]]) -> list[str]:
    titles = ("case", "tokens/s with log-probs", "time (fastest to slowest)", "of roofline", "of roofline, prompts read once", "peak",
              "log-probs off by, mean / max", "measured")  # fmt: skip
    lines = [row(*titles), row(*["---"] * len(titles))]
    for r in results:
        off, shared = r.get("logprob_difference"), decode_bound(CASES[r["case"]], *r["rates"], True) / r["seconds"]
        peak = f"{r['peak_gib']:.1f} GiB" if "peak_gib" in r else "see the step"
        lines.append(row(work(r["case"]), f"**{r['tokens_s']:,.0f}**", spread(r, "seconds"), f"{100 * r['share_of_bound']:.0f}%",
                         f"{100 * shared:.0f}%", peak,
                         f"{off['mean']:.4f} / {off['max']:.3f}" if off else "", r["date"]))  # fmt: skip
        if "lognormal" in r:
            one = r["lognormal"]
            share = f"{100 * one['tokens_s'] / r['tokens_s']:.0f}% of equal lengths"
            lines.append(row(f"{r['case']}, lognormal lengths, mean 256, longest 1024", f"**{one['tokens_s']:,.0f}**",
                             f"{one['seconds']:.2f} s", share, "", "", "", r["date"]))  # fmt: skip
        for key in (key for key in r if key.startswith("ahead_")):
            _, staleness, way = key.split("_")
            share = f"{100 * r[key]['tokens_s'] / r['tokens_s']:.0f}% of equal lengths"
            title = f"{r['case']}, the same lengths, max_staleness={staleness}, in_flight={way}"
            lines.append(row(title, f"**{r[key]['tokens_s']:,.0f}**", "", share, "", "", "", r["date"]))
        for way, title in (("faster", "with the extra `hopper`"), ("fp8", "MLP in fp8")):
            if one := r.get(way):
                off, share = one["logprob_difference"], f"{100 * one['share_of_bound']:.0f}%" if way == "faster" else ""
                lines.append(row(f"{r['case']}, {title}", f"**{one['tokens_s']:,.0f}**", spread(one, "seconds"), share, "",
                                 f"{one['peak_gib']:.1f} GiB", f"{off['mean']:.4f} / {off['max']:.3f}", one["date"]))  # fmt: skip
    return lines


def steps(results: list[dict[str, Any]]) -> list[str]:
    titles = ("case", "prompts", "step (fastest to slowest)", "generate", "train", "MFU of training", "roofline of the step", "peak",
              "sampler and trainer differ by", "gradient off by", "measured")  # fmt: skip
    lines = [row(*titles), row(*["---"] * len(titles))]
    for r in results:
        fast, once = r.get("faster", {}), "computed once"
        ways = ((work(r["case"]), r.get("shared"), once), (f"{r['case']}, with the extra `hopper`", fast.get("shared"), once),
                (work(r["case"]), r.get("plain"), "each time"))  # fmt: skip
        for title, s, word in ways:
            if s is None:
                continue
            gate = r.get("gate") if s is r.get("shared") else None
            parts = [f"{s[key]:.2f} s" for key in ("generate", "train")]
            lines.append(row(title, word, f"**{spread(s, 'step')}**", *parts, f"{100 * s['mfu']:.0f}%",
                             f"{s['bound_s']:.2f} s", f"{s['peak_gib']:.1f} GiB", f"{s['mismatch']:.4f}",
                             f"{gate['relative_error']:.3f}" if gate else "", s["date"]))  # fmt: skip
        if r.get("trl"):
            t = r["trl"]
            times = " and ".join(f"{t['step'] / t['ours'][way]:.2f}" for way in ("shared", "plain"))
            lines.append(row(f"{r['case']}, TRL {t['trl']}, HF generate", "each time", spread(t, "step"), "", "", "", "",
                             f"{t['peak_gib']:.1f} GiB", f"{times} times ours then", "", t["date"]))  # fmt: skip
    return lines


def draw(generated: list[dict[str, Any]], stepped: list[dict[str, Any]], folder: Path) -> None:
    """Tokens a second beside the bound, and where a step's seconds go."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, trained = ({r["case"]: r for r in results} for results in (generated, stepped))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for n, r in enumerate(reversed(made.values())):
        share = 100 * r["share_of_bound"]
        left.barh(n, 100, color=BOUND)
        left.barh(n, share, color=OURS)
        left.text(share + 2, n, f"{r['tokens_s'] / 1000:,.0f}k tokens/s", va="center", color=INK, fontsize=9)
    left.set_yticks(range(len(made)), [f"{name}: {NAMES[name]}" for name in reversed(made)])
    left.set_xlabel("% of what memory and matrix units allow")
    left.set_title("Generation with log-probs", loc="left", fontsize=10)
    bars = [(f"{name}, {word}", r[way]["generate"], r[way]["train"]) for name, r in trained.items() if name in "ab"
            for way, word in (("shared", "prompts once"), ("plain", "plain"))]  # fmt: skip
    for name, r in trained.items():
        if r.get("trl"):
            bars.append((f"{name}, TRL", r["trl"]["step"], 0.0))
    for n, (_, one, two) in enumerate(reversed(bars)):
        whole = not two
        right.barh(n, one, color=MUTED if whole else OURS)
        right.barh(n, two, left=one, color="#e08a2e")
        right.text(one + two + 0.3, n, f"{one + two:.1f} s", va="center", color=INK, fontsize=9)
    right.set_yticks(range(len(bars)), [b[0] for b in reversed(bars)])
    right.set_xlim(0, 1.15 * max(b[1] + b[2] for b in bars))
    right.set_xlabel("seconds of a GRPO step: generation, then training")
    right.set_title("Whole step", loc="left", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "gpu_benchmarks.png", dpi=130)


def main() -> None:
    runs = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.strip()]
    folder, last = Path(sys.argv[2]), runs[-1]
    made, trained = (merged(runs, kind) for kind in KINDS)
    made = sorted([*made, *of_steps(trained, made)], key=lambda r: r["case"])
    rates = f"{last['bytes_s'] / 1e12:.2f} TB/s, {last['flops_s'] / 1e12:.0f} TFLOP/s"
    head = f"{last['gpu']}, torch {last['torch']}, transformers {last['transformers']}, bfloat16; measured in the last run: {rates}."
    tables = ["### Generation", "", *generation(made), "", "### A GRPO step", "", *steps(trained)]
    drawn = "\n".join([START, "", head, "", *tables, "", END])
    page = folder / "benchmarks.md"
    text = page.read_text()
    page.write_text(text[: text.index(START)] + drawn + text[text.index(END) + len(END) :])
    draw(made, trained, folder)


if __name__ == "__main__":
    main()
