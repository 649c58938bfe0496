"""What all stages that train have in common: settings, roles, the trainer, the loop, the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from posttrain.algorithms.base import Algorithm
from posttrain.errors import Count, Interval, require
from posttrain.loop import Loop, LoopSchedule, Source
from posttrain.models.load import same_vocabulary
from posttrain.monitor.rules import MonitorSettings
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.train.optimizer import Optimization
from posttrain.types import JSON, Sampler

if TYPE_CHECKING:
    from posttrain.models.policy import Policy
    from posttrain.models.scorer import Scorer
    from posttrain.train.roles.base import Role
    from posttrain.train.trainer import Trainer

# what an algorithm learns from, and the stage that reads it
STAGES = {
    "demonstrations": "an sft stage",
    "pairs": "a preference stage",
    "labels": "a preference stage",
    "rankings": "a reward_model stage",
    "step_labels": "a reward_model stage",
    "rollouts": "an rl stage",
}


@dataclass(frozen=True, kw_only=True)
class TrainStage(Stage):
    """Trains `model` by `algorithm`. A stage says what its algorithm may learn from, which roles it can build, and where the
    material comes from."""

    reads: ClassVar[tuple[str, ...]] = ()
    builds: ClassVar[tuple[str, ...]] = ("proximal",)

    model: str
    algorithm: Algorithm
    steps: Count = 300
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-5, warmup=20, schedule="cosine")
    )
    checkpoint_every: Interval = 100
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        learns, name = self.algorithm.learns_from, self.algorithm.name
        require(
            learns in self.reads,
            f"{self.name}: {name} learns from {learns.replace('_', ' ')}; use {STAGES.get(learns, 'another stage')}",
        )
        strange = sorted(self.algorithm.roles - {*self.builds})
        require(
            not strange,
            f"{self.name}: {name} asks for the role {', '.join(strange)}, which this stage does not build; it builds "
            f"{', '.join(self.builds)}",
        )

    def optimizers(self) -> dict[str, Optimization]:
        """The settings of its optimizers, by their key."""
        return {"optimizer": self.optimizer}

    def check_ready(self, device: str) -> None:
        super().check_ready(device)
        for settings in self.optimizers().values():
            settings.ready(device)

    def warnings(self) -> list[str]:
        found = self.optimizer.warning(f"{self.name}.optimizer", self.steps)
        return [found] if found else []

    def make_roles(self, context: Context, policy: Policy) -> list[Role]:
        """The roles that the algorithm asks for."""
        return [self.make_role(name, context, policy) for name in sorted(self.algorithm.roles)]

    def make_role(self, name: str, context: Context, policy: Policy) -> Role:
        from posttrain.train.roles.proximal import Proximal

        assert name == "proximal"
        return Proximal(policy)

    def role_bytes(self, policy: Policy, tokens: int) -> dict[str, float]:
        """What each role takes of the device's memory, for a micro-batch of `tokens`."""
        return {}

    def make_trainer(
        self,
        context: Context,
        learner: Policy | Scorer,
        roles: Sequence[Role] = (),
        reserved_bytes: float = 0.0,
    ) -> Trainer:
        from posttrain.train.trainer import Trainer

        events = context.events
        return Trainer(learner, self.algorithm, self.optimizer, roles, reserved_bytes, events)

    def train(
        self,
        context: Context,
        trainer: Trainer,
        source: Source,
        schedule: LoopSchedule,
        *,
        label: str = "",
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        sampler: Sampler | None = None,
        release: Callable[[], None] | None = None,
    ) -> Loop:
        """Run the loop. `label` is what the run calls it where the stage trains several models."""
        name = label or self.name
        loop = Loop(
            stage=name,
            schedule=schedule,
            trainer=trainer,
            source=source,
            writer=context.writer,
            checkpoints=context.checkpoints(name),
            interrupt=context.interrupt,
            trackers=context.trackers,
            sampler=sampler,
            evaluate=evaluate,
            release=release,
            monitor=self.monitor,
            seed=context.seed,
        )
        loop.run()
        return loop

    def schedule(self, evaluate_every: int = 0, seconds: float = 0.0) -> LoopSchedule:
        return LoopSchedule(
            steps=self.steps,
            evaluate_every=evaluate_every,
            checkpoint_every=self.checkpoint_every,
            seconds=seconds,
        )


def trained(loop: Loop) -> dict[str, JSON]:
    """The figures that the result of every stage that trained one model begins with."""
    return {"steps": loop.step, "train_seconds": loop.elapsed, **loop.best_figures()}


def load_reference(
    stage: TrainStage, name: str, device: str, context: Context, policy: Policy
) -> Policy:
    """The model `name`, frozen; with device `cpu` it comes to the policy's only when it is asked."""
    reference = load_policy(name or stage.model, context, stage.alphabet())
    same_vocabulary(stage.name, policy, reference)
    if device == "cpu":
        reference.model.to("cpu")
    return reference
