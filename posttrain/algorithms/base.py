"""The contract of an algorithm: all that the rest of the package knows of it. Most algorithms define two of these methods and
inherit the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from posttrain.errors import Checked, Several, require
from posttrain.types import JSON, Batch, Group, Metric, Outputs, Sampling, Selection, Terms

# JSON-able, saved with every checkpoint: adaptive coefficients, running statistics
State = dict[str, JSON]
# of samples of another policy; see _corrections.py
Correction = Literal["none", "proximal", "token", "sequence", "decoupled"]


@dataclass(frozen=True, kw_only=True)
class Reuse(Checked):
    """How often a frozen rollout is reused: `epochs` passes, each in `mini_batches` optimizer steps, into which it deals the groups
    anew at random. The rest of the reuse is left out after an update whose `metric` exceeds `limit`; without a metric, never."""

    epochs: Several = 1
    mini_batches: Several = 1
    metric: str = ""
    limit: float = 0.0

    @property
    def once(self) -> bool:
        """Whether every update is the first on its rollout: on-policy."""
        return self.epochs == self.mini_batches == 1

    def stop(self, metrics: Sequence[Metric]) -> bool:
        """Whether the metrics of an update end the reuse."""
        return bool(self.metric) and mean_of(metrics, self.metric) > self.limit


@dataclass(frozen=True, kw_only=True)
class Algorithm(Checked):
    """A frozen dataclass: fields are hyper-parameters named as in the paper, methods are the maths."""

    paper: ClassVar[str] = ""
    # what it learns from: demonstrations | pairs | rankings | labels (single responses called good or bad, each with a mismatched one
    # without a label, for a baseline) | step_labels | rollouts (what it samples itself)
    learns_from: ClassVar[str] = "rollouts"
    unit: ClassVar[str] = "sequence"  # sequence | pair | ranking: what a micro-batch may not cut
    trains: ClassVar[str] = "policy"  # policy | scorer: the vocabulary's head, or one of one number

    @property
    def where(self) -> str:
        return f"{self.name}: "

    def check(self, condition: bool, message: str) -> None:
        """Refuse settings unless `condition` holds."""
        require(condition, f"{self.where}{message}")

    @property
    def name(self) -> str:
        """What it is called in the catalogue; a user's own by its class."""
        package, _, module = type(self).__module__.rpartition(".")
        return module if package.startswith("posttrain.") else type(self).__name__

    @property
    def roles(self) -> frozenset[str]:
        """Which roles of train/roles/ it asks for; exactly these are built.

        reference    `Batch.reference_T`: log-probs of the frozen starting model
        critic       `Batch.value_T`: values before the step; `Outputs.value_T`: those that learn
        proximal     `Batch.proximal_T`: log-probs of the policy itself as the step begins
        pretraining  text to stay good at, a term of its own in every update
        teacher      `Outputs.predictions["teacher"]`: hidden states of a frozen model and its head; or, where `teacher_by_token`,
                     `Batch.teacher_T`: its log-probs of the tokens
        """
        return frozenset()

    @property
    def additions(self) -> Mapping[str, float]:
        """The coefficient of the loss that a role adds to every update, by the role (InstructGPT's ptx: pretraining)."""
        return {}

    @property
    def learns_steps(self) -> bool:
        """Whether the values of steps (Score.steps, in `Batch.step_T`) are learned from, not the score of the whole response alone: by
        its `supervision`, where it has such a setting."""
        return getattr(self, "supervision", "outcome") != "outcome"

    @property
    def learns_parts(self) -> tuple[str, ...]:
        """Parts of the score that are learned from one by one, in the columns that `types.part_column` names."""
        return ()

    @property
    def needs_scores(self) -> bool:
        """Of preferences: whether it learns from how much better a response is, so that those without scores are refused."""
        return False

    @property
    def teacher_by_token(self) -> bool:
        """Of a teacher: whether its log-probs of the tokens, once a step, are enough, not its whole distribution in every update."""
        return False

    def samples(self, sampling: Sampling) -> tuple[Sampling, ...]:
        """How each response to a prompt is sampled: a group of as many, where it has such a setting."""
        return (sampling,) * getattr(self, "group", 1)

    @property
    def group_size(self) -> int:
        """Responses to a prompt."""
        return len(self.samples(Sampling()))

    @property
    def compares_episodes(self) -> bool:
        """Whether it compares the responses to one prompt with each other, so that they must begin in the same state."""
        return self.learns_from == "rollouts" and self.group_size > 1

    @property
    def reuse(self) -> Reuse:
        """How often a frozen rollout is reused."""
        return Reuse()

    def corrected(self, correction: Correction) -> Algorithm:
        """Itself for samples of older weights: with this correction (_corrections.py) where it knows them and has none."""
        return self

    def start(self) -> State:
        return {}

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        """Which groups to train on, or a request for more; none of them leaves the step out. No tensors yet."""
        return Selection(tuple(groups))

    @property
    def learns_apart(self) -> bool:
        """Whether its roles always learn early, so that one model at a time has activations."""
        return False

    def early(self, step: Batch, state: State) -> Batch | None:
        """The step with what `early_terms` needs of all of it, where a role that learns may do so while it fills its columns: where
        its loss needs no other model, and nothing reads its columns once it has moved. None: in the update, with the others."""
        return None

    def early_terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """The losses of one micro-batch of an early step, from the outputs of the role alone."""
        raise NotImplementedError

    def prepare(self, step: Batch, state: State) -> Batch:
        """Without gradient, for the whole optimizer step: rewards to advantages, and the weight of every term."""
        raise NotImplementedError

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """The losses of one micro-batch of a prepared step, per unit, with their weights."""
        raise NotImplementedError

    def warnings(self, sampling: Sampling) -> tuple[str, ...]:
        """Lines to show before the first step of a run that samples like this: a term that cannot act, for example."""
        return ()

    def finish(self, state: State, metrics: Sequence[Metric]) -> State:
        """Once an optimizer step, on statistics of all of it."""
        return state

    def step_values(self, step: Batch, supervision: str) -> Tensor:
        """[T]: the values of steps at the tokens they end in, NaN elsewhere; refused where the reward gives none. A step in which no
        response could be scored has none either, and is skipped."""
        if "step_T" in step.columns:
            return step.step_T
        needs = f"supervision={supervision} needs a reward that scores steps (Score.steps); this one scores none"
        self.check(not bool(step.valid_N.any()), needs)
        return torch.full_like(step.behaviour_T, torch.nan)


def mean_of(metrics: Sequence[Metric], name: str) -> float:
    """A metric over all the micro-batches it came from; 0 where it did not come."""
    found = [m for m in metrics if m.name == name]
    return sum(float(m.total) for m in found) / max(1.0, sum(float(m.count or 0) for m in found))
