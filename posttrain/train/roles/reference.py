"""The reference: the model that the policy should stay close to, frozen or following the policy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from posttrain.errors import require
from posttrain.models.policy import Policy
from posttrain.models.scorer import on_device
from posttrain.ops.kl import kl_estimate
from posttrain.train.forward import forward
from posttrain.train.roles.base import Role
from posttrain.types import JSON, Batch, Metric


class Reference(Role):
    """Log-probs of the same tokens at the same temperature. A `watched` reference serves the metric `kl` only. With `every_step`
    the KL of whole responses is also measured in each step."""

    name = "reference"
    columns = ("reference_T",)

    def __init__(self, policy: Policy, watched: bool = False, every_step: bool = False):
        self.policy, self.frozen = policy, policy.model
        self.watched, self.every_step = watched, every_step
        self.only_shown = watched and not every_step

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        return {"reference_T": forward(self.policy, piece).logprob_T}

    def metrics(self, filled: Batch) -> tuple[Metric, ...]:
        """The KL over the sampled tokens, if no term of the loss reports it, and that of whole responses, sum_t log mu - log ref."""
        if "reference_T" not in filled.columns:
            return ()
        found = []
        measured_T = filled.mask_T & ~filled.reference_T.isnan()
        if self.watched:
            found.append(Metric("kl", kl_of(filled).where(measured_T, 0.0).sum(), measured_T.sum()))
        if self.every_step:
            k1_T = (filled.behaviour_T - filled.reference_T).where(measured_T, 0.0)
            responses = torch.unique(filled.sequence_T[measured_T]).numel()
            found.append(Metric("kl/response", k1_T.sum(), responses))
        return tuple(found)

    def token_arrays(self, batch: Batch) -> Mapping[str, Tensor]:
        return {"kl": kl_of(batch)} if "reference_T" in batch.columns else {}


class MovingReference(Reference):
    """A reference that follows the policy (TR-DPO, arXiv:2404.09656), after every step or every k steps:

        ema > 0      theta_ref <- ema theta_ref + (1 - ema) theta
        every = k    theta_ref <- theta, after step k, 2 k, ...

    The KL then bounds how fast the policy moves, not how far. In 16 bits a small step would be rounded away, so the average of 16-bit
    weights is kept in float32. It is in every checkpoint.
    """

    def __init__(self, policy: Policy, followed: Policy, ema: float, every: int, *measured: bool):
        super().__init__(policy, *measured)
        sharded = "a reference that moves cannot follow weights that are spread over processes"
        require(followed.sharded is None, f"{sharded}; use parallel=ddp")
        self.frozen, self.followed, self.ema, self.every = None, followed, ema, every
        self.means = {
            name: weight.detach().float()
            for name, weight in policy.model.named_parameters()
            if ema and weight.dtype.itemsize < 4
        }

    def resident(self, device: torch.device) -> AbstractContextManager[None]:
        return on_device(self.policy.model, device)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if self.every and step % self.every:
            return
        share = 1.0 if self.every else 1 - self.ema
        theirs = dict(self.followed.model.named_parameters())
        for name, weight in self.policy.model.named_parameters():
            mean = self.means.get(name, weight)
            mean.lerp_(theirs[name].to(mean), share)
            weight.copy_(mean)

    def state(self) -> JSON:
        """All weights as bytes, because NumPy has no bfloat16."""
        weights = dict(self.policy.model.named_parameters()) | self.means
        return {n: w.detach().cpu().flatten().view(torch.uint8).numpy() for n, w in weights.items()}

    @torch.no_grad()
    def restore(self, state: JSON) -> None:
        require(state is not None, "the checkpoint has no reference that moves; start a new run")
        for name, weight in self.policy.model.named_parameters():
            mean = self.means.get(name, weight)
            mean.copy_(torch.from_numpy(state[name]).view(mean.dtype).view_as(mean))
            weight.copy_(mean)


def kl_of(batch: Batch) -> Tensor:
    """[T]: the KL to the reference at the sampled tokens, by the k3 estimate; NaN in sequences where it was not computed."""
    kl_T = kl_estimate("k3", batch.behaviour_T, batch.reference_T)
    return kl_T.where(batch.mask_T | batch.reference_T.isnan(), 0.0)
