"""Packs rollouts or examples into flat tensors without padding, and cuts these into mini-batches and micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.data.stream import permutation
from posttrain.errors import require
from posttrain.ops.device import sent
from posttrain.types import Batch, Example, Group, Rollout, Segment, part_column

# the tensor fields of a batch, which are all cut alike; `sequence_T` is renumbered
NAMES = [f.name for f in fields(Batch) if f.name.endswith(("_T", "_N"))]
TENSORS = [name for name in NAMES if name not in ("sequence_T", "unit_N")]
MASKS = "a sequence needs a mask of its own length, and its first token cannot carry loss: nothing predicts it"


def pack_groups(
    groups: Sequence[Group],
    temperature: float,
    device: torch.device | str = "cpu",
    together: bool = False,
    parts: Sequence[str] = (),
) -> Batch:
    """Concatenate the rollouts of all groups. Tokens that the policy sampled carry loss; given tokens do not.

    `together` makes each group a unit, as for pairs and rankings. The named `parts` of the scores become columns.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    number = [n for n, group in enumerate(groups) for _ in group.rollouts]
    segments = [s for r in rollouts for s in r.segments]
    sizes = np.array([len(s.ids) for s in segments], np.int64)
    episodes = [(n, r.sample) for n, r in zip(number, rollouts, strict=True)]
    places = {one: n for n, one in enumerate(dict.fromkeys(episodes))}
    several = len(places) < len(episodes)
    # sums over the segments of each rollout
    cut = np.array([s.sampled and s.finish == "length" for s in segments], np.int64)
    bounds = np.cumsum([0, *[len(r.segments) for r in rollouts]])
    lengths, cuts = (np.diff(np.cumsum(np.r_[0, column])[bounds]) for column in (sizes, cut))
    device = torch.device(device)
    return _batch(
        lengths.tolist(),
        _joined([s.ids for s in segments], torch.int64, device),
        torch.from_numpy(np.repeat(np.array([s.sampled for s in segments], np.bool_), sizes)),
        _filled([s.logprobs for s in segments], sizes, np.float32(0), device),
        [float("nan") if r.score.value is None else r.score.value for r in rollouts],
        [step_rewards(r) for r in rollouts],
        number,
        number if together else range(len(rollouts)),
        device,
    ).replace(
        **{part_column(n): _column(part_values(rollouts, n), np.float32, device) for n in parts},
        temperature=temperature,
        valid_N=_column([r.score.valid for r in rollouts], np.bool_, device),
        truncated_N=sent(cuts > 0, device),
        rollout_N=torch.arange(len(rollouts), device=device),
        routes_T=_routes(rollouts, device),
        episode_N=_column([places[one] for one in episodes], np.int64, device) if several else None,
        paid_T=sent(_paid(segments), device) if any(s.reward for s in segments) else None,
    )


def token_versions(groups: Sequence[Group], batch: Batch) -> Tensor:
    """int32 [T]: the version of the weights that sampled each token of a batch of rollouts of these groups, -1 for given tokens."""
    rollouts = [r for group in groups for r in group.rollouts]
    segments = [s for n in batch.rollout_N.tolist() for s in rollouts[n].segments]
    sizes = np.array([len(s.ids) for s in segments], np.int64)
    return _filled([s.versions for s in segments], sizes, np.int32(-1), batch.ids_T.device)


def _routes(rollouts: Sequence[Rollout], device: torch.device) -> Tensor | None:
    """The recorded experts of all tokens, -1 where unknown: after the last completion, and in rollouts without routes."""
    width = next((r.routes.shape[1] for r in rollouts if r.routes is not None), 0)
    if not width:
        return None
    whole = [np.full((len(r.ids), width), -1, np.int16) for r in rollouts]
    for made, rollout in zip(whole, rollouts, strict=True):
        if rollout.routes is not None:
            made[: len(rollout.routes)] = rollout.routes[: len(made)]
    return sent(np.concatenate(whole), device)


def part_values(rollouts: Sequence[Rollout], name: str) -> list[float]:
    """The part `name` of each score, NaN for a rollout without a score. An error if a score has no such part."""
    found = [r.part(name) if r.score.valid else float("nan") for r in rollouts]
    for rollout, value in zip(rollouts, found, strict=True):
        known = ", ".join(rollout.score.parts) or "none"
        require(value is not None, f"parts: {name!r} is no part of the reward; it has {known}")
    return [float(value) for value in found if value is not None]


def _paid(segments: Sequence[Segment]) -> np.ndarray:
    """The reward of each turn, at its last token."""
    ends = np.cumsum([len(segment.ids) for segment in segments])
    paid_T = np.zeros(ends[-1], np.float32)
    for segment, end in zip(segments, ends.tolist(), strict=True):
        if len(segment.ids):
            paid_T[end - 1] = segment.reward
    return paid_T


def pack_examples(
    examples: Sequence[Example], device: torch.device | str = "cpu", together: bool = True
) -> Batch:
    """Concatenate examples. Those of one unit must be neighbours. Without `together`, each example is a unit of its own."""
    alone = not together or all(e.unit < 0 for e in examples)
    units = range(len(examples)) if alone else [e.unit for e in examples]
    lengths = [len(e.ids) for e in examples]
    if lengths != [len(e.mask) for e in examples]:
        raise ValueError(MASKS)
    device = torch.device(device)
    return _batch(
        lengths,
        _joined([e.ids for e in examples], torch.int64, device),
        _joined([e.mask for e in examples], torch.bool, device),
        torch.zeros(sum(lengths), device=device),
        [e.reward for e in examples],
        [e.steps for e in examples],
        units,
        units,
        device,
    )


def step_rewards(rollout: Rollout) -> np.ndarray | None:
    """The values of a score's steps at the tokens where the steps end, NaN elsewhere. None if the score has no steps."""
    if not rollout.score.steps:
        return None
    step_T = np.full(len(rollout.ids), np.nan, np.float32)
    written, token = 0, 0  # characters of the response before this segment, and tokens before it
    for segment in rollout.segments:
        if segment.sampled and segment.offsets is not None:
            for position, value in rollout.score.steps:
                within = position - written
                if 0 < within <= len(segment.text):
                    # the first token that ends there or after it
                    at = token + int(np.searchsorted(segment.offsets, within))
                    step_T[at] = value if np.isnan(step_T[at]) else step_T[at] + value
            written += len(segment.text)
        token += len(segment.ids)
    return step_T


def _batch(
    lengths: Sequence[int],
    ids_T: Tensor,
    mask_T: Tensor,
    behaviour_T: Tensor,
    rewards: Sequence[float],
    steps: Sequence[np.ndarray | None],
    group: Sequence[int],
    units: Sequence[int],
    device: torch.device,
) -> Batch:
    starts, mask = _starts(lengths), mask_T.numpy()
    if not all(lengths) or mask[list(starts[:-1])].any():
        raise ValueError(MASKS)
    columns = {}
    if any(one is not None for one in steps):
        pairs = zip(lengths, steps, strict=True)
        whole = [np.full(length, np.nan) if s is None else s for length, s in pairs]
        columns["step_T"] = sent(_joined(whole, torch.float32, device), device)
    return Batch(
        ids_T=sent(ids_T, device),
        starts=starts,
        sequence_T=_sequences(lengths, device),
        mask_T=sent(mask_T, device),
        behaviour_T=behaviour_T,
        reward_N=_column(rewards, np.float32, device),
        valid_N=torch.ones(len(lengths), dtype=torch.bool, device=device),
        group_N=_column(group, np.int64, device),
        unit_N=tuple(units),
        truncated_N=torch.zeros(len(lengths), dtype=torch.bool, device=device),
        columns=columns,
        ids=ids_T.numpy(),
        mask=mask,
    )


def _joined(arrays: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Join arrays in host memory from which the device copies by itself."""
    joined = torch.empty(sum(map(len, arrays)), dtype=dtype, pin_memory=device.type == "cuda")
    np.concatenate([joined.numpy()[:0], *arrays], out=joined.numpy(), casting="unsafe")
    return joined


def _filled(
    arrays: Sequence[np.ndarray | None], sizes: np.ndarray, rest: np.generic, device: torch.device
) -> Tensor:
    """Join arrays of these sizes on the device, with `rest` in place of those that are None."""
    blank = np.full(sizes.max(initial=0), rest)
    pairs = zip(arrays, sizes.tolist(), strict=True)
    whole = [blank[:size] if array is None else array for array, size in pairs]
    return sent(_joined(whole, torch.from_numpy(blank).dtype, device), device)


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return (0, *np.cumsum(lengths, dtype=np.int64).tolist())


def _sequences(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The index of each token's sequence, computed on the device: lengths are quicker to copy."""
    length_N = sent(np.array(lengths, np.int64), device)
    return torch.repeat_interleave(length_N, output_size=sum(lengths))


def _column(values: Sequence[float], dtype: type, device: torch.device) -> Tensor:
    """A tensor of many numbers; torch.tensor takes three times as long."""
    return sent(np.array(values, dtype), device)


def host_ids(batch: Batch) -> np.ndarray:
    """ids_T in host memory. Waits for the device only if the batch holds no host copy."""
    return batch.ids_T.cpu().numpy() if batch.ids is None else batch.ids


def host_mask(batch: Batch) -> np.ndarray:
    """mask_T in host memory; see `host_ids`."""
    return batch.mask_T.cpu().numpy() if batch.mask is None else batch.mask


def with_loss(batch: Batch) -> Batch:
    """The batch without units that have no loss token: the weights are fixed by now, so these units add nothing to the gradient.
    The result holds a host copy of its mask."""
    mask = host_mask(batch)
    batch = batch if batch.mask is mask else batch.replace(mask=mask)
    loss_N = np.logical_or.reduceat(mask, batch.starts[:-1]) if batch.sequences else ()
    alive = {unit for unit, loss in zip(batch.unit_N, loss_N, strict=True) if loss}
    keep = [n for n, unit in enumerate(batch.unit_N) if unit in alive]
    return batch if len(keep) == batch.sequences else gather(batch, keep)


def gather(batch: Batch, sequences: Sequence[int]) -> Batch:
    """The given sequences of a batch, in that order."""
    starts, chosen = np.array(batch.starts), np.array(sequences, np.int64)
    first, length_N, device = starts[chosen], np.diff(starts)[chosen], batch.ids_T.device
    at = np.arange(length_N.sum()) + np.repeat(first - np.cumsum(length_N) + length_N, length_N)
    return _select(
        batch,
        sent(at, device),
        sent(chosen, device),
        at,
        starts=_starts(length_N.tolist()),
        unit_N=tuple(batch.unit_N[n] for n in sequences),
        sequence_T=_sequences(length_N.tolist(), device),
    )


def take(batch: Batch, first: int, last: int) -> Batch:
    """Sequences first..last-1 of a batch, as views."""
    start, end = batch.starts[first], batch.starts[last]
    tokens = slice(start, end)
    return _select(
        batch,
        tokens,
        slice(first, last),
        tokens,
        starts=tuple(s - start for s in batch.starts[first : last + 1]),
        unit_N=batch.unit_N[first:last],
        sequence_T=batch.sequence_T[tokens] - first,
    )


def first_tokens(batch: Batch, tokens: int) -> Batch:
    """The first units of a batch, with at most `tokens` tokens together, but at least one unit."""
    ends = unit_ends(batch)
    held = [end for end in ends if batch.starts[end] <= tokens] or ends[:1]
    return batch if held[-1] == batch.sequences else take(batch, 0, held[-1])


def _select(batch: Batch, at_T: Any, at_N: Any, host: Any, **more: Any) -> Batch:
    """Every tensor of a batch at the given tokens or sequences; `more` are the fields that these indices do not give."""

    def parts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {name: t[at_T if name.endswith("_T") else at_N] for name, t in tensors.items()}

    return replace(
        batch,
        **parts({name: getattr(batch, name) for name in TENSORS}),
        **more,
        columns=parts(batch.columns),
        ids=None if batch.ids is None else batch.ids[host],
        mask=None if batch.mask is None else batch.mask[host],
    )


def micro_batches(batch: Batch, token_budget: int) -> list[Batch]:
    """Cut a step between units into pieces of at most `token_budget` tokens. A longer unit is a piece of its own.

    The weights were computed for the whole step before, so the gradients of the pieces add up to the same sum however they are cut.
    """
    ends, cuts, units = unit_ends(batch), [0], 0
    tokens = [batch.starts[end] for end in ends]
    while units < len(ends):
        units = max(units + 1, bisect_right(tokens, batch.starts[cuts[-1]] + token_budget))
        cuts.append(ends[units - 1])
    return [take(batch, a, b) for a, b in pairwise(cuts)]


def mini_batches(batch: Batch, count: int, seed: int) -> list[Batch]:
    """Split a step into up to `count` mini-batches with nearly equal numbers of whole groups. `seed` decides which groups share a
    mini-batch; within it they keep their order."""
    ends = _run_ends(batch.group_N.tolist()) if count > 1 else [batch.sequences]
    count = min(count, len(ends))
    if count == 1:
        return [batch]
    order, members = permutation(len(ends), "mini_batches", seed), list(pairwise([0, *ends]))
    cuts = [len(ends) * i // count for i in range(count + 1)]
    dealt = [sorted(order[a:b].tolist()) for a, b in pairwise(cuts)]
    return [gather(batch, [n for one in groups for n in range(*members[one])]) for groups in dealt]


def unit_ends(batch: Batch) -> list[int]:
    """The index after the last sequence of each unit."""
    return _run_ends(batch.unit_N)


def _run_ends(numbers: Sequence[int]) -> list[int]:
    """The index after the last element of each run of equal numbers."""
    return list((np.flatnonzero(np.diff(numbers, append=np.inf)) + 1).tolist())
