"""What may change between two attempts of a run."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.runs.resume_policy import compare, flatten

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


def lengths(steps: int | None, schedule: str = "constant", **more: Any) -> dict[str, Any]:
    stage = {"stage": "rl", "name": "rl", "steps": steps, "optimizer": {"schedule": schedule}, "critic_optimizer": None, **more}
    return {"stages": [stage]}


def test_more_steps_are_an_extension_where_the_learning_rate_does_not_depend_on_them() -> None:
    found = compare(lengths(5), lengths(9), ["rl"])
    assert (found.named, found.refused, found.extended) == (("rl.steps: 5 -> 9",), (), ("rl",))
    found = compare(lengths(None, epochs=1.0), lengths(None, epochs=2), ["rl"])
    assert (found.named, found.extended) == (("rl.epochs: 1.0 -> 2",), ("rl",))
    assert compare(lengths(5), lengths(9), []).extended == (), "one that has not begun is just another"


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_stage_may_end_where_its_checkpoint_is(schedule: str) -> None:
    """Nothing more is trained, so that no learning rate can differ; between there and the end it could."""
    found = compare(lengths(12, schedule), lengths(4, schedule), ["rl"], {"rl": 4})
    assert (found.named, found.refused, found.extended) == (("rl.steps: 12 -> 4",), (), ())
    assert bool(compare(lengths(12, schedule), lengths(6, schedule), ["rl"], {"rl": 4}).refused) == (schedule != "constant")


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (lengths(5), lengths(4), "can be made longer, not shorter"),
        (lengths(5, "cosine"), lengths(9, "cosine"), "optimizer.schedule=cosine ends at the last step"),
        (
            lengths(5, critic_optimizer={"schedule": "linear"}),
            lengths(9, critic_optimizer={"schedule": "linear"}),
            "critic_optimizer.schedule",
        ),
        (lengths(5, as_long_as="x"), lengths(9, as_long_as="x"), "as_long_as decides its length"),
        ({"stages": [{"name": "rl", "steps": 5}]}, {"stages": [{"name": "rl", "steps": 9}]}, "no stage that trains"),
    ],
)
def test_why_a_stage_cannot_be_extended_is_said(before: dict[str, Any], after: dict[str, Any], reason: str) -> None:
    found = compare(before, after, ["rl"])
    assert found.extended == () and len(found.refused) == 1 and reason in found.refused[0]
    assert compare(lengths(5), lengths(None, epochs=3.0), ["rl"]).refused == ("rl.steps: 5 -> None",)


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


@pytest.mark.parametrize("stages", [[{}], [3], "rl", [[]]])
def test_a_configuration_that_another_program_wrote_is_flat_too(stages: object) -> None:
    assert flatten({"seed": 0, "stages": stages}) != flatten({"seed": 0, "stages": [{"name": "rl"}]})  # type: ignore[dict-item]


def test_a_stage_of_another_name_is_refused() -> None:
    """Its steps are then neither more nor fewer."""
    before, after = ({"stages": [{"name": name, "steps": 6}]} for name in ("rl", "other"))
    assert "rl.steps: 6 -> nothing" in compare(before, after, ["rl"]).refused
