"""The plan of a stage: its batch sizes in words, its memory, and a shortened stage for a dry run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import many
from posttrain.loop import Stop
from posttrain.models.lora import Lora
from posttrain.models.policy import Policy
from posttrain.monitor.rules import ALWAYS, RULES, MonitorSettings
from posttrain.train import memory

if TYPE_CHECKING:
    from posttrain.stages.base import Context, Stage
    from posttrain.stages.rl import RLStage
    from posttrain.stages.sft import SFTStage
    from posttrain.stages.train import DataStage, TrainStage, UnitStage

    Stages = Mapping[str, Stage]  # those before it, by name

STEPS = 3  # of a dry run; the first one warms up
ITEMS = 32  # problems, prompts or pairs of a dry run of a stage without steps
NEVER = 10**7


@dataclass(frozen=True)
class DryRun:
    """A shortened stage, and how to compute the whole stage's time from it: `factor` times as long, or `steps` steps with an
    evaluation before, after and every `evaluate_every`. `loops` are the names under which the shortened stage writes its metrics.
    `limit` is the token limit of responses if the stage samples while it trains; `batch` is the number of examples a step if it
    learns from examples."""

    stage: Stage
    factor: float = 1.0
    steps: int = 0
    counted: Callable[[int], int] | None = None  # steps by number of examples, if epochs are given
    evaluate_every: int = 0
    loops: tuple[str, ...] = ()
    limit: int = 0
    batch: int = 0
    same_time_as: str = ""  # an earlier stage that it takes as long as

    def at_length(self, tokens: int, name: str) -> Stage:
        """The shortened stage with every response `tokens` long, under another name."""
        small: Any = self.stage
        sampling = replace(small.sampling, max_new_tokens=tokens, min_new_tokens=tokens)
        made: Stage = replace(small, name=name, sampling=sampling)
        return made


def fewer(stage: Any, field: str, **changes: Any) -> DryRun:
    """The dry run of a stage without steps, with a smaller value of `field`."""
    count = getattr(stage, field)
    few = min(count, ITEMS)
    return DryRun(replace(stage, **{field: few}, **changes), factor=count / few)


def few_steps(stage: Any, evaluate_every: int = 0, members: int = 1, **changes: Any) -> DryRun:
    """The dry run of a training stage. Its model, which is deleted, need not pass any gate."""
    monitor = MonitorSettings(off=tuple(set(RULES) - set(ALWAYS)))
    if evaluate_every:
        changes["evaluate_every"] = NEVER  # only before the first step and after the last
    if stage.steps is None:
        changes["epochs"] = None
    changes |= {"checkpoint_every": NEVER, "keep": "last", "monitor": monitor, "stop": Stop()}
    small = replace(stage, steps=min(STEPS, stage.steps or STEPS), **changes)
    loops = tuple(f"{stage.name}-{n}" if n else stage.name for n in range(members))
    counted = None if stage.steps else lambda size: stage.counted(size).steps
    return DryRun(small, 1.0, stage.steps or 0, counted, evaluate_every, loops)


@dataclass(frozen=True, slots=True)
class Memory:
    """An estimate of memory in bytes, item by item."""

    sizes: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.sizes.values())

    def line(self) -> str:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in self.sizes.items() if size)
        return f"memory: about {size_text(self.total)} besides Python and torch ({parts})"


def size_text(size: float) -> str:
    """
    >>> size_text(1536), size_text(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def training_memory(
    stage: TrainStage,
    policy: Policy,
    tokens: int,
    layered: bool,
    others: Mapping[str, float],
    cache: float = 0.0,
    predicted: int = 0,
) -> Memory:
    """Memory of training: the weights; gradients and Adam's two moments of the trained weights; the activations of one micro-batch of
    `tokens`; the logits of its tokens, or of `predicted` of them; the sampler's cache; and the weights of other models. `layered`
    says whether layers are checkpointed."""
    optimizer, lora = stage.optimizer, stage.lora
    adapters = 0 if lora is None else lora.parameters(policy.body)
    more = 0.0 if lora is None else lora.weight_bytes(policy.body, policy.dtype.itemsize)
    items = {"weights": memory.weight_bytes(policy) + more}
    items |= memory.learning_bytes(policy, adapters or policy.trainable, optimizer.moment_bytes)
    items["activations"] = memory.activation_bytes(policy, tokens, layered)
    items["logits"] = memory.logits_bytes(policy, predicted or tokens)
    items["logits"] += 0.0 if adapters else memory.head_bytes(policy)
    return Memory({**items, "key-value cache": cache, **others})


@dataclass(frozen=True, slots=True)
class Way:
    """How a step will be computed: the tokens of a micro-batch and whether layers are checkpointed, as the trainer will choose them
    if the device is present. `need` is the memory of a step without checkpointing, excluding the weights; `have` is the free memory
    for it."""

    tokens: int
    layered: bool
    need: float
    have: float | None


def planned_way(stage: TrainStage, policy: Policy, longest: int, reserved: float = 0.0) -> Way:
    """The `Way` of a stage for sequences of up to `longest` tokens. Trained roles are not counted."""
    optimizer, lora, have = stage.optimizer, stage.lora, memory.at_hand(policy.device)
    count = policy.trainable if lora is None else lora.parameters(policy.body)
    if have is not None:  # free memory after the weights are loaded, possibly in 4 bits
        there = policy.model.device.type == policy.device.type
        more = 0.0 if lora is None else lora.weight_bytes(policy.body, policy.dtype.itemsize)
        have -= more + (0.0 if there else memory.weight_bytes(policy))
    learning = sum(memory.learning_bytes(policy, count, optimizer.moment_bytes).values())
    frozen = 0.0 if lora is None else memory.head_bytes(policy)

    def need(layered: bool, tokens: int) -> float:
        whole = memory.step_bytes([policy], learning, max(tokens, longest), layered)
        return reserved + whole - frozen

    asked = (optimizer.token_budget, optimizer.checkpointing)
    tokens, layered = memory.choose_way(*asked, need, have, reserved + learning)
    usual = tokens if isinstance(optimizer.token_budget, int) else max(tokens, memory.PLAIN_BUDGET)
    return Way(tokens, layered, need(False, usual), have)


def sft_plan(stage: SFTStage, policy: Policy, context: Context, before: Stages) -> list[str]:
    """Batch sizes, memory and the data report of a supervised stage. Data of earlier stages does not exist yet and is not counted."""
    files = [source.file for source in stage.data if source.file in before]
    later = [f"examples written by {file}: not there yet" for file in files]
    there = tuple(source for source in stage.data if source.file not in before)
    if later and not there:
        return [f"a step: {many(stage.batch, 'example')}; {how_long(stage)}", *later]
    material = replace(stage, data=there).material(context, policy)
    lengths = [[len(e.ids) for e in s] for s in material.sets if s]
    weights = [weight for weight, s in zip(material.weights, material.sets, strict=True) if s]
    mean = sum(w * sum(of) / len(of) for w, of in zip(weights, lengths, strict=True)) / sum(weights)
    total, whole = sum(map(len, lengths)), stage
    stage = stage if later else stage.counted(total)
    reports = [
        f"{source}: {line}" if n == 0 else f"  {line}"
        for source, report in zip(there, material.reports, strict=True)
        for n, line in enumerate(report.lines())
    ]
    return [
        f"a step: {many(stage.batch, 'example')}, about {stage.batch * mean:,.0f} tokens; {how_long(stage, total)} "
        f"{many(total, 'example')}{f', {len(material.held_out):,} held out' if material.held_out else ''}",
        *counted_warnings(whole, stage),
        *reports,
        *later,
        memory_line(stage, policy, max(map(max, lengths))),
    ]


def memory_line(stage: DataStage, policy: Policy, longest: int) -> str:
    """The memory of a stage that learns from units of up to `longest` tokens."""
    way = planned_way(stage, policy, longest)
    tokens = min(max(way.tokens, longest), stage.batch * longest)
    others = stage.role_bytes(policy, tokens)
    return training_memory(stage, policy, tokens, way.layered, others).line()


def how_long(stage: DataStage, size: int = 0) -> str:
    """The length of a stage in words, with the steps over `size` examples if that is known."""
    if stage.steps is None:
        return many(stage.epochs or 0.0, "epoch")
    steps = many(stage.steps, "step")
    return f"{steps} = {stage.steps * stage.batch / size:.1f} passes over" if size else steps


def counted_warnings(stage: DataStage, counted: DataStage) -> list[str]:
    """The warnings that need the number of steps, which epochs and data decide."""
    return [f"warning: {text}" for text in counted.warnings() if text not in stage.warnings()]


def preference_plan(
    stage: UnitStage, policy: Policy, context: Context, before: Stages
) -> list[str]:
    """Batch sizes, memory and the data report of a stage that learns from preferences."""
    times = f", {stage.makes()} times over" if stage.makes() > 1 else ""
    files = [file for _, file in stage.named("data") if file in before]
    later = [f"preferences written by {file}: not there yet" for file in files]
    if later:
        return [f"a step: {many(stage.batch, 'unit')}; {how_long(stage)}{times}", *later]
    reports: list[str] = []
    with context.events.shown_by(lambda event: reports.append(event.text)):
        train, held_out = stage.limited(policy).split(context, policy.tokenizer)
    units, whole, stage = [*train, *held_out], stage, stage.counted(len(train))
    sizes = [sum(len(example.ids) for example in unit) for unit in units]
    average = stage.batch * sum(sizes) // len(units)
    return [
        f"a step: {stage.batch} of {many(len(units), 'unit')}, about {average:,} tokens; {how_long(stage, len(train))} "
        f"{len(train):,} that are not held out{times}",
        *counted_warnings(whole, stage),
        *reports,
        memory_line(stage, policy, max(sizes)),
    ]


def rl_plan(stage: RLStage, policy: Policy, context: Context, before: Stages) -> list[str]:
    """Batch sizes and memory of an rl stage."""
    group, reuse = stage.algorithm.group_size, stage.algorithm.reuse
    samples, updates = stage.prompts * group, reuse.epochs * reuse.mini_batches
    longest, new = stage.longest(policy.tokenizer), stage.sampling.max_new_tokens
    reserved = stage.cache_bytes(policy) + stage.sampler_bytes(policy)
    way = planned_way(stage, policy, longest, reserved)
    budget = way.tokens
    here = memory.at_hand(policy.device) is not None
    elsewhere = stage.optimizer.token_budget == "auto" and policy.device.type == "cuda" and not here
    size = f"{budget} tokens{', or more by the memory of the GPU, which is not here' * elsewhere}"
    # the prompt is computed once for all responses of its group in the same micro-batch
    together = min(samples, max(1, budget // longest))
    tokens = -(-together // group) * (longest - new) + together * new

    held_out = len(stage.task.problems("test")[: stage.evaluate_problems])
    what = "accuracy" if stage.task.verifiable else "reward"
    every = many(stage.evaluate_every, "step")
    scored = f"held-out {what} on {many(held_out, 'problem')} every {every}"
    if not (held_out and stage.evaluate_every):
        scored = "there is no held-out score"

    def needed(one: RLStage) -> Memory:
        cache, rewards = one.cache_bytes(policy, training=False), reward_bytes(one, policy, before)
        return rl_memory(one, policy, tokens, cache, rewards, way.layered, together * new)

    completions = stage.algorithm.branches.completions
    more = f", and {many(completions, 'completion')} from the end of each step of a response but the last"
    return [
        f"a step: {many(stage.prompts, 'prompt')} x {many(group, 'sample')} = {many(samples, 'response')} "
        f"of at most {many(new, 'token')}{more if completions else ''}",
        f"then {many(updates, 'optimizer update')} of {many(samples // reuse.mini_batches, 'response')} each; at full length "
        f"{many(-(-samples * longest // budget), 'micro-batch')} of up to {size} (this changes memory, never the gradient)",
        f"{many(stage.steps, 'step')} = {many(stage.steps * samples, 'response')} and "
        f"{many(stage.steps * updates, 'update')}",
        f"levels {', '.join(map(str, stage.task.levels))}; {scored}",
        *stage.precision_lines(),
        needed(stage).line(),
        checkpointing_line(stage, policy, tokens, way),
        *savings(stage, needed),
    ]


def rl_memory(
    stage: RLStage,
    policy: Policy,
    tokens: int,
    cache: float,
    rewards: float,
    layered: bool = False,
    predicted: int = 0,
) -> Memory:
    """The policy's memory in training, and that of the other models. `rewards` is the size of the reward models' weights. A model
    that is on the CPU between calls is not counted, because it is on the device only while there are no gradients. A cache that is
    released before training counts only as far as it exceeds the gradients and activations that take its place."""
    others = {**stage.role_bytes(policy, tokens), "reward models": rewards}
    others["weights of the sampler"] = stage.sampler_bytes(policy)
    made = training_memory(stage, policy, tokens, layered, others, cache, predicted)
    if not stage.release_cache:
        return made
    left = max(0.0, cache - made.sizes["gradients"] - made.sizes["activations"])
    return Memory({**made.sizes, "key-value cache": left})


def reward_bytes(stage: RLStage, policy: Policy, before: Stages) -> float:
    """Bytes of the reward models on the device: as many models as their stage trains, of the policy's size, or the size of their
    folder."""
    total = 0.0
    for name in stage.reward.on_device():
        members = before[name].makes() if name in before else 1
        total += members * model_bytes("" if name in before else name, policy)
    return total


def model_bytes(name: str, policy: Policy) -> float:
    """Bytes of the model called `name`: the size of its folder, or else that of the policy."""
    sizes = [float(f.stat().st_size) for f in Path(name).glob("*.safetensors")] if name else []
    return sum(sizes) or memory.weight_bytes(policy)


def checkpointing_line(stage: RLStage, policy: Policy, tokens: int, way: Way) -> str:
    """What activation checkpointing would save and cost, and what the setting chooses with the free memory."""
    kept, by_layer = (memory.activation_bytes(policy, tokens, layered) for layered in (False, True))
    price = f"per layer, activations take {size_text(by_layer)} in place of {size_text(kept)}, and training about a third longer"
    chosen, need, have = stage.optimizer.checkpointing, way.need, way.have
    if chosen != "auto":
        found: str = chosen
    elif have is not None:
        does = "per layer" if way.layered else "never"
        sizes = f"{size_text(need)} are needed without and {size_text(have)} are at hand"
        found = f"{does}, for {sizes}"
    elif policy.device.type == "cuda":
        found = f"chosen by the memory of the GPU, which is not here: per layer where it has less than {size_text(need)}"
        found += " besides the weights"
    else:
        found = "never on a CPU"
    return f"activation checkpointing: {found}; {price}"


def savings(stage: RLStage, needed: Callable[[RLStage], Memory]) -> list[str]:
    """How much memory each option would save."""
    ways: list[tuple[str, RLStage]] = []
    if stage.lora is None or stage.reference:  # with lora the reference is the policy's own weights
        ways.append(("reference_device=cpu", replace(stage, reference_device="cpu")))
    offloaded = stage.reward.offloaded()
    if offloaded is not None:
        ways.append(("reward.device=cpu", replace(stage, reward=offloaded)))
    if not stage.max_staleness or stage.sampler == "engine":  # others sample during training
        ways.append(("release_cache=true", replace(stage, release_cache=True)))
    if stage.lora is None and not stage.moves:  # a moving reference has its own weights
        ways.append(("lora.rank=16", replace(stage, lora=Lora(), reference_device="same")))
    now = needed(stage).total
    found = [(way, now - needed(other).total) for way, other in ways]
    parts = [f"{stage.name}.{way} saves {size_text(saved)}" for way, saved in found if saved > 0]
    return [f"to save memory on a GPU: {', '.join(parts)}"] if parts else []
