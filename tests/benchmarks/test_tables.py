"""Tables that scripts draw into pages: dates of each case, no figure in another column, no mean of two seeds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_for_tests import load_script

ROOT = Path(__file__).parent.parent.parent


def test_the_gpu_table_dates_cases_of_a_later_day_and_keeps_graphs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    table = load_script("benchmarks/gpu_table.py")
    runs = [
        {"date": "2026-01-01", "results": [{"case": "a"}, {"case": "c"}]},
        {"date": "2026-01-02", "results": [{"case": "c"}]},
    ]
    assert (table.dates(runs[:1]), table.dates(runs)) == ("2026-01-01", "2026-01-01 (c 2026-01-02)")
    lognormal = {"tokens_s": 5.0, "seconds": 2.0, "graphs": 34}
    one = {
        "case": "a",
        "tokens_s": 10.0,
        "seconds": 1.0,
        "fastest": 1.0,
        "slowest": 1.0,
        "share_of_bound": 0.5,
        "peak_gib": 8.0,
    }
    titles, _, plain, other = (
        [cell.strip() for cell in line.split("|")] for line in table.generation([one | {"lognormal": lognormal}], 1e12, 1e14)
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
