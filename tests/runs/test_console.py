"""The console: plain lines off a terminal, a panel on one, and nothing a model writes is obeyed."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.events import Events, printable
from posttrain.runs import console
from posttrain.runs.console import (
    Answers,
    BeforeAfter,
    Console,
    duration,
    final_table,
    render_plain,
    show,
    side_by_side,
    sparkline,
    time_split,
)  # fmt: skip

ROW = {
    "reward": 0.5,
    "kl": 0.0012,
    "length": 31.25,
    "tokens_per_second": 8123.4,
    "seconds/generate": 0.6,
    "seconds/score": 0.02,
    "seconds/train": 0.3,
    "seconds/total": 1.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_escapes_become_visible() -> None:
    assert printable("\x1b[31mred\x1b[0m\x07") == "\\x1b[31mred\\x1b[0m\\x07"
    assert printable("over\rwritten\b") == "over\\rwritten\\x08"
    assert printable("\x9b2J") == "\\x9b2J"  # the one-byte form of ESC [
    assert printable("\u202eevil\u200b\ufeff") == "\\u202eevil\\u200b\\ufeff"
    assert printable("\ud800") == "\\ud800"
    assert printable("a\u2028b\x85c") == "a\\u2028b\\x85c"
    assert printable("tab\tand\nline", lines=True) == "tab\tand\nline"
    assert printable("naïve 中\u3000文 ∑ 🙂\xa0[bold]") == "naïve 中\u3000文 ∑ 🙂\xa0[bold]"


@given(st.text(st.characters(codec=None)), st.booleans())
def test_what_is_printable_stays_so_and_holds_no_control(text: str, lines: bool) -> None:
    shown = printable(text, lines)
    assert not [c for c in shown if unicodedata.category(c)[0] in "C" and not (lines and c in "\n\t")]
    assert not set(shown) & set("\u2028\u2029")
    assert printable(shown, lines) == shown
    shown.encode()


def test_plain_lines_are_rare_and_the_last_always_comes(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(1000, "rl", stream=stream) as view:
        for step in range(1, 998):
            clock[0] += 0.01
            view.update(ROW, step)
    lines = stream.getvalue().splitlines()
    # the first, one a tenth (100, 200, ..., 900), one for each 5 s that no tenth fell into (none), and the last
    assert [line.split()[1] for line in lines] == [f"{step}/1000" for step in (1, *range(100, 1000, 100), 997)]


def test_slow_steps_are_printed_every_few_seconds(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(1000, "rl", stream=stream) as view:
        for step in range(1, 13):
            view.update(ROW, step)
            clock[0] += 2.0
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/1000", "4/1000", "7/1000", "10/1000", "12/1000"]


def test_a_plain_line_says_what_matters_without_ansi(clock: list[float]) -> None:
    stream = io.StringIO()
    view = Console(20, "rl", start=10, stream=stream)
    clock[0] += 30
    view.update({**ROW, "accuracy/test": 0.645}, step=15)
    view.close()
    view.close()
    assert stream.getvalue() == (
        "rl 15/20  reward 0.500  held-out 64.5%  KL 0.0012  length 31.2  tokens/s 8,123"
        "  time: generate 60% score 2% train 30% other 8%  elapsed 30s  left 30s\n"
    )


def test_a_mismatch_is_shown_where_it_is_more_than_rounding(clock: list[float]) -> None:
    """Not where all samples are of older weights, which have no mismatch."""
    stream = io.StringIO()
    with Console(3, "rl", stream=stream) as view:
        view.update({"length": 5.0, "mismatch": 0.009})
        view.update({"length": 5.0, "mismatch": float("nan")})
        view.update({"length": 5.0, "mismatch": 0.043})
    assert [line.split("  elapsed")[0] for line in stream.getvalue().splitlines()] == [
        "rl 1/3  length 5.0",
        "rl 2/3  length 5.0",
        "rl 3/3  length 5.0  mismatch 0.043",
    ]


def test_the_level_is_shown_where_a_task_has_levels(clock: list[float]) -> None:
    lines = []
    for level in (0.0, 2.0):
        stream = io.StringIO()
        console = Console(1, "rl", stream=stream)
        console.update({"reward": 0.5, "level": level})
        lines.append(stream.getvalue())
    assert "level" not in lines[0] and "level 2" in lines[1]


def test_missing_figures_are_left_out_and_held_out_scores_stay(clock: list[float]) -> None:
    stream = io.StringIO()
    with Console(3, "sft", stream=stream) as view:
        view.update({"loss": 1.25, "accuracy/test": 0.5})
        view.update({"loss": float("nan")})
        view.update({})
    assert [line.split("  elapsed")[0] for line in stream.getvalue().splitlines()] == [
        "sft 1/3  held-out 50.0%  loss 1.2500",
        "sft 2/3  held-out 50.0%  loss nan",
        "sft 3/3  held-out 50.0%",
    ]


def test_events_are_escaped_on_both_kinds_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (io.StringIO(), Terminal()):
        events = Events()
        with Console(3, "rl", stream=stream) as view, events.shown_by(view.show):
            events.emit("message", "model said \x1b]0;title\x07 [bold]hi[/bold]\nforged line", stage="rl")
        assert "\\x1b]0;title\\x07 [bold]hi[/bold]\\nforged line" in stream.getvalue()
        assert "\x1b]0;title" not in stream.getvalue()


def test_a_terminal_gets_a_panel_and_a_dumb_one_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    stream = Terminal()
    with Console(10, "rl", stream=stream) as view:
        for step in range(1, 6):
            view.update({**ROW, "reward": (step - 1) / 4, "accuracy/test": 0.5}, step)
    shown = stream.getvalue()
    for expected in ("╭", "5/10", "50%", "1.000", "held-out", "generate 60%", "8,123", "▁▃▅▆█", "\x1b["):
        assert expected in shown
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Console(10, "rl", stream=stream) as view:
        view.update(ROW)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("rl 1/10")


def test_a_stream_that_cannot_encode_gets_escapes_not_an_exception() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(side_by_side([Answers("∑?", "1", "ä", "ö")]), stream)
    assert b"\\u2211?" in raw.getvalue()


def test_small_helpers_at_their_edges() -> None:
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert len(sparkline([float(n) for n in range(1000)], width=24)) == 24
    assert sparkline([0.0, float("inf"), 1.0]) == "▁█"
    assert (duration(59.4), duration(59.6), duration(3599.9), duration(-1)) == ("59s", "1m00s", "1h00m", "0s")
    assert time_split({}) == []
    assert time_split({"seconds/generate": 0.0, "seconds/total": 0.0}) == []
    assert time_split({"seconds/generate": 1.0, "seconds/train": 3.0}) == [("generate", 0.25), ("train", 0.75), ("other", 0.0)]


def test_the_final_table_gives_values_intervals_and_the_change() -> None:
    before, after, difference = (0.1, 0.066, 0.149), (0.75, 0.686, 0.805), (0.65, 0.58, 0.72)
    rows = [
        BeforeAfter("addition", before, after, difference, problems=200),
        BeforeAfter("reward [red]\x1b", before, after),
    ]
    text = render_plain(final_table(rows, "Held-out problems"))
    assert "10.0% [6.6%, 14.9%]" in text
    assert "75.0% [68.6%, 80.5%]" in text
    assert "+65.0% [+58.0%, +72.0%]" in text
    assert "reward [red]\\x1b" in text
    assert "+65.0%\n" in text
    assert "[low, high]: 95% confidence interval; 200 problems" in text


@pytest.mark.parametrize(("low", "high", "colour"), [(0.1, 0.3, "green"), (-0.3, -0.1, "red"), (-0.1, 0.3, "")])
def test_a_change_is_coloured_only_where_its_interval_excludes_zero(low: float, high: float, colour: str) -> None:
    row = BeforeAfter("x", (0.1, 0, 1), (0.2, 0, 1), ((low + high) / 2, low, high))
    cell = next(iter(final_table([row], "").columns[3].cells))
    assert {str(span.style) for span in cell.spans if "dim" not in str(span.style)} == {f"bold {colour}".strip()}


def test_answers_stand_side_by_side_and_are_cut_when_long() -> None:
    problems = [
        Answers("12+34", "46", "maybe 3", "12+34\n= 46", False, True),
        Answers("[b]q\x1b", "", "z" * 500, "", None, False),
    ]
    lines = render_plain(side_by_side(problems), width=80).splitlines()
    (answer,) = [line for line in lines if "maybe 3" in line]
    assert "wrong: maybe 3" in answer
    assert "right: 12+34" in answer
    (question,) = [line for line in lines if "12+34" in line and "expected: 46" in line]
    assert question.index("expected") == answer.index("right")
    text = "\n".join(lines)
    assert "[b]q\\x1b" in text
    assert text.count("z") == 400
    assert "... and 100 more characters" in text
    assert "(empty)" in text
