"""The script that runs `sentiment` over seeds: what it keeps of a run, also of one that stops, and how seeds come together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lexicon_for_tests import LetterLexicon
from scripts_for_tests import load_script

from posttrain.models.save import save
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.stages.base import PRINTABLE
from posttrain.tasks import sentiment as annotator

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/sentiment.py", "sentiment_benchmark")


def settings(folder: Path) -> dict[str, str]:
    tokenizer = character_tokenizer(PRINTABLE)
    save(tiny_model(tokenizer, "nano", 0), tokenizer, folder / "model")
    few = {"rounds": "1", "comparisons": "30", "steps": "1", "prompts": "4", "tokens": "40", "problems": "4", "lr": "1e-3"}
    return {"model": str(folder / "model"), **few}


def test_a_seed_leaves_its_figures(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotator, "lexicon", LetterLexicon)
    monkeypatch.setattr(annotator, "factors", lambda text: {})
    script.one_seed((str(tmp_path), str(tmp_path / "scratch"), 3, "cpu", settings(tmp_path)))
    found = json.loads((tmp_path / "seed-3.json").read_text())
    assert found["seed"] == 3 and "stopped" not in found and set(found["curves"]) == {"rl_1", "best of n, reward_1"}
    assert set(found["versus"]["versus_sft_1"]["parts"]) == {"praise", "about", "measured"}
    assert found["versus"]["versus_sft_1"]["parts"]["measured"] == 1.0 and found["rankings"]["comparisons_1"] > 0
    assert len(found["answers"]["versus_sft_1"]) == 8  # of four questions, two models


def test_a_seed_that_stops_says_where_and_keeps_what_there_was(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(annotator, "lexicon", LetterLexicon)
    given = {**settings(tmp_path), "comparisons": "1", "tokens": "1"}  # one token is no answer: all four are cut off
    script.one_seed((str(tmp_path), str(tmp_path), 0, "cpu", given))
    found = json.loads((tmp_path / "seed-0.json").read_text())
    assert (
        found["stopped"].startswith("comparisons_1: UserError: comparisons_1: no two answers differed")
        and found["curves"] == {}
    )


def run_of(seed: int, *names: str) -> dict[str, Any]:
    points = [{"kl": kl, "proxy": kl, "gold": 0.5 - 0.04 * kl, "gold_low": 0.4, "gold_high": 0.6} for kl in (0.0, 4.0)]
    curve = {"best": points[0], "last": points[1], "errors": 3.0, "turned_down": True, "points": points}
    return {"seed": seed, "seconds": 1.0, "versus": {}, "curves": dict.fromkeys(names, curve)}


def test_seeds_come_together_and_are_drawn_though_one_is_not_whole(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.json").write_text(json.dumps(run_of(2, "rl_1")))
    (tmp_path / "a.json").write_text(json.dumps({"runs": [run_of(1, "rl_1", "best of n, reward_1")]}))
    words = [str(tmp_path / name) for name in ("b.json", "a.json", "all.json")]
    monkeypatch.setattr(sys, "argv", ["sentiment.py", "--join", *words])
    assert script.main() == 0 and capsys.readouterr().out.count("over-optimised") == 3
    assert [one["seed"] for one in json.loads((tmp_path / "all.json").read_text())["runs"]] == [1, 2]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["sentiment.py", "--draw", words[2], str(tmp_path / "all.png")])
    assert script.main() == 0 and (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"


def test_settings_are_the_recipes_own(script: ModuleType) -> None:
    from posttrain.recipes.sentiment import sentiment

    given = {"model": "m", "rounds": "2", "lr": "1e-5", "style": "story"}
    assert script.arguments(sentiment, given) == {"model": "m", "rounds": 2, "lr": 1e-5, "style": "story"}
    with pytest.raises(SystemExit, match="sentiment has no sped"):
        script.arguments(sentiment, {"sped": "1"})
