"""From a point of a curve to what moved the policy there, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs_for_tests import make_run

from posttrain import cli
from posttrain.studio.library import path_id

pytestmark = pytest.mark.studio
SMALL = ["sft.steps=100", "rl.steps=4", "rl.prompts=8", "rl.algorithm.group=4", "rl.checkpoint_every=2", "rl.rollouts_every=1"]
LESS = [
    "before.problems=4",
    "after.problems=4",
    "rl.evaluate_problems=4",
    "rl.task.level=1",
    "rl.curriculum.start=1",
    "threads=1",
]


def test_a_click_on_a_curve_shows_what_moved_the_policy(tmp_path: Path, serve: Any, visit: Any) -> None:
    assert cli.main(["run", "quickstart", f"out={tmp_path / 'run'}", *SMALL, *LESS]) == 0
    visitor = visit(serve(tmp_path))
    page = visitor.go(f"/run/{path_id(tmp_path / 'run')}")
    chart = page.locator(".chart:has(h3:text-is('Reward while training')) .u-over")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_url("**/replay?stage=rl&step=4")
    visitor.until("document.querySelector('main p .chip.good, main .error:not([hidden])')", 120)
    assert page.locator("main .error:visible").all_inner_texts() == []
    assert "figures of 2 steps, computed from step 2, are those that the run wrote" in page.locator("main").inner_text()
    assert page.locator(".tokens").count() > 0 and page.locator("tbody tr").count() == 32
    page.click("tbody tr >> nth=0 >> text=Without it")
    visitor.until("[...document.querySelectorAll('dt')].some((n) => n.innerText.startsWith('Without rollout'))", 120)
    page.click("tbody tr a >> nth=0")
    page.wait_for_selector("text=What did it change?")
    page.click("text=What did it change?")
    visitor.until("[...document.querySelectorAll('h3')].some((n) => n.innerText.startsWith('log-prob of the answer'))", 120)
    assert visitor.wrong == []


def test_a_drag_zooms_and_replays_nothing(tmp_path: Path, serve: Any, visit: Any) -> None:
    make_run(tmp_path / "one")
    page = visit(serve(tmp_path)).go(f"/run/{path_id(tmp_path / 'one')}")
    chart = page.locator(".chart:has(h3:text-is('Reward while training')) .u-over")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_selector("button:text-is('Whole run'):not([disabled])")
    assert "replay" not in page.url
