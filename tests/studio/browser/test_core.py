"""What `make test` drives in a real browser where chromium is there: every page, the stages, labelling by keyboard, hostile text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from payloads_for_tests import PAYLOADS
from runs_for_tests import hostile_run

from posttrain.data.labels import Labels
from posttrain.studio.library import path_id

pytestmark = pytest.mark.browser


def test_every_page_shows_itself_without_an_error(root: Path, paths: list[str], serve: Any, visit: Any) -> None:
    visitor = visit(serve(root))
    for path in paths:
        page = visitor.go(path)
        page.wait_for_timeout(150)
        assert page.locator(".error:visible").count() == 0, path
    page = visitor.go(f"/run/{path_id(root / 'one')}/pipeline")
    row = page.locator(".steps button:not([disabled])")
    names = [text.split("\n")[0] for text in row.all_inner_texts()]
    assert names == ["start", "sft", "rl"]
    for number, name in enumerate(names):
        row.nth(number).click()
        assert page.locator(".steps button[aria-pressed='true']").inner_text().startswith(name)
        assert page.locator(".answer-card, .card.empty").count() >= 1
    assert visitor.wrong == []


def test_ten_pairs_are_labelled_and_sixty_payloads_are_text(tmp_path: Path, serve: Any, visit: Any) -> None:
    assert len(PAYLOADS) >= 60
    hostile_run(tmp_path / "<b>run", PAYLOADS[:60])
    (tmp_path / "labels").mkdir()
    rows = [{"prompt": text, "responses": [text, f"{text} "]} for text in PAYLOADS[:10]]
    (tmp_path / "labels" / "hostile.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    visitor = visit(serve(tmp_path))
    page = visitor.page
    page.add_init_script(
        "window.ran = []; window.alert = window.confirm = window.prompt = (x) => { window.ran.push(String(x)); }"
    )
    run = path_id(tmp_path / "<b>run")
    for path in (f"/run/{run}/hacking", f"/run/{run}/rollouts"):
        visitor.go(path)
        page.wait_for_timeout(300)
        shown = page.locator("main").inner_text()
        assert sum(text.strip()[:20] in shown for text in PAYLOADS[:60] if text.isascii() and text.isprintable()) > 30, path
        assert page.locator("main script, main iframe, main img, main object").count() == 0
    visitor.go("/label")
    page.click("a.button:text-is('Label')")
    page.fill("input[aria-label='Your name']", "<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    for number in range(10):
        page.wait_for_selector(f"[data-done='{number}']")
        page.keyboard.press(["ArrowLeft", "ArrowRight", "t", "b"][number % 4])
    page.wait_for_selector("text=All are labelled")
    assert len(Labels.read(tmp_path / "labels" / "hostile.jsonl").votes()) == 10
    assert page.evaluate("window.ran") == [] and visitor.wrong == []
