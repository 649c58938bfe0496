"""Guards: what a run watches about itself, so that a failure costs minutes and not days.

Each guard has a name, a threshold, an action and a line in GUARDS. Most look at the figures of a step beside those of the first
steps; what they remember is JSON and goes into every checkpoint, so that a resumed run warns and stops where the whole one would.

    watch = Watch(Guards(kl=0.5, stop=("kl",)))
    alarms = watch.rollouts(step, groups)         # before the update: rewards that failed, log-probs that are not numbers
    alarms = watch.figures(step, figures)         # after it: drift
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from posttrain.errors import require, unknown
from posttrain.types import JSON, Group, Rollout

GUARDS = {
    "nonfinite": "a loss, gradient, log-prob or reward that is not a number: nothing is updated, the batch is kept in alarms/",
    "kl": "KL from the reference, in nats per token, above a limit",
    "entropy": "entropy per token below this share of what it was in the first steps: the policy has stopped exploring",
    "length": "response length above this multiple of what it was in the first steps, or below its inverse",
    "repetition": "share of a response's 4-grams that it said before, above a limit: loops and garbage",
    "spread": "standard deviation of the rewards below this share of what it was in the first steps: nothing left to compare",
    "mismatch": "mean difference of a token's log-prob between sampler and trainer, before anything moved, above a limit",
    "failed": "share of a step's responses that could not be scored, above a limit",
    "dropped": "share of a step's responses that the algorithm left out as too far from the policy, above a limit",
    "flat": "steps in a row in which every group has equal rewards: no gradient. Warns, and stops after five times as many",
    "coefficient": "a coefficient of the algorithm that is set, and changes no gradient of the first batch",
    "frozen": "weights that must not move (the reference; what LoRA stands on) have moved, or are not those the run began with",
    "memory": "the device has no memory left for a step",
    "slow": "a step takes this many times the median: the stacks of every thread and worker are written to alarms/",
}
STOPS = (
    "nonfinite",
    "repetition",
    "mismatch",
    "failed",
    "frozen",
    "memory",
)  # the others warn, unless told to stop
ADVICE = {
    "kl": "lower the learning rate, raise beta, or start again from an earlier checkpoint",
    "entropy": "lower the learning rate, raise the temperature or clip_high, or add an entropy bonus",
    "length": "look at some rollouts; penalise length, mask truncated responses, or use a reduction by token",
    "repetition": "look at the last rollouts; lower the learning rate, raise beta, or resume from an earlier checkpoint",
    "spread": "use harder problems or another reward; if all is solved, the stage is done",
    "mismatch": "the sampler's weights or its temperature are not the trainer's; check what updates them, or set correction=token",
    "dropped": "update the sampler more often, or lower the learning rate",
    "flat": "use problems that are sometimes solved (task.level, a curriculum), more samples a group, or a finer reward",
    "slow": "look there for what it waited for; if steps of this length are normal, raise guards.slow",
}
START = 5  # steps that say what is normal
QUIET = 50  # steps before the same guard warns again
MIN_SECONDS = 10.0  # a step shorter than this is never called slow
SHORT = 16  # tokens; shorter responses say nothing of repetition
LARGEST = 1e6  # a reward beyond this would drown every other one
JUMP, FLOOR = (
    20.0,
    1e-4,
)  # a mismatch that grows this much over its start, and is above the floor, is worth a warning
FLAT_STOP = 5


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Thresholds and actions. `off`, `warn` and `stop` name guards; `stop` makes one end the run that would only warn."""

    apart: ClassVar[bool] = (
        True  # its keys are never meant by their name alone: rl.kl is the algorithm's
    )

    kl: float = 5.0
    entropy: float = 0.02
    length: float = 8.0
    repetition: float = 0.6
    spread: float = 0.05
    mismatch: float = 0.1
    failed: float = 0.5
    dropped: float = 0.5
    flat: int = 10  # steps
    slow: float = 20.0
    patience: int = 3  # steps in a row before a drift counts
    skip: int = 0  # steps in a row that may be left out for numbers that are not finite; 0: stop at the first
    off: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.off, *self.warn, *self.stop):
            if name not in GUARDS:
                raise unknown("guard", name, GUARDS)
        for name in ("kl", "length", "slow", "mismatch"):
            require(
                getattr(self, name) > 0,
                f"guards: {name} must be positive, not {getattr(self, name)}; off=[{name}] turns it off",
            )
        for name in ("entropy", "repetition", "spread", "failed", "dropped"):
            require(
                0 <= getattr(self, name) <= 1,
                f"guards: {name} is a share between 0 and 1, not {getattr(self, name)}",
            )
        require(
            self.flat >= 1 and self.patience >= 1,
            "guards: flat and patience are numbers of steps, at least 1",
        )
        require(self.skip >= 0, f"guards: skip is a number of steps, not {self.skip}")
        fixed = not {"nonfinite", "memory"} & {*self.off, *self.warn}
        require(
            fixed,
            "guards: nonfinite and memory can be neither off nor warnings; skip=N leaves out N steps in a row, not finite",
        )

    def stops(self, name: str) -> bool:
        return name in self.stop or (name in STOPS and name not in self.warn)


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a guard saw and what to try, in one line."""

    guard: str
    text: str
    stop: bool


class Watch:
    """The guards of one stage with what they remember: `memory` is saved with every checkpoint. The durations of recent steps are
    not: another attempt may run on another machine."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.memory: dict[str, JSON] = {
            "start": {},
            "streak": {},
            "warned": {},
            "broken": 0,
            "checked": False,
            "frozen": None,
        }
        self.recent: deque[float] = deque(maxlen=64)

    def state(self) -> JSON:
        return self.memory

    def restore(self, state: JSON) -> None:
        self.memory = {**self.memory, **state}

    # --- before the update ---------------------------------------------------------------------------------------------

    def rollouts(self, step: int, groups: Sequence[Group]) -> list[Alarm]:
        """Look at what was sampled and scored, before anything is learned from it."""
        rollouts = [r for g in groups for r in g.rollouts]
        failed = [r for r in rollouts if not r.score.valid]
        alarms = []
        if failed and len(failed) > self.guards.failed * len(rollouts):
            kinds = Counter(str(r.score.failure).split(":")[0] for r in failed)
            text = f"{len(failed)} of {len(rollouts)} responses could not be scored: " + ", ".join(
                f"{count} {kind}" for kind, count in kinds.most_common(4)
            )
            first = f"; the first: problem {failed[0].problem.id}, {failed[0].score.failure}"
            alarms += self.alarm(
                "failed", step, text + first + "; mend the reward, or raise guards.failed"
            )
        bad = [r for r in rollouts if strange(r)]
        if bad:
            named = ", ".join(r.problem.id for r in bad[:4])
            text = f"{len(bad)} of {len(rollouts)} responses have a log-prob that is not finite or a reward beyond {LARGEST:g}"
            alarms += self.broken(step, f"{text} (problems {named})")
        return alarms

    def broken(self, step: int, text: str) -> list[Alarm]:
        """A step that must not be learned from: the run stops, or leaves it out where `skip` still allows that."""
        self.memory["broken"] += 1
        stop = self.memory["broken"] > self.guards.skip
        advice = "look at the batch in alarms/; lower the learning rate, or set guards.skip to leave such steps out"
        after = (
            advice
            if stop
            else f"the step is left out ({self.memory['broken']} of at most {self.guards.skip} in a row)"
        )
        return [Alarm("nonfinite", f"step {step}: {text}; nothing was updated; {after}", stop)]

    # --- after it ------------------------------------------------------------------------------------------------------

    def figures(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Look at a step's figures, and remember those of the first steps."""
        guards, alarms = self.guards, []
        if math.isfinite(figures.get("loss", math.nan)) and math.isfinite(
            figures.get("grad_norm", math.nan)
        ):
            self.memory["broken"] = 0  # an update was made
        if "reward" in figures:
            alarms += self.drift(step, "entropy", figures, low=guards.entropy)
            alarms += self.drift(step, "length", figures, low=1 / guards.length, high=guards.length)
            alarms += self.drift(step, "spread", figures, low=guards.spread, figure="reward_spread")
            alarms += self.limit(
                step, "kl", figures, guards.kl, "nats per token from the reference"
            )
            alarms += self.limit(
                step,
                "repetition",
                figures,
                guards.repetition,
                "of a response's 4-grams were there before",
            )
            alarms += self.limit(
                step, "dropped", figures, guards.dropped, "of the responses were left out"
            )
            alarms += self.flat(step, figures)
            alarms += self.mismatch(step, figures)
        return alarms

    def limit(
        self, step: int, guard: str, figures: Mapping[str, float], limit: float, words: str
    ) -> list[Alarm]:
        """A figure above a limit for `patience` measurements in a row."""
        value = figures.get(guard, math.nan)
        if not self.lasts(guard, value, value > limit):
            return []
        return self.alarm(guard, step, f"{value:.3g} {words}, above {limit:g}; {ADVICE[guard]}")

    def drift(
        self,
        step: int,
        guard: str,
        figures: Mapping[str, float],
        low: float,
        high: float = math.inf,
        figure: str = "",
    ) -> list[Alarm]:
        """A figure that has left the range [low, high] * (its mean over the first steps) for `patience` measurements in a row."""
        value = figures.get(figure or guard, math.nan)
        start = self.start(guard, value)
        if start is None or not self.lasts(
            guard, value, start > 0 and not low * start <= value <= high * start
        ):
            return []
        return self.alarm(
            guard,
            step,
            f"{figure or guard} is {value:.3g}, {start:.3g} in the first steps; {ADVICE[guard]}",
        )

    def flat(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Steps in a row without any difference within a group."""
        share, streak = figures.get("groups/zero_variance", math.nan), self.memory["streak"]
        if math.isnan(share):
            return []
        streak["flat"] = streak.get("flat", 0) + 1 if share == 1.0 else 0
        if streak["flat"] < self.guards.flat:
            return []
        last = streak["flat"] >= FLAT_STOP * self.guards.flat
        text = f"all rewards of every group were equal for {streak['flat']} steps: nothing is learned; {ADVICE['flat']}"
        return self.alarm("flat", step, text, stop=last and "flat" not in self.guards.warn)

    def mismatch(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Sampler and trainer disagree: by too much, or suddenly by much more than at the start. No patience: the next update
        would already be a wrong one."""
        value = figures.get("mismatch/start", figures.get("mismatch", math.nan))
        start = self.start("mismatch", value)
        text = f"log-probs of sampler and trainer differ by {value:.3g} on average"
        if value > self.guards.mismatch:
            return self.alarm(
                "mismatch", step, f"{text}, above {self.guards.mismatch:g}; {ADVICE['mismatch']}"
            )
        if start is not None and value > max(JUMP * start, FLOOR):
            text = f"{text}, {start:.3g} in the first steps; {ADVICE['mismatch']}"
            return self.alarm("mismatch", step, text, stop="mismatch" in self.guards.stop)
        return []

    def seconds(self, step: int, seconds: float, where: str) -> list[Alarm]:
        """Note how long a step took; an alarm where that was many times the median."""
        limit = self.slowest()
        self.recent.append(seconds)
        if limit is None or seconds <= limit:
            return []
        middle = statistics.median(self.recent)
        text = f"the step took {seconds:.1f} s, the median is {middle:.2g} s; stacks of all threads and workers are in {where}"
        return self.alarm("slow", step, f"{text}; {ADVICE['slow']}")

    def slowest(self) -> float | None:
        """Seconds after which a step is slow, or None while too few are known."""
        if len(self.recent) < START or "slow" in self.guards.off:
            return None
        return max(MIN_SECONDS, self.guards.slow * statistics.median(self.recent))

    # --- once, and now and then ----------------------------------------------------------------------------------------

    def coefficients(self, step: int, dead: Sequence[str] | None) -> list[Alarm]:
        """What the start-up check found; None: the batch had no gradient to compare, so that the next one is looked at."""
        self.memory["checked"] = dead is not None
        if not dead:
            return []
        text = f"{', '.join(dead)} of the algorithm changes no gradient of the first batch: it has no effect here; check what it needs"
        return self.alarm("coefficient", step, text)

    def frozen(self, step: int, checksum: int | None) -> list[Alarm]:
        """Compare a checksum of the frozen weights with the one that the stage began with."""
        first, self.memory["frozen"] = (
            self.memory["frozen"],
            checksum if self.memory["frozen"] is None else self.memory["frozen"],
        )
        if first is None or checksum is None or first == checksum:
            return []
        text = "weights that must not move are not those the stage began with: the reference, or what adapters stand on"
        return self.alarm(
            "frozen",
            step,
            f"{text}; resume from the last checkpoint with the same models, and report this",
        )

    def memory_full(self, step: int, text: str, budget: int) -> list[Alarm]:
        """There was no memory for a step, and the trainer has tried smaller pieces, if it was its to try."""
        seen = " ".join(text.split())[:200]
        advice = f"lower optimizer.token_budget (now {budget}: the gradient stays the same), set optimizer.checkpointing=layer or "
        advice += "release_cache=true, lower max_rows where it was generating"
        return self.alarm(
            "memory", step, f"out of memory ({seen}); {advice}, or max_new_tokens; then resume"
        )

    # --- shared --------------------------------------------------------------------------------------------------------

    def start(self, guard: str, value: float) -> float | None:
        """The mean of a figure over its first measurements, once there are enough of them."""
        total, count = self.memory["start"].get(guard, (0.0, 0))
        if count >= START:
            return float(total / count)
        if math.isfinite(value):
            self.memory["start"][guard] = [total + value, count + 1]
        return None

    def lasts(self, guard: str, value: float, outside: bool) -> bool:
        """Count measurements in a row outside the range; whether there were `patience` of them. What was not measured counts not."""
        streak = self.memory["streak"]
        if not math.isnan(value):
            streak[guard] = streak.get(guard, 0) + 1 if outside else 0
        return not math.isnan(value) and int(streak[guard]) >= self.guards.patience

    def alarm(self, guard: str, step: int, text: str, stop: bool | None = None) -> list[Alarm]:
        """One alarm, or none where the guard is off or has warned a moment ago."""
        stop = self.guards.stops(guard) if stop is None else stop
        last = self.memory["warned"].get(guard)
        if guard in self.guards.off or (
            not stop and last is not None and last <= step < last + QUIET
        ):
            return []
        self.memory["warned"][guard] = step
        return [Alarm(guard, f"step {step}: {text}", stop)]


def strange(rollout: Rollout) -> bool:
    """Whether a rollout holds what no update may see: a log-prob that is not finite, or a reward out of all proportion."""
    far = rollout.score.value is not None and abs(rollout.score.value) > LARGEST
    return far or any(
        s.logprobs is not None and not np.isfinite(s.logprobs).all() for s in rollout.segments
    )


def rollout_figures(groups: Sequence[Group]) -> dict[str, float]:
    """What the guards look at besides the usual figures: the spread of rewards, groups without a difference, repetition."""
    figures: dict[str, float] = {}
    rewards = [value for g in groups for value in g.rewards]
    if len(rewards) > 1:
        figures["reward_spread"] = float(np.std(rewards))
    compared = [g.rewards for g in groups if len(g.rollouts) > 1]
    if compared:
        figures["groups/zero_variance"] = sum(not r or max(r) == min(r) for r in compared) / len(
            compared
        )
    repeated = repetition([r for g in groups for r in g.rollouts])
    if repeated is not None:
        figures["repetition"] = repeated
    return figures


def repetition(rollouts: Sequence[Rollout]) -> float | None:
    """The mean over responses of 1 - (distinct 4-grams / 4-grams), by token ids; None where all responses are short.

    "abcabcabc..." of 30 tokens has 27 4-grams, 3 of them distinct: 24/27.
    """
    parts = [[s.ids for s in r.segments if s.sampled] for r in rollouts]
    counts = np.array([sum(map(len, part)) for part in parts], dtype=np.int64)
    if not (counts >= SHORT).any():
        return None
    ids = np.concatenate(
        [
            piece
            for part, count in zip(parts, counts, strict=True)
            if count >= SHORT
            for piece in part
        ]
    )
    counts = counts[counts >= SHORT]
    owner = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    hashed = owner[:-3] * np.uint64(0x9E3779B97F4A7C15)
    for place, prime in enumerate(
        (1_000_003, 10_000_019, 100_000_007, 1_000_000_007)
    ):  # wraps round
        hashed += ids[place : len(ids) - 3 + place].astype(np.uint64) * np.uint64(
            prime * 2_654_435_761
        )
    within = owner[:-3] == owner[3:]
    _, first = np.unique(hashed[within], return_index=True)
    distinct = np.bincount(owner[:-3][within][first].astype(np.int64), minlength=len(counts))
    return float(np.mean(1.0 - distinct / (counts - 3)))
