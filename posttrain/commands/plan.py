"""What a run will do and need, said before it is started: batch arithmetic in words, memory, and the data report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain.errors import require
from posttrain.models.load import Reader, check_device, same_vocabulary
from posttrain.models.lora import Lora
from posttrain.models.policy import Policy
from posttrain.runs.console import duration
from posttrain.stages.base import Context, Stage, load_policy, warnings_of
from posttrain.stages.best import BestStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.mine import MineStage
from posttrain.stages.preference import PreferenceStage
from posttrain.stages.reward_model import RewardModelStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage
from posttrain.train.memory import (
    activation_bytes,
    at_hand,
    checkpointing_pays,
    learning_bytes,
    logits_bytes,
    weight_bytes,
)
from posttrain.train.optimizer import Optimization
from posttrain.trust import trusting

if TYPE_CHECKING:
    from posttrain.commands.dry_run import Estimate
    from posttrain.config import Settings


class Elsewhere(Policy):
    """A model that is priced for a CUDA device which this machine does not have; its weights lie in host memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Memory:
    """An estimate in bytes, item by item."""

    items: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        return sum(size for _, size in self.items)

    def line(self) -> str:
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in self.items if size)
        return f"memory: about {size_text(self.total)} beside Python and torch ({parts})"


def size_text(size: float) -> str:
    """
    >>> size_text(1536), size_text(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def training_memory(
    policy: Policy,
    tokens: int,
    optimizer: Optimization,
    lora: Lora | None = None,
    cache: float = 0.0,
) -> Memory:
    """Weights, and for those that learn gradients and Adam's two moments; the activations of one micro-batch of `tokens`."""
    adapters = 0 if lora is None else lora.parameters(policy.body)
    learning = learning_bytes(policy, adapters or policy.parameters, optimizer.moment_bytes)
    weights = ("weights", weight_bytes(policy) + policy.dtype.itemsize * adapters)
    kept = ("activations", activation_bytes(policy, tokens, optimizer.checkpointing == "layer"))
    logits = ("logits", logits_bytes(policy, tokens))
    return Memory((weights, *learning, kept, logits, ("key-value cache", cache)))


def rl_memory(stage: RLStage, policy: Policy, tokens: int, cache: float, judges: float) -> Memory:
    """The policy's memory in training, and that of everyone else on stage. `judges` is the weights of the reward models. A model that
    rests on the CPU is not counted; it comes when the gradients are not yet there. A cache that is given back before training counts
    where it is larger than the gradients and activations that come in its place."""
    checkpointed = stage.optimizer.checkpointing == "layer"
    own = training_memory(policy, tokens, stage.optimizer, stage.lora, cache)
    if stage.release_cache:
        sizes = dict(own.items)
        left = max(0.0, cache - sizes["gradients"] - sizes["activations"])
        own = Memory(tuple((sizes | {"key-value cache": left}).items()))
    body = weight_bytes(policy)
    anchored = "reference" in stage.algorithm.needs or stage.watch_kl
    shared = stage.lora is not None and not stage.reference  # the policy's own frozen weights
    reference = body if anchored and stage.reference_device == "same" and not shared else 0.0
    critic = 0.0
    if "value" in stage.algorithm.needs:
        trained = policy.parameters if stage.lora is None else stage.lora.parameters(policy.body)
        trunk = 0.0 if stage.lora is not None and not stage.critic else body
        adapters = 0.0 if stage.lora is None else float(policy.dtype.itemsize * trained)
        learns = (stage.critic_optimizer or stage.optimizer).moment_bytes
        critic = trunk + adapters + sum(size for _, size in learning_bytes(policy, trained, learns))
        critic += activation_bytes(policy, tokens, checkpointed)
    others = (
        ("reference", reference),
        ("critic", critic),
        ("reward models", judges),
    )
    return Memory((*own.items, *others))


def checkpointing_lines(
    stage: RLStage, policy: Policy, tokens: int, total: float, have: float | None
) -> list[str]:
    """What checkpointing by layers would save and cost, and what the setting will choose with the memory at hand (which already
    holds the weights)."""
    kept, least = (activation_bytes(policy, tokens, checkpointed) for checkpointed in (False, True))
    price = f"per layer, activations take {size_text(least)} in place of {size_text(kept)}, and training about a third longer"
    chosen = stage.optimizer.checkpointing
    if chosen != "auto":
        return [f"activation checkpointing: {chosen}; {price}"]
    need = total - weight_bytes(policy)
    if have is None and policy.device.type == "cuda":
        return [
            f"activation checkpointing: chosen by the memory of the GPU, which is not here: per layer where it has less than "
            f"{size_text(need)} beside the weights; {price}"
        ]
    if have is None:
        return [f"activation checkpointing: never on a CPU; {price}"]
    way = "per layer" if checkpointing_pays(chosen, need, have) else "never"
    return [
        f"activation checkpointing: {way}, for {size_text(need)} are needed and {size_text(have)} are at hand; {price}"
    ]


def judge_bytes(stage: RLStage, policy: Policy, before: Mapping[str, Stage]) -> float:
    """Weights of the reward models: as many as their stage trains, of the policy's size; or what their directory holds."""
    total = 0.0
    for name in stage.reward.on_device():
        files = list(Path(name).glob("*.safetensors")) if name not in before else []
        members = getattr(before.get(name), "members", 1)
        total += (
            float(sum(f.stat().st_size for f in files)) if files else members * weight_bytes(policy)
        )
    return total


def choices(stage: RLStage, memory: Callable[[RLStage], Memory]) -> list[str]:
    """What each way to save memory would save, where there is something to save."""
    ways = [("release_cache=true", replace(stage, release_cache=True))]
    offloaded = stage.reward.offloaded()
    if offloaded is not None:
        ways.insert(0, ("reward.device=cpu", replace(stage, reward=offloaded)))
    if stage.lora is None:
        ways.append(("lora.rank=16", replace(stage, lora=Lora(), reference_device="same")))
    if stage.lora is None or stage.reference:  # with lora the reference is the policy's own weights
        ways.insert(0, ("reference_device=cpu", replace(stage, reference_device="cpu")))
    now = memory(stage).total
    found = [(way, now - memory(other).total) for way, other in ways]
    told = [f"{stage.name}.{way} saves {size_text(saved)}" for way, saved in found if saved > 0]
    return [f"to save memory on a GPU: {', '.join(told)}"] if told else []


def describe(settings: Settings, dry: bool = False) -> list[str]:
    """The whole plan as lines. Loads the first model (to price it and to count tokens), trains nothing, writes nothing. `dry` runs a
    few steps of every stage in a folder that is thrown away, to say how long the run will take."""
    from posttrain.commands.dry_run import estimate
    from posttrain.runs.write import RunWriter

    device = (
        settings.device
        if settings.device != "auto"
        else "cuda"
        if torch.cuda.is_available()
        else "cpu"
    )
    away = device.startswith("cuda") and not torch.cuda.is_available()
    require(
        not (dry and away),
        f"device={device}: dry steps run on the device, and torch sees no CUDA device here; leave --dry out",
    )
    if not away:
        check_device(device)
    lines = [
        f"recipe {settings.name}, seed {settings.seed}: {' -> '.join(s.name for s in settings.recipe.stages)}"
    ]
    if away:
        lines.append(f"priced for {device}, which this machine does not have")
    with (
        trusting(settings.trust),
        tempfile.TemporaryDirectory() as folder,
        RunWriter(Path(folder)) as writer,
    ):
        seen = (
            estimate(settings.recipe.stages, settings.seed, device, settings.threads) if dry else {}
        )
        context = Context(writer, settings.seed, device, say=False)
        policies: dict[str, Any] = {}
        before: dict[str, Stage] = {}
        for stage in settings.recipe.stages:
            lines.append("")
            lines.append(f"{stage.name} ({type(stage).__name__})")
            warnings = [f"warning: {text}" for text in warnings_of(stage)]
            lines += [
                f"  {line}" for line in (*warnings, *_stage(stage, context, policies, before))
            ]
            lines += [f"  {line}" for line in dry_lines(seen[stage.name])] if dry else []
            before[stage.name] = stage
    if dry:
        total, most = sum(e.seconds for e in seen.values()), sum(e.most for e in seen.values())
        lines += [
            "",
            f"the whole run: about {time_text(total)}{at_most(most, total)}, by dry steps on this machine",
        ]
    return lines


def time_text(seconds: float) -> str:
    """
    >>> time_text(1.739), time_text(75)
    ('1.74s', '1m15s')
    """
    return f"{seconds:.3g}s" if seconds < 60 else duration(seconds)


def dry_lines(seen: Estimate) -> list[str]:
    """What dry steps say of a stage."""
    each = f"a step takes {seen.step:.3g} s, " if seen.step else ""
    measured = f"an evaluation {seen.evaluation:.3g} s, " if seen.evaluation else ""
    length = (
        f" with responses of {seen.length:.0f} tokens, as in its examples" if seen.length else ""
    )
    return [
        f"dry steps: about {time_text(seen.seconds)}{length}{at_most(seen.most, seen.seconds)}; {each}{measured}memory "
        f"{size_text(seen.memory)} at the most"
    ]


def at_most(most: float, usual: float) -> str:
    return (
        f", at most {time_text(most)} where every response reaches its limit"
        if most > 1.05 * usual
        else ""
    )


def _stage(
    stage: Stage, context: Context, policies: dict[str, Any], before: Mapping[str, Stage]
) -> list[str]:
    model = getattr(stage, "model", None)
    if isinstance(stage, BestStage) and stage.models[0] in policies:
        policies[stage.name] = policies[stage.models[0]]
        return [f"keeps one of {', '.join(stage.models)}, by {stage.figure}"]
    if model is None:
        return ["no estimate for this kind of stage"]
    if model not in policies:
        policies[model] = load_priced(model, context, stage.alphabet())
    policy = policies[stage.name] = policies[model]
    check_vocabularies(stage, policy, policies)
    said = [
        f"model {model}: {policy.parameters:,} parameters, {str(policy.dtype).removeprefix('torch.')}"
    ]
    if isinstance(stage, MineStage):
        again = f", after those that {stage.again} kept" if stage.again else ""
        return [
            *said,
            f"{stage.prompts} training problems{again}, x {stage.samples} answers; those solved at most "
            f"{stage.max_solved:.0%} are kept",
        ]
    if isinstance(stage, RLStage):
        return said + rl_lines(stage, policy, before)
    if isinstance(stage, SFTStage):
        return said + sft_lines(stage, policy, context, before)
    if isinstance(stage, PreferenceStage | RewardModelStage):
        return said + preference_lines(stage, policy, context, before)
    if isinstance(stage, EvaluateStage):
        return [
            *said,
            f"{stage.problems} held-out problems x {stage.samples} = {stage.problems * stage.samples} answers of at most "
            f"{stage.sampling.max_new_tokens} tokens",
        ]
    return said


def load_priced(name: str, context: Context, alphabet: str) -> Policy:
    """The model as a run would have it on the device, or in host memory where the device is not here."""
    if not context.device.startswith("cuda") or torch.cuda.is_available():
        return load_policy(name, context, alphabet)
    policy = load_policy(name, context, alphabet, place="cpu")
    return Elsewhere(policy.model, policy.tokenizer, policy.stop_ids, policy.source)


def check_vocabularies(stage: Stage, policy: Policy, policies: Mapping[str, Policy]) -> None:
    """Refuse a reference, critic or reward model that the run would refuse for its vocabulary. Of those that lie on the disk
    only the tokenizer is read, of those on the hub nothing; a judge is asked in words, and may be of any family."""
    names = [getattr(stage, "reference", ""), getattr(stage, "critic", "")]
    if isinstance(stage, RLStage):
        names += stage.reward.reads_ids()
    for name in dict.fromkeys(name for name in names if name):
        if name in policies or name.startswith("tiny:") or Path(name).expanduser().exists():
            same_vocabulary(
                stage.name, policy, policies.get(name) or read_reader(name, stage.alphabet())
            )


def read_reader(name: str, alphabet: str) -> Reader:
    from posttrain.models.load import load, locate
    from posttrain.models.load_directory import read_tokenizer
    from posttrain.models.tiny import character_tokenizer

    if name.startswith("tiny:"):
        return Reader(character_tokenizer(alphabet), name)
    path = locate(name)
    return Reader(
        load(name).tokenizer if path.suffix.lower() == ".gguf" else read_tokenizer(path), name
    )


def rl_lines(stage: RLStage, policy: Policy, before: Mapping[str, Stage]) -> list[str]:
    """Batch arithmetic and memory of a reinforcement-learning stage."""
    group = stage.algorithm.group_size
    epochs, pieces = stage.algorithm.reuse
    samples, updates = stage.prompts * group, epochs * pieces
    longest = stage.longest(policy.tokenizer)
    micro = -(-samples * longest // stage.optimizer.token_budget)
    new = stage.sampling.max_new_tokens
    share = (longest + (group - 1) * new) / (
        group * longest
    )  # a prompt is computed once for its group
    tokens = round(share * min(stage.optimizer.token_budget, samples * longest))

    def memory(one: RLStage) -> Memory:
        cache, judges = one.cache_bytes(policy, training=False), judge_bytes(one, policy, before)
        return rl_memory(one, policy, tokens, cache, judges)

    return [
        f"a step: {stage.prompts} prompts x {group} samples = {samples} responses of at most {stage.sampling.max_new_tokens} tokens",
        f"then {updates} optimizer update(s) of {samples // pieces} responses each; at full length {micro} micro-batch(es) of up to "
        f"{stage.optimizer.token_budget} tokens (this changes memory, never the gradient)",
        f"{stage.steps} steps = {stage.steps * samples:,} responses and {stage.steps * updates:,} updates",
        f"levels {', '.join(map(str, stage.task.levels))}; held-out accuracy on {stage.evaluate_problems} problems every "
        f"{stage.evaluate_every} steps",
        memory(stage).line(),
        *checkpointing_lines(stage, policy, tokens, memory(stage).total, at_hand(policy.device)),
        *choices(stage, memory),
    ]


def sft_lines(
    stage: SFTStage, policy: Policy, context: Context, before: Mapping[str, Stage]
) -> list[str]:
    """Batch arithmetic, memory and the data report of a supervised stage. What an earlier stage will write cannot be counted."""
    later = [
        f"examples written by {source.file}: not there yet"
        for source in stage.data
        if source.file in before
    ]
    there = tuple(source for source in stage.data if source.file not in before)
    if later and not there:
        return [f"a step: {stage.batch} examples; {stage.steps} steps", *later]
    material = replace(stage, data=there).material(context, policy.tokenizer)
    total = sum(len(s) for s in material.sets)
    lengths = [len(e.ids) for s in material.sets for e in s]
    reports: Sequence[str] = [
        f"{source}: {line}" if n == 0 else f"  {line}"
        for source, report in zip(there, material.reports, strict=True)
        for n, line in enumerate(report.lines())
    ]
    tokens = min(stage.optimizer.token_budget, stage.batch * max(lengths))
    return [
        f"a step: {stage.batch} examples, about {stage.batch * sum(lengths) // total:,} tokens; {stage.steps} steps = "
        f"{stage.steps * stage.batch / total:.1f} passes over {total:,} examples",
        *reports,
        *later,
        training_memory(policy, tokens, stage.optimizer, stage.lora).line(),
    ]


def preference_lines(
    stage: PreferenceStage | RewardModelStage,
    policy: Policy,
    context: Context,
    before: Mapping[str, Stage],
) -> list[str]:
    """Batch arithmetic, memory and the data report of a stage that learns from preferences."""
    later = [
        f"preferences written by {path}: not there yet" for path in stage.data if path in before
    ]
    count = getattr(stage, "members", 1)
    members = f", {count} times over" if count > 1 else ""
    if later:
        return [f"a step: {stage.batch} units; {stage.steps} steps{members}", *later]
    given = (context, policy.tokenizer)
    reports: list[str] = []
    with context.events.shown_by(lambda event: reports.append(event.text)):
        units = (
            stage.read(*given, stage.data)
            if isinstance(stage, PreferenceStage)
            else stage.read(*given)
        )
    sizes = [sum(len(example.ids) for example in unit) for unit in units]
    tokens = min(stage.optimizer.token_budget, stage.batch * max(sizes))
    memory = training_memory(policy, tokens, stage.optimizer)
    if (
        "reference" in stage.algorithm.needs
        and getattr(stage, "reference_device", "same") == "same"
    ):
        memory = Memory((*memory.items, ("reference", weight_bytes(policy))))
    passes = stage.steps * stage.batch / len(units) / (1 - stage.held_out)
    return [
        f"a step: {stage.batch} of {len(units):,} units, about {stage.batch * sum(sizes) // len(units):,} tokens; {stage.steps} steps "
        f"= {passes:.1f} passes over what is not held out{members}",
        *reports,
        memory.line(),
    ]
