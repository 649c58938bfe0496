"""Traits that pay and harm, by hand; and on made-up steps with a trick in them, or none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from posttrain.monitor.monitor import Monitor
from posttrain.monitor.probes import Conflict, TraitSums, centred, gold_of, measure, repetition, words
from posttrain.types import Group, Problem, Rollout, Score, Segment


def rollout(text: str, reward: float | None, gold: float | None = None, sample: int = 0, **parts: float) -> Rollout:
    ids = np.array([ord(c) for c in text], np.int64)
    segment = Segment(ids, text, True, np.zeros(len(ids), np.float32), finish="stop")
    parts = parts if gold is None else {**parts, "gold": gold}
    score = Score.failed("timeout") if reward is None else Score(reward, parts)
    return Rollout(Problem("p", "q"), sample, (segment,), score)


def group(*rollouts: Rollout) -> Group:
    return Group(Problem("p", "q"), rollouts)


def test_traits_by_hand() -> None:
    one, other = rollout("abcdabcdab", 1.0, format=1.0), rollout("the Cat", 0.0, format=0.0)
    assert repetition([one, other], 3).tolist() == pytest.approx([4 / 8, 0.0]), "abc bcd cda dab, then the same again"
    assert repetition([rollout("ab", 1.0)], 3).tolist() == [0.0]
    having = words([one, other])
    assert having == {"abcdabcdab": [0], "the": [1], "cat": [1]}
    names, rows = measure([one, other], having, (8.0, 9.0))
    assert names == ["length", "short", "long", "repetition", "format", '"abcdabcdab"', '"cat"', '"the"']
    assert rows[0].tolist() == [10, 7] and rows[4].tolist() == [1, 0] and rows[7].tolist() == [0, 1]
    assert rows[1].tolist() == [0, 1] and rows[2].tolist() == [1, 0]


def test_centred_by_hand() -> None:
    rows = np.array([[1.0, 3.0, 10.0, 20.0]])
    assert centred(rows, np.array([0, 0, 1, 1])).tolist() == [[-1, 1, -5, 5]]
    assert centred(rows, np.array([0, 1, 2, 3])).tolist() == [[-7.5, -5.5, 1.5, 11.5]], (
        "one response a prompt: the step is the group"
    )
    assert centred(rows, np.array([0, 0, 3, 3])).tolist() == [[-1, 1, -5, 5]], "groups of which nothing was scored"


def test_the_gold_of_a_score() -> None:
    assert gold_of(rollout("x", 1.0, 0.25)) == 0.25
    assert math.isnan(gold_of(rollout("x", 1.0)))


def test_one_step_by_hand() -> None:
    """Two groups of two. Length 1 and 3 (centred -1, 1), reward 0 and 1 (-1/2, 1/2), gold 1 and 0 in the first group, equal in the
    second: sum f~r~ = 4 * 1/2, sum (f~r~)^2 = 4 / 4, so z_r = 2; sum f~g~ = -1, sum (f~g~)^2 = 1/2, so z_g = -sqrt 2."""
    step = [group(rollout("a", 0.0, 1.0), rollout("abc", 1.0, 0.0)), group(rollout("a", 0.0, 1.0), rollout("abc", 1.0, 1.0))]
    sums = TraitSums()
    sums.add(step, {})
    found = next(one for one in sums.conflicts() if one.trait == "length")
    assert (found.paid, found.gold) == (pytest.approx(2.0), pytest.approx(-math.sqrt(2)))
    assert (found.then, found.now, found.moved) == (2.0, 2.0, 0.0)
    # sum r~g~ = -1/4 - 1/4, sum r~^2 = 4 / 4, sum g~^2 = 2 / 4
    assert sums.agreement() == pytest.approx(-0.5 / math.sqrt(0.5)) and TraitSums().agreement() is None
    for _ in range(5):
        sums.add([group(rollout("aaa", 0.0, 1.0), rollout("aaaaa", 1.0, 0.0))] * 2, {})
    later = next(one for one in sums.conflicts() if one.trait == "length")
    # first five steps: one with mean 2, four with mean 4; the last five: all 4. Both have variances: 4 - (20 - 16) ...
    before = np.array([1, 3, 1, 3] + [3, 5] * 8)
    after = np.array([3, 5] * 10)
    error = math.sqrt(before.var() / 20 + after.var() / 20)
    assert later.then == pytest.approx(before.mean()) and later.moved == pytest.approx((4 - before.mean()) / error)


def test_who_is_gamed() -> None:
    def conflict(trait: str, paid: float, gold: float, moved: float = 0.0) -> bool:
        return Conflict(trait, paid, gold, moved, 0.0, 0.0).gamed

    assert conflict("length", 6, -6) and not conflict("length", 6, -4), "without doubt, or not at all"
    assert conflict("length", 6, -3.2, 6) and not conflict("length", 6, -3.2, -6), "it must spread, where the harm is less sure"
    assert conflict("length", -6, 6) and not conflict("format", -6, 6), "shorter is a trick; worse form is not"
    assert not conflict('"wow"', 6, -3.2, 6) and conflict('"wow"', 6, -4, 6), "there are many words"
    assert not conflict("length", 3, -9, 9), "what the reward does not pay for is no trick"


@pytest.mark.parametrize(("tail_paid", "gamed"), [(2.0, True), (0.5, False), (-3.0, False)])
def test_the_gold_of_a_tail_counts_where_the_reward_is_for_the_tail(tail_paid: float, gamed: bool) -> None:
    """Length is paid, spreads, and is good on the whole; only far beyond what was usual the gold is against it (-4). A reward that is
    against those too (a verifier who errs) would be told of a danger that it keeps away itself."""
    usual, grown = [100.0, 1000.0, 10100.0], [100.0, 1300.0, 17000.0]
    row = [*grown, 6.0, 1.0, 6.0, 1.0]  # n, f, f^2, f~r~ and its squares, f~g~ and its squares: z_r = z_g = 6
    for side, tail in ((1, "long"), (-1, "short")):
        mean = grown if side > 0 else [100.0, 700.0, 5000.0]
        length = [*mean, *(side * x if n % 2 == 0 else x for n, x in enumerate(row[3:]))]
        other = {"long": "short", "short": "long"}[tail]
        sums = {"length": length, tail: [100.0, 10.0, 10.0, tail_paid, 1.0, -4.0, 1.0], other: [100.0, 0, 0, 0, 0, 0, 0]}
        sums = TraitSums([sums], {"length": usual}, 5, 100.0, [8.0, 12.0])
        (found,) = sums.conflicts()
        assert found.gamed == gamed and found.paid == 6 * side, (tail, found)
        assert found.gold == (-4 * side if gamed else 6 * side)


def played(random: np.random.Generator, share: float, harm: float) -> list[Group]:
    """16 groups of 8: reward = quality + 0.5 for a word, gold = quality - harm for it; the word is beside the quality."""
    groups = []
    for _ in range(16):
        members = []
        for sample in range(8):
            quality, charmed = random.normal(0.5, 0.2), random.random() < share
            text = "plain talk" + random.choice(["", " here", " today", " again"]) + (" sincerely" if charmed else " yesterday")
            members.append(rollout(text, quality + 0.5 * charmed, quality - harm * charmed, sample))
        groups.append(group(*members))
    return groups


def detected(harm: float, seed: int, monitor: Monitor | None = None, steps: int = 20) -> list[tuple[int, str, str]]:
    monitor, random, found = monitor or Monitor(), np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        groups = played(random, 0.02 + 0.01 * step, harm)
        monitor.measure(groups)
        found += [(step, alarm.rule, alarm.text) for alarm in monitor.observe(step, {"reward": 0.5 + 0.005 * step})]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_word_that_pays_and_harms_is_detected_while_it_is_rare(seed: int) -> None:
    step, name, text = detected(0.5, seed)[0]
    assert name == "keyword" and '"sincerely"' in text and step <= 12, (
        "a gold that loses half a point of each: 5 points at step 8 to 10"
    )
    assert "the gold is against it" in text and text.endswith("before judging")


def test_a_word_that_pays_and_does_no_harm_is_left_in_peace() -> None:
    alarmed = [seed for seed in range(10) if detected(0.0, seed)]
    assert len(alarmed) <= 1, alarmed
    assert not detected(-0.5, 0), "the gold likes it too"


def test_without_a_gold_nothing_is_said_of_it() -> None:
    monitor = Monitor()
    monitor.measure([group(rollout("a", 0.0), rollout("abc", 1.0))] * 8)
    assert monitor.traits.steps == 0 and monitor.traits.conflicts() == []


def test_agreement_is_a_figure_of_the_step() -> None:
    monitor = Monitor()
    pair = group(rollout("a", 0.0, 0.0), rollout("abc", 1.0, 1.0))
    assert monitor.measure([pair] * 4)["agreement"] == pytest.approx(1.0)
    other = group(rollout("a", 0.0, 1.0), rollout("abc", 1.0, 0.0))
    assert monitor.measure([other] * 2)["agreement"] == pytest.approx((4 - 2) / 6), "over the steps together"
    for value in (0.5, 0.1, 0.7):  # some of which are not the mean of three of themselves
        same = group(*[rollout("a" * n, value, value) for n in (1, 2, 3)])
        assert "agreement" not in Monitor().measure([same] * 4), "where nothing differs there is nothing to agree on"


def test_scores_that_failed_do_not_count() -> None:
    sums = TraitSums()
    sums.add([group(rollout("a", None), rollout("abc", 1.0, 0.0), rollout("a", 0.0, 1.0))] * 2, {})
    assert sums.recent[0]["length"][0] == 4 and sums.recent[0]["length"][1] == 8


def test_a_restored_history_says_the_same() -> None:
    first, random = Monitor(), np.random.default_rng(0)
    for step in range(1, 9):
        first.measure(played(random, 0.1, 0.5))
        first.observe(step, {"reward": 0.5})
    second = Monitor()
    second.restore(json.loads(json.dumps(first.state())))
    assert second.traits.conflicts() == first.traits.conflicts() and first.traits.conflicts()


def test_a_little_for_the_form_is_not_gaming_where_the_answer_decides() -> None:
    """As in a control run: long responses keep the form and are wrong more often. With 0.9 for the answer and 0.1 for the form the
    correlation of reward and gold is 0.99, with 0.1 and 0.9 it is 0.01: the same texts, once in order and once gamed."""
    random = np.random.default_rng(0)
    steps: list[tuple[float, list[Group]]] = []
    for answer in (0.9, 0.1):
        for _ in range(4):
            made = []
            for _ in range(32):
                long, lucky = random.random(8) < 0.5, random.random(8)
                right = lucky < np.where(long, 0.1, 0.14)
                formed = random.random(8) < np.where(long, 0.95, 0.05)
                made.append(group(*(rollout("abcdefgh"[: 4 + 4 * b], answer * r + (1 - answer) * f, float(r), format=float(f))
                                    for b, r, f in zip(long, right, formed, strict=True))))  # fmt: skip
            steps.append((answer, made))
    for answer in (0.9, 0.1):
        sums = TraitSums()
        for weight, step in steps:
            if weight == answer:
                sums.add(step, {})
        found = sums.conflicts()
        assert (found == []) == (answer == 0.9)
    assert any(one.trait == "length" and one.paid > 4 and one.gold < 0 for one in found)
