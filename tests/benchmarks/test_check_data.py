"""The comparison with math-verify on real data, tried on a few rows of each schema."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType

import pytest
from scripts_for_tests import load_script

ROOT = Path(__file__).parent.parent.parent
MATH = [
    "7",
    r"\frac{3}{8}",
    r"\frac{5}{6}",
    r"2\sqrt{3}",
    "(3,-1)",
    "[0,3)",
    r"90^\circ",
    r"10\text{ feet}",
    "1011_2",
    "50\\%",
    "3+4i",
    r"\text{(B)}",
    "x^2+1",
    "-2, 5",
]


@pytest.fixture(scope="module")
def check_data() -> ModuleType:
    return load_script("benchmarks/check_data.py")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    def lines(rows: list[dict[str, str | None]]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    with gzip.open(tmp_path / "gsm8k-train.jsonl.gz", "wt") as file:
        file.write(lines([{"question": "?", "answer": f"{n} it is\n#### {n:,}"} for n in (5, 72, 1080)]))
    with gzip.open(tmp_path / "math-train.json.gz", "wt") as file:
        json.dump([{"problem": "?", "answer": answer} for answer in [*MATH, None, ""]], file)
    with gzip.open(tmp_path / "math-500.jsonl.gz", "wt") as file:
        file.write(lines([{"problem": "?", "answer": "12"}]))
    return tmp_path


def test_golds_of_every_schema(check_data: ModuleType, data: Path) -> None:
    assert check_data.golds(data) == ["5", "72", "1,080", *MATH, "12"]


def test_our_verdict_is_the_one_a_pair_was_made_for(check_data: ModuleType, data: Path) -> None:
    pairs = check_data.make_pairs(check_data.golds(data), 1_000)
    assert {pair.made for pair in pairs if not pair.right} >= {
        "chain",
        "rounded",
        "other unit",
        "swapped",
        "value of another base",
    }
    result = check_data.compare(pairs, None)
    assert result["mistakes"] == 0
    assert result["pairs"] == len(pairs) > 100


def test_an_unexplained_difference_is_seen(check_data: ModuleType) -> None:
    pairs = [check_data.Pair("5", "5", "itself", True), check_data.Pair("5", "x = 6 = 5", "chain", False)]
    result = check_data.compare(pairs, lambda pair: pair.made == "chain")  # a grader that is wrong about both
    assert result["differ"] == {"chain": 1, "itself": 1}
    assert result["unexplained"] == ["itself"]
    wrong = check_data.compare([check_data.Pair("5", "6", "itself", True)], None)
    assert wrong["mistakes"] == 1


def test_every_explanation_is_of_a_way_that_exists(check_data: ModuleType, data: Path) -> None:
    made = {pair.made for pair in check_data.make_pairs([*check_data.golds(data), "a + b", "5 + t"], 2_000)}
    assert set(check_data.EXPLAINED) <= made


@pytest.mark.peers
def test_math_verify_differs_only_where_it_is_explained(check_data: ModuleType, data: Path) -> None:
    pytest.importorskip("math_verify")
    result = check_data.compare(check_data.make_pairs(check_data.golds(data), 300), check_data.theirs())
    assert result["mistakes"] == 0
    assert result["unexplained"] == []
    assert result["differ"]["chain"] > 0
