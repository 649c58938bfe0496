"""Draws docs/console.svg: what a terminal shows of a run, at a step of its rl stage and at its end, from the run directory.

posttrain run quickstart out=runs/quickstart && python docs/make_console.py runs/quickstart
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

from rich.console import Console as RichConsole

from posttrain.evals.evaluate import compare_rows, same_problems
from posttrain.runs.console import BeforeAfter, Console, final_table, side_by_side
from posttrain.runs.read import Run
from posttrain.stages._conclusion import chosen

HERE = Path(__file__).parent


def drawn(run: Run, stage: str = "rl", share: float = 0.6) -> str:
    """The panel when a share of the steps was done, then the table and a problem of the end, as rich's SVG."""
    rows = run.metrics(stage)
    panel = Console(rows[-1].step, stage, stream=io.StringIO())
    done = [row for row in rows if row.step <= share * panel.total]
    for row in done:
        panel.update(row.figures, row.step)
    panel._began = time.monotonic() - (done[-1].time - rows[0].time)
    screen = RichConsole(record=True, width=100, file=io.StringIO(), force_terminal=True)
    screen.print(panel._panel())
    old, new = (run.stage_rows(evaluation, "problems.jsonl") for evaluation in ("before", "after"))
    pairs = same_problems(old, new)
    paired = compare_rows(pairs)
    change = paired.difference.row() if paired else None
    was, now = (run.stage_rows(evaluation, "result.json")[0]["accuracy"] for evaluation in ("before", "after"))
    scores = BeforeAfter("answer right", was, now, change, len(pairs))
    screen.print(final_table([scores], "Held-out problems, before and after training"))
    screen.print(side_by_side(chosen(old, new)[:1]))
    svg = screen.export_svg(title=f"posttrain run {run.name}", unique_id="posttrain")
    svg = re.sub(r'viewBox="0 0 (\S+) (\S+)"', r'\g<0> width="\1" height="\2"', svg, count=1)  # else a table makes it small
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # nothing is fetched from other hosts


def main(directory: str) -> None:
    (HERE / "console.svg").write_text(drawn(Run(directory)), "utf-8")
    sys.stdout.write("wrote docs/console.svg\n")


if __name__ == "__main__":
    main(sys.argv[1])
