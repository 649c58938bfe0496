"""The programs on the pages about Python and of questions run as they stand, with few steps."""

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


def test_ratings_of_a_table_as_in_faq_md(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rated.csv").write_text("question,reply,stars\nq,a,5\nq,b,2\nr,c,4\nr,d,\nr,e,1\n,,\ns,f,2\nt,g,5\n")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.with_name("faq.md").read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text(re.sub(r"\bsteps=\d+", "steps=2", code))
    found = runpy.run_path(str(script))
    assert [row["scores"] for row in found["rankings"]] == [[5.0, 2.0], [4.0, 1.0], [2.0], [5.0]]
    assert found["tuned"].metrics[-1]["step"] == found["liked"].metrics[-1]["step"] == 2
