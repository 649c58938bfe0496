"""THE loop: collect, fill, prepare, update, finish; write it down; evaluate; save. Every kind of training goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from posttrain.algorithms.base import Algorithm, State
from posttrain.collect import Collected
from posttrain.engine.random import derive
from posttrain.errors import Interrupted, UserError, require
from posttrain.monitor.monitor import StageMonitor
from posttrain.monitor.rules import MonitorSettings
from posttrain.runs.console import Console
from posttrain.runs.layout import TokenArrays
from posttrain.runs.metrics import Best, best_score, merge
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.train import checkpoint
from posttrain.train.pack import mini_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer
from posttrain.types import JSON, Batch, Group, Metric, Sampler

# what a checkpoint of another stage may raise
FOREIGN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


class Source(Protocol):
    """Where the material of a step comes from; see rollouts.py."""

    def collect(self, step: int, algorithm: Algorithm, state: State) -> Collected: ...

    def observe(self, groups: Sequence[Group]) -> None: ...

    def state(self) -> JSON: ...

    def restore(self, state: JSON) -> None: ...

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The frozen models that score, for a checkpoint to name them by their weights."""
        ...


@dataclass
class Interrupt:
    """Set by a signal handler; the loop looks at it between steps."""

    requested: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopSchedule:
    """How long and how often; 0 is never. `seconds` ends the stage early."""

    steps: int
    evaluate_every: int = 0
    checkpoint_every: int = 25
    rollouts_every: int = 5
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "checkpoint_every", "rollouts_every", "seconds"):
            require(
                getattr(self, name) >= 0,
                f"{name} is {getattr(self, name)}; it must be 0 (never) or more",
            )


@dataclass(eq=False)
class Loop:
    """One stage's training. What changes while it runs: `step`, `elapsed`, `best`, `state` and `stage_monitor`, the trainer, the
    sources, the generators of random numbers."""

    stage: str
    schedule: LoopSchedule
    trainer: Trainer
    source: Source
    writer: RunWriter
    checkpoints: Store
    interrupt: Interrupt
    trackers: Trackers | None = None
    sampler: Sampler | None = None
    evaluate: Callable[[], Mapping[str, float]] | None = None
    release: Callable[[], None] | None = (
        None  # called between sampling and learning: gives the sampler's cache back
    )
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    seed: int = 0  # of the run: decides which groups go into a mini-batch together
    step: int = 0  # optimizer steps of the loop that are done
    elapsed: float = 0.0  # seconds over all attempts
    best: Best | None = None  # the best held-out score so far
    state: State = field(default_factory=dict)  # the algorithm's
    identities: dict[str, JSON] | None = None  # derived: of the frozen models
    stage_monitor: StageMonitor = field(init=False)

    def __post_init__(self) -> None:
        self.stage_monitor = StageMonitor(
            self.stage, self.trainer, self.writer, self.checkpoints, self.monitor
        )

    def run(self) -> None:
        """Go from the newest good checkpoint, or from the start, to the end."""
        self.state = self.trainer.algorithm.start()
        self.resume()
        shown = Console.open(self.schedule.steps, self.stage, self.step)
        events = self.writer.events
        with (
            shown as console,
            self.checkpoints,
            events.shown_by(console.show),
            events.at(self.stage, self.step),
            self.stage_monitor.running() as monitor,
        ):
            monitor.check_frozen(self.step)
            if self.step == 0 and self.schedule.evaluate_every and self.evaluate is not None:
                self.report(console, self.measure())
            while not self.finished():
                began, events.step = time.perf_counter(), self.step + 1
                self.checkpoints.check()
                with monitor.step(self.step + 1):
                    figures = self.one_step()
                seconds = time.perf_counter() - began
                self.elapsed += seconds
                figures |= {
                    "seconds/total": seconds,
                    "tokens_per_second": figures["tokens"] / seconds,
                }
                if self.due(self.schedule.evaluate_every):
                    figures |= self.measure()
                self.report(console, figures)
                monitor.after(self.step, figures)
                asked = self.interrupt.requested
                if asked or (
                    is_due(self.step, self.schedule.checkpoint_every) and not self.finished()
                ):
                    monitor.check_frozen(self.step)
                    self.save()
                if asked:
                    self.checkpoints.finish()
                    raise Interrupted(f"stopped after step {self.step} of {self.stage}")
            monitor.check_frozen(self.step)

    def finished(self) -> bool:
        return self.step >= self.schedule.steps or bool(
            self.schedule.seconds and self.elapsed >= self.schedule.seconds
        )

    def due(self, every: int) -> bool:
        return bool(every) and (is_due(self.step, every) or self.finished())

    def one_step(self) -> dict[str, float]:
        """Collect, fill, prepare and update, finish, write: one step and its figures."""
        algorithm, trainer, monitor = self.trainer.algorithm, self.trainer, self.stage_monitor
        collected = self.source.collect(self.step, algorithm, self.state)
        if self.release is not None:
            self.release()
        began = time.perf_counter()
        metrics = [*collected.metrics, Metric("tokens", collected.batch.tokens, None)]
        usable = monitor.before(self.step + 1, collected)
        shown = bool(collected.groups) and (
            is_due(self.step + 1, self.schedule.rollouts_every)
            or self.step + 1 in (1, self.schedule.steps)
        )
        filled = trainer.fill(collected.batch, shown)
        metrics += trainer.role_metrics(filled)
        rate = trainer.settings.rate(self.step, self.schedule.steps)
        trained: list[Batch] = []  # the first pass, as it was prepared
        if not filled.sequences:  # nothing was selected
            metrics.append(Metric("skipped", 1, None))
        elif usable and self.learn(filled, rate, collected.groups, metrics, trained):
            monitor.check_coefficients(self.step + 1, filled, self.state, collected.groups, metrics)
            self.state = algorithm.finish(self.state, metrics)
        metrics.append(Metric("seconds/train", time.perf_counter() - began, None))
        self.step += 1
        if self.sampler is not None:
            self.sampler.publish(self.step)
        if shown:
            self.write_rollouts(collected.groups, trained)
        self.source.observe(collected.groups)
        figures = (
            monitor.monitor.measure(collected.groups)
            | dict(merge(metrics))
            | {"learning_rate": rate}
        )
        return figures

    def learn(
        self,
        filled: Batch,
        rate: float,
        groups: Sequence[Group],
        metrics: list[Metric],
        trained: list[Batch],
    ) -> bool:
        """Prepare and update, once or more on the same rollout; figures are added to `metrics`, what the first pass trains with to
        `trained`. False: an update was not made, because it was not finite."""
        algorithm, moved = self.trainer.algorithm, False
        reuse = algorithm.reuse
        for epoch in range(reuse.epochs):
            for piece in mini_batches(
                filled, reuse.mini_batches, derive(self.seed, self.step, epoch)
            ):
                prepared = algorithm.prepare(piece, self.state)
                if epoch == 0:  # with the mask of all that was sampled
                    trained.append(prepared.replace(mask_T=piece.mask_T))
                try:
                    update = self.trainer.update(prepared, rate)
                except NonFinite as error:
                    metrics += [*error.metrics, Metric("grad_norm", error.norm, 1)]
                    self.stage_monitor.broken(self.step + 1, error, prepared, groups)
                    return False
                metrics += [
                    *update.metrics,
                    Metric("grad_norm", update.grad_norm, 1),
                    Metric("updates", int(update.moved), None),
                ]
                if not (moved or reuse.once):  # later ones are meant to differ from what sampled
                    metrics += [
                        replace(m, name=m.name.replace("mismatch", "mismatch/start"))
                        for m in update.metrics
                        if m.name.startswith("mismatch")
                    ]
                moved = moved or update.moved
                if not reuse.once and reuse.stop(update.metrics):
                    return True
        return True

    def measure(self) -> dict[str, float]:
        """Held-out figures, where they can be taken; the best score is remembered with its step."""
        figures = {} if self.evaluate is None else dict(self.evaluate())
        self.best = best_score(self.best, self.step, figures)
        return figures

    def best_figures(self) -> dict[str, JSON]:
        """The best held-out score, for the stage's result."""
        return {} if self.best is None else {"best_score": asdict(self.best)}

    def report(self, console: Console, figures: Mapping[str, float]) -> None:
        row = self.writer.metrics(self.stage, self.step, figures)
        if self.trackers is not None:
            self.trackers.log(row)
        console.update(figures, self.step)

    def write_rollouts(self, groups: Sequence[Group], trained: Sequence[Batch]) -> None:
        """The step's rollouts as text and, of those that were trained on, what the algorithm made of each token."""
        rollouts = [r for g in groups for r in g.rollouts]
        turns = any(r.turns > 1 for r in rollouts)
        found: dict[int, dict[str, np.ndarray]] = {}  # by the rollout's number
        for batch in trained:
            host = {name: t.cpu().numpy() for name, t in self.token_arrays(batch, turns).items()}
            for number, (start, end) in zip(
                batch.rollout_N.tolist(), pairwise(batch.starts), strict=True
            ):
                found[number] = {name: array[start:end] for name, array in host.items()}
        if not found:
            self.writer.rollouts(self.stage, self.step, rollouts)
            return
        lengths = [len(found[n]["ids"]) if n in found else 0 for n in range(len(rollouts))]
        joined = {
            name: np.concatenate([found[n][name] for n in sorted(found)])
            for name in next(iter(found.values()))
        }
        advantages = [
            float(found[n]["advantage"][-1]) if n in found else None for n in range(len(rollouts))
        ]
        starts = np.cumsum([0, *lengths], dtype=np.int64)
        self.writer.rollouts(
            self.stage, self.step, rollouts, advantages, TokenArrays(starts, joined)
        )

    def token_arrays(self, batch: Batch, turns: bool) -> dict[str, torch.Tensor]:
        """What is kept of each token of a prepared step, which may have several `turns`: [T] each."""
        nothing_T = torch.zeros_like(batch.behaviour_T)
        arrays = {
            "ids": batch.ids_T,
            "logprob": batch.behaviour_T,
            "advantage": batch.columns.get("advantage_T", nothing_T),
        }
        if turns:  # then what was sampled is not all that follows the prompt
            arrays["sampled"] = batch.mask_T
        for role in self.trainer.roles:
            arrays |= role.token_arrays(batch)
        return arrays

    def save(self) -> None:
        """Write everything that a resumed run needs to be the same run."""
        generators = {"cpu": torch.get_rng_state().numpy().tobytes().hex()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
        state = {
            "stage": self.stage,
            "algorithm": self.state,
            "source": self.source.state(),
            **{role.name: s for role in self.trainer.roles if (s := role.state()) is not None},
            "generators": generators,
            "elapsed": self.elapsed,
            "frozen": self.frozen(),
            "best": None if self.best is None else asdict(self.best),
            **self.stage_monitor.state(),
        }
        made = checkpoint.Checkpoint(
            self.step, self.trainer.weights(), self.trainer.moments(), state
        )
        self.checkpoints.save(made)

    def frozen(self) -> dict[str, JSON]:
        """Who the models are that do not learn, by their weights; worked out once."""
        if self.identities is None:
            models = {role.name: role.frozen for role in self.trainer.roles}
            self.identities = {
                "reward": [checkpoint.identity(model) for model in self.source.models],
                **{who: checkpoint.identity(m) for who, m in models.items() if m is not None},
            }
        return self.identities

    def resume(self) -> None:
        """Take up the newest checkpoint that verifies; say what was wrong with newer ones."""
        path, problems = self.checkpoints.newest()
        for problem in problems:
            self.writer.events.emit("damaged", problem, "warning", stage=self.stage)
        if path is None:
            if problems:
                folder = self.checkpoints.directory
                raise UserError(
                    f"no usable checkpoint: {problems[0]}; remove {folder} to start the stage again"
                )
            if self.writer.attempt > 1:
                self.writer.resumed(self.stage, -1)
            return
        saved = checkpoint.load(path)
        try:
            self.restore(saved, path)
        except FOREIGN as error:  # it is whole, but not ours
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise UserError(
                f"{path} is not of this stage ({what}); remove it, then resume"
            ) from error
        self.writer.resumed(self.stage, self.step)

    def restore(self, saved: checkpoint.Checkpoint, path: Path) -> None:
        """Put everything back; the generators last, because the rest may draw from them."""
        for who, before in saved.state.get(
            "frozen", {}
        ).items():  # absent in checkpoints of format 1
            require(
                before == self.frozen().get(who),
                f"the {who} model of {self.stage} is not the one that {path} was made with: "
                "its weights differ; put it back, or start a new run",
            )
        self.trainer.restore(saved.model, saved.optimizer)
        self.step, self.state, self.elapsed = (
            saved.step,
            saved.state["algorithm"],
            saved.state["elapsed"],
        )
        self.source.restore(saved.state["source"])
        self.best = (
            Best(**saved.state["best"]) if saved.state.get("best") else None
        )  # older checkpoints have none
        self.stage_monitor.restore(saved.state)
        for role in self.trainer.roles:
            role.restore(saved.state.get(role.name))  # older checkpoints have those with a state
        if self.sampler is not None:
            self.sampler.publish(self.step)
        torch.set_rng_state(_generator(saved.state["generators"]["cpu"]))
        if torch.cuda.is_available() and "cuda" in saved.state["generators"]:
            torch.cuda.set_rng_state(_generator(saved.state["generators"]["cuda"]))


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps (0: never) is done at this one."""
    return every > 0 and step % every == 0


def _generator(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
