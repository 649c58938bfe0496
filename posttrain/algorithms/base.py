"""The contract of an algorithm: all that the loop knows of it. Most algorithms define two of these methods and inherit the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from posttrain.errors import require
from posttrain.types import JSON, Batch, Group, Metric, Outputs, Sampling, Selection, Terms

State = dict[
    str, JSON
]  # JSON-able, saved with every checkpoint: adaptive coefficients, running statistics


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A frozen dataclass: fields are hyper-parameters named as in the paper, methods are the maths."""

    paper: ClassVar[str] = ""
    online: ClassVar[bool] = True  # learns from what it samples itself; else from examples
    unit: ClassVar[str] = (
        "sequence"  # token | sequence | pair | ranking: what a micro-batch may not cut
    )
    trains: ClassVar[str] = (
        "policy"  # policy | scorer: a language model, or one with a head of one number
    )

    def check(self, condition: bool, message: str) -> None:
        """Refuse settings unless `condition` holds."""
        require(condition, f"{self.name}: {message}")

    def choose(self, field: str, options: Sequence[str]) -> None:
        """Refuse a value of a field that is not among its options."""
        value = getattr(self, field)
        self.check(value in options, f"{field} must be one of {', '.join(options)}, not {value!r}")

    @property
    def name(self) -> str:
        """What it is called in the catalogue; a user's own by its class."""
        package, _, module = type(self).__module__.rpartition(".")
        return module if package.startswith("posttrain.") else type(self).__name__

    @property
    def needs(self) -> frozenset[str]:
        """What else must be on stage; exactly this is built. `reference`: log-probs of the frozen starting model in
        `Batch.reference_T`. `value`: a critic, trained beside the policy; its values before the step are in `Batch.value_T`.
        `proximal`: log-probs of the policy itself as the step begins, in `Batch.proximal_T`. `pretraining`: text to stay good at.
        """
        return frozenset()

    @property
    def pretraining(self) -> float:
        """Coefficient of the log-likelihood of pretraining text that is added to every optimizer step (InstructGPT's ptx)."""
        return 0.0

    @property
    def group_size(self) -> int:
        """Samples per prompt, for online algorithms: the setting `group`, where there is one."""
        return int(getattr(self, "group", 1))

    @property
    def reuse(self) -> tuple[int, int]:
        """(epochs, mini-batches): how often a frozen rollout is reused, and in how many optimizer steps: the settings `epochs` and
        `mini_batches`, where there are any. (1, 1) is on-policy. Every pass deals the groups into mini-batches anew, at random."""
        epochs, pieces = int(getattr(self, "epochs", 1)), int(getattr(self, "mini_batches", 1))
        require(
            epochs >= 1 and pieces >= 1,
            f"{type(self).__name__}: epochs and mini_batches must be at least 1",
        )
        return epochs, pieces

    @property
    def learns_steps(self) -> bool:
        """Whether the values of steps (Score.steps, in `Batch.step_T`) are learned from, not the score of the whole response alone:
        the setting `supervision`, where there is one."""
        return getattr(self, "supervision", "outcome") != "outcome"

    def start(self) -> State:
        return {}

    def select(self, groups: Sequence[Group], state: State) -> Selection:
        """Which groups to train on, or a request for more. No tensors yet."""
        return Selection(tuple(groups))

    def prepare(self, step: Batch, state: State) -> Batch:
        """Without gradient, for the whole optimizer step: rewards to advantages, and the weight of every term."""
        raise NotImplementedError

    def terms(self, outputs: Outputs, batch: Batch) -> Terms:
        """The losses of one micro-batch of a prepared step, per unit, with their weights."""
        raise NotImplementedError

    def warnings(self, sampling: Sampling) -> tuple[str, ...]:
        """What a person should hear before the first step of a run that samples like this: a term that cannot act, say."""
        return ()

    def stop_reuse(self, metrics: Sequence[Metric]) -> bool:
        """After an optimizer step on a reused rollout, given its figures: whether to leave the rest of the reuse."""
        return False

    def finish(self, state: State, metrics: Sequence[Metric]) -> State:
        """Once an optimizer step, on statistics of all of it."""
        return state
