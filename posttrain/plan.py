"""What a run will do and need, said before it is started: batch arithmetic in words, memory, and the data report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.models.lora import Lora
from posttrain.stages.base import Context, Stage, load_policy
from posttrain.stages.best import BestStage
from posttrain.stages.evaluate import EvaluateStage
from posttrain.stages.mine import MineStage
from posttrain.stages.rl import RLStage
from posttrain.stages.sft import SFTStage

if TYPE_CHECKING:
    from posttrain.config import Settings
    from posttrain.models.policy import Policy


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


def training_memory(policy: Policy, tokens: int, cache: float = 0.0, lora: Lora | None = None) -> Memory:
    """Weights, and for those that learn gradients and Adam's two moments; the activations of one micro-batch of `tokens`.

    A decoder layer keeps about 18 vectors of its width, 4 of its feed-forward width and 4 of its key and value width a token
    for the backward pass.
    """
    adapters = 0 if lora is None else lora.parameters(policy.body)
    learning = learning_bytes(policy, adapters or policy.parameters)
    weights = ("weights", weight_bytes(policy) + policy.dtype.itemsize * adapters)
    return Memory((weights, *learning, ("activations", activation_bytes(policy, tokens)), ("key-value cache", cache)))


def weight_bytes(policy: Policy) -> float:
    return float(policy.dtype.itemsize * policy.parameters)


def learning_bytes(policy: Policy, count: int) -> tuple[tuple[str, float], ...]:
    """What `count` weights need besides themselves in order to learn."""
    masters = 0.0 if policy.dtype.itemsize == 4 else 4.0 * count
    return ("gradients", 4.0 * count), ("float32 master weights", masters), ("optimizer", 8.0 * count)


def activation_bytes(policy: Policy, tokens: int) -> float:
    text = policy.model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer = 18 * text.hidden_size + 4 * text.intermediate_size + 4 * heads * head_width
    return float(policy.dtype.itemsize * tokens * text.num_hidden_layers * layer)


def rl_memory(stage: RLStage, policy: Policy, tokens: int, cache: float, judges: float) -> Memory:
    """The policy's memory in training, and that of everyone else on stage. `judges` is the weights of the reward models. A model that
    rests on the CPU is not counted; it comes when the gradients are not yet there."""
    own = training_memory(policy, tokens, cache, stage.lora)
    body = weight_bytes(policy)
    anchored = "reference" in stage.algorithm.needs or stage.watch_kl
    shared = stage.lora is not None and not stage.reference  # the policy's own frozen weights
    reference = body if anchored and stage.reference_device == "same" and not shared else 0.0
    critic = 0.0
    if "value" in stage.algorithm.needs:
        trained = policy.parameters if stage.lora is None else stage.lora.parameters(policy.body)
        trunk = 0.0 if stage.lora is not None and not stage.critic else body
        adapters = 0.0 if stage.lora is None else float(policy.dtype.itemsize * trained)
        critic = trunk + adapters + sum(size for _, size in learning_bytes(policy, trained)) + activation_bytes(policy, tokens)
    others = (("reference", reference), ("critic", critic), ("reward models", judges if stage.reward_device == "same" else 0.0))
    return Memory((*own.items, *others))


def judge_bytes(stage: RLStage, policy: Policy, before: Mapping[str, Stage]) -> float:
    """Weights of the reward models: as many as their stage trains, of the policy's size; or what their directory holds."""
    total = 0.0
    for name in stage.reward_models:
        files = list(Path(name).glob("*.safetensors")) if name not in before else []
        members = getattr(before.get(name), "members", 1)
        total += float(sum(f.stat().st_size for f in files)) if files else members * weight_bytes(policy)
    return total


def choices(stage: RLStage, memory: Callable[[RLStage], Memory]) -> list[str]:
    """What each way to save memory would save, where there is something to save."""
    ways = [("reward_device=cpu", replace(stage, reward_device="cpu"))]
    if stage.lora is None:
        ways.append(("lora.rank=16", replace(stage, lora=Lora(), reference_device="same")))
    if stage.lora is None or stage.reference:  # with lora the reference is the policy's own weights
        ways.insert(0, ("reference_device=cpu", replace(stage, reference_device="cpu")))
    now = memory(stage).total
    found = [(way, now - memory(other).total) for way, other in ways]
    told = [f"{stage.name}.{way} saves {size_text(saved)}" for way, saved in found if saved > 0]
    return [f"to save memory on a GPU: {', '.join(told)}"] if told else []


def cache_bytes(policy: Policy, rows: int, length: int) -> float:
    text = policy.model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return float(2 * rows * length * heads * head_width * text.num_hidden_layers * policy.dtype.itemsize)


def describe(settings: Settings) -> list[str]:
    """The whole plan as lines. Loads the first model (to price it and to count tokens), trains nothing, writes nothing."""
    from posttrain.runs.write import RunWriter

    lines = [f"recipe {settings.name}, seed {settings.seed}: {' -> '.join(s.name for s in settings.recipe.stages)}"]
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder)) as writer:
        context = Context(writer, settings.seed, say=False)
        policies: dict[str, Any] = {}
        before: dict[str, Stage] = {}
        for stage in settings.recipe.stages:
            lines.append("")
            lines.append(f"{stage.name} ({type(stage).__name__})")
            lines += [f"  {line}" for line in _stage(stage, context, policies, before)]
            before[stage.name] = stage
    return lines


def _stage(stage: Stage, context: Context, policies: dict[str, Any], before: Mapping[str, Stage]) -> list[str]:
    model = getattr(stage, "model", None)
    if isinstance(stage, BestStage) and stage.models[0] in policies:
        policies[stage.name] = policies[stage.models[0]]
        return [f"keeps one of {', '.join(stage.models)}, by {stage.figure}"]
    if model is None:
        return ["no estimate for this kind of stage"]
    if model not in policies:
        policies[model] = load_policy(model, context, stage.alphabet())
    policy = policies[stage.name] = policies[model]
    said = [f"model {model}: {policy.parameters:,} parameters, {str(policy.dtype).removeprefix('torch.')}"]
    if isinstance(stage, MineStage):
        again = f", after those that {stage.again} kept" if stage.again else ""
        return [
            *said,
            f"{stage.prompts} training problems{again}, x {stage.samples} answers; those solved at most {stage.most:.0%} are kept",
        ]
    if isinstance(stage, RLStage):
        return said + rl_lines(stage, policy, before)
    if isinstance(stage, SFTStage):
        return said + sft_lines(stage, policy, context)
    if isinstance(stage, EvaluateStage):
        return [*said, f"{stage.problems} held-out problems x {stage.samples} = {stage.problems * stage.samples} answers of at most "
                f"{stage.sampling.max_new_tokens} tokens"]  # fmt: skip
    return said


def rl_lines(stage: RLStage, policy: Policy, before: Mapping[str, Stage]) -> list[str]:
    """Batch arithmetic and memory of a reinforcement-learning stage."""
    from posttrain.data.chat import render_prompt

    group = stage.algorithm.group_size
    epochs, pieces = stage.algorithm.reuse
    samples, updates = stage.prompts * group, epochs * pieces
    problem = stage.task.problems("train")[0]
    prompt = len(render_prompt(policy.tokenizer, stage.task.prompt(problem)))
    longest = prompt + stage.sampling.max_new_tokens
    rows = min(stage.rows(policy.device.type), samples)
    micro = -(-samples * longest // stage.optimizer.token_budget)
    tokens, judges = min(stage.optimizer.token_budget, samples * longest), judge_bytes(stage, policy, before)

    def memory(one: RLStage) -> Memory:
        return rl_memory(one, policy, tokens, cache_bytes(policy, rows, longest), judges)

    return [
        f"a step: {stage.prompts} prompts x {group} samples = {samples} responses of at most {stage.sampling.max_new_tokens} tokens",
        f"then {updates} optimizer update(s) of {samples // pieces} responses each; at full length {micro} micro-batch(es) of up to "
        f"{stage.optimizer.token_budget} tokens (this changes memory, never the gradient)",
        f"{stage.steps} steps = {stage.steps * samples:,} responses and {stage.steps * updates:,} updates",
        f"levels {', '.join(map(str, stage.task.levels))}; held-out accuracy on {stage.evaluate_problems} problems every "
        f"{stage.evaluate_every} steps",
        memory(stage).line(),
        *choices(stage, memory),
    ]


def sft_lines(stage: SFTStage, policy: Policy, context: Context) -> list[str]:
    """Batch arithmetic, memory and the data report of a supervised stage."""
    material = stage.material(context, policy.tokenizer)
    total = sum(len(s) for s in material.sets)
    lengths = [len(e.ids) for s in material.sets for e in s]
    reports: Sequence[str] = [
        f"{source}: {line}" if n == 0 else f"  {line}"
        for source, report in zip(stage.data, material.reports, strict=True)
        for n, line in enumerate(report.lines())
    ]
    tokens = min(stage.optimizer.token_budget, stage.batch * max(lengths))
    return [
        f"a step: {stage.batch} examples, about {stage.batch * sum(lengths) // total:,} tokens; {stage.steps} steps = "
        f"{stage.steps * stage.batch / total:.1f} passes over {total:,} examples",
        *reports,
        training_memory(policy, tokens, lora=stage.lora).line(),
    ]
