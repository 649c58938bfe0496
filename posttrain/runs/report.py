"""How a run ends on the screen: scores before and after with their intervals, and both models' answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from posttrain.evals.statistics import Interval
from posttrain.events import printable
from posttrain.types import JSON

LIMIT = 400  # characters of an answer that are shown
MARKS = {True: ("right: ", "bold green"), False: ("wrong: ", "bold red"), None: ("", "")}


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """One row of the final table. `difference` is the paired one: its interval excludes or contains 0, which the two
    intervals beside it, overlapping or not, cannot tell."""

    name: str
    before: Interval
    after: Interval
    difference: Interval | None = None
    problems: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """One problem and what the two models answered."""

    question: str
    answer: str
    before: str
    after: str
    before_correct: bool | None = None
    after_correct: bool | None = None


def final_table(rows: Sequence[BeforeAfter], title: str) -> Table:
    """Before, after and the change, each with its interval. Print it with `console.show`."""
    counts = sorted({row.problems for row in rows if row.problems})
    over = f"; {' / '.join(map(str, counts))} problems" if counts else ""
    # Text, not strings: rich would read [low, high] as one of its style tags
    caption = Text(f"[low, high]: 95% confidence interval{over}", style="dim")
    table = Table(title=Text(printable(title), style="bold"), box=SIMPLE_HEAD, caption=caption)
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=bool(heading))
    for row in rows:
        name, before, after = Text(printable(row.name)), _interval(row.before), _interval(row.after)
        table.add_row(name, before, after, _change(row))
    return table


def figures_table(figures: Mapping[str, JSON]) -> Table:
    """The figures of one evaluation as `stages/evaluate.py` leaves them, each with its 95% interval."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "value", "low", "high"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = [
        (f"{kind}@{k}", value, True)
        for kind in ("pass", "avg", "majority")
        for k, value in figures.get(f"{kind}_at", {}).items()
    ]
    rows += [(name, value, True) for name, value in figures.get("parts", {}).items()]
    rows += [
        (name, figures[name], False) for name in ("reward", "kl") if figures.get(name) is not None
    ]
    for name, bounds, percent in rows:
        table.add_row(Text(printable(name)), *(_number(bound, percent) for bound in bounds))
    if "perplexity" in figures:
        table.add_row("perplexity", _number(figures["perplexity"], False))
    return table


def _number(value: float, percent: bool = True, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}%" if percent else f"{value:.3f}"


def _interval(figure: Interval, style: str = "bold", sign: str = "") -> Text:
    value, low, high = (_number(v, sign=sign) for v in (figure.value, figure.low, figure.high))
    return Text.assemble((value, style), (f" [{low}, {high}]", "dim"))


def _change(row: BeforeAfter) -> Text:
    """Green or red only where the paired interval excludes 0: colour is a claim."""
    if row.difference is None:
        return Text(_number(row.after.value - row.before.value, sign="+"), style="bold")
    colour = " green" if row.difference.low > 0 else " red" if row.difference.high < 0 else ""
    return _interval(row.difference, f"bold{colour}", "+")


def side_by_side(problems: Sequence[Answers]) -> Table:
    """Problems with both models' answers in two columns; long answers are cut, and say so."""
    table = Table(box=SIMPLE_HEAD, expand=True, show_lines=False, padding=(0, 1))
    for heading in ("before training", "after training"):
        table.add_column(heading, ratio=1, overflow="fold")
    for problem in problems:
        expected = f"expected: {printable(problem.answer)}" if problem.answer else ""
        table.add_row(Text(printable(problem.question), style="cyan"), Text(expected, style="dim"))
        before = _answer(problem.before, problem.before_correct)
        table.add_row(before, _answer(problem.after, problem.after_correct))
        table.add_section()
    return table


def _answer(text: str, correct: bool | None) -> Text:
    shown = printable(text.strip("\n"), lines=True)
    more = f"\n... and {len(shown) - LIMIT} more characters" if len(shown) > LIMIT else ""
    return Text.assemble(MARKS[correct], shown[:LIMIT] or "(empty)", (more, "dim"))
