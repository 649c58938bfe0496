"""The base classes of all stages that train: settings, roles, the trainer, the loop, the result."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from posttrain.algorithms.base import Algorithm
from posttrain.collect import Examples, Item, Source
from posttrain.data.preferences import Unit, read_preferences
from posttrain.errors import Count, Interval, Positive, Range, Several, Whole, many, require
from posttrain.loop import Loop, LoopSchedule, Stop
from posttrain.models import nf4
from posttrain.models.load import Reader, same_vocabulary
from posttrain.models.lora import Lora, add_adapters, share_weights
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.monitor.rules import MonitorSettings
from posttrain.stages._held_out import HeldOutEvaluation
from posttrain.stages._material import ROWS, HeldOut, split_sources, until_end
from posttrain.stages._naming import DataName, ModelName
from posttrain.stages._plan import DryRun, few_steps, preference_plan
from posttrain.stages.base import Context, Stage, data_place, load_policy
from posttrain.train.memory import weight_bytes
from posttrain.train.optimizer import Optimization
from posttrain.train.roles.base import Role
from posttrain.train.roles.proximal import Proximal
from posttrain.train.roles.reference import MovingReference, Reference
from posttrain.train.trainer import Trainer
from posttrain.types import JSON, Example

DEFAULT_STEPS = 300
MaxLength = Annotated[int, Range(ge=0, text="0 (the model's positions) or a number of tokens")]
# the stage that provides each kind of `Algorithm.learns_from`
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
    """Trains `model` by `algorithm`. A subclass defines what its algorithm may learn from (`reads`), which roles it can build
    (`builds`), and where the training material comes from."""

    leaves: ClassVar[str | None] = "model"
    together: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()
    builds: ClassVar[tuple[str, ...]] = ("proximal",)

    model: ModelName
    algorithm: Algorithm
    steps: Count | None = DEFAULT_STEPS
    optimizer: Optimization = field(
        default_factory=lambda: Optimization(lr=1e-5, warmup=20, schedule="cosine")
    )
    lora: Lora | None = None  # train adapters on frozen weights instead of the weights
    checkpoint_every: Interval = 100
    # export the model of the last step, or that of the best held-out score
    keep: Literal["last", "best"] = "last"
    # end the stage early at a KL or a plateau, and continue with the next stage
    stop: Stop = field(default_factory=Stop)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)

    def mistakes(self) -> Iterator[str]:
        learns, name = self.algorithm.learns_from, self.algorithm.name
        if learns not in self.reads:
            yield f"{name} learns from {learns.replace('_', ' ')}; use {STAGES.get(learns, 'another stage')}"
        for used, key in ((self.keep == "best", "keep=best"), (self.stop.plateau, "stop.plateau")):
            if used and not self.measures():
                yield f"{key} needs held-out scores; set evaluate_every above 0 and hold something out"
        if self.stop.kl and not self.samples_kl():
            yield "stop.kl needs samples and a reference: an rl stage with a beta above 0 or watch_kl"
        builds = ", ".join(self.builds)
        if strange := ", ".join(sorted(self.algorithm.roles - {*self.builds})):
            yield f"{name} asks for the role {strange}, which this stage does not build; it builds {builds}"

    def measures(self) -> bool:
        """Whether it evaluates on held-out material while it trains."""
        return int(getattr(self, "evaluate_every", 0)) > 0

    def samples_kl(self) -> bool:
        """Whether it has samples and a reference, so that it can measure the KL of responses."""
        return False

    def optimizers(self) -> dict[str, Optimization]:
        """The settings of its optimizers, by their key."""
        return {"optimizer": self.optimizer}

    def check_ready(self, device: str, names: Collection[str]) -> None:
        super().check_ready(device, names)
        for settings in self.optimizers().values():
            settings.ready(device)
        if self.lora is not None:
            self.lora.ready(device)

    def warnings(self) -> list[str]:
        # without `steps`, the epochs and the data decide their number
        found = self.optimizer.warning(f"{self.name}.optimizer", self.steps) if self.steps else ""
        return [line for line in (found, self._lora_warning()) if line]

    def _lora_warning(self) -> str:
        """A warning if adapters train with no more than the default learning rate, which is one of full training, else "". Whether it
        was given makes no difference: a resumed run has every setting in its file."""
        factory = type(self).__dataclass_fields__["optimizer"].default_factory
        usual, rate = (factory if callable(factory) else Optimization)().lr, self.optimizer.lr
        if self.lora is None or rate > usual:
            return ""
        kept = f"lora is used with lr {rate:g}, and {usual:g} is the default of full training"
        return f"{kept}; adapters usually need about ten times as much: lr={10 * usual:g}"

    def load(self, context: Context, name: str = "") -> Policy:
        if name or self.lora is None or not self.lora.load_in_4bit:
            return super().load(context, name)
        policy = load_policy(self.starts_from(), context, self.alphabet(), place="cpu")
        nf4.quantize_layers(policy.body, context.device)
        policy.model.to(context.device)
        return policy

    def make_roles(self, context: Context, policy: Policy) -> list[Role]:
        """Build the roles that the algorithm needs."""
        return [self.make_role(name, context, policy) for name in sorted(self.algorithm.roles)]

    def make_role(self, name: str, context: Context, policy: Policy) -> Role:
        assert name == "proximal"
        return Proximal(policy)

    def role_bytes(self, policy: Policy, tokens: int) -> dict[str, float]:
        """The device memory of each role in bytes, for micro-batches of `tokens` tokens."""
        return {}

    def make_trainer(
        self,
        context: Context,
        learner: Policy | Scorer,
        roles: Sequence[Role] = (),
        reserved_bytes: float = 0.0,
        seed: int | None = None,
        longest: int = 0,
    ) -> Trainer:
        """Make the trainer of a model. LoRA adapters are added to the model here, after a reference and a critic were made on the same
        frozen weights. `seed` is that of the adapters, if not the run's. `longest` is the number of tokens of the longest unit, if
        known."""
        algorithm, settings, events = self.algorithm, self.optimizer, context.events
        if self.lora is not None:
            head = ("score.",) if isinstance(learner, Scorer) else ()
            add_adapters(learner.model, self.lora, context.seed if seed is None else seed, head)
        return Trainer(learner, algorithm, settings, roles, reserved_bytes, events, longest)

    def train(
        self,
        context: Context,
        trainer: Trainer,
        source: Source,
        schedule: LoopSchedule,
        *,
        label: str = "",
        **more: Any,
    ) -> Loop:
        """Run the loop. `more` are further fields of `Loop`. `label` names the loop if the stage trains several models."""
        name = label or self.name
        loop = context.loop(
            stage=name,
            schedule=schedule,
            trainer=trainer,
            source=source,
            writer=context.writer,
            checkpoints=context.checkpoints(name),
            interrupt=context.interrupt,
            trackers=context.trackers,
            on_step=context.on_step,
            monitor=self.monitor,
            keep_best=self.keep == "best",
            seed=context.seed,
            **more,
        )
        loop.run()
        return loop

    def schedule(self, evaluate_every: int = 0, seconds: float = 0.0) -> LoopSchedule:
        assert self.steps is not None, "begin() settles the steps"
        return LoopSchedule(
            steps=self.steps,
            evaluate_every=evaluate_every,
            checkpoint_every=self.checkpoint_every,
            seconds=seconds,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True)
class ReferenceStage(TrainStage):
    """A stage that can have a reference: its starting model, or the model that `reference` names. The reference is frozen unless
    `reference_ema` or `reference_every` makes it follow the policy."""

    reference: ModelName = ""
    # after every step, reference <- reference_ema * reference + (1 - reference_ema) * policy; 0: frozen
    reference_ema: Annotated[float, Range(ge=0, lt=1)] = 0.0
    # copy the policy to the reference every so many steps; 0: never
    reference_every: Whole = 0
    # cpu: the reference is on the policy's device only while it computes
    reference_device: Literal["same", "cpu"] = "same"

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.shared and self.reference_device == "cpu":
            own = "with lora the reference is the policy's own frozen weights and has no memory to give back"
            yield f"{own}; leave reference_device out"
        if self.reference_ema and self.reference_every:
            yield "reference_ema and reference_every are two ways to move the reference: choose one"
        if self.moves and "reference" not in self.algorithm.roles:
            yield "the reference moves, but this algorithm has no use for one; set its beta above 0"
        if self.moves and self.stop.kl:
            yield "stop.kl is the distance from where the stage began, and this reference moves; leave one of them out"
        if self.moves and (self.lora is not None or self.reference):
            yield "a reference that moves begins as the stage's model with all of its weights; leave lora and reference out"

    @property
    def shared(self) -> bool:
        """Whether the reference is the policy without its adapters, sharing the frozen weights."""
        return self.lora is not None and not self.reference

    @property
    def moves(self) -> bool:
        return self.reference_ema > 0 or self.reference_every > 0

    def reads_ids(self) -> tuple[str, ...]:
        return (self.reference,) if self.reference else ()

    def make_role(self, name: str, context: Context, policy: Policy) -> Role:
        if name != "reference":
            return super().make_role(name, context, policy)
        watched = name not in self.algorithm.roles
        model = self.reference_model(context, policy)
        every_step = self.stop.kl > 0 and (watched or not self.algorithm.measures_kl)
        if self.moves:
            ema, every = self.reference_ema, self.reference_every
            return MovingReference(model, policy, ema, every, watched, every_step)
        return Reference(model, watched, every_step)

    def reference_model(self, context: Context, policy: Policy) -> Policy:
        if self.shared:
            return share_weights(policy)
        reference = self.load(context, self.reference)
        same_vocabulary(self.name, policy, reference)
        if self.reference_device == "cpu":
            reference.model.to("cpu")
        return reference

    def role_bytes(self, policy: Policy, tokens: int) -> dict[str, float]:
        if "reference" not in self.algorithm.roles:
            return {}
        return {"reference": self.reference_bytes(policy)}

    def reference_bytes(self, policy: Policy) -> float:
        if self.reference_device == "cpu" or self.shared:
            return 0.0
        # an average of 16-bit weights is kept in float32
        averaged = self.reference_ema > 0 and policy.dtype.itemsize < 4
        return weight_bytes(policy) + 4.0 * policy.parameters * averaged


@dataclass(frozen=True, kw_only=True)
class DataStage(TrainStage):
    """A stage that learns from a data set, for `steps` optimizer steps or for `epochs` passes over the training examples. Every
    `evaluate_every` steps it is evaluated on a share `held_out` of the prompts, which is not trained on."""

    shares = "batch"
    either: ClassVar[tuple[str, ...]] = ("steps", "epochs")  # one of the two is given

    steps: Count | None = None  # default without epochs: 300
    epochs: Positive | None = None
    # examples or units an optimizer step; with epochs, at most the size of the data set
    batch: Several = 32
    evaluate_every: Interval = 50
    held_out: HeldOut = 0.0

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        super().__post_init__()

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if self.steps is not None and self.epochs is not None:
            yield "give steps or epochs, not both"

    def measures(self) -> bool:
        return super().measures() and self.held_out > 0

    def counted(self, size: int) -> Self:
        """The stage with the steps that its epochs take on `size` examples."""
        if self.epochs is None:
            return self
        batch = min(self.batch, size)
        steps = max(1, math.ceil(round(self.epochs * size / batch, 6)))
        return replace(self, steps=steps, epochs=None, batch=batch)

    def examples(self, context: Context, policy: Policy) -> tuple[list[Example], list[Example]]:
        """(to train on, held out), the first example of each unit."""
        return [], []

    def learn(
        self,
        context: Context,
        policy: Policy,
        sets: Sequence[Sequence[Item]],
        weights: Sequence[float],
        held_out: Sequence[Unit],
        seconds: float = 0.0,
    ) -> dict[str, JSON]:
        """Train on sets that are mixed by weight, evaluate on the held-out units, and save the model. Returns the result of the
        stage."""
        items = [item if isinstance(item, tuple) else (item,) for one in sets for item in one]
        stage = self.begin(context, len(items))
        longest = max(sum(len(example.ids) for example in unit) for unit in items)
        roles = self.make_roles(context, policy)
        trainer = self.make_trainer(context, policy, roles, longest=longest)
        evaluation = HeldOutEvaluation(trainer, held_out)
        source = Examples(sets, weights, stage.batch, context.seed, policy.device)
        schedule = stage.schedule(self.evaluate_every if held_out else 0, seconds)
        loop = stage.train(context, trainer, source, schedule, evaluate=evaluation.evaluate)
        result = {**trained(loop), "trained_on": len(items)}
        if held_out:  # before adapters are merged into weights that the reference shares
            result |= self.held_out_result(context, evaluation)
        context.save_model(self.name, policy, self.lora)
        return result

    def held_out_result(self, context: Context, evaluation: HeldOutEvaluation) -> dict[str, JSON]:
        """The figures on the held-out units after training, for the result of the stage."""
        raise NotImplementedError

    def begin(self, context: Context, size: int) -> Self:
        """`counted`, with a message about the steps."""
        stage = self.counted(size)
        if self.epochs is not None:
            passes = f"{many(self.epochs, 'epoch')} of {many(size, 'example')}"
            steps = f"{many(stage.steps or 0, 'step')} of {stage.batch}"
            context.announce(self.name, [f"{passes} = {steps}"])
            new = [line for line in stage.warnings() if line not in self.warnings()]
            context.announce(self.name, new, "warning")
        return stage


@dataclass(frozen=True, kw_only=True)
class UnitStage(DataStage):
    """A stage that learns from units in `data` files: pairs, rankings, labelled responses or labelled steps."""

    reads_first = True

    data: tuple[DataName, ...]
    # the files' own names of columns, as in {prompt: question, chosen: better, rejected: worse}
    columns: Mapping[str, str] = field(default_factory=dict)
    max_length: MaxLength = 0
    held_out: HeldOut = 0.1

    def mistakes(self) -> Iterator[str]:
        yield from super().mistakes()
        if not self.data:
            yield "give at least one JSONL file of preferences as data"

    def check_data(self, reader: Reader, context: Context, before: Collection[str]) -> None:
        if reader.tokenizer is None:
            return
        limited = self.limited(reader)
        files = [path for _, path in self.named("data")]
        there = [path for path in files if path not in before]
        if len(there) < len(files):  # the other files do not exist yet, so the data cannot be split
            limited.read(context, reader.tokenizer, there)
        else:
            limited.split(context, reader.tokenizer)

    def read(self, context: Context, tokenizer: object, paths: Sequence[str]) -> list[Unit]:
        """Read the units of some files, each cut after its response, and report what became of the rows."""
        learns, limit = self.algorithm.learns_from, self.max_length or sys.maxsize
        units: list[Unit] = []
        for path in paths:
            found = read_preferences(data_place(path, context), tokenizer, limit, self.columns)
            context.announce(self.name, found.lines())
            holds = f"{self.name}: {path} holds rows of kind {found.kind}"
            wanted = f"this algorithm learns from {' or '.join(ROWS[learns])}"
            require(found.kind in ROWS[learns], f"{holds}; {wanted}")
            none = f"{self.name}: soft labels are made of scores, and {path} has none"
            scored = found.margins or not self.algorithm.needs_scores
            require(scored, f"{none}; use labels=hard")
            units += [tuple(map(until_end, unit)) for unit in found.units]
        return units

    def split(self, context: Context, tokenizer: object) -> tuple[list[Unit], list[Unit]]:
        """The units of the files: (to train on, held out)."""
        units = self.read(context, tokenizer, self.data)
        (train,), held_out = split_sources([units], self.held_out, context.seed)
        return train, held_out

    def examples(self, context: Context, policy: Policy) -> tuple[list[Example], list[Example]]:
        train, held_out = self.limited(policy).split(context, policy.tokenizer)
        return [unit[0] for unit in train], [unit[0] for unit in held_out]

    def limited(self, reader: Policy | Reader) -> Self:
        """The stage with the model's positions as `max_length` if it has none."""
        return replace(self, max_length=length_limit(self.name, self.max_length, reader))

    plan = preference_plan

    def dry_run(self) -> DryRun:
        return few_steps(self, self.evaluate_every, self.makes())


def length_limit(stage: str, max_length: int, reader: Policy | Reader) -> int:
    """The most tokens of a sequence: `max_length` or, if that is 0, the model's positions. An error if it exceeds them."""
    reader.check_length(max_length, f"lower {stage}.max_length")
    return max_length or reader.positions or sys.maxsize


def trained(loop: Loop) -> dict[str, JSON]:
    """The first figures in the result of every stage that trains one model."""
    return {"steps": loop.step, "train_seconds": loop.elapsed, **loop.best_figures()}
