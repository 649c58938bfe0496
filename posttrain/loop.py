"""The training loop: collect, fill, prepare, update, finish, write, evaluate, save. All training runs through it, RL and SFT alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from posttrain import errors
from posttrain.algorithms.base import Algorithm, State
from posttrain.collect import Rollouts, Source
from posttrain.engine.random import derive
from posttrain.errors import Checked, Count, Interval, NotNegative, Seed, Whole, require
from posttrain.monitor.monitor import StageMonitor
from posttrain.monitor.rules import MonitorSettings
from posttrain.runs.console import Console
from posttrain.runs.layout import Row, TokenArrays
from posttrain.runs.metrics import Best, best_score, group_metrics, merge
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.system.world import World, current
from posttrain.train import checkpoint
from posttrain.train.pack import host_ids, mini_batches
from posttrain.train.saving import Store
from posttrain.train.trainer import NonFinite, Trainer, Update
from posttrain.types import JSON, Batch, Group, Metric, Rollout, Sampling

MANY_OBJECTS = 10_000  # allocated since the last garbage collection
# errors that restoring another stage's checkpoint may raise
FOREIGN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedArrays:
    """Per-token arrays of the rollouts of one mini-batch, for the viewer."""

    rollouts: tuple[int, ...]  # their indices among the step's rollouts
    starts: tuple[int, ...]  # N+1 offsets into T
    arrays: Mapping[str, np.ndarray]  # [T] each


@dataclass
class Interrupt:
    """Set by a signal handler; the loop reads it between steps. Outside of a loop a signal ends the run at once."""

    requested: bool = False
    looping: bool = False
    hung_up: bool = False  # the terminal was closed

    @contextmanager
    def at_steps(self) -> Iterator[None]:
        self.looping = True
        try:
            yield
        finally:
            self.looping = False


@dataclass(frozen=True, kw_only=True)
class Stop(Checked):
    """Conditions that end a training stage early; the pipeline then goes on with the next stage. 0 switches a condition off."""

    apart: ClassVar[bool] = True  # its keys need their path: rl.kl is the algorithm's
    where: ClassVar[str] = "stop: "

    kl: NotNegative = 0.0  # KL to the reference, in nats a response
    kl_steps: Count = 3  # steps in a row above `kl`: a single one may be noise of the estimate
    # evaluations in a row without a better held-out score
    plateau: Whole = 0


@dataclass(frozen=True, kw_only=True)
class LoopSchedule(Checked):
    """How many steps, and how often to evaluate, save and write rollouts; 0 is never. `seconds` and `stop` end the stage early."""

    steps: Whole
    evaluate_every: Interval = 0
    checkpoint_every: Interval = 25
    rollouts_every: Interval = 5
    seconds: NotNegative = 0.0
    stop: Stop = field(default_factory=Stop)


# Called after each step with the loop and the row of its metrics. If it returns False, the loop ends.
OnStep = Callable[["Loop", Row], "bool | None"]


@dataclass(eq=False)
class Loop:
    """The training of one stage. Its mutable state is `step`, `elapsed`, `best`, `state` and `stage_monitor`, the trainer, the
    source and the random generators; checkpoints save all of it."""

    stage: str
    schedule: LoopSchedule
    trainer: Trainer
    source: Source
    writer: RunWriter
    checkpoints: Store
    interrupt: Interrupt
    trackers: Trackers | None = None
    sampler: Rollouts | None = None  # the source, if what it samples with is told of new weights
    evaluate: Callable[[], Mapping[str, float]] | None = None
    on_step: OnStep | None = None
    release: Callable[[], None] | None = None  # frees the sampler's cache before training
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    keep_best: bool = False  # end with the weights of the best held-out score, not the last ones
    seed: Seed = 0  # of the run: decides which groups share a mini-batch
    step: int = 0  # steps done
    elapsed: float = 0.0  # seconds over all attempts
    best: Best | None = None  # the best held-out score so far
    state: State = field(default_factory=dict)  # the algorithm's
    ended: bool = False  # `on_step` or `stop` ended the loop
    above_kl: int = 0  # steps in a row above `stop.kl`
    stopped: str = ""  # why `stop` ended the stage
    identities: dict[str, JSON] | None = None  # cached: checksums of the frozen models
    world: World = field(default_factory=current)
    stage_monitor: StageMonitor = field(init=False)

    def __post_init__(self) -> None:
        given = (self.stage, self.trainer, self.writer, self.checkpoints, self.monitor)
        self.stage_monitor = StageMonitor(*given)

    def run(self) -> None:
        """Train to the end, from the newest intact checkpoint or from the start."""
        schedule, events = self.schedule, self.writer.events
        measured = schedule.evaluate_every > 0 and self.evaluate is not None
        wanted = "keep=best" if self.keep_best else "stop.plateau" if schedule.stop.plateau else ""
        none = f"{self.stage}: {wanted} needs held-out scores, and nothing is held out"
        require(measured or not wanted, f"{none}; hold something out, or leave {wanted} out")
        self.state = checked_state(self.trainer.algorithm, self.trainer.algorithm.start())
        self.resume()
        with (
            Console(schedule.steps, self.stage, self.step) as console,
            self.checkpoints,
            events.shown_by(console.show),
            events.at(self.stage, self.step),
            self.stage_monitor.running() as monitor,
            manual_garbage_collection(),
            self.interrupt.at_steps(),
        ):
            monitor.check_frozen(self.step)
            if self.step == 0 and measured:
                self.report(console, self.measure())
            while not self.finished():
                began, events.step = time.perf_counter(), self.step + 1
                self.checkpoints.check()
                with monitor.step(self.step + 1):
                    figures = self.one_step()
                seconds = time.perf_counter() - began
                speed = figures["tokens"] / seconds
                figures |= {"seconds/total": seconds, "tokens_per_second": speed}
                # all processes must take the same decisions, so they use the first one's figures
                figures, self.elapsed = self.world.same([figures, self.elapsed + seconds])
                self.check_kl(figures)
                if is_due(self.step, schedule.evaluate_every, last=self.finished()):
                    figures |= self.measure()
                    self.check_plateau()
                self.report(console, figures)
                monitor.after(self.step, figures)
                flags = self.world.gather([self.interrupt.requested, self.ended])
                interrupted, self.ended = (any(each) for each in zip(*flags, strict=True))
                due = is_due(self.step, schedule.checkpoint_every) and not self.finished()
                if interrupted or due:
                    monitor.check_frozen(self.step)
                    self.save()
                if interrupted:
                    self.checkpoints.finish()
                    raise errors.Interrupted(f"stopped after step {self.step} of {self.stage}")
            monitor.check_frozen(self.step)
            if self.keep_best:
                self.take_best()

    def finished(self) -> bool:
        late = self.schedule.seconds > 0 and self.elapsed >= self.schedule.seconds
        return self.step >= self.schedule.steps or late or self.ended

    def check_kl(self, figures: Mapping[str, float]) -> None:
        """End the stage after `stop.kl_steps` steps in a row above `stop.kl`. A step without a KL is ignored."""
        stop, kl = self.schedule.stop, figures.get("kl/response", math.nan)
        if stop.kl and not math.isnan(kl):
            self.above_kl = self.above_kl + 1 if kl > stop.kl else 0
            if self.above_kl >= stop.kl_steps:
                self.end_early(f"a KL of {kl:.3g} nats a response (stop.kl={stop.kl:g})")

    def check_plateau(self) -> None:
        """End the stage if the best held-out score is `stop.plateau` evaluations old."""
        plateau, best = self.schedule.stop.plateau, self.best
        allowed = plateau * self.schedule.evaluate_every
        if plateau and best is not None and self.step - best.step >= allowed:
            held = f"{best.figure} {best.score:.4g} of step {best.step}"
            self.end_early(f"no better than {held} (stop.plateau={plateau})")

    def end_early(self, why: str) -> None:
        if not self.finished():
            self.ended, self.stopped = True, f"step {self.step} of {self.schedule.steps}: {why}"
            line = f"the stage ends at {self.stopped}"
            self.writer.events.emit("message", line, stage=self.stage)

    def one_step(self) -> dict[str, float]:
        """Run one step (collect, fill, prepare and update, finish, write) and return its metrics."""
        algorithm, trainer, monitor = self.trainer.algorithm, self.trainer, self.stage_monitor
        step, schedule = self.step + 1, self.schedule
        collected = self.source.collect(self.step, algorithm, self.state)
        groups = collected.groups
        if self.release is not None:
            self.release()
        began = time.perf_counter()
        metrics = [*collected.metrics, Metric("tokens", collected.batch.tokens, None)]
        usable = monitor.before(step, collected)
        shown = is_due(step, schedule.rollouts_every) or step in (1, schedule.steps)
        write = shown and bool(groups)
        filled = trainer.fill(collected.batch, write, groups, self.state if usable else None)
        metrics += trainer.role_metrics(filled)
        rate = trainer.settings.rate(self.step, schedule.steps)
        figures: dict[str, float] = {}
        arrays: list[TrainedArrays] = []
        # with a single update its arrays are all there is to write, so they are written during it
        written = arrays if write and algorithm.reuse.once else None
        work = self.side_work(step, groups, metrics, figures, written)
        meanwhile, kept = partial(next, work, None), arrays if write else None
        updated = False
        if not filled.sequences:  # the algorithm selected nothing
            metrics.append(Metric("skipped", 1, None))
        elif usable:
            updated = self.update(filled, rate, groups, metrics, kept, meanwhile)
        for _ in work:  # finish it: there may be more pieces than micro-batches
            pass
        if updated:
            monitor.check_coefficients(step, filled, self.state, groups, metrics)
            self.state = checked_state(algorithm, algorithm.finish(self.state, metrics))
        for role in trainer.roles:
            role.after_step(step)
        metrics.append(Metric("seconds/train", time.perf_counter() - began, None))
        self.step = step
        if self.sampler is not None:
            self.sampler.publish(step)
        if write and not algorithm.reuse.once:
            self.write_rollouts(step, groups, arrays)
        self.source.observe(groups)
        return figures | merge(metrics) | {"learning_rate": rate}

    def side_work(
        self,
        step: int,
        groups: Sequence[Group],
        metrics: list[Metric],
        figures: dict[str, float],
        arrays: Sequence[TrainedArrays] | None,
    ) -> Iterator[bool]:
        """CPU work to do while the device computes the first update, in pieces shorter than a micro-batch: `Trainer.update` runs one
        piece after it has queued each micro-batch."""
        if step < self.schedule.steps:
            self.source.look_ahead()
            yield True
        if groups:
            drawn = self.trainer.algorithm.samples(Sampling())
            greedy = [n for n, one in enumerate(drawn) if one.temperature == 0]
            metrics += group_metrics(groups, greedy)
            yield True
        for part in self.stage_monitor.monitor.measuring(groups):
            figures.update(part)
            yield True
        if arrays is not None:
            self.write_rollouts(step, groups, arrays)
            yield True
        collect_garbage()

    def update(
        self,
        filled: Batch,
        rate: float,
        groups: Sequence[Group],
        metrics: list[Metric],
        arrays: list[TrainedArrays] | None,
        meanwhile: Callable[[], object],
    ) -> bool:
        """Prepare and update, once or several times on the same rollouts. Adds to `metrics`, and to `arrays` the tokens of the first
        epoch. Returns False if a loss or gradient was not finite; the rest of the step is then skipped."""
        algorithm, moved = self.trainer.algorithm, False
        reuse = algorithm.reuse
        for epoch in range(reuse.epochs):
            seed = derive(self.seed, self.step, epoch)
            for piece in mini_batches(filled, reuse.mini_batches, seed):
                prepared = algorithm.made("prepare", algorithm.prepare(piece, self.state), Batch)
                if epoch == 0 and arrays is not None:  # the viewer shows all sampled tokens
                    sampled = prepared.replace(mask_T=piece.mask_T)
                    arrays.append(self.trained_arrays(sampled, groups))
                try:
                    update = self.apply(prepared, rate, meanwhile, groups)
                except NonFinite as error:
                    metrics += [*error.metrics, Metric("grad_norm", error.norm, 1)]
                    self.stage_monitor.report_non_finite(self.step + 1, error, prepared, groups)
                    return False
                metrics += [*update.metrics, Metric("updates", int(update.moved), None)]
                if update.moved:
                    metrics.append(Metric("grad_norm", update.grad_norm, 1))
                # Only before the first update is the trainer's policy the one that sampled.
                if not (moved or reuse.once):
                    own = (m for m in update.metrics if m.name.startswith("mismatch"))
                    start = "mismatch/start"
                    metrics += [replace(m, name=m.name.replace("mismatch", start)) for m in own]
                moved = moved or update.moved
                if not reuse.once and reuse.stop(update.metrics):
                    return True
        return True

    def apply(
        self, prepared: Batch, rate: float, meanwhile: Callable[[], object], groups: Sequence[Group]
    ) -> Update:
        """Make one update. `posttrain replay` overrides this to inspect the gradients of the rollouts in `groups`."""
        return self.trainer.update(prepared, rate, meanwhile)

    def measure(self) -> dict[str, float]:
        """Evaluate on held-out problems, and remember the best score with its step."""
        figures = {} if self.evaluate is None else dict(self.evaluate())
        before, self.best = self.best, best_score(self.best, self.step, figures)
        if self.keep_best and self.best is not before:
            weights = self.trainer.learners[0].weights()
            if self.world.first:
                self.checkpoints.keep(checkpoint.Checkpoint(self.step, weights, {}, {}))
        return figures

    def take_best(self) -> None:
        """Restore the weights of the best held-out score, and report which step they are from."""
        if self.best is None:
            line = "keep=best: no held-out score is known, so that the last step is kept"
            self.writer.events.emit("message", line, "warning", stage=self.stage)
            return
        score = f"{self.best.figure} {self.best.score:.4g}"
        if self.best.step < self.step:
            saved = checkpoint.load(self.checkpoints.best(self.best.step))
            self.trainer.learners[0].restore(saved.model, {})
        line = f"keep=best: the model is that of step {self.best.step} of {self.step}, with {score}"
        self.writer.events.emit("message", line, stage=self.stage)

    def best_figures(self) -> dict[str, JSON]:
        """The best held-out score, and why the stage ended early, for the stage's result."""
        found: dict[str, JSON] = {"stopped": self.stopped} if self.stopped else {}
        if self.best is None:
            return found
        kept = {"kept_step": self.best.step} if self.keep_best else {}
        return {**found, "best_score": asdict(self.best), **kept}

    def report(self, console: Console, figures: Mapping[str, float]) -> None:
        row = self.writer.metrics(self.stage, self.step, figures)
        if self.trackers is not None:
            self.trackers.log(row)
        console.update(figures, self.step)
        if self.on_step is not None and self.step and self.on_step(self, row) is False:
            self.ended = True

    def write_rollouts(
        self, step: int, groups: Sequence[Group], trained: Sequence[TrainedArrays]
    ) -> None:
        """Write the rollouts of a step as text and, for those that were trained on, their per-token arrays."""
        if not self.world.first:
            return
        rollouts = [r for g in groups for r in g.rollouts]
        found: list[dict[str, np.ndarray] | None] = [None] * len(rollouts)
        for one in trained:
            for n, (start, end) in zip(one.rollouts, pairwise(one.starts), strict=True):
                found[n] = {name: array[start:end] for name, array in one.arrays.items()}
        known = [own for own in found if own is not None]
        if not known:
            self.writer.rollouts(self.stage, step, rollouts)
            return
        joined = {name: np.concatenate([own[name] for own in known]) for name in known[0]}
        lengths = [0 if own is None else len(own["ids"]) for own in found]
        advantages = [*map(_mean_advantage, rollouts, found)]
        arrays = TokenArrays(np.cumsum([0, *lengths], dtype=np.int64), joined)
        self.writer.rollouts(self.stage, step, rollouts, advantages, arrays)

    def trained_arrays(self, batch: Batch, groups: Sequence[Group]) -> TrainedArrays:
        """The per-token arrays of a prepared batch, copied to the host."""
        advantage_T = batch.columns.get("advantage_T", torch.zeros_like(batch.behaviour_T))
        arrays = {"logprob": batch.behaviour_T, "advantage": advantage_T}
        if any(r.turns > 1 for g in groups for r in g.rollouts):
            arrays["sampled"] = batch.mask_T  # given tokens follow the prompt, too
        for role in self.trainer.roles:
            arrays |= role.token_arrays(batch)
        host = {"ids": host_ids(batch), **{name: t.cpu().numpy() for name, t in arrays.items()}}
        return TrainedArrays(tuple(batch.rollout_N.tolist()), batch.starts, host)

    def save(self) -> None:
        """Save a checkpoint from which a resumed run continues exactly as this one."""
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
            "above_kl": self.above_kl,
            "stopped": self.stopped,
            **self.stage_monitor.state(),
        }
        world, sharded = self.world, self.trainer.sharded
        if world.first or sharded:
            weights, moments = self.trainer.own_parts()
            rank, ranks = world.rank, world.size if sharded else 1
            made = checkpoint.Checkpoint(self.step, weights, moments, state, rank, ranks)
            self.checkpoints.save(made)

    def frozen(self) -> dict[str, JSON]:
        """Checksums of the frozen models' weights, computed once."""
        if self.identities is None:
            models = {role.name: role.frozen for role in self.trainer.roles}
            self.identities = {
                "reward": [checkpoint.identity(model) for model in self.source.models],
                **{who: checkpoint.identity(m) for who, m in models.items() if m is not None},
            }
        return self.identities

    def resume(self) -> None:
        """Restore the newest intact checkpoint, and report what is wrong with newer ones."""
        path, problems = self.newest()
        for problem in problems:
            self.writer.events.emit("damaged", problem, "warning", stage=self.stage)
        if path is None:
            if problems:
                advice = f"remove {self.checkpoints.directory} to start the stage again"
                raise errors.UserError(f"no usable checkpoint: {problems[0]}; {advice}")
            if self.writer.attempt > 1:
                self.writer.resumed(self.stage, -1)
            return
        saved = checkpoint.load(path)
        try:
            self.restore(saved, path)
        except FOREIGN as error:  # the files are intact, but of another stage
            what = f"{type(error).__name__}: {str(error)[:200]}"
            text = f"{path} is not of this stage ({what}); remove it, then resume"
            raise errors.UserError(text) from error
        self.writer.resumed(self.stage, self.step)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint, and what is wrong with newer ones. The first process looks, and all get its answer."""
        path, problems = self.checkpoints.newest() if self.world.first else (None, [])
        place, problems = self.world.same([None if path is None else str(path), problems])
        return None if place is None else Path(place), problems

    def restore(self, saved: checkpoint.Checkpoint, path: Path) -> None:
        """Restore everything, the random generators last, because the rest may draw from them."""
        state = saved.state
        for who, before in state.get("frozen", {}).items():  # absent in checkpoints of format 1
            other = f"the {who} model of {self.stage} is not the one that {path} was made with"
            advice = "its weights differ, or the device rounds them otherwise (CPU: float32, GPU: bfloat16)"
            advice += "; put it back, resume on the earlier kind of device, or start a new run"
            require(before == self.frozen().get(who), f"{other}: {advice}")
        self.trainer.restore(saved.model, saved.optimizer)
        self.step, self.state, self.elapsed = saved.step, state["algorithm"], state["elapsed"]
        self.above_kl = state.get("above_kl", 0)  # older ones have none
        self.stopped = state.get("stopped", "")  # it was interrupted after its last step
        self.ended = bool(self.stopped)
        self.source.restore(state["source"])
        self.best = Best(**state["best"]) if state.get("best") else None  # older ones have none
        if self.keep_best and self.best is not None:
            problem = checkpoint.verify(self.checkpoints.best(self.best.step))
            if problem is not None:  # damaged, or never kept because keep=best was not set then
                line = f"the best step so far, {self.best.step}, cannot be kept: {problem}"
                self.writer.events.emit("damaged", line, "warning", stage=self.stage)
                self.best = None
        self.stage_monitor.restore(state)
        for role in self.trainer.roles:
            role.restore(state.get(role.name))  # None where a role has no state
        if self.sampler is not None:
            self.sampler.publish(self.step)
        setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
        for device, text in state["generators"].items():
            if device == "cpu" or torch.cuda.is_available():
                setters[device](torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))


def checked_state(algorithm: Algorithm, state: State) -> State:
    """The state that an algorithm returned. An error if a checkpoint could not hold it."""
    why = "" if isinstance(state, dict) else f"it is a {type(state).__name__}"
    try:
        checkpoint.without_arrays(state)
    except (TypeError, ValueError) as error:
        why = why or str(error)
    asked = "start and finish return a dict of finite numbers, texts, lists and dicts"
    algorithm.check(not why, f"{asked}, which checkpoints hold; {why}")
    return state


def collect_garbage() -> None:
    if gc.get_count()[0] > MANY_OBJECTS:
        gc.collect()


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Switch Python's automatic garbage collection off: the loop collects at most once a step, and never looks at objects that exist
    already, such as modules and data sets. A step allocates many small objects, and the automatic collector would search all objects
    for cycles again and again."""
    automatic = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()


def is_due(step: int, every: int, last: bool = False) -> bool:
    """Whether something that happens every `every` steps happens at this step. 0 means never; else `last` makes it happen, too."""
    return every > 0 and (step % every == 0 or last)


def _mean_advantage(rollout: Rollout, arrays: dict[str, np.ndarray] | None) -> float | None:
    """Return the mean advantage of a rollout's sampled tokens; None if it was not trained on."""
    if arrays is None:
        return None
    total = arrays["advantage"][rollout.mask].sum(dtype=np.float64)
    return float(total / max(rollout.length, 1))
