"""From rollouts or examples to flat tensors without padding, and from those to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import numpy as np
import torch

from posttrain.data.stream import permutation
from posttrain.types import Batch, Example, Group, Rollout


def pack_groups(
    groups: Sequence[Group],
    temperature: float,
    device: torch.device | str = "cpu",
    together: bool = False,
) -> Batch:
    """Lay the rollouts of all groups end to end. Tokens the policy sampled carry loss; those it was given do not.

    `together` makes each group a unit, as for pairs and rankings.
    """
    ids, mask, behaviour, versions, rewards, valid, group = [], [], [], [], [], [], []
    rollouts = [r for one in groups for r in one.rollouts]
    for number, one in enumerate(groups):
        for rollout in one.rollouts:
            ids.append(rollout.ids)
            parts = rollout.segments
            mask.append(rollout.mask)
            zero = [
                s.logprobs if s.logprobs is not None else np.zeros(len(s.ids), np.float32)
                for s in parts
            ]
            behaviour.append(np.concatenate(zero))
            versions += [
                np.full(len(s.ids), -1, np.int32) if s.versions is None else s.versions
                for s in parts
            ]
            rewards.append(float("nan") if rollout.score.value is None else rollout.score.value)
            valid.append(rollout.score.valid)
            group.append(number)
    units = group if together else list(range(len(ids)))
    batch = _batch(ids, mask, behaviour, rewards, valid, group, units, temperature, device)
    cut = torch.tensor([r.finish == "length" for r in rollouts], device=device)
    numbers = torch.arange(len(rollouts), device=device)
    return batch.replace(
        rollout_N=numbers,
        truncated_N=cut,
        version_T=torch.from_numpy(np.concatenate(versions).astype(np.int32)).to(device),
        step_T=_steps([step_rewards(r) for r in rollouts], ids, device),
    )


def pack_examples(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Lay examples end to end; those of one unit must be neighbours."""
    count = len(examples)
    behaviour = [np.zeros(len(e.ids), np.float32) for e in examples]
    units = list(range(count)) if all(e.unit < 0 for e in examples) else [e.unit for e in examples]
    batch = _batch(
        [e.ids for e in examples],
        [e.mask for e in examples],
        behaviour,
        [e.reward for e in examples],
        [True] * count,
        units,
        units,
        1.0,
        device,
    )
    return batch.replace(
        step_T=_steps([e.steps for e in examples], [e.ids for e in examples], device)
    )


def step_rewards(rollout: Rollout) -> np.ndarray | None:
    """A score's step values at the tokens in which the steps end; NaN elsewhere. None where the score has no steps."""
    if not rollout.score.steps:
        return None
    step_T = np.full(len(rollout.ids), np.nan, np.float32)
    written, token = 0, 0  # characters of the response before this segment, and tokens before it
    for segment in rollout.segments:
        if segment.sampled and segment.offsets is not None:
            for position, value in rollout.score.steps:
                within = position - written
                if 0 < within <= len(segment.text):
                    at = token + int(
                        np.searchsorted(segment.offsets, within)
                    )  # the first token that reaches this far
                    step_T[at] = value if np.isnan(step_T[at]) else step_T[at] + value
            written += len(segment.text)
        token += len(segment.ids)
    return step_T


def _steps(
    given: Sequence[np.ndarray | None], ids: Sequence[np.ndarray], device: torch.device | str
) -> torch.Tensor | None:
    """Step values of all sequences end to end, or None where no sequence has any."""
    if all(one is None for one in given):
        return None
    parts = [
        np.full(len(i), np.nan, np.float32) if g is None else g
        for g, i in zip(given, ids, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)


def _batch(
    ids: list[np.ndarray],
    mask: list[np.ndarray],
    behaviour: list[np.ndarray],
    rewards: list[float],
    valid: list[bool],
    group: list[int],
    units: list[int],
    temperature: float,
    device: torch.device | str,
) -> Batch:
    lengths = [len(i) for i in ids]
    for i, m in zip(ids, mask, strict=True):
        if len(i) != len(m) or not len(i) or m[0]:
            raise ValueError(
                "a sequence needs a mask of its own length, and its first token cannot carry loss: nothing predicts it"
            )
    flat = {
        "ids": np.concatenate(ids),
        "mask": np.concatenate(mask),
        "behaviour": np.concatenate(behaviour),
    }
    return Batch(
        ids_T=torch.from_numpy(flat["ids"].astype(np.int64)).to(device),
        starts=(0, *np.cumsum(lengths).tolist()),
        sequence_T=torch.repeat_interleave(torch.arange(len(ids)), torch.tensor(lengths)).to(
            device
        ),
        mask_T=torch.from_numpy(flat["mask"].astype(bool)).to(device),
        behaviour_T=torch.from_numpy(flat["behaviour"].astype(np.float32)).to(device),
        reward_N=torch.tensor(rewards, dtype=torch.float32, device=device),
        valid_N=torch.tensor(valid, device=device),
        group_N=torch.tensor(group, device=device),
        unit_N=tuple(units),
        truncated_N=torch.zeros(len(ids), dtype=torch.bool, device=device),
        temperature=temperature,
    )


def with_loss(batch: Batch) -> Batch:
    """The batch without the units in which no token carries loss: they add nothing to a gradient whose weights are fixed."""
    loss_N = torch.zeros(batch.sequences, dtype=torch.bool, device=batch.mask_T.device)
    loss_N[batch.sequence_T[batch.mask_T]] = True
    alive = {unit for unit, loss in zip(batch.unit_N, loss_N.tolist(), strict=True) if loss}
    keep = [n for n, unit in enumerate(batch.unit_N) if unit in alive]
    return batch if len(keep) == batch.sequences else gather(batch, keep)


def gather(batch: Batch, sequences: Sequence[int]) -> Batch:
    """The given sequences of a batch, in that order."""
    device = batch.ids_T.device
    lengths = [batch.starts[n + 1] - batch.starts[n] for n in sequences]
    if not sequences:
        return take(batch, 0, 0)
    at_T = torch.cat([torch.arange(batch.starts[n], batch.starts[n + 1]) for n in sequences]).to(
        device
    )
    at_N = torch.tensor(sequences, device=device)
    changes: dict[str, object] = {
        "starts": (0, *np.cumsum(lengths).tolist()),
        "unit_N": tuple(batch.unit_N[n] for n in sequences),
        "sequence_T": torch.repeat_interleave(
            torch.arange(len(sequences)), torch.tensor(lengths)
        ).to(device),
    }
    for f in fields(batch):
        value = getattr(batch, f.name)
        if f.name not in changes and isinstance(value, torch.Tensor):
            changes[f.name] = value[at_T] if f.name.endswith("_T") else value[at_N]
    return batch.replace(**changes)


def take(batch: Batch, first: int, last: int) -> Batch:
    """Sequences first..last-1 of a batch, as views."""
    start, end = batch.starts[first], batch.starts[last]
    changes: dict[str, object] = {
        "starts": tuple(s - start for s in batch.starts[first : last + 1]),
        "unit_N": batch.unit_N[first:last],
        "sequence_T": batch.sequence_T[start:end] - first,
    }
    for f in fields(batch):
        value = getattr(batch, f.name)
        if f.name in changes or not isinstance(value, torch.Tensor):
            continue
        changes[f.name] = value[start:end] if f.name.endswith("_T") else value[first:last]
    return batch.replace(**changes)


def micro_batches(batch: Batch, token_budget: int) -> list[Batch]:
    """Cut a step between units so that each piece has at most `token_budget` tokens; a longer unit stands alone.

    The weights were fixed for the whole step before this, so the pieces add up to the same gradient however they are cut.
    """
    cuts, held = [0], 0
    units = _run_ends(batch.unit_N)
    for begin, end in zip([0, *units], units, strict=False):
        tokens = batch.starts[end] - batch.starts[begin]
        if held and held + tokens > token_budget:
            cuts.append(begin)
            held = 0
        held += tokens
    cuts.append(batch.sequences)
    return [take(batch, a, b) for a, b in pairwise(cuts) if b > a]


def mini_batches(batch: Batch, count: int, seed: int) -> list[Batch]:
    """Deal a rollout into up to `count` optimizer steps of whole groups, as equal in groups as can be. Which groups go together is
    random by `seed`; within a step they keep their order."""
    ends = _run_ends(batch.group_N.tolist())
    count = min(count, len(ends))
    if count == 1:
        return [batch]
    order, members = permutation(len(ends), "mini_batches", seed), list(pairwise([0, *ends]))
    dealt = [
        sorted(order[len(ends) * i // count : len(ends) * (i + 1) // count].tolist())
        for i in range(count)
    ]
    return [gather(batch, [n for one in groups for n in range(*members[one])]) for groups in dealt]


def _run_ends(numbers: Sequence[int]) -> list[int]:
    """Where each run of equal numbers ends."""
    return [
        i + 1 for i in range(len(numbers)) if i + 1 == len(numbers) or numbers[i + 1] != numbers[i]
    ]
