"""Data parallelism within one optimizer step: each process takes its share of the units, and gradients and metrics are summed.

The weights of a step are fixed before it is cut (one number per token decides the reduction), so that shares add up to the gradient of
one process. Shares are neighbours: columns that a role fills are put together in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.system.world import current
from posttrain.train.optimizer import Optimizer
from posttrain.train.pack import micro_batches, take, unit_ends
from posttrain.types import Batch, Metric

BUCKET = 1 << 25  # numbers that are summed at once


def shares(batch: Batch, count: int) -> list[Batch]:
    """Cut the batch between units into `count` contiguous parts with about equal numbers of tokens; some may be empty."""
    ends = unit_ends(batch)
    cuts, place = [0], 0
    for number in range(1, count):
        wanted = batch.tokens * number / count
        # the end of a unit that is nearest to an equal cut
        while place < len(ends) and batch.starts[ends[place]] <= wanted:
            place += 1
        below = ends[place - 1] if place else 0
        above = ends[place] if place < len(ends) else batch.sequences
        nearer = wanted - batch.starts[below] <= batch.starts[above] - wanted
        cuts.append(max(cuts[-1], below if nearer else above))
    return [take(batch, a, b) for a, b in zip(cuts, [*cuts[1:], batch.sequences], strict=True)]


def own_passes(batch: Batch, token_budget: int, equal: bool) -> tuple[list[Batch], list[Batch]]:
    """(micro-batches of this process, extra passes that add nothing). With `equal`, because all processes take part in every
    forward pass of a sharded model, every process makes the same number of passes: one with fewer repeats the shortest unit of the
    step with weight 0."""
    world = current()
    if world.shares == 1:
        return micro_batches(batch, token_budget), []
    cut = [micro_batches(share, token_budget) for share in shares(batch, world.shares)]
    own, longest = cut[world.rank // world.tensor], max(map(len, cut))
    if not equal or len(own) == longest:
        return own, []
    ends = unit_ends(batch)
    starts = batch.starts
    shortest = min(pairwise([0, *ends]), key=lambda span: starts[span[1]] - starts[span[0]])
    return own, [take(batch, *shortest)] * (longest - len(own))


def sum_gradients(optimizer: Optimizer) -> None:
    """Sum the gradients over all processes. A weight without a gradient in any process keeps none."""
    if current().size == 1:
        return
    masters = list(optimizer.masters.values())
    present = torch.tensor([int(m.grad is not None) for m in masters])
    dist.all_reduce(present, dist.ReduceOp.MAX)
    gradients = list[Tensor]()
    for master, there in zip(masters, present.tolist(), strict=True):
        if there:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            gradients.append(master.grad)
    for bucket in buckets(gradients):
        flat = torch.cat([g.reshape(-1) for g in bucket])
        dist.all_reduce(flat)  # SUM: the weights of the loss are those of the whole step
        parts = torch.split(flat, [g.numel() for g in bucket])
        torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group neighbouring tensors of one dtype into buckets of up to BUCKET numbers; a larger tensor is alone."""
    through = zip(tensors, accumulate(t.numel() for t in tensors), strict=True)
    alike = groupby(through, key=lambda one: (one[1] // BUCKET, one[0].dtype))
    return [[tensor for tensor, _ in bucket] for _, bucket in alike]


def sum_metrics(metrics: Sequence[Metric]) -> list[Metric]:
    """Merge the metrics of the micro-batches of all processes."""
    world = current()
    if world.size == 1:
        return list(metrics)
    own = [
        [m.name, float(m.total), None if m.count is None else float(m.count), m.largest, m.smallest]
        for m in metrics
    ]
    return [Metric(*row) for rows in world.gather(own)[:: world.tensor] for row in rows]


def join_columns(columns: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Join the columns of all processes' shares into columns of the whole batch."""
    world = current()
    if world.size == 1:
        return dict(columns)
    shared = world.gather({name: column.cpu().numpy() for name, column in columns.items()})
    there = [own for own in shared[:: world.tensor] if own]
    device = batch.ids_T.device
    return {
        name: torch.cat([torch.from_numpy(own[name]) for own in there]).to(device)
        for name in there[0]
    }
