"""The table of rules: which series indicate a problem, and what to try.

A rule has a limit, a trend, or neither: then a probe reports what it found. A limit compares the value of a step with a threshold of
the settings, or with the first steps. A trend asks over several windows whether a series moved, whether the reward rose with it, and
whether what the reward stands for (the gold) did not. The earliest trend is read from the rollouts: a trait that the reward pays for
and that lowers the gold (probes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import yaml

from posttrain.errors import Checked, Count, Positive, Share, Whole, many, refuse_unknown, require
from posttrain.monitor.probes import Conflict
from posttrain.monitor.series import HELD_OUT, Change, History, change, since_best

ALWAYS = ("nonfinite", "memory")  # can be neither off nor warnings
WINDOWS = ((5, 10), (10, 30), (20, 60), (20, 120))  # (points in a window, points from then to now)
MIN_POINTS = 15  # rewards, before trends are read
ERRORS = 5.0  # standard errors that a symptom must have moved by
# a jump of the mismatch relative to its first steps, and the smallest that counts
JUMP, FLOOR = 20.0, 1e-4
DIFFERENCE = "mean difference of log-prob between sampler and trainer"
EQUAL = "share of groups with equal rewards"
FRONTIER = 20  # points in a window of gold against KL


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(Checked):
    """Thresholds by rule, and actions. `off`, `warn` and `stop` name rules; `stop` makes a rule end the run that would only warn. A
    limit counts after `patience` steps in a row, a trend after `trend_patience`; a warning is repeated after `repeat_after`
    steps."""

    apart: ClassVar[bool] = True  # its keys need their path: rl.kl is the algorithm's
    where: ClassVar[str] = "monitor: "

    kl: Positive = 5.0
    entropy: Share = 0.02
    length: Positive = 8.0
    repetition: Share = 0.6
    truncated: Share = 0.3
    spread: Share = 0.05
    mismatch: Positive = 0.1
    failed: Share = 0.5
    dropped: Share = 0.5
    flat: Count = 10  # steps
    slow: Positive = 20.0
    patience: Count = 3
    trend_patience: Count = 2
    repeat_after: Count = 50
    skip: Whole = 0  # steps in a row that may be left out for numbers that are not finite; 0: stop at the first
    off: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("rule", (*self.off, *self.warn, *self.stop), RULES)
        text = "monitor: nonfinite and memory can be neither off nor warnings; skip=N leaves out N steps in a row, not finite"
        require(not set(ALWAYS) & {*self.off, *self.warn}, text)


Moved = Callable[[float, float], bool]  # from then to now


@dataclass(frozen=True, slots=True)
class Symptom:
    """A series whose drift shows how the reward is gamed, if the reward rises and the gold reward does not."""

    figure: str
    words: str
    moved: Moved  # far enough where a gold is measured
    far: Moved  # far enough without a gold

    def seen(self, drift: Change | None, gold: str, real: Change | None, when: str = "") -> str:
        """A description of the drift, if it is large enough; `real` is the change of the `gold` reward."""
        moved = self.moved if real is not None else self.far
        if drift is None or not moved(drift.then, drift.now) or abs(drift.z) < ERRORS:
            return ""
        known = "nothing measures the gold" if real is None else f"{gold} {real}"
        return f"{drift} {self.words}{when}, and {known}"


def grew(factor: float) -> Moved:
    return lambda then, now: now > factor * then


def shrank(factor: float) -> Moved:
    return lambda then, now: now < factor * then


def rose(by: float) -> Moved:
    return lambda then, now: now > then + by


def left(low: float, high: float) -> Moved:
    return lambda then, now: not low * then < now < high * then


def became_common(then: float, now: float) -> bool:
    return now > 0.9 > then + 0.5


WORD, MODELS = "of responses have a word few had", "spread of the reward models"
SYMPTOMS = {
    "length": Symptom("length", "tokens a response", left(0.7, 1.25), left(0.25, 3)),
    "format": Symptom("reward/format", "of the responses are well formed", rose(0.06), rose(2.0)),
    "repetition": Symptom("repetition", "of n-grams repeated", rose(0.05), rose(0.25)),
    "distinct": Symptom("distinct", "of 2-grams distinct", shrank(0.8), shrank(0.3)),
    "keyword": Symptom("keyword", WORD, rose(0.1), became_common),
    "disagreement": Symptom("reward/disagreement", MODELS, grew(1.4), grew(2.5)),
}


@dataclass(eq=False)
class View:
    """What the rules read at a step. Rises of the reward and conflicts of traits serve several rules and are computed once."""

    settings: MonitorSettings
    now: Mapping[str, float]
    history: History
    conflicts: Sequence[Conflict] = ()

    def value(self, name: str) -> float:
        return self.now.get(name, math.nan)

    @property
    def has_history(self) -> bool:
        return len(self.history.series.get("reward", ())) >= MIN_POINTS

    def changes(self, name: str) -> list[Change | None]:
        values = self.history.values(name)
        return [change(values, window, back) for window, back in WINDOWS]

    @cached_property
    def rises(self) -> list[tuple[int, Change, Change | None]]:
        """The windows (by number) in which the reward rose and the gold reward did not, with both changes."""
        gold, found = self.history.gold(), []
        golds = self.changes(gold) if gold else [None] * len(WINDOWS)
        for n, (rise, real) in enumerate(zip(self.changes("reward"), golds, strict=True)):
            fell = real is None or real.now <= real.then
            if rise is not None and rise.now > rise.then and fell and rise.z >= 3:
                found.append((n, rise, real))
        return found

    @cached_property
    def fallen(self) -> str:
        """How far the gold reward fell from its best while the reward rose."""
        history, name, found = self.history, self.history.gold(), ""
        if not name or not self.has_history:
            return ""
        gold, reward = history.values(name), history.values("reward")
        for window in (5, 10, 20, 40):
            place, fallen = since_best(gold, window) or (0, None)
            rise = change(reward, window, len(reward) - place) if fallen is not None else None
            if fallen is None or rise is None or fallen.z >= -3:
                continue
            if rise.now > rise.then and rise.z > 2:
                at = history.steps[name][place - 1]
                found = f"{name} fell {fallen} since step {at} while the reward rose {rise}"
        return found

    @cached_property
    def gamed(self) -> dict[str, str]:
        """Traits that the reward pays for, that spread, and that lower the gold reward, by rule."""
        found: dict[str, str] = {}
        for one in self.conflicts:
            if one.gamed:
                name = "keyword" if one.word else one.trait
                what = f"of responses have {one.trait}" if one.word else SYMPTOMS[name].words
                pays = f"within groups the reward pays for {'more' if one.paid > 0 else 'less'} of it ({one.paid:+.1f} standard errors)"
                seen = f"{one.then:.3g} -> {one.now:.3g} {what} since the start; {pays} and the gold is against it ({one.gold:+.1f})"
                found.setdefault(name, seen)
        return found


# Returns what was found, "" if all is well, or None if nothing was measured: then a streak of steps neither grows nor ends.
Check = Callable[[View], str | None]


def above(name: str, words: str) -> Check:
    """A rule: a metric above the threshold of the same name."""

    def check(view: View) -> str | None:
        value, limit = view.value(name), getattr(view.settings, name)
        if math.isnan(value):
            return None
        return f"{value:.3g} {words}, above {limit:g}" if value > limit else ""

    return check


def outside(figure: str, bounds: Callable[[MonitorSettings], tuple[float, float]]) -> Check:
    """A rule: a metric outside these multiples of its mean over the first steps."""

    def check(view: View) -> str | None:
        value, start = view.value(figure), view.history.mean_of_first(figure)
        if start is None or math.isnan(value):
            return None
        low, high = bounds(view.settings)
        out = start > 0 and not low * start <= value <= high * start
        return f"{figure} is {value:.3g}, {start:.3g} in the first steps" if out else ""

    return check


def cut_off(view: View) -> str | None:
    """Many more responses reach the length limit than in the first steps. A policy that stops ending its answers may keep its reward,
    for example if a grader reads the last box. If most responses were cut off from the start, this rule is silent."""
    value, start = view.value("truncated"), view.history.mean_of_first("truncated")
    if start is None or math.isnan(value):
        return None
    seen = f"{value:.3g} of the responses are cut off by the length limit, {start:.3g} in the first steps"
    return seen if value - start > view.settings.truncated else ""


def flat(view: View) -> str | None:
    share = view.value("groups/zero_variance")
    if math.isnan(share):
        return None
    equal = f"all rewards of every group were equal for {many(view.settings.flat, 'step')} or more"
    return f"{equal}: nothing is learned" if share == 1.0 else ""


def mismatch_jump(view: View) -> str | None:
    """The mismatch is suddenly much larger than at the start: the sampler has other weights."""
    value, start = view.value("mismatch"), view.history.mean_of_first("mismatch")
    jumped = start is not None and max(JUMP * start, FLOOR) < value <= view.settings.mismatch
    return f"{value:.3g} {DIFFERENCE}, {start:.3g} in the first steps" if jumped else ""


def gamed(name: str) -> Check:
    """A rule: a trait that pays and harms, or a symptom that drifts while the reward rises and the gold reward does not."""

    def check(view: View) -> str:
        if name in view.gamed or not view.has_history:
            return view.gamed.get(name, "")
        symptom, gold = SYMPTOMS[name], view.history.gold()
        drifts = view.changes(symptom.figure) if view.rises else []
        for n, rise, real in view.rises:
            if seen := symptom.seen(drifts[n], gold, real, f" while the reward went {rise}"):
                return seen
        return ""

    return check


def past_frontier(view: View) -> str:
    """The gold reward fell by at least 4 standard errors while the KL kept rising: the optimum has been passed (Gao et al. 2023:
    gold = d (a - b d), d = sqrt(KL))."""
    history, name = view.history, view.history.gold()
    best = since_best(history.values(name), FRONTIER) if view.fallen else None
    if best is None or "kl" not in history.steps:
        return ""
    place, gold = best
    # the gold reward may be measured at some steps only
    kl = np.interp(history.steps[name], history.steps["kl"], history.values("kl"))
    then, now = float(kl[place - FRONTIER : place].mean()), float(kl[-FRONTIER:].mean())
    if now <= then or gold.z > -4:
        return ""
    at = history.steps[name][place - 1]
    return f"{name} was best at step {at} ({gold.then:.3g} at KL {then:.3g}); now {gold.now:.3g} at KL {now:.3g}"


def held_out(view: View) -> str:
    """Held-out accuracy compared with its best, by the spread of many measurements or, while there are few, by their own intervals."""
    history = view.history
    held, low, high = map(history.values, HELD_OUT)
    best = since_best(held, 3)
    if best is not None:
        place, fallen, z = best[0] - 1, best[1].then - best[1].now, best[1].z
    elif len(held) > 1 and len(low) == len(high) == len(held):
        place = int(np.argmax(held[:-1]))
        errors = (high - low)[[place, -1]] / (2 * 1.96)
        fallen = float(held[place] - held[-1])
        z = -fallen / max(1e-9, float(np.hypot(*errors)))
    else:
        return ""
    at = history.steps["accuracy/test"][place]
    since = history.values("reward")[np.array(history.steps["reward"]) > at - 10]
    rise = change(since, 10, len(since) - 10) if len(since) >= 20 else None
    if not view.has_history or z >= -4 or fallen <= 0.03 or rise is None or rise.z <= 2:
        return ""
    return f"held-out accuracy fell by {fallen:.3g} ({z:.1f} standard errors) since step {at} while the reward rose {rise}"


def without_gain(figure: str, words: str, lost: Callable[[Change], bool]) -> Check:
    """A rule: exploration or learning signal was lost while the reward did not rise."""

    def check(view: View) -> str:
        if not view.has_history:
            return ""
        pairs = zip(view.changes("reward"), view.changes(figure), strict=True)
        known = [(gained, moved) for gained, moved in pairs if gained and moved]
        seen = [moved for gained, moved in known if lost(moved) and gained.z <= 1]
        return f"{words} {seen[-1]}, and the reward did not rise" if seen else ""

    return check


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule. `action` is that of a limit and of a report; a trend warns. `patience` names the setting for steps in a row; "" is
    one step."""

    limit: Check | None = None
    trend: Check | None = None
    action: Literal["warn", "stop"] = "warn"
    patience: str = "patience"
    stop_after: int = 0  # times `patience`, after which a warning becomes a stop


# docs/reliability.md (limits and reports) and docs/alarms.md (trends) list each rule with its threshold.
RULES: Mapping[str, Rule] = {
    "nonfinite": Rule(action="stop"),
    "failed": Rule(action="stop"),
    "kl": Rule(above("kl", "nats per token from the reference")),
    "entropy": Rule(
        outside("entropy", lambda s: (s.entropy, math.inf)),
        without_gain("entropy", "entropy fell", lambda m: m.now < 0.4 * m.then and m.z < -5),
    ),
    "length": Rule(outside("length", lambda s: (1 / s.length, s.length)), gamed("length")),
    "repetition": Rule(
        above("repetition", "of a response's 4-grams were there before"),
        gamed("repetition"),
        "stop",
    ),
    "truncated": Rule(cut_off),
    "spread": Rule(outside("reward_spread", lambda s: (s.spread, math.inf))),
    "mismatch": Rule(above("mismatch", DIFFERENCE), mismatch_jump, "stop", patience=""),
    "dropped": Rule(above("dropped", "of the responses were left out")),
    "flat": Rule(flat, patience="flat", stop_after=5),
    "coefficient": Rule(),
    "frozen": Rule(action="stop"),
    "memory": Rule(action="stop"),
    "slow": Rule(),
    "proxy": Rule(trend=lambda view: view.fallen),
    "frontier": Rule(trend=past_frontier),
    "held_out": Rule(trend=held_out),
    **{name: Rule(trend=gamed(name)) for name in ("format", "distinct", "keyword", "disagreement")},
    "zero_variance": Rule(
        trend=without_gain("groups/zero_variance", EQUAL, lambda m: m.now > 0.8 and m.z > 4)
    ),
}

# What to try, by rule.
_ADVICE = Path(__file__).with_name("advice.yaml")
ADVICE: Mapping[str, str] = yaml.safe_load(_ADVICE.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a rule found and what to try, in one line."""

    rule: str
    text: str
    stop: bool
