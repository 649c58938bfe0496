"""What may change between two attempts of a run."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.runs.resume_policy import compare

BASE: dict[str, Any] = {
    "seed": 0,
    "threads": 1,
    "trackers": [],
    "stages": [
        {"stage": "sft", "name": "sft", "optimizer": {"lr": 0.1, "token_budget": 10}, "data": [{"file": "a"}], "checkpoint_every": 5},
        {"stage": "rl", "name": "rl", "algorithm": {"name": "grpo", "group": 4}},
    ],
}  # fmt: skip


def changed(key: str, value: Any) -> dict[str, Any]:
    import copy

    tree = copy.deepcopy(BASE)
    *path, last = key.split(".")
    node: Any = tree
    for part in path:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = value
    return tree


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("threads", 4, "threads: 1 -> 4"),
        ("trackers", ["wandb"], "trackers: [] -> ['wandb']"),
        ("stages.0.optimizer.token_budget", 99, "sft.optimizer.token_budget: 10 -> 99"),
        ("stages.0.checkpoint_every", 1, "sft.checkpoint_every: 5 -> 1"),
        ("stages.1.algorithm.group", 8, "rl.algorithm.group: 4 -> 8"),  # it has not begun
        ("stages.0.optimizer.new_in_this_version", 1, "sft.optimizer.new_in_this_version: nothing -> 1"),
    ],
)
def test_harmless_changes_are_named(key: str, value: Any, text: str) -> None:
    found = compare(BASE, changed(key, value), ["sft"])
    assert found.named == (text,) and found.refused == ()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", 1, "seed: 0 -> 1"),
        ("stages.0.optimizer.lr", 0.2, "sft.optimizer.lr: 0.1 -> 0.2"),
        ("stages.0.data", [{"file": "b"}], "sft.data: [{'file': 'a'}] -> [{'file': 'b'}]"),
        ("stages.0.stage", "rl", "sft.stage: sft -> rl"),
    ],
)
def test_others_are_refused(key: str, value: Any, text: str) -> None:
    found = compare(BASE, changed(key, value), ["sft"])
    assert found.refused == (text,) and found.named == ()


def test_another_algorithm_is_another_run() -> None:
    found = compare(BASE, changed("stages.1.algorithm.name", "dapo"), ["rl"])
    assert found.refused == ("rl.algorithm.name: grpo -> dapo",)
    assert compare({**BASE, "name": "a"}, {**BASE, "name": "b"}, ["sft", "rl"]).refused == (), "the run's own name is a label"


def test_a_stage_that_has_begun_may_not_go_and_new_ones_may_come() -> None:
    without = {**BASE, "stages": BASE["stages"][1:]}
    assert any("sft.optimizer.lr: 0.1 -> nothing" in text for text in compare(BASE, without, ["sft"]).refused)
    assert compare(without, BASE, ["rl"]).refused == ()


def test_nothing_changed() -> None:
    assert compare(BASE, BASE, ["sft", "rl"]) == compare(BASE, changed("seed", 0), [])
    assert compare(BASE, BASE, []).named == ()


def test_a_stage_may_have_a_field_that_is_called_as_one_of_the_recipe() -> None:
    old, new = ({"before": a, "stages": [{"name": "compare", "before": a}]} for a in ("x", "y"))
    found = compare(old, new, ["compare"])
    assert found.named == ("before: x -> y",) and found.refused == ("compare.before: x -> y",)
