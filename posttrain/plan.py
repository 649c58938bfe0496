"""What a run will do and need, said before it is started: batch arithmetic in words, memory, and the data report."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.stages.base import Context, Stage, load_policy
from posttrain.stages.evaluate import EvaluateStage
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


def training_memory(policy: Policy, tokens: int, reference: bool = False, cache: float = 0.0) -> Memory:
    """Weights, gradients, Adam's two moments, a frozen reference, and the activations of one micro-batch of `tokens`.

    A decoder layer keeps about 18 vectors of its width, 4 of its feed-forward width and 4 of its key and value width a token
    for the backward pass.
    """
    text = policy.model.config.get_text_config()
    count, width = policy.parameters, policy.model.dtype.itemsize
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer = 18 * text.hidden_size + 4 * text.intermediate_size + 4 * heads * head_width
    masters = 0 if width == 4 else 4 * count
    return Memory(
        (
            ("weights", float(width * count)),
            ("reference", float(width * count if reference else 0)),
            ("gradients", 4.0 * count),
            ("float32 master weights", float(masters)),
            ("optimizer", 8.0 * count),
            ("activations", float(width * tokens * text.num_hidden_layers * layer)),
            ("key-value cache", cache),
        )
    )


def cache_bytes(policy: Policy, rows: int, length: int) -> float:
    text = policy.model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2.0 * rows * length * heads * head_width * text.num_hidden_layers * policy.model.dtype.itemsize


def describe(settings: Settings) -> list[str]:
    """The whole plan as lines. Loads the first model (to price it and to count tokens), trains nothing, writes nothing."""
    from posttrain.runs.write import RunWriter

    lines = [f"recipe {settings.name}, seed {settings.seed}: {' -> '.join(s.name for s in settings.recipe.stages)}"]
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder)) as writer:
        context = Context(writer, settings.seed, say=False)
        policies: dict[str, Any] = {}
        for stage in settings.recipe.stages:
            lines.append("")
            lines += [f"{stage.name} ({type(stage).__name__})"] + [f"  {line}" for line in _stage(stage, context, policies)]
    return lines


def _stage(stage: Stage, context: Context, policies: dict[str, Any]) -> list[str]:
    model = getattr(stage, "model", None)
    if model is None:
        return ["no estimate for this kind of stage"]
    if model not in policies:
        policies[model] = load_policy(model, context, stage.alphabet())
    policy = policies[stage.name] = policies[model]
    said = [f"model {model}: {policy.parameters:,} parameters, {str(policy.dtype).removeprefix('torch.')}"]
    if isinstance(stage, RLStage):
        return said + rl_lines(stage, policy)
    if isinstance(stage, SFTStage):
        return said + sft_lines(stage, policy, context)
    if isinstance(stage, EvaluateStage):
        return [*said, f"{stage.problems} held-out problems x {stage.samples} = {stage.problems * stage.samples} answers of at most "
                f"{stage.sampling.max_new_tokens} tokens"]  # fmt: skip
    return said


def rl_lines(stage: RLStage, policy: Policy) -> list[str]:
    """Batch arithmetic and memory of a reinforcement-learning stage."""
    from posttrain.data.chat import render_prompt

    group = stage.algorithm.group_size
    epochs, pieces = stage.algorithm.reuse
    samples, updates = stage.prompts * group, epochs * pieces
    problem = stage.task.problems("train")[0]
    prompt = len(render_prompt(policy.tokenizer, stage.task.prompt(problem)))
    longest = prompt + stage.sampling.max_new_tokens
    rows = min(stage.max_rows, samples)
    micro = -(-samples * longest // stage.optimizer.token_budget)
    memory = training_memory(
        policy,
        min(stage.optimizer.token_budget, samples * longest),
        "reference" in stage.algorithm.needs,
        cache_bytes(policy, rows, longest),
    )
    return [
        f"a step: {stage.prompts} prompts x {group} samples = {samples} responses of at most {stage.sampling.max_new_tokens} tokens",
        f"then {updates} optimizer update(s) of {samples // pieces} responses each; at full length {micro} micro-batch(es) of up to "
        f"{stage.optimizer.token_budget} tokens (this changes memory, never the gradient)",
        f"{stage.steps} steps = {stage.steps * samples:,} responses and {stage.steps * updates:,} updates",
        f"levels {', '.join(map(str, stage.task.levels))}; held-out accuracy on {stage.evaluate_problems} problems every "
        f"{stage.evaluate_every} steps",
        memory.line(),
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
        training_memory(policy, tokens).line(),
    ]
