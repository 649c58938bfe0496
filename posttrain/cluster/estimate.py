"""Estimates what a run of any size needs on a number of GPUs: memory of each, a layout that fits, tokens a second, days and cost.

It loads nothing: a model is given by its size ("70B", "30B-A3B") or by the shape in its config. The arithmetic is the trainer's:
bfloat16 weights, float32 gradients, master weights and two moments (18 bytes a trained weight), sharded over the GPUs by FSDP2, with
activation checkpointing of each layer. Times are rooflines with the efficiencies below, which published runs reach; docs/cluster.md
compares them.

    train = sum over passes of 2 * weights * tokens * factor / (GPUs * FLOP/s * TRAIN)
    generate = mean * (weights + keys and values of the rows) / (bandwidth * READ) + (limit - mean) * weights / (bandwidth * READ)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from posttrain.errors import Checked, Count, UserError, Whole, many, refuse_unknown, require

# share of the peak FLOP/s in training, for dense models and for mixtures of experts
TRAIN, TRAIN_EXPERTS = 0.35, 0.12
READ = 0.6  # share of the peak bandwidth in decoding
OTHER = 1.2  # factor for scoring, weight updates and waiting
# seconds of a layer in decoding in addition to reading: on one GPU, sharded within a node, and sharded across nodes
LAYER, LAYER_DIVIDED, LAYER_APART = 30e-6, 80e-6, 250e-6
ROOM = 0.9  # usable share of a GPU's memory; the rest is for CUDA and fragmentation
RECOMPUTED = 8 / 6  # forward, backward, and a second forward for checkpointed layers
EXCHANGED = 1.15  # factor if GPUs exchange keys and values, or activations, in every layer
GB = 1e9
LEARNING = 18.0  # bytes of a trained weight: itself 2, gradient 4, master 4, moments 8


@dataclass(frozen=True, slots=True)
class GPU:
    """Memory in GB, dense bfloat16 TFLOP/s, bandwidth in TB/s (from the vendors' data sheets), and dollars an hour (an
    assumption)."""

    memory: float
    flops: float
    bandwidth: float
    price: float
    node: int = 8  # GPUs that share fast links


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
GPUS = {name: GPU(*figures) for name, figures in _TABLES["gpus"].items()}


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of weights, the number that a token uses, and the dimensions that decide activations and caches."""

    weights: float
    active: float
    layers: int
    hidden: int
    keys: int  # width of a layer's keys
    vocabulary: int = 128_000

    @property
    def cache(self) -> float:
        """Bytes of the keys and values of a token."""
        return 4.0 * self.keys * self.layers


def shape_of(text: str) -> Shape:
    """The shape of a model of this size, with the dimensions of the published model of the nearest size.

    >>> shape_of("70B").layers, shape_of("30B-A3B").active / 1e9
    (80, 3.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([bm])(?:-a(\d+(?:\.\d+)?)b)?", text.strip().lower())
    if found is None:
        return named_shape(text)
    size = float(found[1]) * (1e9 if found[2] == "b" else 1e6)
    active = float(found[3]) * 1e9 if found[3] else size
    more = f"--params {text}: a token uses some of the weights, not more than all"
    require(0 < active <= size, more)
    nearest = min(_TABLES["models"], key=lambda known: abs(math.log(known[0] * 1e9 / size)))
    return Shape(size, active, *nearest[1:])


def named_shape(name: str) -> Shape:
    """The shape in the config of a model, from a folder or the hub. Its weights are not read."""
    from posttrain.models.load import class_for, locate, read_config

    if not Path(name).exists() and "/" not in name:
        advice = "give a size such as 7B, 350M or 30B-A3B, or a model's folder or name"
        raise UserError(f"--params {name}: {advice}")
    import torch

    from posttrain.models.policy import active_parameters
    from posttrain.train.memory import key_width

    config = read_config(locate(name, weights=False))
    with torch.device("meta"):
        model = class_for(config).from_config(config)
    text = config.get_text_config()
    weights, active = float(model.num_parameters()), float(active_parameters(model))
    layers, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    return Shape(weights, active, layers, hidden, key_width(text), int(text.vocab_size))


@dataclass(frozen=True)
class Work(Checked):
    """The work of one step: what is sampled and trained on, and by which models."""

    algorithm: str = "grpo"
    prompts: Count = 512
    group: Count = 16
    prompt: Count = 256  # in tokens
    response: Count = 2048  # mean length in tokens
    limit: Whole = 0  # longest response in tokens; 0: four times the mean
    steps: Count = 1000

    def __post_init__(self) -> None:
        refuse_unknown("algorithm of an estimate", [self.algorithm], ALGORITHMS)
        super().__post_init__()
        low = 0 < self.limit < self.response
        require(not low, "limit is the longest response, not below the average")

    @property
    def models(self) -> Models:
        return ALGORITHMS[self.algorithm]

    @property
    def responses(self) -> int:
        return self.prompts * (self.group if self.models.samples else 2)

    @property
    def tokens(self) -> int:
        return self.responses * (self.prompt + self.response)

    @property
    def longest(self) -> int:
        return self.limit or 4 * self.response


@dataclass(frozen=True, slots=True)
class Models:
    """The models of the policy's size that an algorithm has: the number of trained ones, the number of frozen ones that read every
    token, and whether it samples."""

    learners: int
    frozen: int
    samples: bool


ALGORITHMS = {name: Models(*given) for name, given in _TABLES["algorithms"].items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """How the work is distributed over the GPUs. All GPUs train. Weights are sharded over `shards`, each layer's computation over
    `divided` of those, and each sequence over `context`. Generation has copies on `tensor` GPUs each; with `offloaded`, the training
    states are in host memory meanwhile."""

    gpus: int
    shards: int
    tensor: int
    offloaded: bool
    context: int = 1
    divided: int = 1

    def rows(self, work: Work) -> int:
        """The responses of each copy that generates."""
        return -(-work.responses // (self.gpus // self.tensor))

    def text(self) -> str:
        how = f"FSDP2 over {self.shards} GPUs"
        if self.shards == 1:
            how = "whole weights on each GPU (ddp)"
        if self.divided > 1:
            how += f", each layer over {self.divided} of them (tensor_parallel={self.divided})"
        if self.context > 1:
            how += f", a sequence over {self.context} (context parallelism, planned)"
        if self.tensor:
            copies = self.gpus // self.tensor
            how += f"; {copies} {'copy' if copies == 1 else 'copies'} for generation on {self.tensor} GPU(s) each"
        if self.tensor > 1:
            how += " (by vLLM, planned)"
        if self.offloaded:
            how += "; what trains waits in host memory meanwhile (planned)"
        return how


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of a GPU in bytes, by item, in training and in generation, and the seconds of a step."""

    layout: Layout
    training: dict[str, float]
    generation: dict[str, float]
    train: float
    generate: float

    @property
    def step(self) -> float:
        return OTHER * (self.train + self.generate)


def layouts(gpus: int, gpu: GPU, samples: bool, dense: bool) -> list[Layout]:
    """All layouts to consider. The layers of experts are not divided."""
    tensors = [t for t in (1, 2, 4, 8, 16, 32) if t <= gpus and gpus % t == 0] if samples else [0]
    shards = sorted({1, min(gpu.node, gpus), gpus})
    contexts = [c for c in (1, 2, 4, 8) if gpus % c == 0]
    kept = (False, True)[: 1 + samples]
    divided = (1, 2, 4, 8) if dense else (1,)
    return [
        Layout(gpus, s, t, offloaded, c, d)
        for c, d, offloaded, t, s in product(contexts, divided, kept, tensors, shards)
        if d == 1 or (d <= gpu.node and s % d == 0)
    ]


def memory_of(
    shape: Shape, work: Work, layout: Layout
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes on each GPU in training, and in generation without keys and values."""
    models, shards = work.models, layout.shards
    learning = models.learners * LEARNING * shape.weights / shards
    frozen = models.frozen * 2.0 * shape.weights / shards
    tokens = (work.prompt + work.longest) / layout.context  # a micro-batch of the longest sequence
    # one layer while it computes: about 34 numbers of width H a token, 10 of which are those of its inputs
    layer = 2.0 * (10 + 24 / layout.divided) * shape.hidden * tokens
    gathered = 3 * 2.0 * shape.weights / shape.layers / layout.divided
    training = {
        "weights that learn, gradients, moments": learning,
        "frozen models": frozen,
        "activations by layer": 2.0 * shape.layers * shape.hidden * tokens + layer,
        "logits": 6.0 * min(tokens * shape.vocabulary, 1 << 28),
        "a gathered layer": 0.0 if shards == 1 else gathered,
    }
    if not layout.tensor:
        return training, {}
    generation = {"weights of the copy": 2.0 * shape.weights / layout.tensor}
    if not layout.offloaded:
        generation |= {"weights that learn, moments": learning, "frozen models": frozen}
    return training, generation


def cache_of(shape: Shape, work: Work, layout: Layout) -> float:
    """Bytes of the keys and values of all responses, on each GPU that generates."""
    return layout.rows(work) * (work.prompt + work.response) * shape.cache / layout.tensor


def estimate(shape: Shape, work: Work, gpu: GPU, layout: Layout) -> Estimate | None:
    """The estimate of a layout; None if it does not fit."""
    room = ROOM * gpu.memory * GB
    training, generation = memory_of(shape, work, layout)
    left = room - sum(generation.values())
    cached = 0.0
    if layout.tensor:
        every = cache_of(shape, work, layout)
        smallest = (work.prompt + work.longest) * shape.cache / layout.tensor  # for one row
        cached = min(every, left)
        if cached < smallest:
            return None
        generation = generation | {"keys and values": cached}
    if sum(training.values()) > room:
        return None
    return Estimate(
        layout,
        training,
        generation,
        train_seconds(shape, work, gpu, layout),
        generate_seconds(shape, work, gpu, layout, cached),
    )


def train_seconds(shape: Shape, work: Work, gpu: GPU, layout: Layout) -> float:
    """Forward and backward passes of the trained models, forward passes of the others, and one more to recompute the log-probs of
    samples."""
    models, share = work.models, TRAIN if shape.active == shape.weights else TRAIN_EXPERTS
    passes = 3 * RECOMPUTED * models.learners + models.frozen + (1 if models.samples else 0)
    # per token: scores and values over half of the positions
    attention = 2.0 * shape.layers * shape.hidden * (work.prompt + work.response)
    flops = passes * work.tokens * (2.0 * shape.active + attention)
    slower = 1.0 if layout.context == 1 else EXCHANGED  # keys and values are exchanged
    slower *= 1.0 if layout.divided == 1 else EXCHANGED  # activations are summed
    return slower * flops / (layout.gpus * gpu.flops * 1e12 * share)


def generate_seconds(shape: Shape, work: Work, gpu: GPU, layout: Layout, cached: float) -> float:
    """Decode all rows at once if their caches fit, otherwise in turns; then the longest row alone."""
    if not layout.tensor:
        return 0.0
    rows, bandwidth = layout.rows(work), gpu.bandwidth * 1e12 * READ
    divided = LAYER_DIVIDED if layout.tensor <= gpu.node else LAYER_APART
    waits = shape.layers * (LAYER if layout.tensor == 1 else divided)
    every = cache_of(shape, work, layout)
    turns = max(1.0, every / cached)
    used = min(shape.weights, shape.active * rows / turns)  # experts that no row uses are not read
    read = 2.0 * used / layout.tensor / bandwidth
    computed = 2.0 * shape.active * rows / turns / layout.tensor / (gpu.flops * 1e12 * TRAIN)
    full = waits + max(read + min(every, cached) / 2 / bandwidth, computed)
    alone = waits + 2.0 * shape.active / layout.tensor / bandwidth
    return turns * work.response * full + (work.longest - work.response) * alone


def best(shape: Shape, work: Work, gpu: GPU, gpus: int) -> Estimate | None:
    """The fastest layout that fits."""
    considered = layouts(gpus, gpu, work.models.samples, shape.active == shape.weights)
    found = [estimate(shape, work, gpu, layout) for layout in considered]
    return min((one for one in found if one is not None), key=lambda one: one.step, default=None)


def fewest(shape: Shape, work: Work, gpu: GPU) -> int | None:
    """The smallest number of GPUs on which it fits, among powers of 2 up to 16,384."""
    counts = (1 << power for power in range(15))
    return next((n for n in counts if best(shape, work, gpu, n) is not None), None)


def textbook_lines(gpu: GPU) -> list[str]:
    """The table in textbooks, next to the estimates of this file."""
    lines = ["what is usually said, and what this arithmetic says:"]
    for name, (low, high), settings in _TABLES["textbook"]:
        work = Work(**settings)
        shape = shape_of(name.split()[-1])
        need = fewest(shape, work, gpu)
        said = f"{low}" if low == high else f"{low}-{high}"
        found = best(shape, work, gpu, low) if need is not None else None
        fits = "fits on no number of these" if need is None else f"fits from {need}"
        verdict = "fits" if need == low else "fits on fewer, if waiting is cheap"
        if need is None or need > low:
            verdict = "does not fit in the fewer"
        if found is not None:
            fits += f"; {work.steps} steps on {low} take {_long(found.step * work.steps)}"
        lines.append(f"  {name}: said {said} GPUs; {fits} ({verdict})")
    return lines


def _long(seconds: float) -> str:
    """
    >>> _long(86400 * 11.2), _long(1800)
    ('11.2 days', '0.5 hours')
    """
    return f"{seconds / 86400:.1f} days" if seconds >= 86400 else f"{seconds / 3600:.1f} hours"


def lines(shape: Shape, work: Work, name: str, gpus: int) -> list[str]:
    """The plan of a run as lines. A plan that does not fit is refused, with the number of GPUs that would suffice."""
    refuse_unknown("GPU", [name], GPUS)
    require(gpus > 0, f"--gpus {gpus}: give a number of GPUs")
    gpu = GPUS[name]
    found = best(shape, work, gpu, gpus)
    if found is None:
        none = "it fits on no number of these: shorten the responses, or take larger GPUs"
        less = "with adapters (lora) less is enough, which 'posttrain plan FILE' counts"
        verdict = f"it fits on {need}; {less}" if (need := fewest(shape, work, gpu)) else none
        what = f"{work.algorithm} of {shape.weights / 1e9:g}B weights"
        raise UserError(f"{what} does not fit on {gpus} x {name}; {verdict}")
    seconds, tokens = found.step, work.tokens
    days = seconds * work.steps / 86400
    size = f"{shape.weights / 1e9:g}B weights"
    if shape.active < shape.weights:
        size += f", {shape.active / 1e9:g}B a token"
    sampled = many(work.prompts, "pair")
    if work.models.samples:
        sampled = f"{many(work.prompts, 'prompt')} x {work.group}"
    assumed = f"{TRAIN:.0%} of the peak FLOP/s in training ({TRAIN_EXPERTS:.0%} with experts), {READ:.0%} of the bandwidth in decoding"
    longest = f", at most {work.longest}" if work.models.samples else ""
    return [
        f"an estimate: {work.algorithm}, {size}, on {gpus} x {name} ({gpu.memory:g} GB, {gpu.flops:g} TFLOP/s, {gpu.bandwidth:g} TB/s)",
        f"a step: {sampled}, {work.prompt} tokens of prompt and {work.response} of response on average{longest} = {tokens:,} tokens",
        f"layout: {found.layout.text()}",
        _memory_line("training", found.training, gpu),
        *([_memory_line("generation", found.generation, gpu)] if found.generation else []),
        f"time: {seconds:.0f} s a step (training {found.train:.0f} s, generation {found.generate:.0f} s, other {OTHER - 1:.0%}), "
        f"{tokens / seconds / gpus:,.0f} tokens/s a GPU",
        f"{many(work.steps, 'step')}: {_long(days * 86400)}, {days * 24 * gpus:,.0f} GPU hours, "
        f"about ${days * 24 * gpus * gpu.price:,.0f} at ${gpu.price:g} an hour (an assumption)",
        f"assumed: {assumed}, +{OTHER - 1:.0%} for scoring and weight updates; real runs differ by a factor of up to 2",
        *textbook_lines(gpu),
    ]


def _memory_line(phase: str, items: dict[str, float], gpu: GPU) -> str:
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in items.items() if size)
    total = sum(items.values()) / GB
    return f"memory of a GPU in {phase}: {total:.1f} of {gpu.memory:g} GB ({parts})"


def with_settings(work: Work, words: Sequence[str]) -> Work:
    """The work with other numbers, as typed: prompts=256."""
    changes: dict[str, int | str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        require(equals, f"{word!r} is not key=value: with --params there is no recipe")
        refuse_unknown("key of an estimate", [key], [field.name for field in fields(work)])
        require(key == "algorithm" or text.isdecimal(), f"{key}={text}: give a whole number")
        changes[key] = text if key == "algorithm" else int(text)
    return replace(work, **changes)  # type: ignore[arg-type]
