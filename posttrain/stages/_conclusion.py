"""Summarises the evaluations of a finished run: scores before and after training, answers side by side, pass@k."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from posttrain.errors import many
from posttrain.evals.evaluate import compare_rows, same_problems, solved_marks
from posttrain.runs import console
from posttrain.runs.layout import json_lines
from posttrain.runs.plot import draw_pass_at_k
from posttrain.stages.base import Context, Stage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.types import JSON


def score_of(result: Mapping[str, JSON]) -> JSON:
    """The held-out score of an evaluation: its accuracy, or the mean reward if no score tells right from wrong."""
    return result.get("accuracy" if result.get("verifiable", True) else "reward")


def compare_before_after(context: Context, first: str, second: str) -> None:
    """Show how two evaluations differ: every figure with its interval, and three problems with both answers."""
    before, after = context.result(first), context.result(second)
    assert before is not None and after is not None
    old, new = problems(context, first), problems(context, second)
    pairs = same_problems(old, new)
    was, now, right = score_of(before), score_of(after), before.get("verifiable", True)
    paired, left = compare_rows(pairs, right), len(old) + len(new) - 2 * len(pairs)
    change = paired.difference.row() if paired else None
    name = "answer right" if right else "reward"
    rows = [console.BeforeAfter(name, was, now, change, len(pairs), percent=right)]
    for part, value in before["parts"].items():
        if part != "answer" and part in after["parts"]:
            label = f"{part} right" if right else part
            rows.append(console.BeforeAfter(label, value, after["parts"][part], percent=right))
    console.show(console.final_table(rows, f"Held-out problems, {first} and {second} training"))
    if left:
        said = f"change:   of the {many(len(pairs), 'problem')} in both evaluations; {left} that only one of them has are left out"
        console.write_text(f"{said}\n", sys.stdout)
    console.show(console.side_by_side(chosen(old, new)))


def pass_at_k(context: Context, stages: Sequence[Stage]) -> bool:
    """Draw pass@k of all evaluations with several samples on the same task as the last one, if there are at least two. Returns
    whether it was drawn."""
    folder, curves, task = context.directory, {}, None
    for stage in reversed([s for s in stages if isinstance(s, EvaluateStage)]):
        points = (context.result(stage.name) or {}).get("pass_at", {})
        if len(points) > 1 and task in (None, stage.task):
            task = stage.task
            curves[stage.name] = {int(k): tuple(bounds) for k, bounds in points.items()}
    if len(curves) > 1:
        in_order = dict(reversed(curves.items()))
        draw_pass_at_k(in_order, folder.resolve().name, folder / "pass_at_k.png")
    return len(curves) > 1


def problems(context: Context, stage: str) -> list[dict[str, JSON]]:
    """Per-problem results of an evaluate stage."""
    return [row for row in json_lines(context.folder(stage) / "problems.jsonl") if row is not None]


def chosen(first: list[dict[str, JSON]], second: list[dict[str, JSON]]) -> list[console.Answers]:
    """Three problems to show: the first ones that training changed, then others."""

    def unchanged(pair: tuple[Mapping[str, JSON], ...]) -> bool:
        old, new = ((row["outcomes"], solved_marks(row)) for row in pair)
        return old == new

    found = []
    for a, b in sorted(same_problems(first, second), key=unchanged)[:3]:
        said, marks = (a["responses"][0], b["responses"][0]), (solved_marks(a), solved_marks(b))
        found.append(console.Answers(a["question"], a["answer"], *said, marks[0][0], marks[1][0]))
    return found
