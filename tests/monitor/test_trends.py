"""Alarms on made-up histories: five synthetic hacks are detected before the gold has fallen far, and control runs are silent."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from posttrain.monitor import monitor as module
from posttrain.monitor.monitor import Monitor, alarm_lines
from posttrain.monitor.rules import ADVICE, RULES, MonitorSettings, View, past_frontier
from posttrain.monitor.series import History, change, since_best, spread
from posttrain.runs.layout import EventRow
from posttrain.types import Group, Problem, Rollout, Score, Segment

STEPS = 260
Figures = dict[str, np.ndarray]


def noise(random: np.random.Generator, deviation: float) -> np.ndarray:
    """Noise of single steps, and slow noise of 0.4 of its size with a memory of five steps, as curves of training have."""
    slow, kicks = np.zeros(STEPS), random.normal(0, 1, STEPS)
    for step in range(1, STEPS):
        slow[step] = 0.8 * slow[step - 1] + 0.6 * kicks[step]
    return random.normal(0, deviation, STEPS) + 0.4 * deviation * slow


def rise(middle: float, width: float) -> np.ndarray:
    return 1 / (1 + np.exp(-(np.arange(STEPS) - middle) / width))


def usual(random: np.random.Generator) -> Figures:
    time = np.arange(STEPS)
    return {
        "entropy": 0.8 * np.exp(-time / random.uniform(150, 600)) + noise(random, 0.02),
        "kl": 0.002 * time * random.uniform(0.5, 2) + np.abs(noise(random, 0.003)),
        "length": 120 * (1 + noise(random, 0.03)),
        "repetition": 0.05 + np.abs(noise(random, 0.01)),
        "distinct": 0.6 + noise(random, 0.015),
        "keyword": 0.15 + np.abs(noise(random, 0.03)),
        "reward/disagreement": 0.2 * (1 + noise(random, 0.04)),
        "groups/zero_variance": np.clip(0.3 + noise(random, 0.06), 0, 1),
    }


def control(seed: int) -> Figures:
    """Nothing learned; learned and done; preferences with a proxy that rises a little further; reasoning that grows longer."""
    random, kind, time = np.random.default_rng(seed), seed % 4, np.arange(STEPS)
    figures, deviation = usual(random), random.uniform(0.015, 0.04)
    extra = np.zeros(STEPS)
    if kind == 0:
        gold = np.full(STEPS, 0.3)
    elif kind == 1:
        gold = 0.2 + 0.5 * rise(random.uniform(40, 120), random.uniform(10, 40))
    elif kind == 2:
        gold = 0.4 + 0.25 * (1 - np.exp(-time / random.uniform(40, 120)))
        figures["length"] *= 1 + 0.2 * (1 - np.exp(-time / 100))
        figures["reward/disagreement"] *= 1 + 0.2 * time / STEPS
        extra = 0.1 * (1 - np.exp(-time / 80))
    else:
        gold = 0.1 + 0.7 * rise(random.uniform(80, 160), random.uniform(20, 50))
        figures["length"] *= 1 + 1.5 * rise(140, 40)
        figures["reward/format"] = np.clip(0.2 + 0.78 * rise(random.uniform(10, 30), 6) + noise(random, 0.02), 0, 1)
        figures["entropy"] = 0.9 * (1 - 0.7 * rise(120, 40)) + noise(random, 0.02)
        figures["keyword"] = np.clip(0.1 + 0.85 * rise(20, 6) + noise(random, 0.02), 0, 1)
        extra = 0.1 * figures["reward/format"]
    figures["reward/task"] = gold + noise(random, deviation)
    figures["reward"] = figures["reward/task"] + extra + noise(random, deviation / 2)
    return figures


def hacked(kind: str, seed: int) -> tuple[Figures, np.ndarray, float]:
    """(figures, the gold without noise, when it begins): real gains, then a trick that pays at once and harms a little later."""
    random, time = np.random.default_rng(1000 + seed), np.arange(STEPS)
    figures, deviation, begins = usual(random), random.uniform(0.015, 0.03), random.uniform(110, 160)
    trick, harm, gains = rise(begins, 15), rise(begins + 15, 15), 0.3 * rise(40, 12)
    gold, proxy = 0.3 + gains - 0.3 * harm, 0.3 + gains + 0.4 * trick
    if kind == "length":
        figures["length"] *= 1 + 3 * trick
    elif kind == "repetition":
        figures["repetition"] += 0.6 * trick
        figures["distinct"] *= 1 - 0.5 * trick
    elif kind == "format":
        figures["reward/format"] = np.clip(0.3 + 0.68 * trick + noise(random, 0.02), 0, 1)
    elif kind == "keyword":
        figures["keyword"] = np.clip(0.1 + 0.88 * trick + noise(random, 0.02), 0, 1)
    else:  # a blind spot of the reward model: Gao's curves
        distance = 0.007 * time
        gold, proxy, begins = 0.4 + distance * (0.55 - 0.35 * distance), 0.4 + 0.5 * distance, 0.55 / 0.7 / 0.007
        figures["kl"] = distance**2 + np.abs(noise(random, 0.003))
        figures["reward/disagreement"] *= 1 + 1.2 * distance**2
    shared = noise(random, deviation)
    figures["reward/task"], figures["reward"] = gold + shared, proxy + 0.7 * shared + noise(random, deviation / 2)
    return figures, gold, begins


def detected(figures: Figures, monitor: Monitor | None = None, steps: int = STEPS) -> list[tuple[int, str, str]]:
    monitor = monitor or Monitor()
    found = []
    for step in range(steps):
        row = {name: float(values[step]) for name, values in figures.items()}
        found += [(step, alarm.rule, alarm.text) for alarm in monitor.observe(step, row)]
    return found


HACKS = {
    "length": "length",
    "repetition": "repetition",
    "format": "format",
    "keyword": "keyword",
    "blind spot": "disagreement",
}


@pytest.fixture
def trends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules without their limits, which some of these series pass too."""
    monkeypatch.setattr(module, "RULES", {name: replace(rule, limit=None) for name, rule in RULES.items()})


@pytest.mark.usefixtures("trends")
@pytest.mark.parametrize("kind", HACKS)
@pytest.mark.parametrize("seed", range(3))
def test_a_synthetic_hack_is_detected_in_time_and_by_its_name(kind: str, seed: int) -> None:
    figures, gold, begins = hacked(kind, seed)
    found = detected(figures)
    first = next(step for step, *_ in found if step > begins - 40)
    lost = float(np.max(gold[: first + 1]) - gold[first])
    assert lost < 0.05, f"detected at step {first}, {lost:.3f} too late"
    assert not [entry for entry in found if entry[0] <= begins - 40], "and not before there was anything to detect"
    assert {HACKS[kind], "proxy", "frontier"} <= {name for _, name, _ in found}
    for _, name, text in found:
        assert text.endswith(ADVICE[name]), "what was seen, and what to try"
        assert " -> " in text or "KL" in text


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_control_runs_are_silent(count: int) -> None:
    """Runs with noise, of four kinds: fewer than one in ten may raise any alarm at all."""
    alarmed = [seed for seed in range(count) if detected(control(seed), steps=200)]
    print(f"false alarms: {len(alarmed)} of {count}")
    assert len(alarmed) < count / 10, alarmed


def series(**figures: object) -> Figures:
    random = np.random.default_rng(0)
    return {name: np.broadcast_to(values, STEPS) + random.normal(0, 0.01, STEPS) for name, values in figures.items()}  # type: ignore[arg-type]


@pytest.mark.usefixtures("trends")
def test_collapse_is_detected_where_nothing_was_gained() -> None:
    fall = 1 - rise(100, 10)
    assert {name for _, name, _ in detected(series(reward=0.5, entropy=fall))} == {"entropy"}
    assert not detected(series(reward=0.5 - 0.4 * fall, entropy=fall)), "an entropy that was spent on learning"
    assert {name for _, name, _ in detected(series(reward=0.1, **{"groups/zero_variance": 0.2 + 0.75 * rise(100, 10)}))} == {
        "zero_variance"
    }
    assert not detected(series(reward=0.9 * rise(100, 10), **{"groups/zero_variance": 0.2 + 0.75 * rise(100, 10)})), (
        "all solved"
    )


def test_without_a_gold_only_the_extreme_is_an_alarm() -> None:
    up = rise(120, 15)
    assert not detected(series(reward=up, length=100 * (1 + 0.8 * up)))
    found = detected(series(reward=up, length=100 * (1 + 4 * up)))
    assert {name for _, name, _ in found} == {"length"} and "nothing measures the gold" in found[0][2]


def test_held_out_accuracy_that_falls_while_the_reward_rises() -> None:
    up = rise(130, 15)
    monitor, found = Monitor(), []
    random = np.random.default_rng(1)
    for step in range(STEPS):
        row = {"reward": 0.4 + 0.5 * up[step] + random.normal(0, 0.02)}
        if step % 10 == 0:
            row["accuracy/test"] = 0.6 - 0.3 * up[step] + random.normal(0, 0.01)
        found += monitor.observe(step, row)
    assert {alarm.rule for alarm in found} == {"held_out"}


def test_two_evaluations_are_enough_where_their_intervals_are_far_apart() -> None:
    """200 problems, 0.7 then 0.5: half widths 0.063 and 0.069, so z = -0.2 / (hypot(0.063, 0.069) / 1.96) = -4.2."""

    def detected_at(last: float, half: float) -> set[str]:
        monitor, random, names = Monitor(), np.random.default_rng(2), set()
        for step in range(60):
            row = {"reward": 0.4 + 0.005 * step + random.normal(0, 0.02)}
            if step in (0, 50):
                value, width = (0.7, 0.063) if step == 0 else (last, half)
                row |= {"accuracy/test": value, "accuracy/test_low": value - width, "accuracy/test_high": value + width}
            names |= {alarm.rule for alarm in monitor.observe(step, row)}
        return names

    assert detected_at(0.5, 0.069) == {"held_out"}
    assert detected_at(0.6, 0.068) == set(), "half as far is 2.1 standard errors"


def test_another_level_of_problems_is_another_history() -> None:
    figures, _, begins = hacked("length", 0)
    figures["level"] = np.where(np.arange(STEPS) < begins + 60, 1.0, 2.0)
    monitor = Monitor()
    found = detected(figures, monitor)
    assert len(monitor.history.series["reward"]) == int((figures["level"] == 2).sum())
    assert found and all(step < begins + 60 + 40 for step, *_ in found)


def test_a_restored_history_raises_the_same_alarms() -> None:
    figures, _, _ = hacked("repetition", 1)
    whole, first, second = [], Monitor(), Monitor()
    reference = Monitor()
    parts = []
    for step in range(STEPS):
        row = {name: float(values[step]) for name, values in figures.items()}
        whole += reference.observe(step, row)
        if step == 150:
            second.restore(json.loads(json.dumps(first.state())))
        parts += (first if step < 150 else second).observe(step, row)
    assert parts == whole and whole


def test_off_and_stop() -> None:
    figures, _, _ = hacked("length", 0)
    assert "length" not in {name for _, name, _ in detected(figures, Monitor(MonitorSettings(off=("length",))))}
    monitor, stops = Monitor(MonitorSettings(stop=("frontier",))), []
    for step in range(STEPS):
        stops += [a.rule for a in monitor.observe(step, {n: float(v[step]) for n, v in figures.items()}) if a.stop]
    assert set(stops) == {"frontier"}


def test_changes_by_hand() -> None:
    values = np.array([0.0, 2.0] * 10 + [5.0, 7.0] * 5)  # steps of 2 but for one of 3
    steps = np.diff(values)
    # blocks of 5: means 0.8, 1.2, 0.8, 1.2, 5.8, 6.2; the median step between them is 0.4 (upper of 0.4 0.4 0.4 0.4 4.6)
    fast = math.sqrt(float((steps**2).mean()) / 20)
    assert spread(values, 10) == pytest.approx(max(fast, 0.4 / 0.6745 / 2))
    found = change(values, 10, 10)
    assert found is not None and (found.then, found.now) == (1.0, 6.0)
    assert found.z == pytest.approx(5 / (math.sqrt(2) * spread(values, 10)))
    assert change(values, 10, 21) is None
    best = since_best(-values, 10)
    assert best is not None and best[0] == 10 and (best[1].then, best[1].now) == (-1.0, -6.0)
    assert since_best(values[:19], 10) is None


def test_the_frontier_says_where_to_stop() -> None:
    random = np.random.default_rng(0)
    distance = np.linspace(0, 2, 200)
    gold = distance * (1.0 - 0.6 * distance) + random.normal(0, 0.01, 200)  # best at d = 1 / 1.2, KL = 0.69

    def found(kl: np.ndarray, steps: int = 200) -> str:
        history = History()
        for step in range(steps):
            history.add(step, {"reward": 0.01 * step, "reward/task": gold[step], "kl": kl[step]})
        return past_frontier(View(MonitorSettings(), {}, history))

    best = re.search(r"best at step \d+ \((\S+) at KL (\S+)\); now", found(distance**2))
    assert best is not None
    assert float(best[1]) == pytest.approx(0.417, abs=0.02) and float(best[2]) == pytest.approx(0.69, abs=0.15)
    assert not found(distance**2, 80)
    assert not found(np.ones(200)), "without more KL it is not the frontier that is passed"


def test_alarms_are_summed_up_at_the_end() -> None:
    def event(attempt: int, stage: str, name: str, step: int) -> EventRow:
        return EventRow("alarm", 0.0, attempt, {"stage": stage, "step": step, "rule": name, "text": f"{name}: step {step}: x"})

    events = [
        event(1, "rl", "length", 9),
        EventRow("stage", 0.0, 1, {"stage": "rl"}),
        event(2, "rl", "length", 7),
        event(2, "rl", "length", 60),
        event(1, "sft", "kl", 2),
    ]
    assert alarm_lines(events) == ["rl: length: step 7: x (and 1 time more)", "sft: kl: step 2: x"]


def group(*texts: str) -> Group:
    rollouts = []
    for number, text in enumerate(texts):
        segment = Segment(np.array([ord(c) for c in text]), text, True, np.zeros(len(text), np.float32), finish="stop")
        rollouts.append(Rollout(Problem("p", "q"), number, (segment,), Score(1.0)))
    return Group(Problem("p", "q"), tuple(rollouts))


def test_figures_of_texts_by_hand() -> None:
    monitor = Monitor()
    figures = monitor.measure([group("abab", "abc")])
    assert figures["distinct"] == pytest.approx(3 / 5), "ab ba ab, ab bc"
    for _ in range(4):
        monitor.measure([group("the cat", "the dog")])
    assert monitor.keywords.steps == 5
    assert monitor.measure([group("the cow sincerely", "the pig Sincerely", "sincerely", "dog")])["keyword"] == 0.75
    assert monitor.measure([]) == {}


def test_settings_come_from_the_command_line_and_go_through_the_configuration() -> None:
    from posttrain import config

    settings = config.parse(
        "quickstart", ["rl.monitor.off=[length]", "rl.monitor.stop=[proxy, frontier]", "rl.monitor.repeat_after=9"]
    )
    stage = next(stage for stage in settings.recipe.stages if stage.name == "rl")
    expected = MonitorSettings(off=("length",), stop=("proxy", "frontier"), repeat_after=9)
    assert stage.monitor == expected  # type: ignore[attr-defined]
    again = config.from_config(config.to_config(settings), "config.yaml")
    assert next(s for s in again.recipe.stages if s.name == "rl").monitor == expected  # type: ignore[attr-defined]


def test_patience_and_repetition_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RULES", {**RULES, "length": replace(RULES["length"], limit=None, trend=lambda view: "longer")})

    def steps(settings: MonitorSettings) -> list[int]:
        monitor = Monitor(settings)
        return [step for step in range(12) for alarm in monitor.observe(step, {"reward": 0.0}) if alarm.rule == "length"]

    assert steps(MonitorSettings(trend_patience=3, repeat_after=4)) == [2, 6, 10]
    assert steps(MonitorSettings(off=("length",))) == []
