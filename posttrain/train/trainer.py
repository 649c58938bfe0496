"""The trainer: forward and backward over micro-batches, then one optimizer step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from posttrain.algorithms.base import Algorithm, State
from posttrain.errors import GuardStop, OutOfMemory, require
from posttrain.events import Events
from posttrain.models.policy import Policy
from posttrain.models.scorer import Scorer
from posttrain.ops.kl import kl_estimate
from posttrain.system.processes import HALVED
from posttrain.system.world import current
from posttrain.train import parallel
from posttrain.train.forward import PASSES, ROUTER_WEIGHT
from posttrain.train.memory import at_hand, choose_way, set_checkpointing, step_bytes
from posttrain.train.optimizer import Learner, Optimization
from posttrain.train.pack import first_tokens, host_mask, micro_batches, with_loss
from posttrain.train.parts import is_sharded, own_part
from posttrain.train.roles.base import Addition, Role
from posttrain.types import Batch, Group, Metric, Outputs, Term, Terms

Result = TypeVar("Result")
SHOWN_TOKENS = 1 << 16  # of a step, for columns that serve monitoring alone


class NonFinite(GuardStop):
    """A loss or a gradient is not finite, so nothing was updated. Holds the metrics of the failed update."""

    def __init__(self, what: str, metrics: Sequence[Metric], norm: float):
        advice = "look at the last rollouts, or lower the learning rate"
        super().__init__(f"{what}: nothing was updated; {advice}")
        self.what, self.metrics, self.norm = what, tuple(metrics), norm


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one optimizer step."""

    metrics: tuple[Metric, ...]
    grad_norm: float
    moved: bool


class Trainer:
    """Holds the model that the algorithm trains (a policy or a scorer) with its optimizer, and the algorithm's roles, some of which are
    trained, too.

    `token_budget: auto` and `checkpointing: auto` are decided from the free memory, the tokens of the longest sequence and
    `reserved_bytes`, the device memory that others take during training, such as the engine's cache. If memory runs out later, the
    token budget is halved, once.
    """

    def __init__(
        self,
        policy: Policy | Scorer,
        algorithm: Algorithm,
        settings: Optimization,
        roles: Sequence[Role] = (),
        reserved_bytes: float = 0.0,
        events: Events | None = None,
        longest: int = 0,
    ):
        self.policy, self.algorithm, self.settings, self.roles = policy, algorithm, settings, roles
        routed = isinstance(policy, Policy) and bool(policy.routers)
        kind = f"{type(policy.model).__name__} is no language model with the routers of Qwen3-MoE in packed sequences"
        text = f"optimizer.router_aux_loss_coef: {kind}; set it to 0"
        require(routed or not settings.router_aux_loss_coef, text)
        own = Learner("policy", policy, settings)
        self.optimizer = own.optimizer
        self.learners = (own, *(role.learner for role in roles if role.learner is not None))
        # with sharded weights, all processes must make the same number of passes
        self.sharded = any(learner.network.sharded is not None for learner in self.learners)
        self.events, self.reserved_bytes, self.longest = events or Events(), reserved_bytes, longest
        have = at_hand(policy.device)
        fixed = reserved_bytes + sum(learner.state_bytes for learner in self.learners)
        budget, checkpointing = settings.token_budget, settings.checkpointing
        chosen, layered = choose_way(budget, checkpointing, self._need, have, fixed)
        self.first_budget = self.token_budget = min(map(int, current().gather(chosen)))
        if self.sharded and HALVED in os.environ and self.token_budget > 1:
            self.token_budget //= 2
        self.checkpointed = self._set_checkpointing(layered, have)
        self.early = list[Metric]()  # metrics of roles that learned while they filled columns
        self.learn_again: Callable[[], object] = lambda: None  # recomputes their dropped gradients

    def _need(self, checkpointed: bool, tokens: int) -> float:
        """Bytes that a step with micro-batches of `tokens` tokens needs, including what others reserve."""
        networks = [learner.network for learner in self.learners]
        learning = sum(learner.state_bytes for learner in self.learners)
        tokens = max(tokens, self.longest)
        at_once = [[one] for one in networks] if self.algorithm.learns_apart else [networks]
        largest = max(step_bytes(some, learning, tokens, checkpointed) for some in at_once)
        return self.reserved_bytes + largest

    def _set_checkpointing(self, layered: bool, have: float | None) -> bool:
        on = current().any(layered)
        for learner in self.learners:
            set_checkpointing(learner.network.model, on)
        if on and self.settings.checkpointing == "auto" and have is not None:
            need = self._need(False, self.token_budget)
            text = f"memory: activations are computed again in the backward pass, layer by layer: a micro-batch of {self.token_budget}"
            text += f" tokens would need about {need / 2**30:.3g} GiB, and {have / 2**30:.3g} GiB are at hand; it takes about a third"
            text += " longer, the gradient is the same (optimizer.checkpointing=never, or a smaller token_budget, turns it off)"
            self.events.emit("memory", text)
        return on

    def _within_memory(
        self, work: Callable[[], Result], before: Callable[[], object] = lambda: None
    ) -> Result:
        """Return `work()`. If it runs out of memory, drop all gradients, halve the token budget, call `before` to recompute earlier
        gradients, and repeat the work. This happens once in the trainer's life. The loss weights are those of the whole step, so
        smaller micro-batches add up to the same gradient. If one process runs out of memory, all repeat. With sharded weights the
        others are in the middle of a pass, so an error makes the launcher start all processes again."""
        found, seen = list[Result](), ""
        try:
            found.append(work())
        except torch.OutOfMemoryError as error:
            asked = self.settings.token_budget
            whole = self.first_budget if asked == "auto" else asked
            if self.token_budget < whole or self.token_budget < 2:
                raise
            seen = " ".join(str(error).split())[:120]
            if self.sharded:
                text = f"out of memory in training, in process {current().rank} of {current().size} ({seen})"
                raise OutOfMemory(f"{text}; resume with a smaller token_budget") from error
        if not current().any(bool(seen)):
            return found[0]
        found.clear()
        self._drop()  # outside the except block: the live error would keep the memory of the failed pass
        self.token_budget //= 2
        text = f"memory: out of memory in training ({seen or 'in another process'}); token_budget is halved to {self.token_budget}"
        text += " for the rest of the run, and the step is done again: the gradient is the same; the next time stops"
        self.events.emit("memory", text)
        before()
        return work()

    def _drop(self) -> None:
        """Drop all gradients, and free cached memory."""
        for learner in self.learners:
            learner.optimizer.zero()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def fill(
        self,
        batch: Batch,
        shown: bool = False,
        groups: Sequence[Group] = (),
        state: State | None = None,
    ) -> Batch:
        """Add the columns of the roles to the batch, before any update. `groups` are the groups of the batch's rollouts. `shown` says
        that this step's rollouts are written: some columns serve that alone, and are computed for the first sequences only, enough for
        a mean, and NaN beyond. With the algorithm's `state`, a role that may learn early does so, after the other roles; `update` must
        follow."""
        for role in sorted(self.roles, key=lambda role: role.learner is not None):
            role.read(groups)
            if role.columns and batch.sequences and (shown or not role.only_shown):
                part = first_tokens(batch, SHOWN_TOKENS) if role.only_shown else batch
                work: Callable[[], list[Mapping[str, Tensor]]] = partial(self._fill, role, part)
                learner, early = role.learner, None
                if learner is not None and state is not None:
                    early = self.algorithm.early(batch, state)
                if learner is not None and early is not None:
                    batch = batch.replace(learned=batch.learned | {learner.name})
                    work = self.learn_again = partial(self._learn, role, learner, early)
                with role.resident(batch.ids_T.device):
                    parts = self._within_memory(work)
                columns = {n: torch.cat([one[n] for one in parts]) for n in role.columns if parts}
                columns = parallel.join_columns(columns, part)
                rest = (0, batch.tokens - part.tokens)
                padded = {n: pad(column, rest, value=math.nan) for n, column in columns.items()}
                batch = batch.replace(**padded)
        return batch

    def _fill(self, role: Role, batch: Batch) -> list[Mapping[str, Tensor]]:
        """Compute a role's columns for this process's share of the batch."""
        pieces, idle = parallel.own_passes(batch, self.token_budget, self.sharded)
        return [role.fill(piece) for piece in (*pieces, *idle)][: len(pieces)]

    @torch.enable_grad()
    def _learn(self, role: Role, learner: Learner, batch: Batch) -> list[Mapping[str, Tensor]]:
        """Compute a role's columns for this process's share of the batch and, in the same pass, the gradient of its loss."""
        learner.optimizer.zero()
        learner.network.learn()
        pieces, idle = parallel.own_passes(batch, self.token_budget, self.sharded)
        found, self.early = list[Mapping[str, Tensor]](), []
        for number, piece in enumerate((*pieces, *idle)):
            outputs = role.outputs(piece)
            own = number < len(pieces)
            terms = self.algorithm.early_terms(outputs, piece)
            figures = [*backward(terms.terms, 1.0 if own else 0.0), *terms.metrics]
            if own:
                found.append({name: outputs.columns[name].detach() for name in role.columns})
                self.early += figures
        return found

    def role_metrics(self, filled: Batch) -> list[Metric]:
        return [metric for role in self.roles for metric in role.metrics(filled)]

    @torch.enable_grad()  # a reward's file may have switched gradients off
    def update(
        self, batch: Batch, rate: float, meanwhile: Callable[[], object] = lambda: None
    ) -> Update:
        """Run forward and backward over the micro-batches of a prepared step and over the batches that roles add, then make one
        optimizer step. `meanwhile` does other work on the CPU: it is called after each micro-batch has been queued on the device, and
        after the last one until it returns something false. Nothing waits for the device before that.

        If no token carries loss, nothing changes, not even the optimizer's moments. `resting` learners (the policy while its critic
        warms up) and their optimizers stay as they are.
        """
        added = [(role.name, more) for role in self.roles if (more := role.draw()) is not None]
        live = with_loss(batch)
        if self.settings.router_aux_loss_coef:
            live = self._balanced(live)
        if not live.sequences:
            return Update((Metric("skipped", 1, None),), 0.0, False)
        work = partial(self.accumulate, live, added, meanwhile)
        found = self._within_memory(work, self.learn_again)
        found[0][1].extend(self.early)
        self.learn_again, self.early = lambda: None, []  # frees the batch that it refers to
        metrics = [Metric("trained", int(host_mask(live).sum()), 1)]
        # collectives come after the work that may be repeated
        for name, own in found:
            summed = of_one_update(parallel.sum_metrics(own))
            if name:
                others = (m for m in summed if m.name != "loss")
                summed = [replace(m, name=f"{name}/{m.name}") for m in others]
            metrics += summed
        for learner in () if self.sharded else self.learners:
            parallel.sum_gradients(learner.optimizer)
        norms = [float(learner.optimizer.norm()) for learner in self.learners]
        self._check(metrics, norms)  # all learners, before any is updated
        for learner, norm in zip(self.learners, norms, strict=True):
            scaled = rate
            if learner is not self.learners[0]:
                metrics.append(Metric(f"grad_norm/{learner.name}", norm, 1))
                # all follow the schedule of the first, scaled to their own rates
                scaled = rate / self.settings.lr * learner.settings.lr
            if learner.name not in batch.resting:
                learner.optimizer.step(scaled, norm)
        return Update(tuple(metrics), norms[0], True)

    def _balanced(self, batch: Batch) -> Batch:
        """Add the token weights of the routers' auxiliary loss: its mean over sequences, times the coefficient."""
        length_N = torch.tensor(batch.starts).diff()
        weight_N = self.settings.router_aux_loss_coef / (batch.sequences * length_N)
        return batch.replace(**{ROUTER_WEIGHT: weight_N.to(batch.ids_T.device)[batch.sequence_T]})

    def accumulate(
        self, batch: Batch, added: Sequence[tuple[str, Addition]], meanwhile: Callable[[], object]
    ) -> list[tuple[str, list[Metric]]]:
        """Run forward and backward over all micro-batches of this process, which accumulates its part of the gradient. Returns the
        metrics of the step under the name "", and those of each batch that a role added under the role's name."""
        for learner in self.learners:
            learner.network.learn()
        found = [("", self._passes(batch, meanwhile))]
        for name, more in added if "policy" not in batch.resting else ():
            found.append((name, self._passes(with_loss(more.batch), lambda: None, more.algorithm)))
        return found

    def _passes(
        self, batch: Batch, meanwhile: Callable[[], object], algorithm: Algorithm | None = None
    ) -> list[Metric]:
        pieces, idle = parallel.own_passes(batch, self.token_budget, self.sharded)
        found, by = list[Metric](), () if algorithm is None else (algorithm,)
        for piece in pieces:
            found += self.forward_backward(piece, *by)
            meanwhile()
        while meanwhile():  # the rest of it: nothing waits for the last micro-batch yet
            pass
        for piece in idle:
            self.forward_backward(piece, algorithm, 0.0)
        return found

    def _check(self, metrics: Sequence[Metric], norms: Sequence[float]) -> None:
        """If the loss or the norm of a gradient is not finite, drop all gradients and raise NonFinite."""
        others = (f"the norm of the {one.name}'s gradient" for one in self.learners[1:])
        figures = dict(zip(("the gradient's norm", *others), norms, strict=True))
        figures["the loss"] = sum(float(m.total) for m in metrics if m.name == "loss")
        for name, value in figures.items():
            if not math.isfinite(value):
                self._drop()
                raise NonFinite(f"{name} is {value}", metrics, sum(norms))

    def outputs(self, piece: Batch) -> Outputs:
        """The outputs of the trained model and of the roles for a micro-batch, with gradients."""
        found = PASSES[self.algorithm.trains](self.policy, piece)
        for role in self.roles:
            if role.learner is None or role.learner.name not in piece.learned:
                found = found.join(role.outputs(piece))
        return found

    def forward_backward(
        self, piece: Batch, algorithm: Algorithm | None = None, factor: float = 1.0
    ) -> list[Metric]:
        """Add the gradient of one micro-batch. Its loss is a plain sum, because the weights are normalised over the whole step.
        `algorithm` is that of a batch which a role added; it sees the outputs of the trained model only. With `factor` 0 the pass
        adds nothing: sharded processes need it to keep in step."""
        more: list[Metric] = []
        if algorithm is None:
            outputs = self.outputs(piece)
            terms = self.algorithm.made("terms", self.algorithm.terms(outputs, piece), Terms)
            if self.algorithm.learns_from == "rollouts":
                more = mismatch(outputs.logprob_T.detach(), piece)
        else:
            terms = algorithm.terms(PASSES[algorithm.trains](self.policy, piece), piece)
        every = list(terms.terms)
        if algorithm is None and "balance_T" in outputs.columns:
            balance_T = outputs.balance_T
            more.append(Metric("router/balance", balance_T.detach().sum(), piece.tokens))
            more += rerouted(outputs, piece) if self.policy.router_replay else []
            if ROUTER_WEIGHT in piece.columns:
                every.append(Term("router", balance_T, piece.router_weight_T))
        return [*backward(every, factor), *terms.metrics, *more]

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> Tensor:
        """[T]: the log-probs of the current policy, or the scores of the current scorer."""

        def passes() -> list[Tensor]:
            pieces = micro_batches(batch, self.token_budget)
            outputs = (PASSES[self.algorithm.trains](self.policy, piece) for piece in pieces)
            return [next(iter(one.columns.values())) for one in outputs]

        return torch.cat(self._within_memory(passes))

    @torch.no_grad()
    def checksum(self) -> int | None:
        """A checksum of all weights that must not change: the sum of their bits as integers. None if there are none."""
        for learner in self.learners if self.sharded else ():
            if learner.network.sharded is not None:
                learner.network.sharded.reshard()
        models = [learner.network.model for learner in self.learners]
        still = {id(p): p for model in models for p in model.parameters() if not p.requires_grad}
        learning = {id(p) for model in models for p in model.parameters() if p.requires_grad}
        for role in self.roles:
            frozen = () if role.frozen is None else role.frozen.parameters()
            still |= {id(p): p for p in frozen if id(p) not in learning}
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if not still:
            return None
        every = current().first or not self.sharded
        counted = [p for p in still.values() if every or is_sharded(p)]
        parts = [own_part(p.detach()).contiguous() for p in counted]
        bits = (part.view(whole[part.element_size()]) for part in parts)
        sums = [one.sum(dtype=torch.int64).cpu() for one in bits]
        found = torch.stack([torch.zeros((), dtype=torch.int64), *sums]).sum()
        if self.sharded:  # unsharded weights are counted in the first process
            dist.all_reduce(found)
        return int(found)

    def weights(self) -> dict[str, Tensor]:
        """All trained weights, by name."""
        return {name: t for learner in self.learners for name, t in learner.weights().items()}

    def moments(self) -> dict[str, Tensor]:
        """The optimizers' state, by name."""
        return {name: t for learner in self.learners for name, t in learner.moments().items()}

    def own_parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments as this process writes them to a checkpoint: its shard, if weights are sharded."""
        weights, moments = dict[str, Tensor](), dict[str, Tensor]()
        for own, state in (learner.own_parts() for learner in self.learners):
            weights, moments = weights | own, moments | state
        return weights, moments

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Restore what `weights` and `moments` returned, bit for bit."""
        weights, moments = dict(weights), dict(moments)
        for learner in reversed(self.learners):  # the first, without a prefix, takes what is left
            learner.restore(_split(weights, learner.prefix), _split(moments, learner.prefix))


def backward(terms: Sequence[Term], factor: float) -> list[Metric]:
    """Backpropagate `factor` times the sum of the terms, and return their losses as metrics."""
    for term in terms:
        shapes = f"{[*term.loss.shape]} and its weights {[*getattr(term.weight, 'shape', ())]}"
        wrong = f"loss/{term.name} has the shape {shapes}; give the loss of each unit"
        advice = "not their mean, which depends on micro-batches"
        fine = isinstance(term.weight, Tensor) and term.loss.shape == term.weight.shape
        require(fine, f"{wrong}, {advice}")
    losses = [(term.name, (term.weight * term.loss).sum()) for term in terms]
    total = torch.stack([loss for _, loss in losses]).sum()
    (total if factor == 1.0 else factor * total).backward()  # type: ignore[no-untyped-call]
    named = [Metric(f"loss/{name}", loss.detach(), None) for name, loss in losses]
    return [Metric("loss", total.detach(), None), *named]


def of_one_update(metrics: Sequence[Metric]) -> list[Metric]:
    """Metrics of one update. A loss is a sum over micro-batches: its parts become one metric with count 1, so that several updates of
    a step average their losses."""
    losses: dict[str, Tensor | float] = {}
    rest = []
    for metric in metrics:
        if metric.name.split("/")[0] == "loss":
            losses[metric.name] = losses.get(metric.name, 0.0) + metric.total
        else:
            rest.append(metric)
    return [*(Metric(name, total, 1) for name, total in losses.items()), *rest]


def mismatch(logprob_T: Tensor, piece: Batch) -> list[Metric]:
    """The difference between the trainer's log-probs and the sampler's: the mean and the largest |log pi - log mu|, and KL(mu || pi) by
    its k3 estimate, e^d - 1 - d with d = log pi - log mu. Tokens that older weights sampled are expected to differ and have a separate
    mean."""
    mask_T = piece.mask_T
    logprob_T, behaviour_T = logprob_T.where(mask_T, 0.0), piece.behaviour_T.where(mask_T, 0.0)
    apart_T, stale = (logprob_T - behaviour_T).abs(), []
    if "stale_T" in piece.columns:
        stale_T = piece.stale_T & mask_T
        stale = [Metric("mismatch/stale", apart_T.where(stale_T, 0.0).sum(), stale_T.sum())]
        mask_T = mask_T & ~stale_T
        apart_T = apart_T.where(mask_T, 0.0)
        logprob_T, behaviour_T = logprob_T.where(mask_T, 0.0), behaviour_T.where(mask_T, 0.0)
    count = mask_T.sum()
    return [
        *stale,
        Metric("mismatch", apart_T.sum(), count),
        Metric("mismatch/max", apart_T.max(), count, largest=True),
        Metric("mismatch/kl", kl_estimate("k3", behaviour_T, logprob_T).sum(), count),
    ]


def rerouted(outputs: Outputs, piece: Batch) -> list[Metric]:
    """The share of loss tokens for which the sampler's experts are replayed and, for these, the share of layers in which the trainer's
    routers would choose others."""
    loss = piece.mask_T.sum()
    if "rerouted_T" not in outputs.columns:
        return [Metric("router/replayed", 0.0, loss)]
    known_T = piece.mask_T & outputs.rerouted_T.isfinite()
    return [
        Metric("router/replayed", known_T.sum(), loss),
        Metric("router/mismatch", outputs.rerouted_T.where(known_T, 0.0).sum(), known_T.sum()),
    ]


def _split(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors whose names begin with `prefix`, and return them without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}
