"""One optimizer step: micro-batches forward and backward, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from posttrain.algorithms.base import Algorithm
from posttrain.errors import GuardStop
from posttrain.events import Events
from posttrain.models.offload import on_device
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.ops.kl import kl_estimate
from posttrain.train import checkpoint
from posttrain.train.forward import forward, scores, values
from posttrain.train.memory import at_hand, checkpointing_pays, set_checkpointing, step_bytes
from posttrain.train.optimizer import Optimization, Optimizer
from posttrain.train.pack import micro_batches, with_loss
from posttrain.types import Batch, Metric, Outputs

CRITIC = "critic."  # what the critic's tensors are called by in a checkpoint
PRETRAINING = "pretraining/"  # and the figures of the text that is mixed in
Result = TypeVar("Result")


class NonFinite(GuardStop):
    """A loss or gradient that is not a number: nothing was updated. Holds the figures of the step that was not made."""

    def __init__(self, what: str, metrics: Sequence[Metric], norm: float):
        super().__init__(
            f"{what}: nothing was updated; look at the last rollouts, or lower the learning rate"
        )
        self.what, self.metrics, self.norm = what, tuple(metrics), norm


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    metrics: tuple[Metric, ...]
    grad_norm: float
    moved: bool


class Trainer:
    """Holds the model that learns (a policy, or a scorer where the algorithm trains one) and its optimizer; where the algorithm
    needs them, the frozen reference, and a critic with an optimizer of its own.

    `beside` is memory of the device that others will take while it trains, such as the engine's cache: with it, and with what is
    free, `checkpointing: auto` decides. `token_budget` is that of the settings until memory runs out; then it is halved, once.
    """

    def __init__(
        self,
        policy: Policy | Scorer,
        algorithm: Algorithm,
        settings: Optimization,
        reference: Policy | None = None,
        critic: Scorer | None = None,
        critic_settings: Optimization | None = None,
        beside: float = 0.0,
        events: Events | None = None,
    ):
        self.policy, self.algorithm, self.settings, self.reference, self.critic = (
            policy,
            algorithm,
            settings,
            reference,
            critic,
        )
        self.critic_settings = critic_settings or settings
        self.optimizer = Optimizer(policy.model, settings)
        self.critic_optimizer = (
            Optimizer(critic.model, self.critic_settings) if critic is not None else None
        )
        self.token_budget = settings.token_budget
        self.events = events or Events()
        self.checkpointed = self._choose_checkpointing(beside)

    def _choose_checkpointing(self, beside: float) -> bool:
        models: list[Policy | Scorer] = [
            self.policy,
            *([self.critic] if self.critic is not None else []),
        ]
        optimizers = [
            self.optimizer,
            *([self.critic_optimizer] if self.critic_optimizer is not None else []),
        ]
        learning = sum(
            (4 + o.settings.moment_bytes) * p.numel()
            for o in optimizers
            for p in o.parameters.values()
        )
        have, chosen = at_hand(self.policy.device), self.settings.checkpointing
        need = beside
        if chosen == "auto" and have is not None:
            need += step_bytes(models, learning, self.token_budget, False)
        on = checkpointing_pays(chosen, need, have)
        for model in models:
            set_checkpointing(model.model, on)
        if on and chosen == "auto" and have is not None:
            self.events.emit(
                "memory",
                f"memory: activations are computed again in the backward pass, layer by layer: a micro-batch of {self.token_budget} "
                f"tokens would need about {need / 2**30:.3g} GiB, and {have / 2**30:.3g} GiB are at hand; it takes about a third "
                "longer, the gradient is the same (optimizer.checkpointing=never, or a smaller token_budget, turns it off)",
            )
        return on

    def _within_memory(self, work: Callable[[], Result]) -> Result:
        """What `work` gives; where memory runs out in it, with all gradients dropped and half the token budget, once in the trainer's
        life. The weights of the loss are those of the whole step, so that smaller pieces add up to the same gradient."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            if self.token_budget < self.settings.token_budget or self.token_budget < 2:
                raise
            seen = " ".join(str(error).split())[:120]
        self._drop()  # beyond the except: while the error is alive, so is the memory of the pass that failed
        self.token_budget //= 2
        self.events.emit(
            "memory",
            f"memory: out of memory in training ({seen}); token_budget is halved to {self.token_budget} for the rest of the run, "
            "and the step is done again: the gradient is the same; the next time stops",
        )
        return work()

    def _drop(self) -> None:
        """Forget all gradients, and give cached memory back."""
        self.optimizer.zero()
        if self.critic_optimizer is not None:
            self.critic_optimizer.zero()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def fill(self, batch: Batch, watch: bool = False) -> Batch:
        """Add what the algorithm needs of others, before anything moves: the reference's log-probs of the same tokens at the same
        temperature, the critic's values, the policy's own log-probs.

        `watch` asks for the reference where it is there to be watched only, and the algorithm has no use for it.
        """
        needs = self.algorithm.needs
        if "reference" in needs or (watch and self.reference is not None):
            reference = self.reference
            assert reference is not None
            with on_device(reference.model, batch.ids_T.device):
                batch = batch.replace(
                    reference_T=self._each(batch, lambda piece: forward(reference, piece).logprob_T)
                )
        if "value" in needs:
            critic = self.critic
            assert critic is not None
            batch = batch.replace(value_T=self._each(batch, lambda piece: values(critic, piece)))
        if "proximal" in needs:
            policy = self.policy
            assert isinstance(policy, Policy)
            batch = batch.replace(
                proximal_T=self._each(batch, lambda piece: forward(policy, piece).logprob_T)
            )
        return batch

    def _each(self, batch: Batch, function: Callable[[Batch], Tensor]) -> Tensor:
        return self._within_memory(
            lambda: torch.cat([function(p) for p in micro_batches(batch, self.token_budget)])
        )

    def update(
        self, batch: Batch, rate: float, beside: tuple[Algorithm, Batch] | None = None
    ) -> Update:
        """Forward and backward over the micro-batches of a prepared step, then one update.

        `beside` is another algorithm with a prepared batch of its own, whose loss is added: the pretraining mix. A step in which
        no token carries loss moves nothing, not even the optimizer's moments; one in which the critic alone has a loss (its warm-up)
        leaves the policy and its optimizer as they are.
        """
        if not bool(batch.mask_T.any()):
            return Update((Metric("skipped", 1, None),), 0.0, False)
        metrics = self._within_memory(lambda: self._accumulate(batch, beside))
        norm = float(self.optimizer.norm())
        critic_norm = 0.0 if self.critic_optimizer is None else float(self.critic_optimizer.norm())
        self._check(metrics, norm, critic_norm)  # of everyone, before anyone moves
        self.optimizer.step(rate, norm)
        if self.critic_optimizer is not None:
            pace = (
                rate / self.settings.lr
            )  # the critic follows the same schedule at a rate of its own
            self.critic_optimizer.step(pace * self.critic_settings.lr, critic_norm)
            metrics.append(Metric("grad_norm/critic", critic_norm, 1))
        return Update(tuple(metrics), norm, True)

    def _accumulate(self, batch: Batch, beside: tuple[Algorithm, Batch] | None) -> list[Metric]:
        """Forward and backward over all micro-batches: the step's gradient is in the optimizers."""
        for model in (
            self.policy,
            self.critic,
        ):  # layers are checkpointed in training mode alone; nothing else differs in it
            if model is not None:
                model.model.train()
        metrics = [Metric("trained", int(batch.mask_T.sum()), 1)]
        for piece in micro_batches(with_loss(batch), self.token_budget):
            metrics.extend(self.forward_backward(piece))
        if beside is not None and any(
            True for _ in self.optimizer.gradients()
        ):  # it goes with a policy that learns
            other, more = beside
            for piece in micro_batches(with_loss(more), self.token_budget):
                found = self.forward_backward(piece, other)
                metrics += [
                    replace(m, name=PRETRAINING + m.name) for m in found if m.name != "loss"
                ]
        return of_one_update(metrics)

    def _check(self, metrics: Sequence[Metric], norm: float, critic_norm: float) -> None:
        """Raise NonFinite, with all gradients dropped, unless the losses and the norms of the gradients are finite."""
        figures = {"the gradient's norm": norm, "the norm of the critic's gradient": critic_norm}
        figures["the loss"] = sum(
            float(metric.total) for metric in metrics if metric.name == "loss"
        )
        for name, value in figures.items():
            if not math.isfinite(value):
                self._drop()
                raise NonFinite(f"{name} is {value}", metrics, norm + critic_norm)

    def outputs(self, piece: Batch) -> Outputs:
        """What the algorithm sees of a micro-batch, with gradients."""
        if isinstance(self.policy, Scorer):
            score_T = scores(self.policy, piece)
            return Outputs(torch.zeros_like(score_T), torch.zeros_like(score_T), score_T=score_T)
        found = forward(self.policy, piece)
        return found if self.critic is None else replace(found, value_T=values(self.critic, piece))

    def forward_backward(self, piece: Batch, algorithm: Algorithm | None = None) -> list[Metric]:
        """Add one micro-batch's gradient; the loss is a plain sum, because the weights are those of the whole step."""
        more: list[Metric] = []
        if algorithm is None:
            outputs = self.outputs(piece)
            terms = self.algorithm.terms(outputs, piece)
            if self.algorithm.online:
                more = mismatch(outputs.logprob_T.detach(), piece)
        else:
            assert isinstance(self.policy, Policy)
            terms = algorithm.terms(forward(self.policy, piece), piece)
        losses = [(term.name, (term.weight * term.loss).sum()) for term in terms.terms]
        total = torch.stack([loss for _, loss in losses]).sum()
        total.backward()
        named = [Metric(f"loss/{name}", loss.detach(), None) for name, loss in losses]
        return [Metric("loss", total.detach(), None), *named, *terms.metrics, *more]

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """[T]: log-probs of the policy as it is now (or a scorer's scores), for whoever wants to know what an update saw."""
        return self._each(
            batch,
            lambda piece: (
                found.logprob_T if (found := self.outputs(piece)).score_T is None else found.score_T
            ),
        )

    @torch.no_grad()
    def checksum(self) -> int | None:
        """A checksum of every weight that must not move: the sum of their bits as integers. None where there are none."""
        models = [self.policy.model, *([self.critic.model] if self.critic is not None else [])]
        still = {id(p): p for model in models for p in model.parameters() if not p.requires_grad}
        if self.reference is not None:
            learning = {id(p) for model in models for p in model.parameters() if p.requires_grad}
            still |= {id(p): p for p in self.reference.model.parameters() if id(p) not in learning}
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [
            p.detach().contiguous().view(whole[p.element_size()]).sum(dtype=torch.int64).cpu()
            for p in still.values()
        ]
        return int(torch.stack(sums).sum()) if sums else None

    def weights(self) -> dict[str, Tensor]:
        """Everything that is trained, by name."""
        tensors = checkpoint.weights(self.policy.model)
        if self.critic is not None:
            tensors |= {
                CRITIC + name: tensor
                for name, tensor in checkpoint.weights(self.critic.model).items()
            }
        return tensors

    def moments(self) -> dict[str, Tensor]:
        """The optimizers' state, by name."""
        tensors = self.optimizer.state()
        if self.critic_optimizer is not None:
            tensors |= {
                CRITIC + name: tensor for name, tensor in self.critic_optimizer.state().items()
            }
        return tensors

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Put back what `weights` and `moments` gave, bit for bit."""
        checkpoint.restore_weights(self.policy.model, _without(weights, CRITIC))
        self.optimizer.restore(_without(moments, CRITIC))
        if self.critic is not None and self.critic_optimizer is not None:
            checkpoint.restore_weights(self.critic.model, _only(weights, CRITIC))
            self.critic_optimizer.restore(_only(moments, CRITIC))


def of_one_update(metrics: Sequence[Metric]) -> list[Metric]:
    """The figures of all micro-batches with each loss, which is a sum over them, as one figure that counts once: several updates of
    a step then give the mean of their losses."""
    losses: dict[str, Tensor | float] = {}
    rest = []
    for metric in metrics:
        if metric.name.removeprefix(PRETRAINING).split("/")[0] == "loss":
            losses[metric.name] = losses.get(metric.name, 0.0) + metric.total
        else:
            rest.append(metric)
    return [*(Metric(name, total, 1) for name, total in losses.items()), *rest]


def mismatch(logprob_T: Tensor, piece: Batch) -> list[Metric]:
    """How far the trainer's log-probs are from those that were sampled with: the mean and the largest |log pi - log mu|, and
    KL(mu || pi) by its k3 estimate, e^d - 1 - d with d = log pi - log mu."""
    mask_T, count = piece.mask_T, piece.mask_T.sum()
    logprob_T, behaviour_T = logprob_T.where(mask_T, 0.0), piece.behaviour_T.where(mask_T, 0.0)
    apart_T = (logprob_T - behaviour_T).abs()
    return [
        Metric("mismatch", apart_T.sum(), count),
        Metric("mismatch/max", apart_T.max(), None, largest=True),
        Metric("mismatch/kl", kl_estimate("k3", behaviour_T, logprob_T).sum(), count),
    ]


def _only(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _without(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
