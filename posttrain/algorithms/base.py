"""The interface of an algorithm: everything that the rest of the package uses of it. Most algorithms define two of these methods and
inherit the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from posttrain.errors import Checked, Several, require
from posttrain.types import JSON, Batch, Group, Metric, Outputs, Sampling, Selection, Terms

# adaptive coefficients, running statistics: JSON, saved with every checkpoint
State = dict[str, JSON]
Made = TypeVar("Made")
# how to correct for samples of another policy; see _corrections.py
Correction = Literal["none", "proximal", "token", "sequence", "decoupled"]


@dataclass(frozen=True, kw_only=True)
class Reuse(Checked):
    """How often a batch of rollouts is reused: `epochs` passes of `mini_batches` optimizer steps each. Every pass shuffles the groups
    into new mini-batches. An update whose `metric` exceeds `limit` ends the reuse; an empty `metric` never does."""

    epochs: Several = 1
    mini_batches: Several = 1
    metric: str = ""
    limit: float = 0.0

    @property
    def once(self) -> bool:
        """Whether each batch of rollouts is used for one update only: on-policy."""
        return self.epochs == self.mini_batches == 1

    def stop(self, metrics: Sequence[Metric]) -> bool:
        """Whether the metrics of an update end the reuse."""
        return bool(self.metric) and mean_of(metrics, self.metric) > self.limit


class Branches(NamedTuple):
    """How many completions are sampled from the end of each step of a response, for the step's value (`Score.steps`), what ends a
    step, and whether completions that are cut off are paid nothing."""

    completions: int = 0
    separator: str = ""
    unpaid: bool = False


@dataclass(frozen=True, kw_only=True)
class Algorithm(Checked):
    """A frozen dataclass. Its fields are the hyper-parameters, named as in the paper; its methods are the maths."""

    paper: ClassVar[str] = ""
    # demonstrations | pairs | rankings | labels (single responses labelled good or bad, each with a mismatched response without a
    # label, for a baseline) | step_labels | rollouts (samples of its own)
    learns_from: ClassVar[str] = "rollouts"
    unit: ClassVar[str] = "sequence"  # sequence | pair | ranking: never cut by a micro-batch
    # policy: with a language-model head | scorer: with a scalar head
    trains: ClassVar[str] = "policy"
    # whether its terms report `kl/response`, the KL of whole responses to the reference
    measures_kl: ClassVar[bool] = False

    @property
    def where(self) -> str:
        return f"{self.name}: "

    def check(self, condition: bool, message: str) -> None:
        """Raise an error about the settings unless `condition` holds."""
        require(condition, f"{self.where}{message}")

    def made(self, method: str, found: Made, kind: type[Made]) -> Made:
        """`found`, which a method returned. An error if it is of another kind."""
        wrong = f"{method} returns a {kind.__name__}, not {type(found).__name__}"
        self.check(isinstance(found, kind), wrong)
        return found

    @property
    def name(self) -> str:
        """Its name in the catalogue; the class name for a user's own algorithm."""
        package, _, module = type(self).__module__.rpartition(".")
        return module if package.startswith("posttrain.") else type(self).__name__

    @property
    def roles(self) -> frozenset[str]:
        """The roles of train/roles/ that it needs. Exactly these are built.

        reference    `Batch.reference_T`: log-probs of the frozen starting model
        critic       `Batch.value_T`: values before the update; `Outputs.value_T`: values with gradient
        proximal     `Batch.proximal_T`: log-probs of the policy at the start of the step
        pretraining  adds a loss on pretraining text to every update
        teacher      `Outputs.predictions["teacher"]`: hidden states and head of a frozen model; or, if `teacher_by_token`,
                     `Batch.teacher_T`: its log-probs of the tokens
        """
        return frozenset()

    @property
    def additions(self) -> Mapping[str, float]:
        """Coefficients, by role, of the losses that roles add to every update (InstructGPT's ptx: pretraining)."""
        return {}

    @property
    def learns_steps(self) -> bool:
        """Whether it learns from the values of steps (`Score.steps`, in `Batch.step_T`) and not only from the score of the whole
        response. By default the setting `supervision` decides, if there is one."""
        return getattr(self, "supervision", "outcome") != "outcome"

    @property
    def learns_parts(self) -> tuple[str, ...]:
        """Names of the parts of a score that it learns from separately. `types.part_column` names their columns."""
        return ()

    @property
    def needs_scores(self) -> bool:
        """Whether it learns from how much better a preferred response is. Preference data without scores is then refused."""
        return False

    @property
    def teacher_by_token(self) -> bool:
        """Whether the teacher's log-probs of the sampled tokens, computed once a step, are enough. Otherwise every update needs the
        teacher's whole distribution."""
        return False

    def samples(self, sampling: Sampling) -> tuple[Sampling, ...]:
        """The sampling settings of each response to a prompt: `group` times the same, if there is such a setting."""
        return (sampling,) * getattr(self, "group", 1)

    @property
    def group_size(self) -> int:
        """How many responses to a prompt are sampled."""
        return len(self.samples(Sampling()))

    @property
    def branches(self) -> Branches:
        """Completions of its responses that it wants; by default none."""
        return Branches()

    @property
    def compares_episodes(self) -> bool:
        """Whether it compares the responses to one prompt with each other. Their episodes must then begin in the same state."""
        return self.learns_from == "rollouts" and self.group_size > 1

    @property
    def reuse(self) -> Reuse:
        """How often a batch of rollouts is reused."""
        return Reuse()

    def corrected(self, correction: Correction) -> Algorithm:
        """Return the algorithm with this correction for samples of older weights (_corrections.py), if it supports corrections and has
        none yet."""
        return self

    def start(self) -> State:
        """The state before the first step."""
        return {}

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        """Choose the groups to train on, or ask for more. Runs before anything is a tensor. Without groups the update is skipped."""
        return Selection(tuple(groups))

    @property
    def learns_apart(self) -> bool:
        """Whether its roles always learn early (see `early`), so that only one model at a time holds activations."""
        return False

    def early(self, step: Batch, state: State) -> Batch | None:
        """Let a role learn in the same pass that fills its columns (PPO's critic). Returns the step with everything that `early_terms`
        needs, or None if the role learns in the update. It may learn early only if its loss needs no other model, and nothing reads
        its columns after its update."""
        return None

    def early_terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """The losses of one micro-batch of an early step, from the outputs of the role alone."""
        raise NotImplementedError

    def prepare(self, step: Batch, state: State) -> Batch:
        """Compute advantages from rewards, and the weight of every term. Runs without gradient on the whole optimizer step."""
        raise NotImplementedError

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """The per-unit losses of one micro-batch of a prepared step, with their weights."""
        raise NotImplementedError

    def warnings(self, sampling: Sampling) -> tuple[str, ...]:
        """Lines to show before the first step of a run with this sampling: a term that cannot act, for example."""
        return ()

    def finish(self, state: State, metrics: Sequence[Metric]) -> State:
        """Update the state after a step, from the metrics of the whole step."""
        return state

    def step_values(self, step: Batch, supervision: str) -> Tensor:
        """[T]: the value of each reasoning step at the token where it ends, NaN elsewhere. An error if the reward scores no steps. If
        no response has a score, there are no values, and the update is skipped."""
        if "step_T" in step.columns:
            return step.step_T
        needs = f"supervision={supervision} needs a reward that scores steps (Score.steps); this one scores none"
        self.check(not bool(step.valid_N.any()), needs)
        return torch.full_like(step.behaviour_T, torch.nan)


def mean_of(metrics: Sequence[Metric], name: str) -> float:
    """The mean of a metric over all micro-batches that report it; 0 if none does."""
    found = [m for m in metrics if m.name == name]
    return sum(float(m.total) for m in found) / max(1.0, sum(float(m.count or 0) for m in found))
