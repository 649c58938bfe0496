"""The monitors of one training stage: probes measure each step, rules read the series, and alarms are emitted or end the run."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.collect import Collected
from posttrain.errors import GuardStop, many
from posttrain.events import Level
from posttrain.monitor.coefficients import coefficients, dead_coefficients
from posttrain.monitor.probes import LARGEST, Keywords, TraitSums, rollout_figures, unusable, words
from posttrain.monitor.rules import ADVICE, RULES, Alarm, MonitorSettings, View
from posttrain.monitor.series import START, History
from posttrain.monitor.watchdog import Watchdog
from posttrain.runs.layout import ALARMS, EventRow
from posttrain.runs.write import RunWriter
from posttrain.train.pack import micro_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import JSON, Batch, Group

TREND = "/trend"  # ends the name of a trend's streak
PARTS = {"history": History, "keywords": Keywords, "traits": TraitSums}
PLAIN = ("streak", "last", "skipped", "coefficients_checked", "frozen")
MIN_SECONDS = 10.0  # a step shorter than this is never called slow


class Monitor:
    """Probes, series and rules of one stage, as functions of metrics and rollouts. Every checkpoint saves their state, except the
    durations of recent steps, because another attempt may run on another machine."""

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.settings, self.history = settings or MonitorSettings(), History()
        self.keywords, self.traits = Keywords(), TraitSums()
        # by rule: steps in a row above its limit or along its trend
        self.streak: dict[str, int] = {}
        self.last: dict[str, int] = {}  # by rule: the step of its last alarm
        self.skipped = 0  # steps in a row that were left out
        self.coefficients_checked = False
        self.frozen: int | None = None  # checksum of the weights that must not move
        self.seconds: deque[float] = deque(maxlen=64)

    def state(self) -> dict[str, JSON]:
        parts = {name: vars(getattr(self, name)) for name in PARTS}
        return {**parts, **{name: getattr(self, name) for name in PLAIN}}

    def restore(self, state: Mapping[str, JSON]) -> None:
        for name, kind in PARTS.items():
            setattr(self, name, kind(**state[name]))
        for name in PLAIN:
            setattr(self, name, state[name])

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of a step's rollouts, including two that need earlier steps: `keyword`, the share of responses with the most
        widespread word that was rare at first, and `agreement`, the correlation of reward and gold over the last steps, if both are
        known."""
        figures: dict[str, float] = {}
        for part in self.measuring(groups):
            figures |= part
        return figures

    def measuring(self, groups: Sequence[Group]) -> Iterator[dict[str, float]]:
        """`measure` in pieces, so that the caller can interleave other work."""
        yield rollout_figures(groups)
        rollouts = [r for g in groups for r in g.rollouts]
        if not rollouts:
            return
        having = words(rollouts)
        yield {"keyword": self.keywords.share(having, len(rollouts))}
        self.traits.add(groups, having)
        agreement = self.traits.agreement()
        yield {} if agreement is None else {"agreement": agreement}

    def observe(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Add the metrics of a step to the series, and apply the rules. Limits and trends apply to sampling stages only: in
        supervised training, entropy falls to almost 0."""
        if all(math.isfinite(figures.get(name, math.nan)) for name in ("loss", "grad_norm")):
            self.skipped = 0  # an update was made
        if "reward" not in figures:
            return []
        # with several updates on one rollout, later ones are meant to differ from what sampled
        first_update = figures.get("mismatch/start", figures.get("mismatch", math.nan))
        now = {**figures, "mismatch": first_update}
        if self.history.add(step, now):
            self.streak = {key: n for key, n in self.streak.items() if not key.endswith(TREND)}
            self.traits = TraitSums()
        view = View(self.settings, now, self.history, self.traits.conflicts())
        alarms: list[Alarm] = []
        for name, rule in RULES.items():
            for check, kind in ((rule.limit, ""), (rule.trend, TREND)):
                seen = None if check is None else check(view)
                if seen is None:
                    continue
                key = name + kind
                self.streak[key] = self.streak.get(key, 0) + 1 if seen else 0
                setting = "trend_patience" if kind and rule.patience else rule.patience
                patience = getattr(self.settings, setting) if setting else 1
                if self.streak[key] >= patience:
                    late = 0 < rule.stop_after * patience <= self.streak[key]
                    stops = late or (rule.action == "stop" and not kind)
                    alarms += self.alarm(step, name, seen, stops)
        return alarms

    def alarm(self, step: int, name: str, seen: str, stops: bool | None = None) -> list[Alarm]:
        """The alarm of a rule, or none if the rule is off or warned a few steps ago. `stops` overrides whether it stops the run."""
        settings = self.settings
        stops = RULES[name].action == "stop" if stops is None else stops
        stop = name in settings.stop or (stops and name not in settings.warn)
        last = self.last.get(name)
        recent = last is not None and last <= step < last + settings.repeat_after
        if name in settings.off or (recent and not stop):
            return []
        self.last[name] = step
        return [Alarm(name, "; ".join(filter(None, (f"step {step}: {seen}", ADVICE[name]))), stop)]

    def check_rollouts(self, step: int, groups: Sequence[Group]) -> list[Alarm]:
        """Check the sampled and scored rollouts before they are trained on."""
        rollouts = [r for g in groups for r in g.rollouts]
        failed = [r for r in rollouts if not r.score.valid]
        alarms: list[Alarm] = []
        whole = many(len(rollouts), "response")
        if failed and len(failed) > self.settings.failed * len(rollouts):
            kinds = Counter(str(r.score.failure).split(":")[0] for r in failed).most_common(4)
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            text = f"{len(failed)} of {whole} could not be scored: {named}"
            first = f"problem {failed[0].problem.id}, {failed[0].score.failure}"
            alarms += self.alarm(step, "failed", f"{text}; the first: {first}")
        bad = unusable(rollouts)
        if bad:
            problems = ", ".join(r.problem.id for r in bad[:4])
            text = f"{len(bad)} of {whole} have a log-prob that is not finite or a reward beyond {LARGEST:g}"
            alarms.append(self.skip(step, f"{text} (problems {problems})"))
        return alarms

    def skip(self, step: int, text: str) -> Alarm:
        """Handle a step that must not be trained on: the run stops, or skips the step if the setting `skip` still allows it."""
        self.skipped += 1
        stop = self.skipped > self.settings.skip
        counted = f"the step is left out ({self.skipped} of at most {self.settings.skip} in a row)"
        after = ADVICE["nonfinite"] if stop else counted
        return Alarm("nonfinite", f"step {step}: {text}; nothing was updated; {after}", stop)

    def slow_after(self) -> float | None:
        """The number of seconds after which a step is slow; None while too few steps are known."""
        if len(self.seconds) < START or "slow" in self.settings.off:
            return None
        return max(MIN_SECONDS, self.settings.slow * statistics.median(self.seconds))

    def check_seconds(self, step: int, seconds: float, stacks: str) -> list[Alarm]:
        limit = self.slow_after()
        self.seconds.append(seconds)
        if limit is None or seconds <= limit:
            return []
        middle = statistics.median(self.seconds)
        text = f"the step took {seconds:.1f} s, the median is {middle:.2g} s; stacks of all threads and workers are in {stacks}"
        return self.alarm(step, "slow", text)

    def check_coefficients(self, step: int, dead: Sequence[str] | None) -> list[Alarm]:
        """Report the result of the coefficient check. None: the batch had no gradient to compare, so the next one is checked."""
        self.coefficients_checked = dead is not None
        text = "of the algorithm changes no gradient of the first batch"
        return self.alarm(step, "coefficient", f"{', '.join(dead)} {text}") if dead else []


@dataclass(eq=False)
class StageMonitor:
    """Runs the monitor of a stage on its trainer and run: before a step is trained on, after its metrics are written, and before
    anything is saved."""

    stage: str
    trainer: Trainer
    writer: RunWriter
    checkpoints: Store
    settings: MonitorSettings
    monitor: Monitor = field(init=False)
    pending: list[Alarm] = field(default_factory=list)  # emitted once the figures are written
    watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        self.monitor = Monitor(self.settings)

    def state(self) -> dict[str, JSON]:
        # the token budget as it was set, and as memory allowed
        budget = [self.trainer.settings.token_budget, self.trainer.token_budget]
        return {"monitor": self.monitor.state(), "token_budget": budget}

    def restore(self, state: Mapping[str, JSON]) -> None:
        if "monitor" in state:  # older checkpoints have none
            self.monitor.restore(state["monitor"])
        asked, allowed = state.get("token_budget", (0, 0))
        if asked == self.trainer.settings.token_budget:
            self.trainer.token_budget = allowed

    @property
    def stacks(self) -> str:
        return f"{ALARMS}/{self.stage}-stacks.txt"

    @contextmanager
    def running(self) -> Iterator[StageMonitor]:
        """Active while the stage trains."""
        with closing(Watchdog(self.writer.directory / self.stacks)) as watchdog:
            self.watchdog = watchdog
            try:
                yield self
            finally:
                self.watchdog = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Wraps one step. If it takes many times the median, the stacks of all threads and workers are written, even if it never
        ends. If the device runs out of memory, the run stops with advice."""
        assert self.watchdog is not None
        try:
            with self.watchdog.step(self.monitor.slow_after()):
                yield
        except torch.OutOfMemoryError as error:
            seen, budget = " ".join(str(error).split())[:200], self.trainer.token_budget
            advice = f"lower optimizer.token_budget (now {budget}: the gradient stays the same), set optimizer.checkpointing=layer or "
            advice += "release_cache=true, lower max_rows where it was generating, or max_new_tokens; then resume"
            self.emit(step, self.monitor.alarm(step, "memory", f"out of memory ({seen}); {advice}"))
            raise

    def before(self, step: int, collected: Collected) -> bool:
        """Check the rollouts before they are trained on. False: skip the step."""
        alarms = self.monitor.check_rollouts(step, collected.groups)
        self.pending = [alarm for alarm in alarms if alarm.rule == "nonfinite" and not alarm.stop]
        if any(alarm.rule == "nonfinite" for alarm in alarms):
            self.keep(step, collected.batch, collected.groups)
        self.emit(step, [alarm for alarm in alarms if alarm not in self.pending])
        return not self.pending

    def report_non_finite(
        self, step: int, error: NonFinite, batch: Batch, groups: Sequence[Group]
    ) -> None:
        """Report an update that was not made because its loss or gradient is not finite."""
        text = f"{error.what}{self.keep(step, batch, groups)}"
        self.pending.append(self.monitor.skip(step, text))

    def after(self, step: int, figures: Mapping[str, float]) -> None:
        """After the metrics of a step are written, emit the alarms of the step and those that the metrics show."""
        alarms = [*self.pending, *self.monitor.observe(step, figures)]
        self.pending = []
        seconds = self.monitor.check_seconds(step, figures["seconds/total"], self.stacks)
        self.emit(step, [*alarms, *seconds])

    def check_coefficients(self, step: int, filled: Batch, *seen: Any) -> None:
        """Check once a stage whether every coefficient that was set has an effect. `seen` are the state, groups and metrics of the
        step, for `dead_coefficients`."""
        if self.monitor.coefficients_checked or "coefficient" in self.settings.off:
            return
        if not coefficients(self.trainer.algorithm):
            self.monitor.coefficients_checked = True
            return
        whole = filled.replace(learned=frozenset())  # terms of the roles that have learned, too
        piece = micro_batches(whole, self.trainer.token_budget)[0]
        with torch.no_grad():
            outputs = self.trainer.outputs(piece)
        dead = dead_coefficients(self.trainer.algorithm, piece, outputs, *seen)
        self.pending += self.monitor.check_coefficients(step, dead)

    def check_frozen(self, step: int) -> None:
        """Check that the frozen weights have not changed, before anything is saved or exported."""
        checksum = None if "frozen" in self.settings.off else self.trainer.checksum()
        if self.monitor.frozen is None:
            self.monitor.frozen = checksum
        if checksum != self.monitor.frozen and checksum is not None:
            seen = "weights that must not move are not those the stage began with: the reference, or the base under adapters"
            self.emit(step, self.monitor.alarm(step, "frozen", seen))

    def emit(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Emit the alarms of `step`, then stop the run if one of them demands it. Nothing of the step was saved."""
        for alarm in alarms:
            text, rule = f"{alarm.rule}: {alarm.text}", {"rule": alarm.rule}
            level: Level = "stop" if alarm.stop else "warning"
            self.writer.events.emit("alarm", text, level, stage=self.stage, step=step, data=rule)
        for alarm in alarms:
            if alarm.stop:
                past = self.checkpoints.published()
                intact = f"the checkpoint {past[0].name} is intact" if past else ""
                left = intact or "there is no checkpoint yet"
                raise GuardStop(f"{self.stage}: {alarm.rule}: {alarm.text}; {left}")

    def keep(self, step: int, batch: Batch, groups: Sequence[Group]) -> str:
        """Write a batch that could not be trained on to alarms/, and return which problems it contains."""
        logprob_T = torch.zeros_like(batch.behaviour_T)
        if bool(batch.mask_T.any()):
            logprob_T = self.trainer.logprobs(batch)
        tensors = {
            "ids": batch.ids_T,
            "mask": batch.mask_T,
            "sampled_logprob": batch.behaviour_T,
            "logprob": logprob_T,
            "reward": batch.reward_N,
            **{name[:-2]: c for name, c in batch.columns.items() if name.endswith("_T")},
        }
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        arrays["starts"] = np.array(batch.starts, dtype=np.int64)
        path = self.writer.attachment(f"{self.stage}-step-{step}", arrays)
        bad_T = torch.zeros_like(batch.mask_T)
        for name in ("logprob", "sampled_logprob", "advantage"):
            if name in tensors:
                bad_T |= ~torch.isfinite(tensors[name]) & batch.mask_T
        bad = sorted(set(batch.sequence_T[bad_T].tolist()))
        rollouts = [r for g in groups for r in g.rollouts]
        places = batch.rollout_N.tolist() if "rollout_N" in batch.columns else []
        named = [rollouts[places[n]].problem.id if places else str(n) for n in bad[:4]]
        where = f"; sequences that are not finite: {', '.join(named)}" if bad else ""
        return f" (batch of {many(batch.sequences, 'sequence')} in {ALARMS}/{path.name}{where})"


def alarm_lines(events: Sequence[EventRow]) -> list[str]:
    """The alarms of a run for its final report: for each stage and rule, the first alarm and the number of further ones. An attempt
    that resumed before an alarm repeats it if it recurs, so the first of the last attempt counts if there is one."""
    found: dict[tuple[str, str], list[EventRow]] = {}
    for event in events:
        if event.kind == "alarm":
            key = str(event.details.get("stage", "")), str(event.details.get("rule", ""))
            found.setdefault(key, []).append(event)
    lines = []
    for (stage, _), rows in found.items():
        last = [row for row in rows if row.attempt == rows[-1].attempt]
        more = f" (and {many(len(last) - 1, 'time')} more)" if len(last) > 1 else ""
        lines.append(f"{stage}: {last[0].details.get('text', '')}{more}")
    return lines
