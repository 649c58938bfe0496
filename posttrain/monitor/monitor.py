"""What stands guard over the loop of one stage: guards, alarms and the watchdog, and who is told of what they see.

What they look for is in monitor/guards.py and monitor/alarms.py, as functions of figures. Here it meets the trainer and the run: before
a step's material is learned from, after its figures are written, before anything is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.algorithms.base import State
from posttrain.collect import Collected
from posttrain.errors import GuardStop
from posttrain.monitor.alarms import Alarms, AlarmSettings
from posttrain.monitor.coefficients import dead_coefficients
from posttrain.monitor.guards import Alarm, Guards, Watch, rollout_figures
from posttrain.monitor.watchdog import Watchdog
from posttrain.runs.layout import ALARMS
from posttrain.runs.write import RunWriter
from posttrain.train.pack import micro_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import JSON, Batch, Group, Metric


@dataclass(eq=False)
class Guarding:
    """The guards of one stage at work. `watch` and `alarms` remember; what they remember is part of every checkpoint."""

    stage: str
    trainer: Trainer
    writer: RunWriter
    checkpoints: Store
    guards: Guards
    hearing: AlarmSettings
    watch: Watch = field(init=False)
    alarms: Alarms = field(init=False)
    watchdog: Watchdog | None = None

    def __post_init__(self) -> None:
        self.watch, self.alarms = Watch(self.guards), Alarms(self.hearing)

    def state(self) -> dict[str, JSON]:
        budget = [
            self.trainer.settings.token_budget,
            self.trainer.token_budget,
        ]  # as set, and as memory allowed
        return {"guards": self.watch.state(), "alarms": self.alarms.state(), "token_budget": budget}

    def restore(self, state: Mapping[str, JSON]) -> None:
        self.watch.restore(state.get("guards", {}))  # older checkpoints have none
        self.alarms.restore(state.get("alarms", {}))
        asked, allowed = state.get("token_budget", (0, 0))
        if asked == self.trainer.settings.token_budget:
            self.trainer.token_budget = allowed

    @contextmanager
    def on_duty(self) -> Iterator[Guarding]:
        """For as long as the stage trains."""
        with closing(
            Watchdog(self.writer.directory / ALARMS / f"{self.stage}-stacks.txt")
        ) as watchdog:
            self.watchdog = watchdog
            try:
                yield self
            finally:
                self.watchdog = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Look on for one step: if it takes many times the median, the stacks of everyone are written down, also if it never ends."""
        assert self.watchdog is not None
        with self.watchdog.step(self.watch.slowest()):
            yield

    def before(self, step: int, collected: Collected) -> list[Alarm]:
        """Look at the material before anything is learned from it. What is returned says that the step is to be left out."""
        alarms = self.watch.rollouts(step, collected.groups)
        if any(alarm.guard == "nonfinite" for alarm in alarms):
            self.keep(step, collected.batch, collected.groups)
        said = [alarm for alarm in alarms if alarm.stop or alarm.guard != "nonfinite"]
        self.sound(step, said)
        return [alarm for alarm in alarms if alarm not in said]

    def broken(
        self, step: int, error: NonFinite, batch: Batch, groups: Sequence[Group]
    ) -> list[Alarm]:
        """An update that was not made."""
        return self.watch.broken(step, f"{error.what}{self.keep(step, batch, groups)}")

    def out_of_memory(self, step: int, error: torch.OutOfMemoryError) -> None:
        """In generation, or in training with half the token budget already: there is no memory for a step."""
        self.sound(step, self.watch.memory_full(step, str(error), self.trainer.token_budget))

    def seen(self, groups: Sequence[Group]) -> dict[str, float]:
        """Figures of the rollouts that guards and alarms look at besides the usual ones."""
        return rollout_figures(groups) | self.alarms.texts(groups)

    def after(self, step: int, alarms: Sequence[Alarm], figures: Mapping[str, float]) -> None:
        """Once the figures of a step are written: sound what was found in it, and what they show."""
        drift = [*self.watch.figures(step, figures), *self.alarms.observe(step, figures)]
        stacks = f"{ALARMS}/{self.stage}-stacks.txt"
        self.sound(
            step, [*alarms, *drift, *self.watch.seconds(step, figures["seconds/total"], stacks)]
        )

    def check_coefficients(
        self,
        step: int,
        filled: Batch,
        state: State,
        groups: Sequence[Group],
        metrics: Sequence[Metric],
    ) -> list[Alarm]:
        """Once a stage: whether every coefficient that was set does something."""
        if self.watch.memory["checked"] or "coefficient" in self.guards.off:
            return []
        piece = micro_batches(filled, self.trainer.token_budget)[0]
        with torch.no_grad():
            outputs = self.trainer.outputs(piece)
        return self.watch.coefficients(
            step, dead_coefficients(self.trainer.algorithm, piece, outputs, state, groups, metrics)
        )

    def check_frozen(self, step: int) -> None:
        """Before anything is saved or handed on: what must not move has not moved."""
        if "frozen" not in self.guards.off:
            self.sound(step, self.watch.frozen(step, self.trainer.checksum()))

    def sound(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Tell the events and the person of every alarm of `step`; then stop, if one of them says so. Nothing of it was saved."""
        for alarm in alarms:
            self.writer.events.emit(
                "alarm",
                f"{alarm.guard}: {alarm.text}",
                "stop" if alarm.stop else "warning",
                stage=self.stage,
                step=step,
                data={"rule": alarm.guard},
            )
        for alarm in alarms:
            if alarm.stop:
                past = self.checkpoints.published()
                left = (
                    f"the checkpoint {past[0].name} is intact"
                    if past
                    else "there is no checkpoint yet"
                )
                raise GuardStop(f"{self.stage}: {alarm.guard}: {alarm.text}; {left}")

    def keep(self, step: int, batch: Batch, groups: Sequence[Group]) -> str:
        """Write a batch that could not be learned from to alarms/, and say which problems it is about."""
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
            "reference": batch.reference_T,
            "advantage": batch.advantage_T,
            "weight": batch.weight_T,
            "reward": batch.reward_N,
        }
        host = {
            name: tensor.detach().cpu().numpy()
            for name, tensor in tensors.items()
            if tensor is not None
        }
        arrays = {**host, "starts": np.array(batch.starts, dtype=np.int64)}
        path = self.writer.attachment(f"{self.stage}-step-{step}", arrays)
        odd_T = torch.zeros_like(batch.mask_T)
        for figure_T in (logprob_T, batch.behaviour_T, batch.advantage_T):
            if figure_T is not None:
                odd_T |= ~torch.isfinite(figure_T) & batch.mask_T
        odd = sorted(set(batch.sequence_T[odd_T].tolist()))
        rollouts = [r for g in groups for r in g.rollouts]
        places = [] if batch.rollout_N is None else batch.rollout_N.tolist()
        named = [rollouts[places[n]].problem.id if places else str(n) for n in odd[:4]]
        where = f"; sequences that are not finite: {', '.join(named)}" if odd else ""
        return f" (batch of {batch.sequences} sequences in {ALARMS}/{path.name}{where})"
