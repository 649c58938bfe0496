"""TRPO: a natural-gradient step within a trust region, for small modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.errors import Checked, Count, NotNegative, Positive, Share, require

MAX_WEIGHTS = 5_000_000  # every iteration is two backward passes through all of them
# the loss to lower, and the log-probs [M, V] of the whole distribution in M states; both are functions of the module's weights
Objective = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class TrustRegion(Checked):
    """How a step is found. The paper's KL is 0.01."""

    delta: Positive = 0.01  # the largest mean KL from the policy before the step, in nats
    damping: NotNegative = 0.01  # added to the diagonal of the Fisher matrix
    iterations: Count = 10  # of conjugate gradients
    halvings: Count = 10  # how often the step is halved before it is given up
    accept: Share = 0.1  # the least share of the improvement that the gradient promises


@dataclass(frozen=True, slots=True)
class TrustStep:
    """What a step did: how far it went of the first proposal (0: nowhere), the KL, and by how much the loss fell."""

    fraction: float
    kl: float
    improvement: float


def trust_region_step(module: nn.Module, objective: Objective, settings: TrustRegion) -> TrustStep:
    """One step of trust region policy optimisation (Schulman et al. 2015, arXiv:1502.05477, appendix C):

        minimise L(theta)  subject to  mean_s KL(pi_old(. | s) || pi(. | s)) <= delta
        F v    = grad_theta ( (grad_theta KL)^T v ) + damping v           Fisher-vector product, F is never stored
        x      = F^-1 g by conjugate gradients,    g = grad L
        theta <- theta - a^j sqrt(2 delta / (x^T F x)) x,    a = 1/2, with the first j = 0, 1, ... at which KL <= delta and
                 L has fallen by at least `accept` a^j g^T (step)

    Where no j does, the weights stay as they are. L is the surrogate -mean rho A, with rho = pi / pi_old and thus 1 at the start.
    Activations must be twice differentiable: scaled dot-product attention is where its backend is MATH. Use it to see what PPO's
    clip stands for: for models above MAX_WEIGHTS weights the two backward passes an iteration are too much, and it is refused.
    """
    weights = [p for p in module.parameters() if p.requires_grad]
    count = sum(p.numel() for p in weights)
    large = f"a trust-region step of {count:,} weights: it is for at most {MAX_WEIGHTS:,}"
    require(0 < count <= MAX_WEIGHTS, f"{large}; use ppo, whose clip stands for it")
    loss, logprob_MV = objective()
    old_MV, before = logprob_MV.detach(), float(loss.detach())
    gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
    gradient = _flat(gradients, weights)
    finite = bool(torch.isfinite(gradient).all())
    require(finite, "the gradient of a trust-region step is not finite")
    slope = _flat(
        torch.autograd.grad(_kl(old_MV, logprob_MV), weights, create_graph=True, allow_unused=True),
        weights,
    )

    def product(vector: Tensor) -> Tensor:
        """F v."""
        found = torch.autograd.grad(slope @ vector, weights, retain_graph=True, allow_unused=True)
        return _flat(found, weights) + settings.damping * vector

    direction = conjugate_gradients(product, gradient, settings.iterations)
    curvature = float(direction @ product(direction))
    if not curvature > 0.0:  # the gradient is 0
        return TrustStep(0.0, 0.0, 0.0)
    step = math.sqrt(2 * settings.delta / curvature) * direction
    promised, start = float(gradient @ step), [p.detach().clone() for p in weights]
    for fraction in (0.5**n for n in range(settings.halvings)):
        _move(weights, start, -fraction * step)
        with torch.no_grad():
            loss, logprob_MV = objective()
            kl, improvement = float(_kl(old_MV, logprob_MV)), before - float(loss)
        if kl <= settings.delta and improvement >= settings.accept * fraction * promised > 0:
            return TrustStep(fraction, kl, improvement)
    _move(weights, start, torch.zeros_like(step))
    return TrustStep(0.0, 0.0, 0.0)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], target: Tensor, iterations: int
) -> Tensor:
    """x with F x = target, for a symmetric positive F of which only products are known; exact after as many `iterations` as F has
    dimensions."""
    found, left = torch.zeros_like(target), target.clone()
    along, size = left.clone(), left @ left
    smallest = 1e-20 * size
    for _ in range(iterations):
        if float(size) <= float(smallest):
            break
        product_along = product(along)
        share = size / (along @ product_along)
        found, left = found + share * along, left - share * product_along
        following = left @ left
        along, size = left + following / size * along, following
    return found


def _kl(old_MV: Tensor, logprob_MV: Tensor) -> Tensor:
    """The mean of KL(old || new) over the states."""
    return (old_MV.exp() * (old_MV - logprob_MV)).sum(1).mean()


def _flat(gradients: tuple[Tensor | None, ...], weights: list[nn.Parameter]) -> Tensor:
    """One vector; weights that play no part have a gradient of 0."""
    pairs = zip(gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


@torch.no_grad()
def _move(weights: list[nn.Parameter], start: list[Tensor], by: Tensor) -> None:
    """Set the weights to where they started, moved by a vector."""
    pieces = torch.split(by, [p.numel() for p in weights])
    for weight, origin, piece in zip(weights, start, pieces, strict=True):
        weight.copy_(origin + piece.view_as(origin))
