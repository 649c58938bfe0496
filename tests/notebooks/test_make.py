"""The notebooks' sources are notebooks: `make test-notebooks` executes them."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scripts_for_tests import load_script

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return load_script("notebooks/make.py", "notebooks_make")


def test_a_percent_file_becomes_cells_of_text_and_code(make: ModuleType) -> None:
    found = doctest.testmod(make)
    assert found.attempted > 0 and found.failed == 0


def test_there_are_six_each_with_text_code_rollouts_and_a_check(make: ModuleType) -> None:
    assert len(make.SOURCES) == 6
    page = (FOLDER.parent / "docs" / "notebooks.md").read_text()
    for path in make.SOURCES:
        cells = make.notebook(path.read_text())["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
        assert cells[0]["cell_type"] == "markdown" and cells[0]["source"].startswith("# "), path.name
        for source in code:
            ast.parse(source)
        whole = "\n".join(code)
        assert ".rollouts(" in whole or ".sample(" in whole, path.name
        assert "assert " in code[-1], f"{path.name} ends with a check"
        assert f"notebooks/{path.name})" in page
        assert len({cell["id"] for cell in cells}) == len(cells)


def test_the_files_are_written_without_jupyter(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-S", str(FOLDER / "make.py"), str(tmp_path)], check=True, timeout=60)
    found = sorted(tmp_path.glob("*.ipynb"))
    assert len(found) == 6 and json.loads(found[0].read_text())["nbformat"] == 4
