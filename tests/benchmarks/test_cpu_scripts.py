"""The scripts behind figures of the CPU in docs/log.md run, and print what the log says of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__, "../../../benchmarks").resolve()


def last_line(name: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words], capture_output=True, text=True, check=True, timeout=300
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_reading_of_rows_is_timed_for_each_kind() -> None:
    found = last_line("read_data.py", "--tiny", "--rows", "20")
    assert set(found["seconds"]) == {"chats", "prompts with completions", "pairs"}
    assert all(seconds > 0 for seconds in found["seconds"].values())


def test_products_have_a_rate_by_each_library() -> None:
    found = last_line("cpu_products.py", "--repeats", "1")["found"]
    assert [row["rows"] for row in found] == [8] * 4 + [32] * 4 + [4480] * 4
    assert all({"torch.mm", "numpy"} <= row["gflops"].keys() for row in found)
    assert all(rate > 0 for row in found for rate in row["gflops"].values())


@pytest.mark.parametrize("name", ["read_data.py", "cpu_products.py"])
def test_the_log_names_the_script(name: str) -> None:
    assert f"benchmarks/{name}" in (BENCHMARKS.parent / "docs" / "log.md").read_text()
