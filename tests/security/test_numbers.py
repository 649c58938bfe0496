"""Absurd numbers are refused at once: every whole number of every setting has a bound in its type."""

from __future__ import annotations

import dataclasses
import time
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from posttrain import catalogue, config
from posttrain.algorithms.base import Algorithm
from posttrain.errors import Range, UserError, check_fields, field_types
from posttrain.recipes.base import MAX_ROUNDS
from posttrain.stages.base import Stage
from posttrain.stages.reward_sources import RewardSource
from posttrain.tasks.base import Task
from posttrain.trust import Trust

KINDS = {"algorithm": Algorithm, "task": Task, "stage": Stage, "reward_source": RewardSource}
HUGE = 10**10


def groups(hint: Any) -> Iterator[type]:
    """The dataclasses of settings in a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for inner in typing.get_args(hint):
        yield from groups(inner)


def settings() -> list[type]:
    """Every dataclass that a configuration may hold."""
    shipped = [catalogue.load(kind, name, base) for kind, base in KINDS.items() for name in catalogue.names(kind)]
    found, pending = list[type](), [config.Settings, *shipped]
    while pending:
        kind = pending.pop()
        if kind not in found and kind not in (*KINDS.values(), Trust):
            found.append(kind)
            pending += [group for _, hint in field_types(kind) for group in groups(hint)]
    return found


def holds_int(hint: Any) -> bool:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        return holds_int(inner[0])
    return hint is int or (typing.get_origin(hint) is not tuple and any(map(holds_int, inner)))


FIELDS = [(kind, name) for kind in settings() for name, hint in field_types(kind) if holds_int(hint)]


def test_many_settings_are_looked_at() -> None:
    assert len(FIELDS) > 100 and len({kind for kind, _ in FIELDS}) > 40


def test_every_whole_number_of_every_setting_has_an_upper_bound() -> None:
    """Each field alone, whatever the others are."""
    accepted = []
    for kind, name in FIELDS:
        hint = dict(field_types(kind))[name]
        value: object = {1: 2**70} if "Mapping" in str(hint) else 2**70
        one = dataclasses.make_dataclass("One", [(name, hint)])(value)
        try:
            check_fields(one)
            accepted.append(f"{kind.__name__}.{name}")
        except UserError:
            pass
    assert accepted == []


@pytest.mark.parametrize(
    "words",
    [
        ["rl.prompts=10000000000"],
        ["rl.steps=2e10"],
        ["threads=10000"],
        ["rl.algorithm.group=2000000000"],
        ["rl.sampling.max_new_tokens=99999999999"],
        ["checkpoint_keep=1000000000"],
        ["seed=99999999999999999999999"],
        ["rl.evaluate_problems=" + "9" * 400],
        ["rl.steps=" + "9" * 5000],
        ["rl.optimizer.token_budget=100000000000"],
        ["sft.data=[{task: {name: arithmetic, level: 1}, counts: {1: 10000000000}}]"],
        ["rl.task.level=1000000"],
    ],
)
def test_an_absurd_number_is_refused_at_once(words: list[str]) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        config.parse("quickstart", words)
    assert time.monotonic() - began < 10 and "\n" not in str(caught.value) and len(str(caught.value)) < 12_000


@pytest.mark.parametrize(
    ("recipe", "word"), [("iterative_dpo", "rounds"), ("sentiment", "rounds"), ("gsm8k", "prompts"), ("r1", "problems")]
)
@pytest.mark.parametrize("value", [2_000_000_000, HUGE, MAX_ROUNDS + 10_000_000])
def test_so_is_one_of_a_recipe(recipe: str, word: str, value: int) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=word):
        config.parse(recipe, [f"{word}={value}"])
    assert time.monotonic() - began < 10


def test_a_bound_of_its_own_may_be_larger() -> None:
    one = dataclasses.make_dataclass("One", [("bytes", Annotated[int, Range(ge=0, le=2**40)])])
    check_fields(one(2**39))
    with pytest.raises(UserError, match="bytes must be in"):
        check_fields(one(2**41))
