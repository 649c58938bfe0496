"""Detects coefficients without effect: a setting of the algorithm that was changed from its default, but whose value makes no
difference.

A term can vanish without an error: a KL with a coefficient but no gradient, a bonus whose weight was multiplied away. So the first
batch of a stage is prepared once more with each number changed, and what the algorithm makes of it is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import UserError
from posttrain.types import Batch, Group, Metric, Outputs

MOVED = 0.5  # how far log-probs are moved from those that sampled, so that a clip or a cap has something to cut
FACTORS = (0.5, 2.0, 0.01, 100.0)


def dead_coefficients(
    algorithm: Algorithm,
    batch: Batch,
    outputs: Outputs,
    state: State,
    groups: Sequence[Group] = (),
    metrics: Sequence[Metric] = (),
) -> list[str] | None:
    """The names of nonzero float settings that have no effect on this step: other values change neither the gradient with respect
    to the model's outputs, nor the selected groups, nor the state. None if the policy has no gradient, or none of its rewards: all
    advantages are 0, as where every response of a group earned the same.

    The gradient with respect to log-probs, entropies, values, scores and hidden states (of which a divergence over the vocabulary is
    made) stands for that of the weights, which is linear in it.
    """
    single = len(outputs.predictions) < 2
    advantage_T = algorithm.prepare(batch, state).columns.get("advantage_T")
    # with a second model, a distance to it has a gradient where all advantages are 0
    if single and advantage_T is not None and not advantage_T.any():
        return None
    perturbed = perturb(outputs, batch)
    usual = gradient(algorithm, batch, perturbed, state)
    # the first output is that of the model which the algorithm trains
    learned = batch.tokens if single else None
    if usual is None or not bool(usual[:learned].any()):
        return None
    before = decisions(algorithm, state, groups, metrics)

    def acts(other: Algorithm) -> bool:
        # decisions first: they need no prepared batch
        decided = decisions(other, state, groups, metrics)
        return decided != before or differs(usual, gradient(other, batch, perturbed, state))

    others = {name: list(changed(algorithm, name)) for name in coefficients(algorithm)}
    return [name for name, made in others.items() if made and not any(map(acts, made))]


def coefficients(algorithm: Algorithm) -> list[str]:
    """The float settings that the user chose: not 0, and not the default of a shipped algorithm, which tests cover; a variant of one
    may leave inherited settings unused."""
    values = {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(algorithm) if f.init}
    shipped = next(c for c in type(algorithm).__mro__ if c.__module__.startswith("posttrain."))
    usual = {f.name: f.default for f in dataclasses.fields(shipped)}
    chosen = {name: v for name, v in values.items() if v != usual.get(name)}
    return [name for name, value in chosen.items() if isinstance(value, float) and value != 0]


def changed(algorithm: Algorithm, name: str) -> Iterator[Algorithm]:
    """The algorithm with other values of one setting, as far as it accepts them."""
    for factor in FACTORS:
        with suppress(UserError):
            yield replace(algorithm, **{name: factor * getattr(algorithm, name)})


def perturb(outputs: Outputs, batch: Batch) -> Outputs:
    """Outputs of a policy and a critic that have moved since the batch was sampled: alternately up and down, by small and large
    amounts."""
    at_T = torch.arange(batch.tokens, device=batch.ids_T.device)
    by_token, by_sequence = (at_T % 7).double() - 3.0, (batch.sequence_T % 5).double() - 2.0
    shift_T = MOVED * (by_token / 3.0 + by_sequence / 4.0)

    def moved(name: str, tensor: Tensor) -> Tensor:
        wide = tensor.detach().double()
        kept = wide if name == "entropy_T" else (wide + shift_T).where(batch.mask_T, 0.0)
        return kept.requires_grad_()

    states = {
        name: replace(made, hidden_MH=made.hidden_MH.detach().requires_grad_())
        for name, made in outputs.predictions.items()
    }
    return outputs.replaced({name: moved(name, c) for name, c in outputs.columns.items()}, states)


def gradient(algorithm: Algorithm, batch: Batch, outputs: Outputs, state: State) -> Tensor | None:
    """The gradient of the loss of the step with respect to the outputs, as one vector; None if the step has no loss."""
    prepared = algorithm.prepare(batch, state)
    if not bool(prepared.mask_T.any()):
        return None
    terms = algorithm.terms(outputs, prepared).terms
    total = torch.stack([(term.weight * term.loss).sum().double() for term in terms]).sum()
    if not total.requires_grad:
        return None
    hidden = [made.hidden_MH for made in outputs.predictions.values()]
    found = torch.autograd.grad(total, [*outputs.columns.values(), *hidden], materialize_grads=True)
    return torch.cat([one.flatten().double() for one in found])


def differs(one: Tensor, other: Tensor | None) -> bool:
    """Whether two gradients differ by more than the rounding of float32 batches."""
    return other is None or bool((one - other).norm() > 1e-6 * one.norm())


def decisions(
    algorithm: Algorithm, state: State, groups: Sequence[Group], metrics: Sequence[Metric]
) -> list[object]:
    """The decisions of an algorithm besides the gradient: selected groups and next state."""
    reuse = algorithm.reuse
    found: list[object] = [algorithm.start(), algorithm.additions, algorithm.group_size]
    found += [reuse.epochs, reuse.mini_batches]
    if groups:
        selected = algorithm.select(list(groups), state)
        samples = [(g.problem.id, [r.sample for r in g.rollouts]) for g in selected.groups]
        found += [samples, selected.refill]
    for more in (0.0, 0.1, 1.0, 10.0) if metrics else ():  # as the figures are, and might become
        later = [replace(m, total=float(m.total) + more * float(m.count or 1)) for m in metrics]
        found += [algorithm.finish(state, later), reuse.stop(later)]
    return found
