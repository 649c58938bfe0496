"""SECURITY.md names a test for each promise, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_architecture import ROOT

HERE = Path(__file__).parent


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    table = text[text.index("## Promises about files") : text.index("## Which test shows it")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        file, named = "", re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", row.split("|")[-2])
        assert named, row
        for place, name in named:
            file = place or file
            assert f"def {name}(" in (HERE / file).read_text(), (file, name)
