"""The monitors of one training stage: probes measure each step, the rules read their series, and alarms are emitted or end the run."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.algorithms.base import State
from posttrain.collect import Collected
from posttrain.errors import GuardStop
from posttrain.monitor.coefficients import dead_coefficients
from posttrain.monitor.probes import LARGEST, Keywords, rollout_figures, unusable, words
from posttrain.monitor.rules import RULES, Alarm, MonitorSettings, Rules
from posttrain.monitor.series import START, History
from posttrain.monitor.traits import TraitSums
from posttrain.monitor.watchdog import Watchdog
from posttrain.runs.layout import ALARMS, EventRow
from posttrain.runs.write import RunWriter
from posttrain.train.pack import micro_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import JSON, Batch, Group, Metric

MIN_SECONDS = 10.0  # a step shorter than this is never called slow


class Monitor:
    """Probes, series and rules of one stage as functions of figures and rollouts. Their state is part of every checkpoint, but for the
    durations of recent steps: another attempt may run on another machine."""

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.rules, self.history = Rules(settings or MonitorSettings()), History()
        self.keywords, self.traits = Keywords(), TraitSums()
        self.skipped = 0  # steps in a row that were left out
        self.coefficients_checked = False
        self.frozen: int | None = None  # checksum of the weights that must not move
        self.seconds: deque[float] = deque(maxlen=64)

    @property
    def settings(self) -> MonitorSettings:
        return self.rules.settings

    def state(self) -> dict[str, JSON]:
        return {
            "streak": self.rules.streak,
            "last": self.rules.last,
            "history": self.history.state(),
            "keywords": self.keywords.state(),
            "traits": vars(self.traits),
            "skipped": self.skipped,
            "coefficients_checked": self.coefficients_checked,
            "frozen": self.frozen,
        }

    def restore(self, state: Mapping[str, JSON]) -> None:
        self.rules.streak, self.rules.last = dict(state["streak"]), dict(state["last"])
        self.history.restore(state["history"])
        self.keywords.restore(state["keywords"])
        self.traits = TraitSums(**state["traits"])
        self.skipped, self.frozen = int(state["skipped"]), state["frozen"]
        self.coefficients_checked = bool(state["coefficients_checked"])

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """Figures of a step's rollouts, with those that need earlier steps: `keyword`, the share of responses with the most widespread
        word that was rare at first, and `agreement` of reward and gold over the last steps, where both are known."""
        figures, rollouts = rollout_figures(groups), [r for g in groups for r in g.rollouts]
        if not rollouts:
            return figures
        having = words(rollouts)
        figures["keyword"] = self.keywords.share(having, len(rollouts))
        self.traits.add(groups, having)
        agreement = self.traits.agreement()
        return figures if agreement is None else {**figures, "agreement": agreement}

    def observe(self, step: int, figures: Mapping[str, float]) -> list[Alarm]:
        """Add the figures of a step to the series, and apply the rules to them. Only what was sampled has limits and trends: in
        supervised training entropy falls to nothing."""
        if all(math.isfinite(figures.get(name, math.nan)) for name in ("loss", "grad_norm")):
            self.skipped = 0  # an update was made
        if "reward" not in figures:
            return []
        if self.history.add(step, figures):
            self.rules.forget_trends()
            self.traits = TraitSums()
        return self.rules.apply(step, self.history, self.traits.conflicts())

    def check_rollouts(self, step: int, groups: Sequence[Group]) -> list[Alarm]:
        """Look at what was sampled and scored, before it is trained on."""
        rollouts = [r for g in groups for r in g.rollouts]
        failed = [r for r in rollouts if not r.score.valid]
        alarms: list[Alarm] = []
        if failed and len(failed) > self.settings.failed * len(rollouts):
            kinds = Counter(str(r.score.failure).split(":")[0] for r in failed).most_common(4)
            named = ", ".join(f"{count} {kind}" for kind, count in kinds)
            text = f"{len(failed)} of {len(rollouts)} responses could not be scored: {named}"
            first = f"problem {failed[0].problem.id}, {failed[0].score.failure}"
            alarms += self.rules.alarm(step, "failed", f"{text}; the first: {first}")
        bad = [r for r in rollouts if unusable(r)]
        if bad:
            problems = ", ".join(r.problem.id for r in bad[:4])
            text = f"{len(bad)} of {len(rollouts)} responses have a log-prob that is not finite or a reward beyond {LARGEST:g}"
            alarms.append(self.skip(step, f"{text} (problems {problems})"))
        return alarms

    def skip(self, step: int, text: str) -> Alarm:
        """A step that must not be trained on: the run stops, or leaves it out where the setting `skip` still allows that."""
        self.skipped += 1
        stop = self.skipped > self.settings.skip
        counted = f"the step is left out ({self.skipped} of at most {self.settings.skip} in a row)"
        after = RULES["nonfinite"].advice if stop else counted
        return Alarm("nonfinite", f"step {step}: {text}; nothing was updated; {after}", stop)

    def slow_after(self) -> float | None:
        """Seconds after which a step is slow; None while too few are known."""
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
        return self.rules.alarm(step, "slow", text)

    def check_coefficients(self, step: int, dead: Sequence[str] | None) -> list[Alarm]:
        """What the check at the start found; None: the batch had no gradient to compare, so that the next one is taken."""
        self.coefficients_checked = dead is not None
        text = "of the algorithm changes no gradient of the first batch"
        return self.rules.alarm(step, "coefficient", f"{', '.join(dead)} {text}") if dead else []

    def check_frozen(self, step: int, checksum: int | None) -> list[Alarm]:
        """Compare a checksum of the frozen weights with the one that the stage began with."""
        if self.frozen is None:
            self.frozen = checksum
        if checksum is None or checksum == self.frozen:
            return []
        text = "weights that must not move are not those the stage began with: the reference, or the base under adapters"
        return self.rules.alarm(step, "frozen", text)


@dataclass(eq=False)
class StageMonitor:
    """Runs the monitor of a stage on its trainer and run: before a step is trained on, after its figures are written, before anything
    is saved."""

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
        """For as long as the stage trains."""
        with closing(Watchdog(self.writer.directory / self.stacks)) as watchdog:
            self.watchdog = watchdog
            try:
                yield self
            finally:
                self.watchdog = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step: if it takes many times the median, the stacks of all threads and workers are written, also if it never
        ends; if the device has no memory for it, the run stops with advice."""
        assert self.watchdog is not None
        try:
            with self.watchdog.step(self.monitor.slow_after()):
                yield
        except torch.OutOfMemoryError as error:
            seen, budget = " ".join(str(error).split())[:200], self.trainer.token_budget
            advice = f"lower optimizer.token_budget (now {budget}: the gradient stays the same), set optimizer.checkpointing=layer or "
            advice += "release_cache=true, lower max_rows where it was generating, or max_new_tokens; then resume"
            self.emit(
                step, self.monitor.rules.alarm(step, "memory", f"out of memory ({seen}); {advice}")
            )
            raise

    def before(self, step: int, collected: Collected) -> bool:
        """Look at the rollouts before they are trained on. False: the step is left out."""
        alarms = self.monitor.check_rollouts(step, collected.groups)
        self.pending = [alarm for alarm in alarms if alarm.rule == "nonfinite" and not alarm.stop]
        if any(alarm.rule == "nonfinite" for alarm in alarms):
            self.keep(step, collected.batch, collected.groups)
        self.emit(step, [alarm for alarm in alarms if alarm not in self.pending])
        return not self.pending

    def broken(self, step: int, error: NonFinite, batch: Batch, groups: Sequence[Group]) -> None:
        """An update that was not made: its loss or gradient is not finite."""
        text = f"{error.what}{self.keep(step, batch, groups)}"
        self.pending.append(self.monitor.skip(step, text))

    def after(self, step: int, figures: Mapping[str, float]) -> None:
        """Once the figures of a step are written: emit what was found in it, and what they show."""
        alarms = [*self.pending, *self.monitor.observe(step, figures)]
        self.pending = []
        seconds = self.monitor.check_seconds(step, figures["seconds/total"], self.stacks)
        self.emit(step, [*alarms, *seconds])

    def check_coefficients(
        self,
        step: int,
        filled: Batch,
        state: State,
        groups: Sequence[Group],
        metrics: Sequence[Metric],
    ) -> None:
        """Once a stage: whether every coefficient that was set does something."""
        if self.monitor.coefficients_checked or "coefficient" in self.settings.off:
            return
        piece = micro_batches(filled, self.trainer.token_budget)[0]
        with torch.no_grad():
            outputs = self.trainer.outputs(piece)
        dead = dead_coefficients(self.trainer.algorithm, piece, outputs, state, groups, metrics)
        self.pending += self.monitor.check_coefficients(step, dead)

    def check_frozen(self, step: int) -> None:
        """Before anything is saved or handed on: the frozen weights are those of the start."""
        if "frozen" not in self.settings.off:
            self.emit(step, self.monitor.check_frozen(step, self.trainer.checksum()))

    def emit(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Emit the alarms of `step`; then stop, if one of them says so. Nothing of the step was saved."""
        for alarm in alarms:
            self.writer.events.emit(
                "alarm",
                f"{alarm.rule}: {alarm.text}",
                "stop" if alarm.stop else "warning",
                stage=self.stage,
                step=step,
                data={"rule": alarm.rule},
            )
        for alarm in alarms:
            if alarm.stop:
                past = self.checkpoints.published()
                intact = f"the checkpoint {past[0].name} is intact" if past else ""
                left = intact or "there is no checkpoint yet"
                raise GuardStop(f"{self.stage}: {alarm.rule}: {alarm.text}; {left}")

    def keep(self, step: int, batch: Batch, groups: Sequence[Group]) -> str:
        """Write a batch that could not be trained on to alarms/, and say which problems it is about."""
        logprob_T = (
            self.trainer.logprobs(batch)
            if bool(batch.mask_T.any())
            else torch.zeros_like(batch.behaviour_T)
        )
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
        for figure_T in (logprob_T, batch.behaviour_T, batch.columns.get("advantage_T")):
            if figure_T is not None:
                bad_T |= ~torch.isfinite(figure_T) & batch.mask_T
        bad = sorted(set(batch.sequence_T[bad_T].tolist()))
        rollouts = [r for g in groups for r in g.rollouts]
        places = batch.rollout_N.tolist() if "rollout_N" in batch.columns else []
        named = [rollouts[places[n]].problem.id if places else str(n) for n in bad[:4]]
        where = f"; sequences that are not finite: {', '.join(named)}" if bad else ""
        return f" (batch of {batch.sequences} sequences in {ALARMS}/{path.name}{where})"


def alarm_lines(events: Sequence[EventRow]) -> list[str]:
    """The alarms of a run, of each stage and rule the first and how many more, for its end. An attempt that went back to before an
    alarm repeats it if it comes again, so the first of the last attempt counts where there is one."""
    found: dict[tuple[str, str], list[EventRow]] = {}
    for event in events:
        if event.kind == "alarm":
            key = str(event.details.get("stage", "")), str(event.details.get("rule", ""))
            found.setdefault(key, []).append(event)
    lines = []
    for (stage, _), rows in found.items():
        last = [row for row in rows if row.attempt == rows[-1].attempt]
        more = f" (and {len(last) - 1} times more)" if len(last) > 1 else ""
        lines.append(f"{stage}: {last[0].details.get('text', '')}{more}")
    return lines
