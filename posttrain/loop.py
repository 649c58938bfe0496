"""THE loop: collect, fill, prepare, update, finish; write it down; evaluate; save. Every kind of training goes through it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from posttrain.algorithms.base import Algorithm, State
from posttrain.algorithms.sft import SFT
from posttrain.errors import GuardStop, Interrupted, UserError, require
from posttrain.ops.kl import kl_estimate
from posttrain.rollouts import Collected
from posttrain.runs.alarms import Alarms
from posttrain.runs.console import Console, printable, write_text
from posttrain.runs.guards import Alarm, Guards, Watch, Watchdog, rollout_figures
from posttrain.runs.layout import ALARMS, TokenArrays
from posttrain.runs.metrics import merge
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.train import checkpoint
from posttrain.train.coefficients import dead_coefficients
from posttrain.train.pack import micro_batches, mini_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import JSON, Batch, Group, Metric, Sampler


class Source(Protocol):
    """Where the material of a step comes from; see rollouts.py."""

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected: ...

    def observe(self, groups: Sequence[Group]) -> list[str]: ...

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None: ...


@dataclass
class Interrupt:
    """Set by a signal handler; the loop looks at it between steps."""

    requested: bool = False


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """How long and how often. `seconds` ends the stage early (0: never)."""

    steps: int
    evaluate_every: int = 0
    checkpoint_every: int = 25
    rollouts_every: int = 5
    seconds: float = 0.0


@dataclass(eq=False)
class Loop:
    """One stage's training. What changes while it runs: `step`, `elapsed`, `state` and `watch`, the trainer, the sources, the
    generators of random numbers."""

    stage: str
    rhythm: Rhythm
    trainer: Trainer
    source: Source
    writer: RunWriter
    checkpoints: Store
    interrupt: Interrupt
    trackers: Trackers | None = None
    sampler: Sampler | None = None
    evaluate: Callable[[], Mapping[str, float]] | None = None
    pretraining: Source | None = None  # text that is mixed into every optimizer step
    guards: Guards = field(default_factory=Guards)
    alarms: Alarms = field(default_factory=Alarms)
    step: int = 0  # optimizer steps of the loop that are done
    elapsed: float = 0.0  # seconds over all attempts
    state: State = field(default_factory=dict)  # the algorithm's
    identities: dict[str, JSON] | None = None  # derived: of the frozen models
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.guards)

    def run(self) -> None:
        """Go from the newest good checkpoint, or from the start, to the end."""
        self.state = self.trainer.algorithm.start()
        self.resume()
        stacks = self.writer.directory / ALARMS / f"{self.stage}-stacks.txt"
        shown = Console.open(self.rhythm.steps, self.stage, self.step)
        with shown as console, self.checkpoints, closing(Watchdog(stacks)) as watchdog:
            self.check_frozen(console)
            if self.step == 0 and self.evaluate is not None and self.rhythm.evaluate_every:
                self.report(console, dict(self.evaluate()))
            while not self.finished():
                began = time.perf_counter()
                self.checkpoints.check()
                try:
                    with watchdog.step(self.watch.slowest()):
                        figures, alarms = self.one_step(console)
                except torch.OutOfMemoryError as error:
                    budget = self.trainer.settings.token_budget
                    self.sound(console, self.watch.memory_full(self.step + 1, str(error), budget), self.step + 1)
                    raise
                seconds = time.perf_counter() - began
                self.elapsed += seconds
                figures |= {"seconds/total": seconds, "tokens_per_second": figures["tokens"] / seconds}
                if self.due(self.rhythm.evaluate_every) and self.evaluate is not None:
                    figures |= self.evaluate()
                self.report(console, figures)
                alarms += [*self.watch.figures(self.step, figures), *self.alarms.observe(self.step, figures)]
                self.sound(console, [*alarms, *self.watch.seconds(self.step, seconds, f"{ALARMS}/{stacks.name}")])
                asked = self.interrupt.requested
                if asked or (self.step % self.rhythm.checkpoint_every == 0 and not self.finished()):
                    self.check_frozen(console)
                    self.save()
                if asked:
                    self.checkpoints.finish()
                    raise Interrupted(f"stopped after step {self.step} of {self.stage}")
            self.check_frozen(console)

    def finished(self) -> bool:
        return self.step >= self.rhythm.steps or bool(self.rhythm.seconds and self.elapsed >= self.rhythm.seconds)

    def due(self, every: int) -> bool:
        return bool(every) and (self.step % every == 0 or self.finished())

    def one_step(self, console: Console) -> tuple[dict[str, float], list[Alarm]]:
        """Collect material, let the algorithm prepare it, update; once or more on the same rollout. What the guards say of it is
        heard once its figures are written."""
        algorithm, trainer = self.trainer.algorithm, self.trainer
        collected = self.source.collect(self.step, algorithm, self.state)
        began = time.perf_counter()
        metrics = [*collected.metrics, Metric("tokens", collected.batch.tokens, None)]
        alarms = self.look(console, collected)
        shown = bool(collected.groups) and (
            (self.step + 1) % self.rhythm.rollouts_every == 0 or self.step + 1 in (1, self.rhythm.steps)
        )
        filled = trainer.fill(collected.batch, watch=shown)
        if filled.reference_T is not None and "reference" not in algorithm.needs:
            metrics.append(watched_kl(filled))
        epochs, pieces = algorithm.reuse
        rate = trainer.settings.rate(self.step, self.rhythm.steps)
        reuse = [] if alarms else [piece for _ in range(epochs) for piece in mini_batches(filled, pieces)]
        for number, piece in enumerate(reuse):
            prepared = algorithm.prepare(piece, self.state)
            try:
                update = trainer.update(prepared, rate, self.pretraining_batch())
            except NonFinite as error:
                metrics += [*error.metrics, Metric("grad_norm", error.norm, 1)]
                alarms = self.watch.broken(self.step + 1, f"{error.what}{self.keep(prepared, collected.groups)}")
                break
            metrics += [*update.metrics, Metric("grad_norm", update.grad_norm, 1), Metric("updates", 1, None)]
            if number == 0 and len(reuse) > 1:  # later ones are meant to differ from what sampled
                metrics += [replace(m, name="mismatch/start") for m in update.metrics if m.name == "mismatch"]
            if len(reuse) > 1 and algorithm.enough(update.metrics):
                break
        if not alarms:
            alarms += self.check_coefficients(filled, collected.groups, metrics)
            self.state = algorithm.finish(self.state, metrics)
        seconds = collected.seconds | {"train": time.perf_counter() - began}
        self.step += 1
        if self.sampler is not None:
            self.sampler.update(self.step)
        if shown:
            self.write_rollouts(collected.groups, algorithm.prepare(filled, self.state))
        for news in self.source.observe(collected.groups):
            console.event(news)
            self.writer.event("curriculum", {"stage": self.stage, "step": self.step, "text": news})
        seen = rollout_figures(collected.groups) | self.alarms.texts(collected.groups)
        figures = seen | dict(merge(metrics)) | {"learning_rate": rate}
        return figures | {f"seconds/{name}": value for name, value in seconds.items()}, alarms

    def pretraining_batch(self) -> tuple[Algorithm, Batch] | None:
        """Pretraining text for one optimizer step, weighed by the algorithm's coefficient."""
        if self.pretraining is None:
            return None
        plain = SFT()
        batch = plain.prepare(self.pretraining.collect(self.step, plain, {}).batch, {})
        assert batch.weight_T is not None
        return plain, batch.replace(weight_T=self.trainer.algorithm.pretraining * batch.weight_T)

    def report(self, console: Console, figures: Mapping[str, float]) -> None:
        row = self.writer.metrics(self.stage, self.step, figures)
        if self.trackers is not None:
            self.trackers.log(row)
        console.update(figures, self.step)

    def write_rollouts(self, groups: Sequence[Group], batch: Batch) -> None:
        """The step's rollouts as text, and what the algorithm made of each token."""
        rollouts = [r for g in groups for r in g.rollouts]
        if len(rollouts) != batch.sequences:  # some were not selected: their text is kept, token arrays would not align
            self.writer.rollouts(self.stage, self.step, rollouts)
            return
        none_T = torch.zeros_like(batch.behaviour_T)
        arrays = {
            "ids": batch.ids_T,
            "logprob": batch.behaviour_T,
            "advantage": none_T if batch.advantage_T is None else batch.advantage_T,
        }
        if batch.value_T is not None:
            arrays["value"] = batch.value_T
        if batch.reference_T is not None:
            arrays["kl"] = kl_estimate("k3", batch.behaviour_T, batch.reference_T).where(batch.mask_T, 0.0)
        host = {name: tensor.cpu().numpy() for name, tensor in arrays.items()}
        starts = np.array(batch.starts, dtype=np.int64)
        advantages = [float(host["advantage"][end - 1]) for end in starts[1:]]
        self.writer.rollouts(self.stage, self.step, rollouts, advantages, TokenArrays(starts, host))

    def save(self) -> None:
        """Write everything that a resumed run needs to be the same run."""
        generators = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
        state = {
            "stage": self.stage,
            "algorithm": self.state,
            "source": self.source.state(),
            "pretraining": None if self.pretraining is None else self.pretraining.state(),
            "generators": generators,
            "elapsed": self.elapsed,
            "frozen": self.frozen(),
            "guards": self.watch.state(),
            "alarms": self.alarms.state(),
        }
        made = checkpoint.Checkpoint(self.step, self.trainer.weights(), self.trainer.moments(), state)
        self.checkpoints.save(made, self.writer.event)

    def frozen(self) -> dict[str, JSON]:
        """Who the models are that do not learn, by their weights; worked out once."""
        if self.identities is None:
            reference, rating = self.trainer.reference, getattr(self.source, "rating", None)
            self.identities = {
                "reference": None if reference is None else checkpoint.identity(reference.model),
                "reward": [checkpoint.identity(model) for model in getattr(rating, "models", ())],
            }
        return self.identities

    def resume(self) -> None:
        """Take up the newest checkpoint that verifies; say what was wrong with newer ones."""
        path, problems = self.checkpoints.newest()
        for problem in problems:
            self.writer.event("damaged", {"stage": self.stage, "text": problem})
            write_text(f"{self.stage}: {printable(problem)}\n", sys.stderr)
        if path is None:
            if problems:
                folder = self.checkpoints.directory
                raise UserError(f"no usable checkpoint: {problems[0]}; remove {folder} to start the stage again")
            if self.writer.attempt > 1:
                self.writer.resumed(self.stage, -1)
            return
        saved = checkpoint.load(path)
        try:
            self.restore(saved, path)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            RuntimeError,
        ) as error:  # it is whole, but not ours
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise UserError(f"{path} is not of this stage ({what}); remove it, then resume") from error
        self.writer.resumed(self.stage, self.step)

    def restore(self, saved: checkpoint.Checkpoint, path: Path) -> None:
        """Put everything back; the generators last, because the rest may draw from them."""
        for who, before in saved.state.get("frozen", {}).items():  # absent in checkpoints of format 1
            require(before == self.frozen().get(who), f"the {who} model of {self.stage} is not the one that {path} was made with: "
                    "its weights differ; put it back, or start a new run")  # fmt: skip
        self.trainer.restore(saved.model, saved.optimizer)
        self.step, self.state, self.elapsed = saved.step, saved.state["algorithm"], saved.state["elapsed"]
        self.source.restore(saved.state["source"])
        self.watch.restore(saved.state.get("guards", {}))  # older checkpoints have none
        self.alarms.restore(saved.state.get("alarms", {}))
        if self.pretraining is not None:
            self.pretraining.restore(saved.state["pretraining"])
        if self.sampler is not None:
            self.sampler.update(self.step)
        torch.set_rng_state(_generator(saved.state["generators"]["cpu"]))
        if torch.cuda.is_available() and "cuda" in saved.state["generators"]:
            torch.cuda.set_rng_state(_generator(saved.state["generators"]["cuda"]))

    # --- guards --------------------------------------------------------------------------------------------------------

    def sound(self, console: Console, alarms: Sequence[Alarm], step: int = 0) -> None:
        """Tell the events and the person of every alarm of `step` (0: the last one that is done); then stop, if one of them says so.
        Nothing of this step was saved."""
        for alarm in alarms:
            self.writer.event("alarm", {"stage": self.stage, "step": step or self.step, **asdict(alarm)})
            console.event(f"{'stop' if alarm.stop else 'warning'}: {alarm.guard}: {alarm.text}")
        for alarm in alarms:
            if alarm.stop:
                past = checkpoint.steps(self.checkpoints.directory)
                left = f"the checkpoint {past[0].name} is intact" if past else "there is no checkpoint yet"
                raise GuardStop(f"{self.stage}: {alarm.guard}: {alarm.text}; {left}")

    def look(self, console: Console, collected: Collected) -> list[Alarm]:
        """What the guards say of the material, before anything is learned from it. What is left are steps to be left out."""
        alarms = self.watch.rollouts(self.step + 1, collected.groups)
        if any(alarm.guard == "nonfinite" for alarm in alarms):
            self.keep(collected.batch, collected.groups)
        said = [alarm for alarm in alarms if alarm.stop or alarm.guard != "nonfinite"]
        self.sound(console, said, self.step + 1)
        return [alarm for alarm in alarms if alarm not in said]

    def keep(self, batch: Batch, groups: Sequence[Group]) -> str:
        """Write a batch that could not be learned from to alarms/, and say which problems it is about."""
        logprob_T = self.trainer.logprobs(batch) if bool(batch.mask_T.any()) else torch.zeros_like(batch.behaviour_T)
        tensors = {
            "ids": batch.ids_T, "mask": batch.mask_T, "sampled_logprob": batch.behaviour_T, "logprob": logprob_T,
            "reference": batch.reference_T, "advantage": batch.advantage_T, "weight": batch.weight_T, "reward": batch.reward_N,
        }  # fmt: skip
        host = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items() if tensor is not None}
        arrays = {**host, "starts": np.array(batch.starts, dtype=np.int64)}
        path = self.writer.attachment(f"{self.stage}-step-{self.step + 1}", arrays)
        odd_T = sum(
            ~torch.isfinite(t) & batch.mask_T for t in (logprob_T, batch.behaviour_T, batch.advantage_T) if t is not None
        )
        odd = sorted(set(batch.sequence_T[odd_T.bool()].tolist()))
        rollouts = [r for g in groups for r in g.rollouts]
        named = [rollouts[n].problem.id for n in odd[:4]] if len(rollouts) == batch.sequences else [str(n) for n in odd[:4]]
        where = f"; sequences that are not finite: {', '.join(named)}" if odd else ""
        return f" (batch of {batch.sequences} sequences in {ALARMS}/{path.name}{where})"

    def check_coefficients(self, filled: Batch, groups: Sequence[Group], metrics: Sequence[Metric]) -> list[Alarm]:
        """Once a stage: whether every coefficient that was set does something."""
        if self.watch.memory["checked"] or "coefficient" in self.guards.off:
            return []
        piece = micro_batches(filled, self.trainer.settings.token_budget)[0]
        with torch.no_grad():
            outputs = self.trainer.outputs(piece)
        dead = dead_coefficients(self.trainer.algorithm, piece, outputs, self.state, groups, metrics)
        return self.watch.coefficients(self.step + 1, dead)

    def check_frozen(self, console: Console) -> None:
        """Before anything is saved or handed on: what must not move has not moved."""
        if "frozen" not in self.guards.off:
            self.sound(console, self.watch.frozen(self.step, self.trainer.checksum()))


def watched_kl(batch: Batch) -> Metric:
    """KL from the reference over the sampled tokens, for the eye alone: no term of the loss uses it."""
    assert batch.reference_T is not None
    kl_T = kl_estimate("k3", batch.behaviour_T, batch.reference_T).where(batch.mask_T, 0.0)
    return Metric("kl", kl_T.sum(), batch.mask_T.sum())


def _generator(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
