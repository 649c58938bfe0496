"""Sends weights from the trainer to sampling workers, and checks that they arrived.

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
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import GuardStop
from posttrain.types import JSON, Completion, Request, Sampling

BUCKET = 64 << 20  # bytes
BUCKETS = 2  # one is filled while the other is read
ALIGNED = 32  # bytes: where a tensor may begin; a kernel that copies several reads 32 at once
WORD, ROW, MULTIPLIER = 8, 1024, 0x9E3779B97F4A7C15  # of the hash
PIECE = 32 << 20  # bytes that are hashed together on a GPU
PROBE = Sampling(max_new_tokens=1)
PROBES = 4  # prompts of a probe, of 1, 2, ... tokens; their sessions are -1, -2, ...
# nats by which log-probs may differ on average: two ways to compute the same, in float32, in half precision and in fp8
FULL, HALF, FP8 = 1e-3, 0.1, 0.3
AGAIN = "resume the run to start the sampler anew"

Named = Iterable[tuple[str, Tensor]]


class Buckets:
    """Two shared buffers in host memory, which child processes inherit by their handles, or in GPU memory if it is the `device` of
    both ends."""

    def __init__(self, size: int = BUCKET, device: torch.device | None = None):
        self.size, self.handles = size, list[int]()
        if device is not None:
            kind: dict[str, Any] = {"dtype": torch.uint8, "device": device}
            self.memory = [torch.empty(size, **kind) for _ in range(BUCKETS)]
            return
        self.handles = [_anonymous_file(size) for _ in range(BUCKETS)]
        self.memory = [_mapped(handle, size) for handle in self.handles]

    def describe(self) -> JSON:
        """A description for `opened`. On a GPU it is for one process only: CUDA counts the processes that open it."""
        if self.handles:
            return [self.size, self.handles]
        return [share_cuda(memory) for memory in self.memory]

    def close(self) -> None:
        self.memory = []
        for handle in self.handles:
            os.close(handle)
        self.handles = []


def opened(description: JSON) -> list[Tensor]:
    """Open the memory that `Buckets.describe` describes, in the receiving process."""
    if isinstance(description[0], int):
        return [_mapped(handle, description[0]) for handle in description[1]]
    return [open_cuda(parts) for parts in description]


def _mapped(handle: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def _anonymous_file(size: int) -> int:
    """An anonymous file in memory, which disappears with the last process that has it open."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("posttrain-weights")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def share_cuda(memory: Tensor) -> JSON:
    """A description with which another process can open GPU memory."""
    storage: Any = memory.untyped_storage()
    parts = storage._share_cuda_()
    return [["b", b64encode(p).decode()] if isinstance(p, bytes) else ["v", p] for p in parts]


def open_cuda(parts: JSON) -> Tensor:
    """Open memory that `share_cuda` describes. The process that allocated it must keep it as long as this one uses it."""
    storage: Any = torch.UntypedStorage
    given = [b64decode(value) if kind == "b" else value for kind, value in parts]
    opened = storage._new_shared_cuda(*given)
    return torch.tensor([], dtype=torch.uint8, device=opened.device).set_(opened)


def layout(weights: Mapping[str, Tensor]) -> JSON:
    """Names, dtypes and shapes in the order in which they are sent."""
    return [
        (name, str(weight.dtype).removeprefix("torch."), list(weight.shape))
        for name, weight in weights.items()
    ]


def fill(weights: Iterable[Tensor], memory: Sequence[Tensor]) -> Iterator[None]:
    """Copy weights into the buckets in turn, and yield whenever one is full, and after the last. When the caller continues, the
    next bucket is filled, so it must have been read."""
    for _ in _fill(weights, memory, ALIGNED):
        _synchronize(memory[0])
        yield


def _fill(weights: Iterable[Tensor], memory: Sequence[Tensor], aligned: int) -> Iterator[None]:
    """Copy tensors into a bucket together: on a GPU, launching a copy takes longer than the copy."""
    which = used = 0
    buckets = [{torch.uint8: one, torch.int64: one.view(torch.int64)} for one in memory]
    targets, sources = list[Tensor](), list[Tensor]()
    for weight in weights:
        rest = _words(weight)
        while count := len(rest):
            bucket, start = buckets[which][rest.dtype], used // rest.itemsize
            fits = min(count, len(bucket) - start)
            targets.append(bucket[start : start + fits])
            sources.append(rest if fits == count else rest[:fits])
            used += -(-fits * rest.itemsize // aligned) * aligned
            if used >= len(memory[which]):
                torch._foreach_copy_(targets, sources)
                yield
                which, used, targets, sources = (which + 1) % len(memory), 0, [], []
            if fits == count:
                break
            rest = rest[fits:]
    if used:
        torch._foreach_copy_(targets, sources)
        yield


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in one dimension: as words, or as bytes if they are not whole words."""
    flat = (tensor.detach() if tensor.requires_grad else tensor).contiguous().view(-1)
    odd = (flat.nbytes | int(flat.storage_offset()) * flat.itemsize) % WORD
    return flat.view(torch.uint8 if odd else torch.int64)


def unpack(
    plan: JSON, memory: Sequence[Tensor], wait: Callable[[], None], free: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what `fill` sends, by name. `wait` until the next bucket is full, `free` it when it has been read. A tensor may lie in
    the bucket, so copy it before taking the next."""
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


def hashes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Of each tensor an integer that differs where one bit does, and nearly always where two elements are exchanged: the higher their
    bits lie in a word, the more pairs of places are alike (1 in 30,000 for the last bf16 of four). Not a hash against intent.

        h = bytes + sum_ij u_i v_j x_ij  mod 2^64,    x the bits as integers of 64 in rows of 1024, u and v odd multipliers

    On the tensors' own device; nothing as large as a tensor is made."""
    if not weights:
        return {}
    device = next(iter(weights.values())).device
    v_J, _ = _multipliers((ROW,), 1 << 40, device)
    sums = list((_one_by_one if device.type == "cpu" else _gathered)(weights.values(), v_J))
    sizes = [weight.nbytes for weight in weights.values()]
    total = torch.tensor(sizes, device=device)
    if sums:
        u_I, owner_I = _multipliers(tuple(-(-size // (ROW * WORD)) for size in sizes), 0, device)
        total.index_add_(0, owner_I, torch.cat(sums)[: len(u_I)] * u_I)
    return dict(zip(weights, total.tolist(), strict=True))


def _one_by_one(weights: Iterable[Tensor], v_J: Tensor) -> Iterator[Tensor]:
    """Sums of the rows of each tensor, in the fastest way on a CPU."""
    for weight in weights:
        words = _words(weight)
        if words.dtype is torch.uint8:
            words = torch.nn.functional.pad(words, (0, -len(words) % WORD)).view(torch.int64)
        whole = len(words) // ROW * ROW
        yield words[:whole].view(-1, ROW).mv(v_J)
        if len(words) > whole:
            yield words[whole:].dot(v_J[: len(words) - whole])[None]


def _gathered(weights: Iterable[Tensor], v_J: Tensor) -> Iterator[Tensor]:
    """The same, piece by piece of memory into which tensors are gathered: on a GPU, to begin a sum takes longer than the sum. It has
    no product of integer matrices."""
    piece = torch.zeros(PIECE, dtype=torch.uint8, device=v_J.device)
    for _ in _fill(weights, [piece], ROW * WORD):
        yield piece.view(torch.int64).view(-1, ROW).mul_(v_J).sum(1)
        piece.zero_()


@lru_cache(maxsize=8)  # a model's are the same at every publish
def _multipliers(
    counts: tuple[int, ...], first: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pseudo-random odd integers, as many for each owner as it counts, and the index of the owner of each."""
    place = torch.cat([torch.arange(first + 1, first + 1 + count) for count in counts])
    mixed = place * (MULTIPLIER - (1 << 64))
    mixed = (mixed ^ (mixed >> 29)) * (MULTIPLIER - (1 << 64))
    return (mixed | 1).to(device), torch.repeat_interleave(torch.tensor(counts)).to(device)


@dataclass(frozen=True, slots=True)
class Receipt:
    """A worker's checksums of the weights that it samples with; None for a tensor that it stores in another form."""

    version: int
    hashes: Mapping[str, int | None]


def probe_prompts(vocabulary: int) -> list[tuple[int, ...]]:
    """Prompts, each the one before plus a token: one forward pass over the last gives the log-probs after all of them."""
    tokens = tuple((7 * n + 3) % vocabulary for n in range(PROBES))
    return [tokens[: 1 + n] for n in range(PROBES)]


def probe_requests(vocabulary: int) -> list[Request]:
    """Requests that a worker makes to itself, with negative session numbers, which nobody else uses."""
    prompts = probe_prompts(vocabulary)
    return [Request(ids, n, PROBE, session=-1 - n) for n, ids in enumerate(prompts)]


class Receipts:
    """The trainer's side: what it published last, and the check of the workers' receipts."""

    def __init__(self) -> None:
        self.version, self.hashes = -1, dict[str, int]()
        # of every token after the prompts of a probe, by version, of the last two: it may be answered after the next publish
        self.logprobs_PV: dict[int, Tensor] = {}
        self.gaps: dict[tuple[str, int], list[float]] = {}  # by worker and version
        self.limit = FULL

    def expect(self, version: int, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Record what was published, and the narrowest dtype in which the sampler computes."""
        self.logprobs_PV = {v: known for v, known in self.logprobs_PV.items() if v == self.version}
        self.version, self.hashes = version, hashes(weights)
        self.gaps = {key: gaps for key, gaps in self.gaps.items() if key[1] in self.logprobs_PV}
        self.limit = {1: FP8, 2: HALF}.get(dtype.itemsize, FULL)

    def check(self, receipt: Receipt, who: str) -> None:
        """Stop the run if a worker has other weights than those published."""
        if receipt.version != self.version:
            text = f"{who} has the weights of version {receipt.version}, and version {self.version} was published"
            raise GuardStop(f"{text}; {AGAIN}")
        found = receipt.hashes
        own = {n: None if found.get(n, 0) is None else h for n, h in self.hashes.items()}
        wrong = sorted({n for n, _ in own.items() ^ found.items()})
        if wrong:
            text = f"{who} has other weights than the trainer at version {self.version}: {', '.join(wrong[:2])}"
            more = f" and {len(wrong) - 2} more" if len(wrong) > 2 else ""
            raise GuardStop(f"{text}{more}; {AGAIN}")

    def probe(self, session: int, completion: Completion, who: str) -> None:
        """Stop the run if a worker's log-probs differ from the trainer's, on average over the prompts."""
        version = int(completion.versions[0])
        if version not in self.logprobs_PV:
            return
        (token,), (found,) = completion.ids.tolist(), completion.logprobs.tolist()
        gaps = self.gaps.setdefault((who, version), [])
        gaps.append(abs(float(self.logprobs_PV[version][-1 - session, token]) - found))
        mean = sum(gaps) / len(gaps)
        if len(gaps) == PROBES and not mean <= self.limit:
            text = f"{who} samples from another model than the trainer's at version {version}"
            gap = f"log-probs differ by {mean:.2g} on average"
            raise GuardStop(f"{text}: {gap}, and at most {self.limit:g} is rounding; {AGAIN}")
