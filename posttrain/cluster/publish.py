"""Weights on their way from the trainer to the workers that sample, and the proof that they arrived.

They go bucket by bucket through memory that both processes see: shared memory of one host, or memory of the GPU that both use. So what
is sent needs twice the size of a bucket, whatever the size of the model. A worker answers each publish with a receipt: its version, and
a hash of every tensor, taken from the parameters that it now samples with. A little later come tokens that it sampled after a few fixed
prompts, whose log-probs the trainer compares with its own: "no error was raised" is not proof that the right model is served.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.errors import GuardStop
from posttrain.types import JSON, Completion, Request, Sampling

BUCKET = 64 << 20  # bytes
BUCKETS = 2  # one is filled while the other is read
ALIGNED = 16  # bytes: where a tensor may begin
ROW, MULTIPLIER = 1024, 0x9E3779B97F4A7C15  # of the hash
# integers as wide as an element
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PROBE = Sampling(max_new_tokens=1)
PROBE_LENGTHS = (3, 7, 12)  # of the prompts of a probe, whose sessions are -1, -2, ...
# nats by which a log-prob may differ: two ways to compute the same, in float32 and in half precision
FULL, HALF = 1e-3, 0.3
AGAIN = "resume the run to start the sampler anew"

Named = Iterable[tuple[str, Tensor]]


class Buckets:
    """Two pieces of memory of this host that processes which are started inherit by their handles; or of a GPU, where it is the
    `device` of both ends. Processes that share no memory but a file system exchange `write_folder` and `read_folder`."""

    def __init__(self, size: int = BUCKET, device: torch.device | None = None):
        self.size, self.handles = size, list[int]()
        if device is not None:
            kind: dict[str, Any] = {"dtype": torch.uint8, "device": device}
            self.memory = [torch.empty(size, **kind) for _ in range(BUCKETS)]
            return
        self.handles = [_anonymous_file(size) for _ in range(BUCKETS)]
        self.memory = [_mapped(handle, size) for handle in self.handles]

    def describe(self) -> JSON:
        """What a process needs for `opened`. On a GPU, of one process alone: CUDA counts who has opened it."""
        if self.handles:
            return [self.size, self.handles]
        return [share_cuda(memory) for memory in self.memory]

    def close(self) -> None:
        self.memory = []
        for handle in self.handles:
            os.close(handle)
        self.handles = []


def opened(description: JSON) -> list[Tensor]:
    """The memory that `Buckets.describe` describes, in the process that it was sent to."""
    if isinstance(description[0], int):
        return [_mapped(handle, description[0]) for handle in description[1]]
    return [open_cuda(parts) for parts in description]


def _mapped(handle: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def _anonymous_file(size: int) -> int:
    """A file in memory that has no name, and is gone with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("posttrain-weights")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def share_cuda(memory: Tensor) -> JSON:
    """What another process needs to open memory of a GPU."""
    storage: Any = memory.untyped_storage()
    parts = storage._share_cuda_()
    return [["b", b64encode(p).decode()] if isinstance(p, bytes) else ["v", p] for p in parts]


def open_cuda(parts: JSON) -> Tensor:
    """The memory that `share_cuda` describes; it must be kept by the process that made it for as long as this one uses it."""
    storage: Any = torch.UntypedStorage
    given = [b64decode(value) if kind == "b" else value for kind, value in parts]
    opened = storage._new_shared_cuda(*given)
    return torch.tensor([], dtype=torch.uint8, device=opened.device).set_(opened)


def write_folder(folder: Path, version: int, weights: Mapping[str, Tensor]) -> Path:
    """Weights as a file that appears whole; its path, for `read_folder` in a process that sees the folder."""
    path = folder / f"version-{version}.safetensors"
    copies = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(copies, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return path


def read_folder(path: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dictionary
            yield name, file.get_tensor(name)


def layout(weights: Mapping[str, Tensor]) -> JSON:
    """Names, types and shapes in the order in which they are sent."""
    return [
        (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
        for name, weight in weights.items()
    ]


def fill(weights: Iterable[Tensor], memory: Sequence[Tensor]) -> Iterator[None]:
    """Copy weights into the buckets in turn; yields whenever one is full, and after the last. The next one is filled when the caller
    goes on: then it must have been read."""
    which = used = 0
    for weight in weights:
        rest = weight.detach().contiguous().flatten().view(torch.uint8)
        while len(rest):
            bucket = memory[which]
            count = min(len(rest), len(bucket) - used)
            bucket[used : used + count].copy_(rest[:count])
            rest, used = rest[count:], used + -(-count // ALIGNED) * ALIGNED
            if used >= len(bucket):
                _synchronize(bucket)
                yield
                which, used = (which + 1) % len(memory), 0
    if used:
        _synchronize(memory[which])
        yield


def unpack(
    plan: JSON, memory: Sequence[Tensor], wait: Callable[[], None], free: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """What `fill` sends, by name. `wait` until the next bucket is full, `free` it when it has been read. A tensor may lie in the
    bucket: it is to be copied before the next one is asked for."""
    which, size = -1, len(memory[0])
    used = size
    for name, kind, shape in plan:
        dtype = getattr(torch, kind)
        pieces, left = list[Tensor](), prod(shape) * dtype.itemsize
        while left:
            if used >= size:
                if which >= 0:
                    pieces[-1:] = [piece.clone() for piece in pieces[-1:]]
                    _synchronize(memory[which % len(memory)])
                    free()
                wait()
                which, used = which + 1, 0
            count = min(left, size - used)
            pieces.append(memory[which % len(memory)][used : used + count])
            left, used = left - count, used + -(-count // ALIGNED) * ALIGNED
        found = pieces[0] if len(pieces) == 1 else torch.cat([memory[0][:0], *pieces])
        yield name, found.view(dtype).view(shape)
    if which >= 0:
        _synchronize(memory[which % len(memory)])
        free()


def _synchronize(memory: Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def published_weights(model: Any, every: bool) -> dict[str, Tensor]:
    """What a worker with the same modules needs: parameters that learn, or `every` one, and persistent buffers. Tied ones are sent
    once."""
    found = {n: p.detach() for n, p in model.named_parameters() if every or p.requires_grad}
    kept = model.state_dict(keep_vars=True)
    return found | {n: b.detach() for n, b in model.named_buffers() if n in kept}


def tensor_hash(tensor: Tensor) -> Tensor:
    """An integer that differs where a bit does, or where two elements are exchanged; not a hash against intent.

        h = sum_ij (u_i + v_j) x_ij  mod 2^64,    x the bits of the elements as integers in rows of 1024, u and v odd multipliers

    Sums of rows and of columns alone: each element is read twice, on its own device, and nothing as large as the tensor is made."""
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(BITS[bits.element_size()])
    whole = len(bits) // ROW * ROW
    found = torch.full((), len(bits), dtype=torch.int64, device=tensor.device)
    for start, block in enumerate((bits[:whole].view(-1, ROW), bits[None, whole:])):
        for dimension in (0, 1):
            sums = block.sum(dimension, dtype=torch.int64)
            found = found + (sums * _multipliers(len(sums), 2 * start + dimension, sums)).sum()
    return found


def _multipliers(count: int, kind: int, like: Tensor) -> Tensor:
    """Odd integers that look random."""
    place = torch.arange(1 + (kind << 40), 1 + (kind << 40) + count, device=like.device)
    mixed = place * (MULTIPLIER - (1 << 64))
    mixed = (mixed ^ (mixed >> 29)) * (MULTIPLIER - (1 << 64))
    return mixed | 1


def hashes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The hash of each tensor, brought to the CPU together."""
    if not weights:
        return {}
    found = torch.stack([tensor_hash(weight) for weight in weights.values()]).tolist()
    return dict(zip(weights, found, strict=True))


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker says of the weights that it samples with; None for a tensor that it has in another form."""

    version: int
    hashes: Mapping[str, int | None]


def probe_prompts(vocabulary: int) -> list[tuple[int, ...]]:
    return [tuple((7 * n + 1) % vocabulary for n in range(size)) for size in PROBE_LENGTHS]


def probe_requests(vocabulary: int) -> list[Request]:
    """Requests of a worker to itself. Their sessions are negative: nobody else's are."""
    prompts = probe_prompts(vocabulary)
    return [Request(ids, n, PROBE, session=-1 - n) for n, ids in enumerate(prompts)]


class Receipts:
    """The trainer's side: what it published last, and the check of what workers say of it."""

    def __init__(self) -> None:
        self.version, self.hashes = -1, dict[str, int]()
        self.logprobs_PV: Tensor | None = None
        self.limit = FULL

    def expect(
        self, version: int, weights: Mapping[str, Tensor], logprobs_PV: Tensor, dtype: torch.dtype
    ) -> None:
        """Note what was published: weights, and the log-probs of every token after the prompts of a probe."""
        self.version, self.hashes, self.logprobs_PV = version, hashes(weights), logprobs_PV
        self.limit = FULL if dtype.itemsize >= 4 else HALF

    def check(self, receipt: Receipt, who: str) -> None:
        """Stop the run where a worker has other weights than those published."""
        if receipt.version != self.version:
            text = f"{who} has the weights of version {receipt.version}, and version {self.version} was published"
            raise GuardStop(f"{text}; {AGAIN}")
        own = {
            n: h if receipt.hashes.get(n, 0) is not None else None for n, h in self.hashes.items()
        }
        wrong = sorted({n for n, _ in own.items() ^ dict(receipt.hashes).items()})
        if wrong:
            text = f"{who} has other weights than the trainer at version {self.version}: {', '.join(wrong[:2])}"
            more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
            raise GuardStop(f"{text}{more}; {AGAIN}")

    def probe(self, session: int, completion: Completion, who: str) -> None:
        """Stop the run where a worker gives a token another log-prob than the trainer."""
        if self.logprobs_PV is None or completion.versions[0] != self.version:
            return
        (token,), (found,) = completion.ids.tolist(), completion.logprobs.tolist()
        own = float(self.logprobs_PV[-1 - session, token])
        if not abs(own - found) <= self.limit:
            gap = f"log-prob {found:.4f} against {own:.4f} of token {token}, at most {self.limit:g} is rounding"
            text = f"{who} samples from another model than the trainer's at version {self.version}"
            raise GuardStop(f"{text} ({gap}); {AGAIN}")
