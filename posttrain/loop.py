"""THE loop: collect, fill, prepare, update, finish; write it down; evaluate; save. Every kind of training goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from posttrain.algorithms.base import Algorithm, State
from posttrain.algorithms.sft import SFT
from posttrain.errors import GuardStop, Interrupted, UserError
from posttrain.ops.kl import kl_estimate
from posttrain.rollouts import Collected
from posttrain.runs.console import Console
from posttrain.runs.layout import TokenArrays
from posttrain.runs.metrics import merge
from posttrain.runs.trackers import Trackers
from posttrain.runs.write import RunWriter
from posttrain.train import checkpoint
from posttrain.train.pack import mini_batches
from posttrain.train.trainer import Trainer
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
    """One stage's training. What changes while it runs: the last three fields, the trainer, the sources, the generators."""

    stage: str
    rhythm: Rhythm
    trainer: Trainer
    source: Source
    writer: RunWriter
    checkpoints: Path
    interrupt: Interrupt
    trackers: Trackers | None = None
    sampler: Sampler | None = None
    evaluate: Callable[[], Mapping[str, float]] | None = None
    pretraining: Source | None = None  # text that is mixed into every optimizer step
    step: int = 0  # optimizer steps of the loop that are done
    elapsed: float = 0.0  # seconds over all attempts
    state: State = field(default_factory=dict)  # the algorithm's

    def run(self) -> None:
        """Go from the newest good checkpoint, or from the start, to the end."""
        self.state = self.trainer.algorithm.start()
        self.resume()
        with Console.open(self.rhythm.steps, self.stage, self.step) as console:
            if self.step == 0 and self.evaluate is not None and self.rhythm.evaluate_every:
                self.report(console, dict(self.evaluate()))
            while not self.finished():
                began = time.perf_counter()
                figures = self.one_step(console)
                seconds = time.perf_counter() - began
                self.elapsed += seconds
                figures |= {"seconds/total": seconds, "tokens_per_second": figures["tokens"] / seconds}
                if self.due(self.rhythm.evaluate_every) and self.evaluate is not None:
                    figures |= self.evaluate()
                self.report(console, figures)
                if self.interrupt.requested:
                    self.save()
                    raise Interrupted(f"stopped after step {self.step} of {self.stage}")
                if self.step % self.rhythm.checkpoint_every == 0 and not self.finished():
                    self.save()

    def finished(self) -> bool:
        return self.step >= self.rhythm.steps or bool(self.rhythm.seconds and self.elapsed >= self.rhythm.seconds)

    def due(self, every: int) -> bool:
        return bool(every) and (self.step % every == 0 or self.finished())

    def one_step(self, console: Console) -> dict[str, float]:
        """Collect material, let the algorithm prepare it, update; once or more on the same rollout."""
        algorithm, trainer = self.trainer.algorithm, self.trainer
        collected = self.source.collect(self.step, algorithm, self.state)
        began = time.perf_counter()
        metrics = [*collected.metrics, Metric("tokens", collected.batch.tokens, None)]
        shown = bool(collected.groups) and (
            (self.step + 1) % self.rhythm.rollouts_every == 0 or self.step + 1 in (1, self.rhythm.steps)
        )
        filled = trainer.fill(collected.batch, watch=shown)
        if filled.reference_T is not None and "reference" not in algorithm.needs:
            metrics.append(watched_kl(filled))
        epochs, pieces = algorithm.reuse
        rate = trainer.settings.rate(self.step, self.rhythm.steps)
        reuse = [piece for _ in range(epochs) for piece in mini_batches(filled, pieces)]
        for piece in reuse:
            prepared = algorithm.prepare(piece, self.state)
            update = trainer.update(prepared, rate, self.pretraining_batch())
            metrics += [*update.metrics, Metric("grad_norm", update.grad_norm, 1), Metric("updates", 1, None)]
            if len(reuse) > 1 and algorithm.enough(update.metrics):
                break
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
        figures = dict(merge(metrics)) | {"learning_rate": rate}
        self.guard(figures)
        return figures | {f"seconds/{name}": value for name, value in seconds.items()}

    def pretraining_batch(self) -> tuple[Algorithm, Batch] | None:
        """Pretraining text for one optimizer step, weighed by the algorithm's coefficient."""
        if self.pretraining is None:
            return None
        plain = SFT()
        batch = plain.prepare(self.pretraining.collect(self.step, plain, {}).batch, {})
        assert batch.weight_T is not None
        return plain, batch.replace(weight_T=self.trainer.algorithm.pretraining * batch.weight_T)

    def guard(self, figures: Mapping[str, float]) -> None:
        """Stop where going on would waste the user's hours. The update has not been saved."""
        loss = figures.get("loss", 0.0)
        if not np.isfinite(loss):
            raise GuardStop(f"the loss of step {self.step} of {self.stage} is {loss}; the last checkpoint is intact")

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
        }
        saved = checkpoint.Checkpoint(self.step, self.trainer.weights(), self.trainer.moments(), state)
        checkpoint.save(self.checkpoints, saved)
        self.writer.event("checkpoint", {"stage": self.stage, "step": self.step})

    def resume(self) -> None:
        """Take up the newest checkpoint that verifies; say what was wrong with newer ones."""
        path, problems = checkpoint.newest(self.checkpoints)
        for problem in problems:
            self.writer.event("damaged", {"stage": self.stage, "text": problem})
        if path is None:
            if problems:
                raise UserError(f"no usable checkpoint: {problems[0]}; remove {self.checkpoints} to start the stage again")
            if self.writer.attempt > 1:
                self.writer.resumed(self.stage, -1)
            return
        saved = checkpoint.load(path)
        self.trainer.restore(saved.model, saved.optimizer)
        self.step, self.state, self.elapsed = saved.step, saved.state["algorithm"], saved.state["elapsed"]
        self.source.restore(saved.state["source"])
        if self.pretraining is not None:
            self.pretraining.restore(saved.state["pretraining"])
        if self.sampler is not None:
            self.sampler.update(self.step)
        torch.set_rng_state(_generator(saved.state["generators"]["cpu"]))
        if torch.cuda.is_available() and "cuda" in saved.state["generators"]:
            torch.cuda.set_rng_state(_generator(saved.state["generators"]["cuda"]))
        self.writer.resumed(self.stage, self.step)


def watched_kl(batch: Batch) -> Metric:
    """KL from the reference over the sampled tokens, for the eye alone: no term of the loss uses it."""
    assert batch.reference_T is not None
    kl_T = kl_estimate("k3", batch.behaviour_T, batch.reference_T).where(batch.mask_T, 0.0)
    return Metric("kl", kl_T.sum(), batch.mask_T.sum())


def _generator(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
