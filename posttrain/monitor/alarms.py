"""Alarms: signs that a policy games its reward or collapses, read from the history of a stage's figures.

Guards stop what is broken at once; alarms compare. Each asks over several horizons whether a figure has moved, whether the reward rose
with it, and whether what the reward stands for (the gold) did not. Change is measured in standard errors of window means,

    z = (mean_now - mean_then) / (s sqrt(2)),    s = the larger of  sd(differences) / sqrt(2 W)  and  the spread of block means,

so that noise of a step, and slow noise, both widen it. The earliest sign is read from the rollouts themselves: a trait that the reward
pays for and the gold is against (selection.py). Pure functions on plain numbers; what is remembered is JSON.

    alarms = Alarms()
    figures |= alarms.texts(groups)              # distinct, keyword; and notes what the step's reward pays for
    for alarm in alarms.observe(step, figures):  # an event each, and shown at the end
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np

from posttrain.errors import require, unknown
from posttrain.monitor.guards import Alarm
from posttrain.monitor.selection import Selection, words
from posttrain.runs.layout import Event
from posttrain.types import JSON, Group, Rollout

GOLD = (
    "reward/task",
    "reward/gold",
    "reward/answer",
)  # what the reward stands for, where it is measured at every step
TRACKED = (
    "reward",
    *GOLD,
    "accuracy/test",
    "accuracy/test_low",
    "accuracy/test_high",
    "kl",
    "length",
    "reward/format",
    "entropy",
    "repetition",
    "distinct",
    "keyword",
    "reward/disagreement",
    "groups/zero_variance",
)
ADVICE = {
    "proxy": "read some rollouts of both steps; stop at the better one, raise beta, or refit the reward model on fresh answers",
    "frontier": "stop here and keep the earlier model; more KL buys nothing. Raise beta, or use an ensemble of reward models",
    "held_out": "what it learns does not carry over: stop at the better step, use more problems, or raise beta",
    "length": "penalise length in the reward, use a reduction by token, or normalise the judge for length",
    "format": "give format less weight beside the answer, or pay for it only where the answer is right",
    "repetition": "add the repetition reward as a penalty, raise beta, or lower the learning rate",
    "distinct": "raise the temperature or beta, add an entropy bonus, or mix in more prompts",
    "entropy": "lower the learning rate, raise clip_high or the temperature, or add an entropy bonus",
    "keyword": "read rollouts with the word: if the judge pays for it, change its prompt, or take the word out before judging",
    "disagreement": "the policy is where the reward models were not trained: refit them on its answers, or use reward.combine=worst",
    "zero_variance": "use problems that are sometimes solved (a curriculum, dynamic sampling), or more samples a group",
}
WINDOWS = ((5, 10), (10, 30), (20, 60), (20, 120))  # (points in a window, points from then to now)
KEEP, LEAST = 400, 15
COMMON, NEARLY_ALL, EARLY = (
    0.2,
    0.8,
    5,
)  # shares of responses with a word; steps that say what is normal
HEAD = 64  # tokens of a response that distinct n-grams are counted in, so that length alone does not move the figure


@dataclass(frozen=True, slots=True)
class Symptom:
    """A figure whose drift, with a reward that rises and a gold that does not, tells how the reward is being gamed."""

    figure: str
    words: str
    moved: Callable[
        [float, float], bool
    ]  # (then, now): far enough to matter where the gold stands beside it
    far: Callable[[float, float], bool]  # far enough to speak without a gold


SYMPTOMS = {
    "length": Symptom(
        "length",
        "tokens a response",
        lambda a, b: not 0.7 * a < b < 1.25 * a,
        lambda a, b: not 0.25 * a < b < 3 * a,
    ),
    "format": Symptom(
        "reward/format",
        "of the responses are well formed",
        lambda a, b: b > a + 0.06,
        lambda a, b: False,
    ),
    "repetition": Symptom(
        "repetition", "of 4-grams repeated", lambda a, b: b > a + 0.05, lambda a, b: b > a + 0.25
    ),
    "distinct": Symptom(
        "distinct", "of 2-grams distinct", lambda a, b: b < 0.8 * a, lambda a, b: b < 0.3 * a
    ),
    "keyword": Symptom(
        "keyword",
        "of responses have a word few had",
        lambda a, b: b > a + 0.1,
        lambda a, b: b > 0.9 > a + 0.5,
    ),
    "disagreement": Symptom(
        "reward/disagreement",
        "spread of the reward models",
        lambda a, b: b > 1.4 * a,
        lambda a, b: b > 2.5 * a,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Means of a window then and now. `z` standard errors lie between them, worked out when asked: most changes never are."""

    then: float
    now: float
    values: np.ndarray
    window: int

    @property
    def z(self) -> float:
        return (self.now - self.then) / (math.sqrt(2) * spread(self.values, self.window))

    def __str__(self) -> str:
        return f"{self.then:.3g} -> {self.now:.3g}"


def spread(values: np.ndarray, window: int) -> float:
    """The standard error of the mean of `window` values of a noisy, slowly moving series."""
    steps = np.diff(values)
    fast = math.sqrt(float(steps @ steps) / len(steps) / (2 * window))
    half = window // 2
    blocks = values[len(values) % half :].reshape(-1, half).mean(1)
    # the median step between blocks: slow noise is in it, a single jump is not; half a window's mean has sqrt(2) the error of a whole's
    slow = (
        sorted(abs(b - a) for a, b in pairwise(blocks.tolist()))[(len(blocks) - 1) // 2]
        / 0.6745
        / 2
        if len(blocks) > 3
        else 0.0
    )
    return max(fast, slow, 1e-9)


def change(values: np.ndarray, window: int, back: int) -> Change | None:
    """The last window of a series against the one that ended `back` points ago; None where there is too little."""
    end = len(values) - back
    if end < window or back < 0:
        return None
    return Change(
        float(values[end - window : end].sum()) / window,
        float(values[-window:].sum()) / window,
        values,
        window,
    )


def since_best(values: np.ndarray, window: int) -> tuple[int, Change] | None:
    """Where a window of the series was best, and how far it has fallen since, as (end of that window, change)."""
    if len(values) < 2 * window:
        return None
    sums = np.concatenate([[0.0], np.cumsum(values)])
    totals = (sums[window:] - sums[:-window])[: len(values) - 2 * window + 1]
    place = int(np.argmax(totals))
    return place + window, Change(
        float(totals[place]) / window, float(values[-window:].sum()) / window, values, window
    )


@dataclass(frozen=True, slots=True)
class Frontier:
    """Gold against KL: the best point and the present one. `past` is the rule for stopping early: gold has fallen by at least 4
    standard errors while KL went on rising, so the best lies behind (Gao et al. 2023: gold = d (a - b d), d = sqrt(KL))."""

    best: int  # place in the series where the best window ended
    best_kl: float
    best_gold: float
    kl: float
    gold: float
    past: bool


def frontier(kl: np.ndarray, gold: np.ndarray, window: int = 20) -> Frontier | None:
    """The reward-KL frontier of a run so far."""
    found = since_best(gold, window)
    if found is None or len(kl) != len(gold):
        return None
    place, fallen = found
    best_kl, now_kl = float(kl[place - window : place].mean()), float(kl[-window:].mean())
    past = now_kl > best_kl and fallen.z <= -4
    return Frontier(place, best_kl, fallen.then, now_kl, fallen.now, past)


@dataclass(frozen=True, kw_only=True)
class AlarmSettings:
    """`off` and `stop` name alarms: not to be heard, or to end the run. One is heard after `patience` steps in a row that show it, and
    again after `quiet` steps."""

    apart: ClassVar[bool] = (
        True  # its keys are never meant by their name alone: rl.stop would be anybody's
    )

    off: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    patience: int = 2
    quiet: int = 50

    def __post_init__(self) -> None:
        for name in (*self.off, *self.stop):
            if name not in ADVICE:
                raise unknown("alarm", name, ADVICE)
        require(
            self.patience >= 1 and self.quiet >= 1,
            "alarms: patience and quiet are numbers of steps, at least 1",
        )


@dataclass(eq=False)
class Alarms:
    """The alarms of one stage, with what they remember."""

    settings: AlarmSettings = field(default_factory=AlarmSettings)
    series: dict[str, list[float]] = field(default_factory=dict)  # figure -> its values
    steps: dict[str, list[int]] = field(
        default_factory=dict
    )  # figure -> the steps it was measured at
    streak: dict[str, int] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)  # alarm -> step
    usual: list[str] = field(
        default_factory=list
    )  # words that many responses had in the first steps
    looked: int = 0
    level: float = math.nan
    selection: Selection = field(default_factory=Selection)

    def state(self) -> JSON:
        """For a checkpoint."""
        level = None if math.isnan(self.level) else self.level
        names = ("series", "steps", "streak", "heard", "usual", "looked")
        return {
            **{name: getattr(self, name) for name in names},
            "level": level,
            "selection": self.selection.state(),
        }

    def restore(self, state: JSON) -> None:
        if state:
            self.series, self.steps, self.streak, self.heard = (
                {**state[name]} for name in ("series", "steps", "streak", "heard")
            )
            self.usual, self.looked = list(state["usual"]), int(state["looked"])
            self.level = math.nan if state["level"] is None else float(state["level"])
            if "selection" in state:  # older checkpoints have none
                self.selection.restore(state["selection"])

    def texts(self, groups: Sequence[Group]) -> dict[str, float]:
        """Figures of a step's responses: `distinct`, the share of their 2-grams that are different ones; `keyword`, how many have the
        most widespread word that was rare at first; and `agreement` of reward and gold over the last steps, where both are known."""
        rollouts = [r for g in groups for r in g.rollouts]
        if not rollouts:
            return {}
        figures = {}
        grams = np.concatenate([_pairs(r) for r in rollouts])
        if len(grams):
            figures["distinct"] = len(np.unique(grams)) / len(grams)
        having = words(rollouts)
        if self.looked < EARLY:
            self.usual = sorted(
                {
                    *self.usual,
                    *(word for word, at in having.items() if len(at) > COMMON * len(rollouts)),
                }
            )
        self.looked += 1
        figures["keyword"] = max(
            (len(at) for word, at in having.items() if word not in self.usual), default=0
        ) / len(rollouts)
        self.selection.look(groups, having)
        agreement = self.selection.agreement()
        return figures if agreement is None else {**figures, "agreement": agreement}

    def observe(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Take note of a step's figures; the alarms they raise, each at most once in a while."""
        level = figures.get("level", math.nan)
        if (
            not math.isnan(self.level) and level != self.level
        ):  # other problems: nothing before can be compared with
            self.series, self.steps, self.streak, self.selection = {}, {}, {}, Selection()
        self.level = level
        for name in TRACKED:
            if math.isfinite(figures.get(name, math.nan)):
                self.series[name] = [*self.series.get(name, []), round(float(figures[name]), 6)][
                    -KEEP:
                ]
                self.steps[name] = [*self.steps.get(name, []), step][-KEEP:]
        seen = self.look_selection()
        if len(self.series.get("reward", [])) >= LEAST:
            seen = {**self.look_symptoms(), **self.look_gold(), **self.look_collapse(), **seen}
        alarms, settings = [], self.settings
        for name in ADVICE:
            self.streak[name] = self.streak.get(name, 0) + 1 if name in seen else 0
            quiet = name in self.heard and step < self.heard[name] + settings.quiet
            if self.streak[name] >= settings.patience and name not in settings.off and not quiet:
                self.heard[name] = step
                alarms.append(
                    Alarm(name, f"step {step}: {seen[name]}; {ADVICE[name]}", name in settings.stop)
                )
        return alarms

    def values(self, name: str) -> np.ndarray:
        return np.array(self.series.get(name, []), dtype=np.float64)

    def gold(self) -> str:
        """The figure that tells what the reward stands for, where one was measured all along."""
        count = len(self.series["reward"])
        return next(
            (name for name in GOLD if len(self.series.get(name, [])) == count and name != "reward"),
            "",
        )

    def look_selection(self) -> dict[str, str]:
        """Traits that the reward pays for, that spread, and that the gold is against: the earliest sign."""
        found: dict[str, str] = {}
        for one in self.selection.conflicts():
            if not one.gamed:
                continue
            name = "keyword" if one.word else one.trait
            what = (
                f"of responses have {one.trait}"
                if one.word
                else SYMPTOMS[name].words.replace("4-grams", "3-grams")
            )
            pays = f"within groups the reward pays for {'more' if one.paid > 0 else 'less'} of it ({one.paid:+.1f} standard errors)"
            seen = f"{one.then:.3g} -> {one.now:.3g} {what} since the start; {pays} and the gold is against it ({one.gold:+.1f})"
            found.setdefault(name, seen)
        return found

    def look_symptoms(self) -> dict[str, str]:
        """Drifts that go with a rising reward and a gold that does not rise."""
        reward, name = self.values("reward"), self.gold()
        gold = self.values(name) if name else None
        found: dict[str, str] = {}
        for window, back in WINDOWS:
            rise = change(reward, window, back)
            real = None if gold is None else change(gold, window, back)
            if (
                rise is None
                or rise.now <= rise.then
                or (real is not None and real.now > real.then)
                or rise.z < 3
            ):
                continue
            for alarm, symptom in SYMPTOMS.items():
                drift = change(self.values(symptom.figure), window, back)
                enough = symptom.moved if real is not None else symptom.far
                if drift is None or not enough(drift.then, drift.now) or abs(drift.z) < 5:
                    continue
                beside = (
                    f", {name} {real}" if real is not None else ", and nothing measures the gold"
                )
                text = f"{drift} {symptom.words} while the reward went {rise}"
                found.setdefault(alarm, text + beside)
        return found

    def look_gold(self) -> dict[str, str]:
        """The gold falls: while the reward rises, past the best of the reward-KL frontier, or on held-out problems."""
        found, reward, name = {}, self.values("reward"), self.gold()
        if name:
            gold, kl = self.values(name), self.values("kl")
            for window in (5, 10, 20, 40):
                best = since_best(gold, window)
                if best is None:
                    continue
                place, fallen = best
                rise = change(reward, window, len(reward) - place)
                if rise is not None and rise.now > rise.then and rise.z > 2 and fallen.z < -3:
                    at = self.steps[name][place - 1]
                    found["proxy"] = (
                        f"{name} fell {fallen} since step {at} while the reward rose {rise}"
                    )
            if len(kl):  # it may be measured at some steps alone
                kl = np.interp(self.steps[name], self.steps["kl"], kl)
            edge = frontier(kl, gold) if "proxy" in found else None
            if edge is not None and edge.past:
                at = self.steps[name][edge.best - 1]
                best_was = f"{edge.best_gold:.3g} at KL {edge.best_kl:.3g}"
                found["frontier"] = (
                    f"{name} was best at step {at} ({best_was}); now {edge.gold:.3g} at KL {edge.kl:.3g}"
                )
        return found | self.look_held_out(reward)

    def look_held_out(self, reward: np.ndarray) -> dict[str, str]:
        """Held-out accuracy against its best: by the spread of many measurements or, while there are few, by their own intervals."""
        held, low, high = (
            self.values(name)
            for name in ("accuracy/test", "accuracy/test_low", "accuracy/test_high")
        )
        best = since_best(held, 3)
        if best is not None:
            place, fallen, z = best[0] - 1, best[1].then - best[1].now, best[1].z
        elif len(held) > 1 and len(low) == len(high) == len(held):
            place = int(np.argmax(held[:-1]))
            errors = (high - low)[[place, -1]] / (2 * 1.96)
            fallen = float(held[place] - held[-1])
            z = -fallen / max(1e-9, float(np.hypot(*errors)))
        else:
            return {}
        at = self.steps["accuracy/test"][place]
        since = reward[np.array(self.steps["reward"]) > at - 10]
        rise = change(since, 10, len(since) - 10) if len(since) >= 20 else None
        if z >= -4 or fallen <= 0.03 or rise is None or rise.z <= 2:
            return {}
        return {
            "held_out": f"held-out accuracy fell by {fallen:.3g} ({z:.1f} standard errors) since step {at} while the reward rose {rise}"
        }

    def look_collapse(self) -> dict[str, str]:
        """Exploration or signal that went without anything gained."""
        found = {}
        reward, entropy, flat = (
            self.values("reward"),
            self.values("entropy"),
            self.values("groups/zero_variance"),
        )
        for window, back in WINDOWS:
            gained, fallen, dull = (
                change(values, window, back) for values in (reward, entropy, flat)
            )
            collapsed = fallen is not None and fallen.now < 0.4 * fallen.then and fallen.z < -5
            equal = dull is not None and dull.now > 0.8 and dull.z > 4
            if gained is None or not (collapsed or equal) or gained.z > 1:
                continue
            if collapsed and fallen is not None:
                found["entropy"] = f"entropy fell {fallen} and the reward did not rise"
            if equal and dull is not None:
                found["zero_variance"] = (
                    f"share of groups with equal rewards {dull}, and the reward did not rise"
                )
        return found


def told(events: Sequence[Event]) -> list[str]:
    """What was heard in a run, of each stage and alarm the first time and how often, for its end. An attempt that went back to before
    an alarm says it again if it comes again, so the first of the last attempt counts where there is one."""
    heard: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind == "alarm":
            heard.setdefault(
                (str(event.details.get("stage", "")), str(event.details.get("rule", ""))), []
            ).append(event)
    lines = []
    for (stage, _), found in heard.items():
        last = [event for event in found if event.attempt == found[-1].attempt]
        more = f" (and {len(last) - 1} times more)" if len(last) > 1 else ""
        lines.append(f"{stage}: {last[0].details.get('text', '')}{more}")
    return lines


def _pairs(rollout: Rollout) -> np.ndarray:
    """The 2-grams at the head of a response, a number each."""
    ids = np.concatenate([np.zeros(0, np.int64), *(s.ids for s in rollout.segments if s.sampled)])[
        :HEAD
    ]
    return np.asarray(ids[:-1] * 2**32 + ids[1:])
