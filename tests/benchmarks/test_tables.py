"""Tables that scripts draw into pages: dates of each case, no figure in another column, no mean of two seeds."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_for_tests import load_script

ROOT = Path(__file__).parent.parent.parent


def test_the_gpu_table_keeps_each_figure_with_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs of a case the later step counts; what was not measured again keeps its day, and TRL is compared with our step of
    the same run: 20 s with 10 s then, not with 5 s now."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    table = load_script("benchmarks/gpu_table.py")
    step = {"step": 10.0, "fastest": 9.0, "slowest": 11.0, "generate": 4.0, "train": 6.0, "mfu": 0.5, "bound_s": 3.0, "peak_gib": 8.0,
            "mismatch": 0.01}  # fmt: skip
    trl = {"trl": "1.0", "step": 20.0, "fastest": 19.0, "slowest": 21.0, "peak_gib": 30.0}
    about = {"benchmark": "gpu_grpo_step", "bytes_s": 4e12, "flops_s": 8e14}
    runs = [
        about | {"date": "2026-01-01", "results": [{"case": "a", "shared": step, "plain": step | {"step": 12.5}, "trl": trl}]},
        about | {"date": "2026-01-02", "results": [{"case": "a", "shared": step | {"step": 5.0}}]},
    ]
    _, _, shared, plain, peer = table.steps(table.merged(runs, "gpu_grpo_step"))
    assert "**5.00 s" in shared and shared.endswith("| 2026-01-02 |")
    assert "**12.50 s" in plain and plain.endswith("| 2026-01-01 |")
    assert "2.00 and 1.60 times ours then" in peer and peer.endswith("| 2026-01-01 |")


def test_the_gpu_table_keeps_graphs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    table = load_script("benchmarks/gpu_table.py")
    lognormal = {"tokens_s": 5.0, "seconds": 2.0, "graphs": 34}
    one = {"case": "a", "tokens_s": 10.0, "seconds": 1.0, "fastest": 1.0, "slowest": 1.0, "share_of_bound": 0.5, "peak_gib": 8.0,
           "rates": (1e12, 1e14), "date": "2026-01-01"}  # fmt: skip
    titles, _, plain, other = (
        [cell.strip() for cell in line.split("|")] for line in table.generation([one | {"lognormal": lognormal}])
    )
    peak = titles.index("peak")
    assert (plain[peak], other[peak]) == ("8.0 GiB", "")


def test_a_mean_over_seeds_takes_three_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    feedback = load_script("benchmarks/feedback.py")
    figures: dict[str, Any] = {name: [0.5, 0.4, 0.6] for name in feedback.FIGURES["safety"]}
    rows = [{"arm": "safety", "seed": seed, "seconds": 1.0, "figures": figures, "kept": {"after": {}}} for seed in range(3)]
    first = [feedback.table("safety", rows[:count]).splitlines()[0] for count in (1, 2, 3)]
    assert ["mean" in line for line in first] == [False, False, True]
    assert all(line.count("|") == 4 for line in feedback.table("safety", rows[:2]).splitlines())


def test_kept_rows_of_feedback_are_of_arms_that_the_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of other settings would be drawn into a page on which no command gives it."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    feedback = load_script("benchmarks/feedback.py")
    kept = json.loads((ROOT / "benchmarks" / "results" / "feedback.json").read_text())
    assert [row["arm"] for row in kept["rows"] if row["arm"] not in feedback.ARMS] == []


def test_a_page_of_feedback_can_be_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    feedback = load_script("benchmarks/feedback.py")
    for arm in feedback.ARMS:
        text = (ROOT / "docs" / "recipes" / f"{arm.split()[0]}.md").read_text()
        assert (text.count(feedback.BEGIN), text.count(feedback.END)) == (1, 1), arm


def test_the_page_of_safety_has_the_figures_of_the_results() -> None:
    page, results = (ROOT / "docs" / "recipes" / "safety.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    rows = re.findall(r"^\| \d \| ([\d.]+)% \| ([\d.]+)% \[.*?\] \|", page, re.MULTILINE)
    (line,) = [line for line in results.splitlines() if line.startswith("| safety |")]
    before, after = (cell.strip().split(", ") for cell in line.split("|")[4:6])
    assert rows == list(zip(before, after, strict=True)) and len(rows) == 3
