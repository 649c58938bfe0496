"""The programs on the page about Python run as they stand, with few steps."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_page_runs_as_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    script = tmp_path / "page.py"
    script.write_text(re.sub(r"\bsteps=\d+", "steps=2", "\n".join(blocks)))
    found = runpy.run_path(str(script))
    assert found["run"].metrics[-1]["step"] == 2
