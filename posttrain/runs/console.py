"""Shows a run to a person: a live panel on a terminal, plain lines at a limited rate elsewhere.

At the end of a run it shows scores before and after with their intervals, and both models' answers side by side.

    with Console(total_steps=60, stage="rl") as console, events.shown_by(console.show):
        console.update({"reward": 0.4, "length": 31.0}, step=1)

Model output may contain control characters: `printable` makes them visible, so that the terminal does not execute them.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from posttrain.errors import UserError
from posttrain.events import Event, printable
from posttrain.runs.layout import AnswerRow
from posttrain.types import JSON

BLOCKS = "▁▂▃▄▅▆▇█"
# with their colours
PHASES = {"generate": "cyan", "score": "yellow", "train": "magenta", "other": "dim"}
PLAIN_SECONDS = 5.0  # at most one plain line in this time, unless a tenth of the stage has passed
HISTORY = 4096  # rewards kept for the sparkline


def sparkline(values: list[float], width: int = 24) -> str:
    """Draw a line of blocks, each the mean of its share of the values; non-finite values are left out.

    >>> sparkline([0.0, 0.5, 1.0], width=3)
    '▁▅█'
    >>> sparkline([float("nan")])
    ''
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [round(i * len(finite) / width) for i in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return BLOCKS[0] * width
    heights = [(mean - low) / (high - low) * (len(BLOCKS) - 1) for mean in means]
    return "".join(BLOCKS[math.floor(height + 0.5)] for height in heights)


def duration(seconds: float) -> str:
    """Format a duration in its two largest units.

    >>> duration(8.2), duration(75), duration(3700), duration(200000)
    ('8s', '1m15s', '1h01m', '2d07h')
    """
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minute}m{second:02d}s" if minute else f"{second}s"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else str(value)


# (metric, its plain name, its format), in the order in which they are shown
SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward", "{:.3f}".format),
    ("accuracy/test", "held-out", _percent),
    ("reward/test", "held-out reward", "{:.3f}".format),
    ("loss", "loss", "{:.4f}".format),
    ("kl", "KL", "{:.2g}".format),
    ("entropy", "entropy", "{:.3f}".format),
    ("length", "length", "{:.1f}".format),
    ("level", "level", "{:g}".format),
    ("mismatch", "mismatch", "{:.2g}".format),
    ("grad_norm", "gradient", "{:.3g}".format),
    ("learning_rate", "rate", "{:.2g}".format),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
)
ROUNDING = 0.02  # mismatch below this is bf16 rounding
LIMIT = 400  # characters of an answer that are shown
MARKS = {True: ("right: ", "bold green"), False: ("wrong: ", "bold red"), None: ("", "")}
Bounds = Sequence[float]  # value, low, high: an estimate with its 95% interval
DETAILS = {"entropy", "gradient", "rate"}  # in the panel only, to keep a plain line readable


def time_split(row: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the shares of a step's time by phase, with the remainder as "other". Empty if the time was not measured.

    >>> time_split({"seconds/generate": 6.0, "seconds/train": 3.0, "seconds/total": 10.0})
    [('generate', 0.6), ('train', 0.3), ('other', 0.1)]
    """
    spent = {phase: row[f"seconds/{phase}"] for phase in PHASES if f"seconds/{phase}" in row}
    total = row.get("seconds/total", sum(spent.values()))
    if not spent or not total > 0:
        return []
    spent["other"] = max(0.0, total - sum(spent.values()))
    return [(phase, round(seconds / total, 4)) for phase, seconds in spent.items()]


class Console(AbstractContextManager["Console"]):
    """The view of one stage: a live panel if the stream is a terminal, else plain lines."""

    def __init__(
        self, total_steps: int, stage: str, start: int = 0, stream: TextIO | None = None
    ) -> None:
        """Begin to show a stage; `start` is the step from which a resumed stage continues."""
        self.total, self.stage, self.start, self.step = total_steps, printable(stage), start, start
        self._stream = stream or sys.stdout
        self._began = self._printed_at = time.monotonic()
        self._printed_step = -1
        self._row: dict[str, float] = {}
        self._rewards: list[float] = []
        self._live: Live | None = None
        if self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            screen = RichConsole(file=self._stream)
            self._live = Live(get_renderable=self._panel, console=screen, refresh_per_second=4)
            self._live.start()

    def update(self, row: Mapping[str, float], step: int | None = None) -> None:
        """Show the metrics of a step. Without `step`, each update is one step. Held-out scores and KL stay until the next
        ones."""
        self.step = self.step + 1 if step is None else step
        lasting = ("accuracy/", "reward/test")
        rare = [name for name in self._row if name == "kl" or name.startswith(lasting)]
        self._row = {**{name: self._row[name] for name in rare}, **row}
        if "reward" in row:
            self._rewards.append(row["reward"])
            if len(self._rewards) > HISTORY:
                self._rewards = self._rewards[::2]
        if self._live is None and self._due():
            self._print_line()

    def show(self, event: Event) -> None:
        """Print a message, above the metrics."""
        if self._live is not None:
            self._live.console.print(Text(event.line()), highlight=False)
        else:
            write_text(event.line() + "\n", self._stream)

    def close(self) -> None:
        """Leave the last metrics on the screen. A second call changes nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._printed_step = self.step
        elif self._row and self._printed_step != self.step:
            self._print_line()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _due(self) -> bool:
        """Whether to print a line: at the first step, at every tenth of the stage (so also the last), and otherwise at most one
        in a few seconds."""
        if self._printed_step < 0:
            return True
        tenth = 10 * self.step // max(1, self.total) > 10 * self._printed_step // max(1, self.total)
        return tenth or time.monotonic() - self._printed_at >= PLAIN_SECONDS

    def _print_line(self) -> None:
        split = " ".join(f"{phase} {share:.0%}" for phase, share in time_split(self._row))
        parts = [f"{self.stage} {self.step}/{self.total}"]
        parts += [f"{label} {text}" for label, text in self._shown() if label not in DETAILS]
        parts += [f"time: {split}"] if split else []
        write_text("  ".join([*parts, self._times()]) + "\n", self._stream)
        self._printed_at, self._printed_step = time.monotonic(), self.step

    def _shown(self) -> Iterator[tuple[str, str]]:
        for name, label, form in SHOWN:
            # the mismatch is not shown if the sampler computes like the trainer, nor for a step whose samples are all from
            # older weights (nan)
            rounding = name == "mismatch" and not self._row.get(name, 0.0) >= ROUNDING
            unlevelled = name == "level" and not self._row.get(name)  # a task without levels
            if name in self._row and not rounding and not unlevelled:
                yield label, form(self._row[name])

    def _times(self) -> str:
        elapsed = time.monotonic() - self._began
        done, left = self.step - self.start, max(0, self.total - self.step)
        if done <= 0 or left == 0:
            return f"elapsed {duration(elapsed)}"
        return f"elapsed {duration(elapsed)}  left {duration(elapsed / done * left)}"

    def _panel(self) -> RenderableType:
        share = min(1.0, self.step / self.total) if self.total else 1.0
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        progress = Text(f"{self.step}/{self.total}  {share:.0%}  {self._times()}", style="default")
        head.add_row(Bar(1.0, 0.0, share, color="green", bgcolor="grey23"), progress)

        figures = Table.grid(padding=(0, 3))
        cells = [self._cell(label, text) for label, text in self._shown()]
        for first in range(0, len(cells), 4):
            figures.add_row(*cells[first : first + 4])
        parts: list[RenderableType] = [head, figures]
        if split := time_split(self._row):
            shares = [(f"{phase} {part:.0%}   ", PHASES[phase]) for phase, part in split]
            parts.append(Text.assemble(("time  ", "dim"), *shares))
        title = Text(self.stage, style="bold")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim")

    def _cell(self, label: str, text: str) -> Text:
        cell = Text.assemble((f"{label} ", "dim"), (text, "bold"))
        if label == "reward" and len(self._rewards) > 1:
            cell.append(" " + sparkline(self._rewards), style="green")
        return cell


def show(renderable: RenderableType, stream: TextIO | None = None) -> None:
    """Print a table or text: in colour on a terminal, as plain characters elsewhere."""
    stream = stream or sys.stdout
    if stream.isatty():
        RichConsole(file=stream).print(renderable)
    else:
        write_text(render_plain(renderable), stream)


def render_plain(renderable: RenderableType, width: int = 100) -> str:
    """Return what `show` prints without a terminal: no colour, a fixed width, no trailing blanks."""
    plain = RichConsole(
        width=width, force_terminal=False, color_system=None, legacy_windows=False, _environ={}
    )
    with plain.capture() as capture:
        plain.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def print_message(event: Event) -> None:
    """Show an event if no panel is open."""
    write_text(event.line() + "\n", sys.stdout)


def write_text(text: str, stream: TextIO) -> None:
    """Write lines and flush. Control characters, and characters that the stream cannot encode, become escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(text, lines=True).encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(shown)
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        full = "no space left where the output is redirected to"
        raise UserError(
            f"{full}; free some or redirect it elsewhere, then repeat the command, or resume the run"
        ) from None


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """One row of the final table. `difference` is the paired one: its interval shows whether the change excludes 0, which the
    two other intervals cannot, whether or not they overlap."""

    name: str
    before: Bounds
    after: Bounds
    difference: Bounds | None = None
    problems: int = 0
    percent: bool = True  # for shares; False for rewards


@dataclass(frozen=True, slots=True)
class Answers:
    """One problem and the two models' answers."""

    question: str
    answer: str
    before: str
    after: str
    before_correct: bool | None = None
    after_correct: bool | None = None


def final_table(rows: Sequence[BeforeAfter], title: str) -> Table:
    """Make the table of before, after and change, each with its interval. Print it with `show`."""
    counts = sorted({row.problems for row in rows if row.problems})
    over = f"; {' / '.join(map(str, counts))} problems" if counts else ""
    # Text, not strings: rich would read [low, high] as one of its style tags
    caption = Text(f"[low, high]: 95% confidence interval{over}", style="dim")
    table = Table(title=Text(printable(title), style="bold"), box=SIMPLE_HEAD, caption=caption)
    for heading in ("", "before", "after", "change"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=bool(heading))
    for row in rows:
        both = (_interval(bounds, percent=row.percent) for bounds in (row.before, row.after))
        table.add_row(Text(printable(row.name)), *both, _change(row))
    return table


def figures_table(figures: Mapping[str, JSON]) -> Table:
    """Make the table of one evaluation's results, as `stages/evaluate.py` writes them, each with its 95% interval."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "value", "low", "high"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    rows = [
        (f"{kind}@{k}", value, True)
        for kind in ("pass", "avg", "majority")
        for k, value in figures.get(f"{kind}_at", {}).items()
    ]
    rows += [(name, value, True) for name, value in figures.get("parts", {}).items()]
    known = [name for name in ("reward", "kl") if figures.get(name) is not None]
    rows += [(name, figures[name], False) for name in known]
    for name, bounds, percent in rows:
        table.add_row(Text(printable(name)), *(_number(bound, percent) for bound in bounds))
    if "perplexity" in figures:
        table.add_row("perplexity", _number(figures["perplexity"], False))
    return table


def _number(value: float, percent: bool = True, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}%" if percent else f"{value:{sign}.3f}"


def _interval(bounds: Bounds, style: str = "bold", sign: str = "", percent: bool = True) -> Text:
    value, low, high = (_number(bound, percent, sign) for bound in bounds)
    return Text.assemble((value, style), (f" [{low}, {high}]", "dim"))


def _change(row: BeforeAfter) -> Text:
    """Format the change: green or red only if the paired interval excludes 0, since colour claims a difference."""
    if row.difference is None:
        return Text(_number(row.after[0] - row.before[0], row.percent, "+"), style="bold")
    _, low, high = row.difference
    colour = " green" if low > 0 else " red" if high < 0 else ""
    return _interval(row.difference, f"bold{colour}", "+", row.percent)


def side_by_side(problems: Sequence[Answers]) -> Table:
    """Show problems with both models' answers in two columns; long answers are cut, with a mark."""
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


def answers_table(rows: Sequence[AnswerRow]) -> Table:
    """Show every stage's answers to the same prompts, stage by stage; long answers are cut, with a mark."""
    table = Table(title=Text("What the stages answer", style="bold"), box=SIMPLE_HEAD)
    for heading in ("stage", "answer"):
        table.add_column(heading, overflow="fold")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or before.prompt != row.prompt:
            table.add_section()
            kind = "held out" if row.held_out else "trained on"
            expected = f"; expected: {printable(row.answer)}" if row.answer else ""
            asked = printable(row.prompt.strip(), lines=True)[:LIMIT]
            table.add_row("", Text.assemble((asked, "cyan"), (f"  ({kind}{expected})", "dim")))
        table.add_row(row.stage, _answer(row.response, None))
    return table


def _answer(text: str, correct: bool | None) -> Text:
    shown = printable(text.strip("\n"), lines=True)
    more = f"\n... and {len(shown) - LIMIT} more characters" if len(shown) > LIMIT else ""
    return Text.assemble(MARKS[correct], shown[:LIMIT] or "(empty)", (more, "dim"))
