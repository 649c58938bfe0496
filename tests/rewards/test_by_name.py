"""Rewards as a task names them: every shipped one by its name and options, and mixes from plain settings."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from posttrain import catalogue
from posttrain.errors import UserError
from posttrain.rewards.length import cosine
from posttrain.tasks.jsonl import Jsonl
from posttrain.types import Problem

PROBLEM = Problem("1", "What is 3 times 4?", "12")


@pytest.fixture
def task(tmp_path: Path) -> Any:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(20)))
    return lambda reward, options: Jsonl(str(file), reward=reward, options=options)


TEXTBOOK = {
    "parts": [
        {"reward": "math", "name": "correctness", "weight": 0.8},
        {"reward": "format", "weight": 0.1, "options": {"announce": True}},
        {"reward": "steps", "name": "reasoning", "weight": 0.1},
    ]
}
RIGHT = "Step 1: 3*4 = 12\nso \\boxed{12}"
CASES: list[tuple[str, dict[str, Any], str, float]] = [
    ("math", {}, RIGHT, 1.0),
    ("answer", {}, "so #12", 1.0),
    ("format", {}, RIGHT, 0.0),
    ("format", {"announce": True}, "Final answer: 12", 0.7),
    ("format", {"announce": True}, "12", 0.3),
    ("language", {"target": "en"}, "It is twelve.", 1.0),
    ("length", {"target": 10, "tolerance": 10}, "x" * 15, 0.5),
    ("length", {"kind": "cosine", "limit": 100}, RIGHT, cosine(len(RIGHT), 100, True)),
    ("length", {"kind": "cosine", "limit": 100}, "no", cosine(2, 100, False)),
    ("length", {"kind": "overlong", "limit": 100, "margin": 20}, "x" * 90, -0.5),
    ("repetition", {}, "a b c d e f", 0.0),
    ("steps", {"wanted": 2}, RIGHT, 1.0),
    ("arithmetic_steps", {}, RIGHT, 1.0),
    ("compose", TEXTBOOK, RIGHT, 0.8 + 0.1 + 0.1 * 2 / 3),
    ("compose", {"how": "product", "parts": TEXTBOOK["parts"]}, RIGHT, 2 / 3),
    ("compose", {"how": "gate", "parts": [{"reward": "format"}, {"reward": "math"}]}, RIGHT, 0.0),
    ("compose", {"how": "gate", "parts": [{"reward": "steps"}, {"reward": "math"}], "threshold": 0.6, "otherwise": -1.0}, RIGHT, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("reward", "options", "response", "value"), CASES)
def test_by_name_with_options(task: Any, reward: str, options: dict[str, Any], response: str, value: float) -> None:
    assert task(reward, options).score(PROBLEM, response).value == pytest.approx(value)


def test_every_shipped_reward_is_tried_here_or_has_a_test_of_its_own() -> None:
    tried = {case[0] for case in CASES}
    assert set(catalogue.names("reward")) - tried == {"code", "judge", "math_verify"}


def test_the_parts_of_a_mix_are_columns(task: Any) -> None:
    found = task("compose", TEXTBOOK).score(PROBLEM, RIGHT)
    assert set(found.parts) == {"correctness", "format", "reasoning"} and found.outcome == "correct"


def test_programs_within_a_mix_run_apart(task: Any) -> None:
    assert not task("compose", TEXTBOOK).isolated
    inner = {"parts": [{"reward": "math"}, {"reward": "code"}]}
    assert task("compose", inner).isolated
    assert task("compose", {"parts": [{"reward": "steps"}, {"reward": "compose", "options": inner}]}).isolated


def test_no_code_comes_in_by_way_of_options(task: Any, tmp_path: Path) -> None:
    """A setting that may name code is guarded (--allow-code); options are not such a setting."""
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef polite(p, r, a): return 1.0\n")
    with pytest.raises(UserError, match="a part is a shipped reward"):
        task("compose", {"parts": [{"reward": f"{tmp_path}/mine.py:polite"}]}).score(PROBLEM, RIGHT)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("reward", "options", "complaint"),
    [
        ("ensemble", {}, "unknown reward"),
        ("compose", {}, "give a list of parts"),
        ("compose", {"parts": 3}, "give a list of parts"),
        ("compose", {"part": []}, "did you mean 'parts'"),
        ("compose", {"parts": [{"weight": 1}]}, "a part is a reward"),
        ("compose", {"how": "sum", "parts": [{"reward": "math"}]}, "how is weighted"),
        ("compose", {"how": "gate", "parts": [{"reward": "math"}]}, "a gate has two parts"),
        ("compose", {"parts": [{"reward": "math"}, {"reward": "math"}]}, "different names"),
        ("compose", {"parts": [{"reward": "maths"}]}, "math"),
        ("compose", {"parts": [{"reward": "math", "options": {"round": 2}}]}, "did you mean 'rounding'"),
        ("compose", {"least": 1, "parts": [{"reward": "math"}]}, "unknown option"),
        ("length", {"kind": "short"}, "kind is one of"),
        ("math", {"round": 2}, "unknown option of the reward math: 'round'; did you mean 'rounding'"),
        ("math", {"rounding": 31}, "rounding must be a number of decimal places from 0 to 30, not 31"),
        ("math", {"rounding": "2"}, "math: rounding must be int, not '2'"),
        ("math", {"bases": 1}, "math: bases must be bool, not 1"),
        ("math", {"variables": "xy"}, "math: variables must be list, not 'xy'"),
        ("code", {"partial": "yes"}, "code: partial must be bool"),
        ("code", {"timeout": 3}, "unknown option of the reward code"),
        ("steps", {"wanted": True}, "steps: wanted must be int, not True"),
        ("language", {"target": "klingon"}, "unknown language"),
        ("format", {"template": "{text}{line}"}, "needs literal text"),
        ("answer", ["marker"], "are not a mapping"),
    ],
)
def test_mistakes_are_named_when_the_config_is_read(task: Any, reward: str, options: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        task(reward, options)


DECLARED: list[tuple[dict[str, Any], str, str]] = [
    ({"reasoning_end": ""}, "12", r"\boxed{12} </think>"),
    ({"marker": "####"}, "12", "#### 12"),
    ({"percent": "bare"}, r"12\%", r"\boxed{12}"),
    ({"decimal_comma": True}, "1.2", r"\boxed{1,2}"),
    ({"bases": True}, "12", r"\boxed{1100_2}"),
    ({"rounding": 2}, r"\frac13", r"\boxed{0.33}"),
    ({"variables": ["x", "y"]}, "x=1, y=2", r"\boxed{(1, 2)}"),
]


@pytest.mark.parametrize(("options", "gold", "response"), DECLARED)
def test_every_declaration_of_the_math_reward_is_an_option(
    task: Any, options: dict[str, Any], gold: str, response: str
) -> None:
    problem = Problem("1", "?", gold)
    assert task("math", options).score(problem, response).value == 1.0
    assert task("math", {}).score(problem, response).value == 0.0


def test_units_may_be_required(task: Any) -> None:
    problem = Problem("1", "?", r"10\text{ m}")
    scores = [task("math", options).score(problem, r"\boxed{10}").value for options in ({}, {"require_units": True})]
    assert scores == [1.0, 0.0]


def test_a_task_accepts_exactly_the_rewards_that_are_listed(task: Any) -> None:
    options = {"judge": {"url": "http://localhost:1", "model": "m"}, "compose": TEXTBOOK}
    installed = importlib.util.find_spec("math_verify") is not None
    for name in catalogue.names("reward"):
        refused = name == "math_verify" and not installed
        with pytest.raises(UserError, match=r"posttrain\[math-verify\]") if refused else nullcontext():
            task(name, options.get(name, {}))
