"""What a notebook shows of runs, rollouts and comparisons: escaped, bounded, with a text for terminals."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.api.display import Rollout, Rollouts
from posttrain.runs import html

TAGS = {"div", "p", "b", "ul", "li", "table", "tr", "th", "td", "pre", "img", "details", "summary", "span"}
ATTRIBUTES = {"class", "style", "title", "src", "alt", "open"}
EVIL = "<script>alert(1)</script><img src=x onerror='alert(2)'> $\\href{javascript:alert(3)}{x}$ \x1b[31m"
ROW: dict[str, Any] = {
    "question": EVIL,
    "response": EVIL,
    "reward": 0.5,
    "advantage": -1.0,
    "failure": None,
    "parts": {EVIL: 0.5},
    "length": 2,
}


class Tags(HTMLParser):
    """The tags of a page and the names of their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}


def check_harmless(page: str) -> None:
    found = Tags(page)
    assert found.tags <= TAGS, found.tags
    assert found.attributes <= ATTRIBUTES, found.attributes
    assert page.startswith("<div class='tex2jax_ignore mathjax_ignore'>"), "dollar signs are not typeset"
    assert "\x1b" not in page and len(page) < 400_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[pt.Run]:
    folder = tmp_path_factory.mktemp("display")
    how: dict[str, Any] = {
        "model": "tiny:nano",
        "prompts": ["<script>alert(1)</script>", "two"],
        "reward": len,
        "beta": 0.1,
        "group": 2,
        "batch": 2,
        "max_new_tokens": 4,
        "device": "cpu",
        "threads": 1,
        "rollouts_every": 1,
    }
    return [pt.grpo(out=folder / f"a{n}", steps=n, **how) for n in (1, 2)]


def test_a_run_shows_whether_it_learns_and_its_curves(runs: list[pt.Run]) -> None:
    page = runs[1]._repr_html_()
    assert page is not None and "a2</b> (finished)" in page and "data:image/png;base64," in page
    check_harmless(page)
    assert repr(runs[1]) == f"<Run {runs[1].directory}: done>", "the text of a terminal"


def test_showing_a_run_that_has_not_begun_does_not_begin_it(tmp_path: Path) -> None:
    run = pt.rl("tiny:nano", prompts=["one"], reward=len, out=tmp_path / "later", steps=1, device="cpu")
    assert run._repr_html_() is None and "not begun" in repr(run) and not run.directory.exists()
    run._settings = None  # it never begins


def test_a_rollout_is_a_map_of_its_tokens_by_advantage_logprob_and_kl(runs: list[pt.Run]) -> None:
    rows = runs[1].rollouts()
    assert isinstance(rows, list) and isinstance(rows[0], dict)
    one = max(rows, key=lambda row: abs(row["advantage"] or 0.0))
    page = one._repr_html_()
    check_harmless(page)
    tokens = one.tokens()
    assert [page.count(f"<summary>{name}") for name in ("advantage", "log-prob", "KL")] == [1, 1, 1]
    assert page.count("<span") == 3 * len(tokens["text"]) and page.count("<details open>") == 1
    assert page.count("given, not sampled") == 3 * (len(tokens["text"]) - one["length"])
    titles = re.findall(r"title='logprob ([-0-9.e]+)'", page)
    assert [float(t) for t in titles] == tokens["figures"]["logprob"][-one["length"] :]


def test_rollouts_are_a_table_and_in_a_terminal_a_few_lines(runs: list[pt.Run]) -> None:
    rows = runs[1].rollouts()
    page = rows._repr_html_()
    check_harmless(page)
    assert page.count("<tr>") == 1 + len(rows) and "&lt;script&gt;" in page
    assert repr(rows).startswith("4 rollouts of rl step 2\n") and len(repr(rows).splitlines()) == 5
    assert isinstance(rows[:2], Rollouts) and len(rows[:2]) == 2
    many = Rollouts([ROW] * 500, "rollouts")
    assert "and 490 more" in repr(many) and len(repr(many)) < 2000 and "\x1b" not in repr(many)


def test_what_a_model_wrote_is_escaped_and_bounded() -> None:
    check_harmless(html.rollouts_html([{**ROW, "response": EVIL * 10_000}] * 500, "rollouts"))
    check_harmless(html.rollouts_html([{**ROW, "reward": None, "failure": EVIL}], EVIL))
    check_harmless(Rollout({**ROW, "response": EVIL * 10_000}, lambda: None)._repr_html_())
    count = 5000
    figures = {name: [0.1] * count for name in ("advantage", "logprob", "kl", "value")} | {"sampled": [True] * count}
    page = Rollout(ROW, lambda: {"text": [EVIL] * count, "figures": figures})._repr_html_()
    check_harmless(page)
    assert "4700 more tokens are not shown" in page


def test_a_comparison_shows_its_lines_and_its_picture(runs: list[pt.Run], tmp_path: Path) -> None:
    found = runs[0].compare(runs[1], tmp_path / "both.png")
    page = found._repr_html_()
    check_harmless(page)
    assert "rl.steps" in str(found) and "rl.steps" in page and str(found) == repr(found)
    assert ("data:image/png" in page) == bool(found.picture)
