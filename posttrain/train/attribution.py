"""How much each unit of an update, and each token, contributes to the gradient.

The weights of a loss are those of the whole update, so that the gradient g is the sum of the gradients g_i of its units, each of which
is a backward pass of that unit alone. The share of a unit is <g_i, g> / |g|^2: shares sum to 1, and that of a unit which pulls against
the others is negative. The loss depends on the weights through what the model says of each token (its log-prob x_t, or its score),
so that g_i is a sum over tokens too: that of a token is (dL/dx_t) <grad x_t, g> / |g|^2, and those of a unit sum to its own. A
divergence over the vocabulary is a loss of each token by itself, whose own gradient is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from posttrain.train.pack import host_mask, take, unit_ends, with_loss
from posttrain.train.roles.base import Addition
from posttrain.train.trainer import Trainer
from posttrain.types import Batch

Tensors = Mapping[str, Tensor]
MAX_SPANS = 64  # backward passes for the tokens of one unit


@dataclass(frozen=True, slots=True)
class Part:
    """The contribution of a unit: sequences first..last-1 of the batch."""

    first: int
    last: int
    norm: float  # of its own gradient
    share: float


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens first..last-1 of a sequence of the batch, counted from its beginning."""

    sequence: int
    first: int
    last: int
    share: float


def gradient(trainer: Trainer, backward: Callable[[], object]) -> dict[str, Tensor]:
    """The gradient of the trained model, by parameter, that `backward` computes. The trainer keeps none of it."""
    _drop(trainer)
    backward()
    found = {name: m.grad for name, m in trainer.optimizer.masters.items() if m.grad is not None}
    _drop(trainer)
    return found


def _drop(trainer: Trainer) -> None:
    for learner in trainer.learners:
        learner.optimizer.zero()


def whole_gradient(
    trainer: Trainer, batch: Batch, added: Sequence[tuple[str, Addition]] = ()
) -> dict[str, Tensor]:
    """The gradient of a prepared update, computed in the same micro-batches as in training, including batches that roles add."""
    return gradient(trainer, lambda: trainer.accumulate(with_loss(batch), added, lambda: None))


def dot(one: Tensors, other: Tensors) -> float:
    """The inner product, summed in double precision."""
    products = [(t * other[n]).sum(dtype=torch.float64) for n, t in one.items() if n in other]
    return float(torch.stack(products).sum()) if products else 0.0


def norm(tensors: Tensors) -> float:
    return float(dot(tensors, tensors) ** 0.5)


def unit_parts(trainer: Trainer, batch: Batch, whole: Tensors) -> Iterator[Part]:
    """The contribution of every unit of a prepared update, whose gradient is `whole`."""
    ends, squared, mask = unit_ends(batch), dot(whole, whole), host_mask(batch)
    for first, last in pairwise([0, *ends]):
        if not mask[batch.starts[first] : batch.starts[last]].any():
            yield Part(first, last, 0.0, 0.0)
            continue
        piece = take(batch, first, last)
        own = gradient(trainer, lambda piece=piece: trainer.forward_backward(piece))  # type: ignore[misc]
        yield Part(first, last, norm(own), dot(own, whole) / squared)


def token_spans(trainer: Trainer, batch: Batch, part: Part, whole: Tensors) -> list[Span]:
    """The contribution of every token of a unit, or of spans of neighbouring tokens if the unit has more than MAX_SPANS loss tokens."""
    piece, squared = take(batch, part.first, part.last), dot(whole, whole)
    slope = slopes(trainer, piece)
    counts_T = torch.stack([column.ne(0) for column in slope.values()]).any(0).cpu().numpy()
    for at_M, _ in divergences(trainer, piece):
        counts_T[at_M.cpu().numpy()] = True
    at = np.flatnonzero(counts_T)
    width = -(-len(at) // MAX_SPANS) if len(at) else 1
    found = []
    for n, (start, end) in enumerate(pairwise(piece.starts)):
        own = at[(at >= start) & (at < end)]
        for place in range(0, len(own), width):
            first, last = int(own[place]), int(own[place : place + width][-1]) + 1

            def backward(first: int = first, last: int = last) -> None:
                columns = trainer.outputs(piece).columns
                sums = [(slope[k][first:last] * columns[k][first:last]).sum() for k in slope]
                for at_M, loss_M in divergences(trainer, piece):
                    sums.append(loss_M[(at_M >= first) & (at_M < last)].sum())
                torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]

            share = dot(gradient(trainer, backward), whole) / squared
            found.append(Span(part.first + n, first - start, last - start, share))
    return found


def divergences(trainer: Trainer, piece: Batch) -> list[tuple[Tensor, Tensor]]:
    """([M], [M]): positions of the loss tokens, and those weighted losses that depend on hidden states and not on per-token outputs."""
    outputs = trainer.outputs(piece)
    if len(outputs.predictions) < 2:  # there is no other model to diverge from
        return []
    still = outputs.replaced({name: c.detach() for name, c in outputs.columns.items()})
    terms = trainer.algorithm.terms(still, piece).terms
    at_M = outputs.predictions["policy"].at_M
    return [(at_M, term.weight * term.loss) for term in terms if term.loss.requires_grad]


def slopes(trainer: Trainer, piece: Batch) -> dict[str, Tensor]:
    """[T] each: the derivative of the loss with respect to every per-token output, such as the log-prob."""
    with torch.no_grad():
        outputs = trainer.outputs(piece)
    leaves = {name: c.detach().requires_grad_() for name, c in outputs.columns.items()}
    terms = trainer.algorithm.terms(outputs.replaced(leaves), piece).terms
    total = torch.stack([(term.weight * term.loss).sum() for term in terms]).sum()
    found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))
