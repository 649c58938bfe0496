"""Each rule fires on a synthetic fault, and none on a healthy run.

What is not here: rules at work in a run are in tests/test_loop.py; rewards that raise, hang or kill their process, and
workers that are killed in tests/system/test_workers.py; full disks and trackers that fail in tests/runs/test_write.py and
test_trackers.py; waits without a limit in tests/test_waits.py; exit codes in tests/cli/test_exit_codes.py.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from material_for_tests import group, rollout, segment

from posttrain import config
from posttrain.algorithms.grpo import GRPO
from posttrain.errors import UserError
from posttrain.monitor import monitor as module
from posttrain.monitor.monitor import Monitor
from posttrain.monitor.probes import repetition, rollout_figures
from posttrain.monitor.rules import ADVICE, RULES, Alarm, MonitorSettings
from posttrain.tasks.base import Task
from posttrain.train.pack import pack_groups
from posttrain.types import Group, Problem, Score

HEALTHY: list[dict[str, float]] = json.loads((Path(__file__).parent / "healthy.json").read_text())["steps"]
NORMAL = {"reward": 0.5, "reward_spread": 0.5, "entropy": 1.0, "length": 100.0, "kl": 0.01, "mismatch": 1e-6, "repetition": 0.1,
          "groups/zero_variance": 0.2, "truncated": 0.1, "dropped": 0.0, "loss": 0.1, "grad_norm": 1.0}  # fmt: skip


def alarms_of(monitor: Monitor, series: Sequence[dict[str, float]], first: int = 1) -> list[Alarm]:
    return [alarm for step, figures in enumerate(series, first) for alarm in monitor.observe(step, figures)]


def odd(count: int, **figures: float) -> list[dict[str, float]]:
    """Ten normal steps, then `count` with some figures changed."""
    return [NORMAL] * 10 + [{**NORMAL, **figures}] * count


# guard: figures that are wrong, and figures just within the threshold
FAULTS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "kl": ({"kl": 5.1}, {"kl": 4.9}),
    "entropy": ({"entropy": 0.019}, {"entropy": 0.021}),
    "length": ({"length": 810.0}, {"length": 790.0}),
    "repetition": ({"repetition": 0.61}, {"repetition": 0.59}),
    "spread": ({"reward_spread": 0.02}, {"reward_spread": 0.03}),
    "truncated": ({"truncated": 0.41}, {"truncated": 0.39}),
    "dropped": ({"dropped": 0.6}, {"dropped": 0.4}),
    "mismatch": ({"mismatch": 0.11}, {"mismatch": 9e-5}),
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules without their trends, which see steps of this size too."""
    alone = {name: rule if name == "mismatch" else replace(rule, trend=None) for name, rule in RULES.items()}
    monkeypatch.setattr(module, "RULES", alone)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("guard", FAULTS)
def test_a_drift_is_reported_once_after_its_patience(guard: str) -> None:
    wrong, near = FAULTS[guard]
    found = alarms_of(Monitor(), odd(12, **wrong))
    assert {a.rule for a in found} == {guard} and all(a.stop == (RULES[guard].action == "stop") for a in found)
    waits = 1 if guard == "mismatch" else 3
    assert found[0].text.startswith(f"step {10 + waits}: ")
    repeats = 13 - waits if RULES[guard].action == "stop" else 1
    assert len(found) == repeats, "a warning is not repeated at once; a stop is meant each time"
    assert alarms_of(Monitor(), odd(12, **near)) == []
    short = [*odd(waits - 1, **wrong), NORMAL]
    assert alarms_of(Monitor(), short * 2) == []
    assert alarms_of(Monitor(MonitorSettings(off=(guard,))), odd(60, **wrong)) == []


def test_a_warning_is_repeated_after_a_while_and_may_be_made_a_stop() -> None:
    assert [a.text.split(":")[0] for a in alarms_of(Monitor(), odd(110, length=10.0))] == [
        "step 13",
        "step 63",
        "step 113",
    ]
    assert alarms_of(Monitor(MonitorSettings(stop=("kl",))), odd(3, kl=6.0))[0].stop
    assert not alarms_of(Monitor(MonitorSettings(warn=("repetition",))), odd(3, repetition=0.9))[0].stop


def test_nothing_fires_on_a_healthy_series() -> None:
    """Figures of a whole quickstart run, in which entropy falls to a fifteenth and reward rises from 0.3 to 0.99."""
    assert min(row["entropy"] for row in HEALTHY) < 0.15 * max(row["entropy"] for row in HEALTHY)
    assert alarms_of(Monitor(), HEALTHY) == []
    assert alarms_of(Monitor(), [*HEALTHY, *[{**HEALTHY[-1], "entropy": 1e-5}] * 3]) != []


def test_figures_of_examples_are_not_those_of_rollouts() -> None:
    """Entropy on demonstrations falls to nothing in a healthy SFT; only what is sampled is watched for it."""
    series = [{"loss": 1.0, "entropy": 3.0, "length": 20.0}] * 6 + [{"loss": 1e-5, "entropy": 1e-5, "length": 20.0}] * 30
    assert alarms_of(Monitor(), series) == []


def test_a_sampler_with_old_weights_is_detected_at_once() -> None:
    """Sampler and trainer agree to 1e-6; one update that is not taken over makes it 1e-2: far below the limit, but a jump."""
    found = alarms_of(Monitor(), odd(1, mismatch=1e-2))
    assert [(a.rule, a.stop) for a in found] == [("mismatch", False)] and "1e-06 in the first steps" in found[0].text
    # with a reuse of rollouts, only the first update of a step is compared
    assert alarms_of(Monitor(), odd(1, mismatch=0.5, **{"mismatch/start": 1e-6})) == []


@pytest.mark.usefixtures("limits")
def test_groups_without_a_difference_warn_and_then_stop() -> None:
    found = alarms_of(Monitor(MonitorSettings(flat=4)), odd(25, **{"groups/zero_variance": 1.0}))
    assert [(a.text.split(":")[0], a.stop) for a in found] == [("step 14", False), ("step 30", True), ("step 31", True),
            ("step 32", True), ("step 33", True), ("step 34", True), ("step 35", True)]  # fmt: skip
    broken_up = [*odd(3, **{"groups/zero_variance": 1.0}), {**NORMAL, "groups/zero_variance": 0.99}]
    assert alarms_of(Monitor(MonitorSettings(flat=4)), broken_up * 8) == []


@pytest.mark.usefixtures("limits")
def test_the_state_is_json_and_a_resumed_run_raises_the_same_alarms() -> None:
    series = odd(4, kl=9.0) + odd(30, **{"groups/zero_variance": 1.0}) + odd(40, entropy=1e-3, length=5.0)
    whole = alarms_of(Monitor(), series)
    assert {a.rule for a in whole} == {"kl", "flat", "entropy", "length"}
    for cut in range(1, len(series), 7):
        first, second = Monitor(), Monitor()
        said = alarms_of(first, series[:cut])
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert said + alarms_of(second, series[cut:], cut + 1) == whole, cut


def test_the_check_of_coefficients_waits_for_a_gradient_and_speaks_once() -> None:
    monitor = Monitor()
    assert monitor.check_coefficients(1, None) == [] and not monitor.coefficients_checked
    assert "beta" in monitor.check_coefficients(2, ["beta"])[0].text and monitor.coefficients_checked
    assert Monitor().check_coefficients(1, []) == []


def test_nan_figures_are_not_measurements() -> None:
    nothing = dict.fromkeys(NORMAL, math.nan)
    monitor = Monitor()
    assert alarms_of(monitor, [NORMAL] * 6 + [nothing] * 20) == []
    json.dumps(monitor.state(), allow_nan=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"off": ("kll",)}, "rule 'kll'; did you mean 'kl'"),
        ({"stop": ("lenght",)}, "rule 'lenght'"),
        ({"repeat_after": 0}, "at least 1"),
        ({"failed": 1.5}, r"monitor: failed must be in \[0, 1\]"),
        ({"kl": -1.0}, "monitor: kl must be"),
        ({"flat": 0}, "flat must be at least 1"),
        ({"off": ("nonfinite",)}, "skip=N"),
        ({"skip": -1}, "skip must be at least 0"),
        ({"warn": ("nonfinite",)}, "neither off"),
    ],
)
def test_settings_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MonitorSettings(**settings)


# --- what is sampled ---------------------------------------------------------------------------------------------------------


def text(ids: Sequence[int], reward: float | None = 1.0, logprobs: Sequence[float] | None = None, sample: int = 0):  # type: ignore[no-untyped-def]
    return rollout([segment([3, 4], False), segment(list(ids), True, logprobs, "stop")], reward, sample=sample)


def test_repetition_is_the_share_of_repeated_4_grams() -> None:
    """ "abcabc..." of 30 tokens: 27 4-grams, 3 distinct. "!!!!" of 20: 17 and 1. All different: 0."""
    loop, shout, plain = [5, 6, 7] * 10, [9] * 20, list(range(3, 23))
    found = repetition([text(loop), text(shout), text(plain), text([9] * 15), text([9, 9])])
    assert found.tolist() == pytest.approx([24 / 27, 16 / 17, 0.0, 11 / 12, 0.0])
    assert repetition([text(plain), text(plain)]).tolist() == [0.0, 0.0], "equal 4-grams of two responses are no repetition"
    figures = rollout_figures([group([text(loop), text(shout), text(plain), text([9] * 15)])])
    assert figures["repetition"] == pytest.approx((24 / 27 + 16 / 17) / 3), "short ones do not count in the figure"


def test_figures_of_rollouts_by_hand() -> None:
    groups = [group([text([5], 1.0), text([6], 0.0, sample=1)]), group([text([5], 1.0), text([6], 1.0), text([7], None)])]
    figures = rollout_figures(groups)
    assert figures["groups/zero_variance"] == 0.5
    assert figures["reward_spread"] == pytest.approx(math.sqrt(0.75 * 0.25))
    assert "repetition" not in figures
    assert rollout_figures([group([text([5], 1.0)])]) == {}, "one response has neither spread nor a group"


def test_log_probs_that_are_not_numbers_stop_before_the_update() -> None:
    bad = text([5, 6], 1.0, [-1.0, math.nan])
    found = Monitor().check_rollouts(4, [group([text([5, 6]), bad])])
    assert [(a.rule, a.stop) for a in found] == [("nonfinite", True)] and "1 of 2 responses" in found[0].text
    assert Monitor().check_rollouts(4, [group([text([5, 6]), text([5])])]) == []


def test_too_many_failures_stop_and_are_named_by_class() -> None:
    def failing(*failures: str | None) -> list[Group]:
        scores = [Score(1.0) if f is None else Score.failed(f) for f in failures]
        return [group([replace(text([5, 6]), score=score) for score in scores])]

    found = Monitor().check_rollouts(2, failing("timeout", "timeout", "KeyError: 'x'", None))
    assert [(a.rule, a.stop) for a in found] == [("failed", True)]
    assert "3 of 4 responses could not be scored: 2 timeout, 1 KeyError; the first: problem p, timeout" in found[0].text
    assert Monitor().check_rollouts(2, failing("timeout", "timeout", None, None)) == [], "half may fail"
    assert Monitor(MonitorSettings(failed=0.25)).check_rollouts(2, failing("timeout", "timeout", None, None)) != []
    assert Monitor(MonitorSettings(failed=1.0)).check_rollouts(2, failing("timeout")) == []


@dataclass
class Gives(Task):
    """A task that returns, or makes a Score of, something strange."""

    value: Any
    wrap: bool = True

    def score(self, problem: Problem, response: str) -> Score:
        return Score(self.value) if self.wrap else self.value

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return []


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1.0, 2.0]])
def test_a_reward_that_is_no_number_is_a_failure_and_never_a_vote(value: Any) -> None:
    score = asyncio.run(Gives(value).scored(Problem("p", ""), ""))
    assert not score.valid and score.failure
    members = group([text([5, 6], 1.0), replace(text([5, 7]), score=score), text([5, 8], 0.0)])
    assert members.rewards == [1.0, 0.0]
    batch = GRPO(beta=0.0).prepare(pack_groups([members], 1.0), {})
    assert batch.advantage_T is not None and bool(torch.isfinite(batch.advantage_T).all())


def test_a_reward_far_beyond_the_others_stops_the_run() -> None:
    """1e30 is a number, but a baseline with it in says nothing about the others."""
    assert Monitor().check_rollouts(1, [group([text([5], 1e30), text([6], 1.0)])])[0].rule == "nonfinite"
    assert Monitor().check_rollouts(1, [group([text([5], -1e5), text([6], 1.0)])]) == []


def test_every_rule_is_documented_with_its_threshold() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    lines = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    defaults = MonitorSettings()
    thresholds = {f.name for f in fields(MonitorSettings)} & set(RULES)
    trends = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text()
    assert ADVICE.keys() == RULES.keys()
    for name, rule in RULES.items():
        assert rule.trend is None or name == "mismatch" or f"`{name}`" in trends, f"docs/alarms.md does not have {name}"
        if rule.trend is None or rule.limit is not None:
            assert name in lines, f"docs/reliability.md has no line for the rule {name}"
            assert f"| {rule.action}" in lines[name], lines[name]
        if name in thresholds:
            assert f"`{getattr(defaults, name):g}`" in lines[name], lines[name]


def test_examples_have_no_rollouts_to_look_at() -> None:
    assert Monitor().check_rollouts(1, []) == [] and rollout_figures([]) == {}


def test_settings_come_from_the_command_line_and_go_through_the_configuration() -> None:
    """rl.kl stays the algorithm's: guards are named by their whole path."""
    given = ["rl.monitor.kl=0.5", "rl.monitor.stop=[kl, entropy]", "sft.monitor.skip=2", "rl.kl=k2", "rl.entropy=0.01"]
    settings = config.parse("quickstart", given)
    stages = {stage.name: stage for stage in settings.recipe.stages}
    assert stages["rl"].monitor == MonitorSettings(kl=0.5, stop=("kl", "entropy")) and stages["sft"].monitor == MonitorSettings(
        skip=2
    )
    assert stages["rl"].algorithm.kl == "k2" and stages["rl"].algorithm.entropy == 0.01
    again = config.from_config(json.loads(json.dumps(config.to_config(settings))), "config.yaml")
    assert again.recipe.stages == settings.recipe.stages
    with pytest.raises(UserError, match="did you mean 'kl'"):
        config.parse("quickstart", ["rl.monitor.kll=1"])
    with pytest.raises(UserError, match="no 'repetition'"):
        config.parse("quickstart", ["rl.repetition=0.5"])


@pytest.mark.parametrize("old", ["rl.guards.kl=0.5", "sft.guards.skip=2", "rl.alarms.off=[length]"])
def test_keys_of_the_first_edition_are_refused_with_the_new_one(old: str) -> None:
    with pytest.raises(UserError, match="an earlier version had it, use monitor"):
        config.parse("quickstart", [old])


def test_a_rule_with_a_limit_and_a_trend_warns_once() -> None:
    """Entropy that falls to a hundredth passes the limit at once, and the trend a few steps later."""
    found = alarms_of(Monitor(), odd(40, entropy=0.01))
    assert [(a.rule, a.text.split(":")[0]) for a in found] == [("entropy", "step 13")]


def test_a_policy_that_stopped_ending_its_answers_is_reported() -> None:
    """The gsm8k run of 2026-11-17: within six steps from 217 on, all answers ran into the limit, and the reward stayed."""
    recorded = Path(__file__).parent.parent.parent / "benchmarks/results/real/gsm8k_never_ending.json"
    curves = json.loads(recorded.read_text())["curves"]["rl"]
    figures = {name: dict(curves[name]) for name in ("reward", "length", "truncated", "entropy", "mismatch")}
    steps = [{name: known[step] for name, known in figures.items()} for step in range(1, 281)]
    monitor = Monitor()
    found = {step: alarm.rule for step, one in enumerate(steps, 1) for alarm in monitor.observe(step, one)}
    assert min(figures["reward"][step] for step in range(225, 281)) > max(figures["reward"][step] for step in range(1, 6))
    assert set(found.values()) == {"truncated"} and 219 <= min(found) <= 226
