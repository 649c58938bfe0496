"""Units in other shapes: rankings to pairs, pairs to labels, and mismatched examples for a baseline."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.data.preferences import as_pairs, as_singles, prompt_length, with_mismatched
from posttrain.errors import UserError
from posttrain.types import Example


def example(prompt: list[int], response: list[int], reward: float) -> Example:
    ids = np.array([*prompt, *response])
    return Example(ids, np.arange(len(ids)) >= len(prompt), reward=reward)


def rewards(units: list[tuple[Example, ...]]) -> list[tuple[float, ...]]:
    return [tuple(e.reward for e in unit) for unit in units]


def test_pairs_stay_and_rankings_become_all_their_pairs() -> None:
    pair = (example([1], [2], 0.0), example([1], [3], 1.0))
    ranking = tuple(example([1], [5 + n], reward) for n, reward in enumerate((2.0, 0.0, 2.0)))
    assert rewards(as_pairs([pair, ranking])) == [(1.0, 0.0), (2.0, 0.0), (2.0, 0.0)]
    four = tuple(example([1], [5 + n], float(n)) for n in range(4))
    assert len(as_pairs([four])) == 6 and all(a > b for a, b in rewards(as_pairs([four])))


def test_pairs_become_labels() -> None:
    pair = (example([1], [2], 2.5), example([1], [3], 4.0))
    single = (example([1], [4], 0.0),)
    assert rewards(as_singles([pair, single])) == [(0.0,), (1.0,), (0.0,)]
    with pytest.raises(UserError, match="a ranking says which response is better, not which are good"):
        as_singles([(*pair, *single)])


def test_a_mismatched_example_has_the_response_to_another_prompt() -> None:
    singles = [(example([1, n], [10 + n, 20 + n, 30 + n][: 1 + n % 3], float(n % 2)),) for n in range(8)]
    units = with_mismatched(singles, singles, 100, seed=0)
    for (own, other), (single,) in zip(units, singles, strict=True):
        assert own is single and math.isnan(other.reward) and other.unit == -1
        begin = prompt_length(single)
        assert begin == 2 and other.ids[:begin].tolist() == single.ids[:begin].tolist()
        response = other.ids[begin:].tolist()
        sources = [s for (s,) in singles if s.ids[2:].tolist() == response]
        assert sources and sources[0].ids[1] != single.ids[1]
        assert other.mask.tolist() == [False] * 2 + [True] * len(response)


def test_the_seed_decides_which() -> None:
    singles = [(example([1, n], [10 + n], 1.0),) for n in range(30)]
    one, same, other = ([u[1].ids.tolist() for u in with_mismatched(singles, singles, 9, seed=s)] for s in (1, 1, 2))
    assert one == same != other


def test_what_does_not_fit_is_not_taken() -> None:
    singles = [(example([1], [2], 1.0),), (example([3] * 5, [4] * 5, 1.0),), (example([5], [6], 0.0),)]
    units = with_mismatched(singles, singles, 6, seed=0)
    assert [len(unit) for unit in units] == [2, 2, 2]
    assert all(len(e.ids) <= 6 for unit in units for e in unit[1:])
    assert [len(unit) for unit in with_mismatched(singles[:2], singles[:2], 5, seed=0)] == [1, 1]


def test_one_prompt_is_not_enough() -> None:
    same = [(example([1], [2], 1.0),), (example([1], [3], 0.0),)]
    with pytest.raises(UserError, match="need at least two different prompts"):
        with_mismatched(same, same, 9, 0)


def test_responses_come_from_the_pool() -> None:
    pool = [(example([1], [2], 1.0),), (example([3], [4], 0.0),)]
    ((own, other),) = with_mismatched([(example([1], [9], 1.0),)], pool, 9, 0)
    assert own.ids.tolist() == [1, 9] and other.ids.tolist() == [1, 4]
