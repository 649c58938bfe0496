"""The benchmark of several turns, with next to no work: what it counts is there, and a later turn computes its new tokens alone."""

from __future__ import annotations

from argparse import Namespace
from types import ModuleType

import pytest
from scripts_for_tests import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/multi_turn.py")


def test_a_later_turn_computes_what_was_given_and_nothing_again(script: ModuleType) -> None:
    sizes = script.Sizes(prompt=12, given=5, turn=6, repeats=1)
    bench = script.Bench(script.load_policy(Namespace(model="", device="cpu", size="nano")), sizes, "cpu")
    bench.seconds(script.Episodes(sizes, turns=4), 3, sizes.turn)
    found = bench.engine.statistics
    assert (found.sampled, found.recomputed, found.dropped_sessions) == (3 * 4 * 6, 0, 0)
    # the last token of a turn was sampled and not read: it is computed with what is given after it
    assert found.prefilled == 3 * (12 + 3 * (5 + 1))


def test_figures_are_printed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "ROWS", 4)
    monkeypatch.setattr(script, "SLEEPS", 0.01)
    monkeypatch.setattr(script, "CPU", script.Sizes(6, 3, 4, 1))
    monkeypatch.setattr("sys.argv", ["multi_turn.py", "--only", "rate", "sleep"])
    script.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines[:2]] == ["rate", "sleep"]
    assert lines[2].startswith('{"device": "cpu"')
