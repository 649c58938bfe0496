"""Runs recipes on real models, on one GPU: what they learn, and how fast. Keeps only figures.

    python benchmarks/real_models.py unpack model.gguf DIR                       # once: stages load a directory in seconds
    python benchmarks/real_models.py run gsm8k OUT model=DIR data=FOLDER seed=0
    python benchmarks/real_models.py run r1_zero OUT model=DIR
    python benchmarks/real_models.py run code OUT model=DIR data=FOLDER          # mbpp-sanitized.json.gz and humaneval.jsonl.gz
    python benchmarks/real_models.py run benchmarks/claim_arms.py:thoughts OUT name=thoughts model=DIR    # a recipe in a file
    python benchmarks/real_models.py run dpo OUT model=DIR data=PAIRS.jsonl seed=1
    python benchmarks/real_models.py run instructgpt OUT model=DIR rl.steps=60   # a setting of one stage needs pydantic and PyYAML
    python benchmarks/real_models.py run distill OUT model=DIR teacher=LARGER data=FOLDER seed=0
    python benchmarks/real_models.py run math OUT model=DIR data=FOLDER          # math-train.json.gz and math-500.jsonl.gz
    python benchmarks/real_models.py run r1 OUT model=DIR lr=3e-5                # with the table and the verdicts of r1_table.py
    python benchmarks/real_models.py draw OUT/gsm8k.json docs/real_gsm8k.png     # curves, pass@k; several files share one picture
    python benchmarks/real_models.py table OUT/*.json                            # rows for docs/results.md
    python benchmarks/real_models.py choose OUT/arm_*.json                       # the arm with the highest training reward at its end
    python benchmarks/real_models.py check OUT                                   # all of it with a tiny random model, on a CPU

`run` takes the recipe's own settings as key=value, writes OUT/NAME.json (name=... gives another name) and prints one JSON line last;
its exit code is 1 if something stopped the recipe early. It needs no command-line packages: torch, transformers and the library are
enough; `draw` needs matplotlib.
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import r1_table

CURVES = {
    "reward": "Reward", "reward/task": "The annotator's own score", "accuracy/test": "Held-out accuracy, greedy",
    "accuracy/held_out": "Held-out accuracy, pairs", "length": "Response length, tokens", "kl": "KL from the start, nats a token",
    "entropy": "Entropy, nats a token", "reward/format": "Share in the asked form", "reward/answer": "Share of right answers",
    "reward/language": "Share of English words", "loss/held_out": "Held-out loss",
    "reflection": "Share that questions itself", "generated_per_second": "Tokens generated a second", "seconds/total": "Seconds a step",
}  # fmt: skip
KEPT = ("seconds/", "accuracy/", "tokens_per", "mismatch", "grad_norm", "groups/", "truncated")  # beside those that are drawn
CHECKED = ("gsm8k", "math", "dpo", "r1_zero", "instructgpt", "r1")
DIGITS = 5  # significant ones that are kept of a curve


def unpack(source: str, target: str) -> None:
    """A GGUF file as a checkpoint directory in bfloat16."""
    from posttrain.models.load import load
    from posttrain.models.save import save

    began = time.perf_counter()
    loaded = load(source, dtype="bfloat16")
    save(loaded.model, loaded.tokenizer, Path(target), replace=True)
    print(json.dumps({"unpacked": source, "parameters": loaded.model.num_parameters(), "seconds": time.perf_counter() - began}))


def run(name: str, out: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Run a recipe to its end and keep its figures as OUT/NAME.json; everything else is thrown away. What stops a run early is among
    them, with the figures until then."""
    import torch

    from posttrain import catalogue
    from posttrain.runs.read import Run
    from posttrain.runs.write import RunWriter
    from posttrain.stages.base import Context, run_stages

    label, seed, device = settings.pop("name", name), int(settings.pop("seed", 0)), settings.pop("device", "")
    function = catalogue.load("recipe", name)
    recipe = function(**arguments(function, {key: value for key, value in settings.items() if "." not in key}))
    stages = changed(recipe.stages, {key: value for key, value in settings.items() if "." in key})
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, ignore_cleanup_errors=True) as folder:
        began = time.perf_counter()
        with RunWriter.create(Path(folder) / "run", {"recipe": name, "seed": seed, **settings}) as writer:
            context = Context(writer, seed, device)
            stopped = attempt(lambda: run_stages(stages, context))
        seconds = time.perf_counter() - began
        finished = Run(Path(folder) / "run")
        figures: dict[str, Any] = {
            "name": label, "recipe": name, "settings": settings, "seed": seed, "date": time.strftime("%Y-%m-%d"), "seconds": seconds,
            "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU", "torch": torch.__version__,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None,
            "stages": {stage.name: found for stage in stages if (found := context.result(stage.name)) is not None},
            "stopped": stopped,
            "alarms": [e.details for e in finished.events() if e.kind == "alarm"],
            "curves": curves(finished, stages),
            "paired": paired(context, recipe.before, recipe.after) if recipe.before and not stopped else None,
            "lenient": {s: lenient(context, s) for s in ("before", "after")} if name == "gsm8k" and not stopped else None,
            "r1": r1_table.table(Path(folder) / "run") if name == "r1" and not stopped else None,
            "answers": examples(context, recipe.after) if recipe.after and not stopped else None,
            "answers_before": examples(context, recipe.before) if recipe.before and not stopped else None,
            "compared": {stage.name: sentences(context, stage.name) for stage in stages
                         if "win_rate" in (context.result(stage.name) or {})},
        }  # fmt: skip
    for result in figures["stages"].values():
        result.pop("lineage", None)
    (out / f"{label}.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps({"name": label, "seconds": round(seconds, 1), "rows": rows(figures)}), flush=True)
    return figures


def changed(stages: Any, settings: dict[str, str]) -> Any:
    """The stages with settings of single ones, such as rl.lr=1e-5, as the command line takes them."""
    if not settings:
        return stages
    from posttrain.config_tree import override, pair

    return override(stages, dict(pair(f"{key}={value}") for key, value in settings.items()))


def attempt(work: Callable[[], None]) -> str:
    """What stopped it, or "": a run on a rented machine must leave its figures whatever happens, an interrupt included."""
    try:
        work()
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def arguments(function: Any, settings: dict[str, str]) -> dict[str, Any]:
    """The recipe's own settings, by the types that it declares."""
    known = inspect.signature(function, eval_str=True).parameters
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise SystemExit(f"{function.__name__} has no {', '.join(unknown)}; it has {', '.join(known)}")
    made: dict[str, Any] = {}
    for key, value in settings.items():
        kind = str(known[key].annotation)
        if "bool" in kind and value not in ("true", "false"):
            raise SystemExit(f"{key} is true or false, not {value}")
        made[key] = (
            value == "true" if "bool" in kind else int(value) if "int" in kind else float(value) if "float" in kind else value
        )
    return made


def curves(finished: Any, stages: Any) -> dict[str, dict[str, list[list[float]]]]:
    """(step, value) pairs by stage and figure."""
    made: dict[str, dict[str, list[list[float]]]] = {}
    group = {stage.name: stage.prompts * stage.algorithm.group_size for stage in stages if hasattr(stage, "prompts")
             and hasattr(stage, "algorithm")}  # fmt: skip
    for row in finished.metrics():
        figures = dict(row.figures)
        if "seconds/generate" in figures and row.stage in group:
            figures["generated_per_second"] = figures["length"] * group[row.stage] / max(1e-9, figures["seconds/generate"])
        for name, value in figures.items():
            if name in CURVES or name.startswith(KEPT):
                made.setdefault(row.stage, {}).setdefault(name, []).append([row.step, float(f"{value:.{DIGITS}g}")])
    return made


def problems(context: Any, stage: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (context.folder(stage) / "problems.jsonl").read_text().splitlines()]


def paired(context: Any, before: str, after: str) -> dict[str, Any]:
    """How many more problems are solved after than before, problem by problem; a prompt that comes again counts once."""
    from posttrain.evals.evaluate import compare_rows, same_problems

    change = compare_rows(same_problems(problems(context, before), problems(context, after)))
    assert change is not None
    return {"difference": change.difference.row(), "gained": change.wins, "lost": change.losses}


def lenient(context: Any, stage: str) -> dict[str, list[float]]:
    """Accuracy where the last number counts without a box, and the share of answers with a box: what is form and what is more."""
    from posttrain.evals.statistics import share_interval
    from posttrain.tasks.gsm8k import Gsm8k
    from posttrain.types import Problem

    task, found = Gsm8k(style="thinking"), problems(context, stage)
    right = [task.score(Problem(r["problem"], r["question"], r["answer"]), r["responses"][0]).solved for r in found]
    boxed = ["\\boxed{" in row["responses"][0] for row in found]
    asked = [row["question"] for row in found]
    return {name: share_interval([*map(float, marks)], asked).row() for name, marks in (("accuracy", right), ("boxed", boxed))}


def examples(context: Any, stage: str) -> list[dict[str, Any]]:
    """A few answers, to look at."""
    return [{key: row[key] for key in ("question", "answer", "responses", "outcomes")} | {"responses": row["responses"][:1]}
            for row in problems(context, stage)[:15]]  # fmt: skip


def sentences(context: Any, stage: str) -> list[dict[str, Any]]:
    """A few answers of both models of a comparison, with what the annotator gave them."""
    return [{key: row[key] for key in ("question", "responses", "values")} for row in problems(context, stage)[:4]]


def rows(figures: dict[str, Any]) -> list[str]:
    """Lines of a table: what was measured, before and after, with 95% intervals."""
    made = [f"| {figures['name']} | stopped early | {figures['stopped']} | |"] if figures.get("stopped") else []

    def share(value: list[float] | None) -> str:
        return "" if value is None else f"{value[0]:.1%} [{100 * value[1]:.1f}, {100 * value[2]:.1f}]"

    stages, who = figures["stages"], f"{figures['name']}, seed {figures['seed']}"
    more = [(name, name.replace("before", "after", 1)) for name in stages if name.startswith("before_")]
    for first, second in (("before", "after"), *more, ("base", "trained")):
        if first in stages and second in stages:
            a, b = stages[first], stages[second]
            what = "greedy accuracy" if len(a["pass_at"]) == 1 else "pass@1"
            made.append(f"| {who} | {what}, {a['problems']} problems | {share(a['accuracy'])} | {share(b['accuracy'])} |")
            if "length" in a and "reflection" in figures["curves"].get("rl", {}):
                made.append(f"| {who} | {first}, {second}: mean length, tokens | {a['length']:.0f} | {b['length']:.0f} |")
            for k in sorted(({"10", max(a["pass_at"], key=int)} & {*a["pass_at"]}) - {"1"}, key=int):
                made.append(f"| {who} | pass@{k} | {share(a['pass_at'][k])} | {share(b['pass_at'][k])} |")
    for stage in ("before", "after") if figures.get("lenient") else ():
        found = figures["lenient"][stage]
        made.append(f"| {who} | {stage}: last number / has a box | {share(found['accuracy'])} | {share(found['boxed'])} |")
    for name, result in stages.items():
        if "held_out" in result and "accuracy" in result:
            what = f"{name}: accuracy on {result['held_out']} held-out pairs"
            made.append(f"| {who} | {what} | 50% (chance) | {share(result['accuracy'])} |")
        if "win_rate" in result:
            made.append(f"| {who} | {name}: win rate, {result['problems']} prompts | 50% | {share(result['win_rate'])} |")
            liked = (f"{result[key][0]:.3f}" for key in ("reward_against", "reward"))
            made.append(f"| {who} | {name}: the annotator's score, KL {result['kl']:.1f} nats | {' | '.join(liked)} |")
            if "perplexity" in result:
                paid = (f"{result[key]:.2f}" for key in ("perplexity_against", "perplexity"))
                made.append(f"| {who} | {name}: perplexity of other text | {' | '.join(paid)} |")
    made += r1_table.told(figures["r1"]) if figures.get("r1") else []
    for stage, found in figures["curves"].items():
        if "generated_per_second" in found:
            speed, step = (statistics.median(v for _, v in found[key]) for key in ("generated_per_second", "seconds/total"))
            made.append(f"| {who} | {stage}: median tokens generated a second / seconds a step | {speed:,.0f} | {step:.2f} |")
    return made


def choose(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """The arm whose sampled training reward is highest over the last quarter of its steps. Arms of equal seconds, each shorter than an
    epoch, are so compared on training problems that they had not seen, and the test has no part in it."""

    def last(arm: dict[str, Any]) -> float:
        values = [value for _, value in arm["curves"].get("rl", {}).get("reward", [])]
        return statistics.fmean(values[-max(1, len(values) // 4) :]) if values else -1.0

    for arm in arms:
        held_out = arm["curves"].get("rl", {}).get("accuracy/test", [[0, float("nan")]])[-1]
        steps = len(arm["curves"].get("rl", {}).get("reward", []))
        print(
            f"{arm['name']}: reward {last(arm):.3f} at the end of {steps} steps, held-out training problems {held_out[1]:.3f}",
            file=sys.stderr,
        )
    return max(arms, key=last)


def draw(sources: list[Path], target: Path) -> None:
    """The curves of one run or of several and, where several samples were taken, pass@k before and after."""
    from functools import partial

    from posttrain.runs import plot

    runs = [json.loads(source.read_text()) for source in sources]
    panels = []
    for name, title in CURVES.items():
        found = [(run["name"] if len(runs) > 1 else stage, kept[name])
                 for run in runs for stage, kept in run["curves"].items() if len(kept.get(name, [])) > 1]  # fmt: skip
        if found:
            panels.append(plot.Panel(title, "" if len(runs) > 1 else found[0][0], partial(lines, found=found)))
    for run in runs:
        many = {stage: r["pass_at"] for stage, r in run["stages"].items() if len(r.get("pass_at", {})) > 1}
        if many:
            panels.append(plot.Panel("pass@k", "right answer among k, held-out", partial(pass_curves, many=many)))
    plot.save_panels(panels, f"{runs[0]['recipe']} on {runs[0]['hardware']}", target)


def lines(axes: Any, found: list[tuple[str, list[list[float]]]]) -> None:
    from posttrain.runs import plot

    for number, (stage, points) in enumerate(found):
        axes.plot([p[0] for p in points], [p[1] for p in points], color=plot.COLOURS[number % len(plot.COLOURS)], linewidth=1.8,
                  label=stage if len(found) > 1 else None, marker="o" if len(points) < 12 else None, markersize=4)  # fmt: skip


def pass_curves(axes: Any, many: dict[str, dict[str, list[float]]]) -> None:
    from posttrain.runs import plot

    for number, (stage, curve) in enumerate(many.items()):
        ks = sorted(map(int, curve))
        value, low, high = ([curve[str(k)][part] for k in ks] for part in range(3))
        axes.fill_between(ks, low, high, color=plot.COLOURS[number], alpha=0.15, linewidth=0)
        axes.plot(ks, value, color=plot.COLOURS[number], linewidth=2, marker="o", markersize=4, label=stage)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("k")
    axes.set_ylim(-0.03, 1.03)


def check(out: Path) -> None:
    """The recipes with a random model of a few thousand weights and rows written here: does everything run?"""
    import string

    from posttrain.models.save import save
    from posttrain.models.tiny import character_tokenizer, tiny_model

    tokenizer = character_tokenizer(string.printable)
    save(tiny_model(tokenizer, "nano", 0), tokenizer, out / "model", replace=True)
    for split, first in (("train", 1), ("test", 50)):
        rows_of = [{"question": f"Ann has {n} pears and buys {n} more. How many?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"}
                   for n in range(first, first + 8)]  # fmt: skip
        (out / f"gsm8k-{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    pairs = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n}!"} for n in range(24)]
    (out / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    model = {"model": str(out / "model")}
    few = {"steps": "2", "prompts": "2", "group": "2", "tokens": "8", "problems": "4", "held_out": "0.3"}
    run("gsm8k", out, model | few | {"data": str(out)})
    for split, first in (("math-train", 1), ("math-500", 50)):
        rows_of = [{"problem": f"What is ${n} + {n}$?", "answer": str(2 * n), "level": 1} for n in range(first, first + 8)]
        (out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    run("math", out, model | few | {"data": str(out)})
    run("dpo", out, model | {"data": str(out / "pairs.jsonl"), "steps": "3"})
    run("r1_zero", out, model | {"steps": "1", "samples": "2", "prompts": "1", "problems": "2"})
    check_pipelines(out, model)
    for name in CHECKED:
        draw([out / f"{name}.json"], out / f"{name}.png")


def check_pipelines(out: Path, model: dict[str, str]) -> None:
    """The pipelines of many stages, each with next to no work."""
    from posttrain import catalogue

    def of(stages: str, **settings: str) -> dict[str, str]:
        return {f"{stage}.{key}": value for stage in stages.split() for key, value in settings.items()}

    written = of("ordinary unseen demonstrations favourites sampled", min_score="0", prompts="24")  # worth nothing, and kept
    written |= of("comparisons", prompts="64") | of("reward preferences", steps="2", min_accuracy="0")
    few = {"instructgpt": of("sft", steps="2") | {"steps": "2", "prompts": "8", "problems": "4"},
           "r1": of("cold_start mixture", steps="2", batch="8") | of("reasoning final", steps="2", prompts="2")
           | of("reasoning.algorithm final.algorithm", group="4") | {"problems": "8"}}  # fmt: skip
    for name, settings in few.items():
        known = {stage.name for stage in catalogue.load("recipe", name)(**model).stages}
        run(name, out, model | settings | {key: value for key, value in written.items() if key.split(".")[0] in known})


def main(words: list[str]) -> int:
    match words:
        case ["unpack", source, target]:
            unpack(source, target)
        case ["run", name, out, *pairs] if all("=" in pair for pair in pairs):
            return 1 if run(name, Path(out), dict(pair.split("=", 1) for pair in pairs))["stopped"] else 0
        case ["draw", *sources, target] if sources:
            draw([Path(source) for source in sources], Path(target))
        case ["table", *files] if files:
            print("\n".join(line for file in files for line in rows(json.loads(Path(file).read_text()))))
        case ["choose", *files] if files:
            print(choose([json.loads(Path(file).read_text()) for file in files])["name"])
        case ["check", out]:
            check(Path(out))
        case _:
            print(__doc__)
            return 0 if words == ["--help"] else 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
