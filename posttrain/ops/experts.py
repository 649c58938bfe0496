"""Mixtures of experts: the experts that a router chooses for each token, and the weighted sum of what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGNED = 16  # bytes of which the rows of torch's grouped product are multiples


@dataclass(slots=True, eq=False)
class Routes:
    """What the routers of a forward pass did, by layer: their logits, and the experts of the largest. Where experts were `chosen`
    before, those are taken, with the weights of now (router replay, arXiv:2510.11370); a token whose first is -1 is routed freely."""

    chosen_TK: Mapping[int, Tensor] = field(default_factory=dict)
    logit_TE: dict[int, Tensor] = field(default_factory=dict)
    index_TK: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, logit_TE: Tensor, index_TK: Tensor) -> Tensor:
        """The experts to take, where the router would take `index_TK`."""
        self.logit_TE[layer], self.index_TK[layer] = logit_TE, index_TK
        if layer not in self.chosen_TK:
            return index_TK
        chosen_TK = self.chosen_TK[layer].to(index_TK.dtype)
        return torch.where(chosen_TK[:, :1] >= 0, chosen_TK, index_TK)

    def replay(self) -> Routes:
        """Routes by which another pass takes the experts of this one."""
        return Routes(dict(self.index_TK))

    def choices(self) -> Tensor:
        """[T, L K], int16: what the routers chose, by layer."""
        return torch.cat([self.index_TK[n] for n in sorted(self.index_TK)], 1).to(torch.int16)

    def take(self, at_K: Tensor) -> None:
        """Only these tokens are computed."""
        self.chosen_TK = {n: chosen_TK[at_K] for n, chosen_TK in self.chosen_TK.items()}

    @torch.no_grad()
    def differing(self, source_T: Tensor | None) -> Tensor | None:
        """[T]: the share of layers in which a token would go to other experts than those that were chosen before; NaN where nothing
        was; None where nothing is replayed."""
        if not self.chosen_TK:
            return None
        pairs = [(self.chosen_TK[n], self.index_TK[n]) for n in self.chosen_TK]
        same = [(a.sort(1)[0] == b.sort(1)[0]).all(1) for a, b in pairs]
        share_T = 1 - torch.stack(same).float().mean(0)
        share_T = share_T.where(pairs[0][0][:, 0] >= 0, torch.nan)
        return share_T if source_T is None else share_T[source_T]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Probabilities and choices (1 where chosen), each added over layers: [T, E]."""
        total_TE, count_TE = torch.zeros(()), torch.zeros(())
        for layer, logit_TE in self.logit_TE.items():
            p_TE = torch.softmax(logit_TE, -1, dtype=torch.float32)
            index_TK = self.index_TK[layer]
            total_TE = total_TE.to(p_TE.device) + p_TE
            count_TE = count_TE.to(p_TE.device) + torch.zeros_like(p_TE).scatter(1, index_TK, 1.0)
        return total_TE, count_TE


def load_balance(
    total_TE: Tensor, count_TE: Tensor, layers: int, sequence_T: Tensor, sequences: int
) -> Tensor:
    """[T]: terms whose mean over a sequence is its auxiliary loss for a balanced load (Switch Transformer, arXiv:2101.03961, equations
    4 to 6), as transformers computes it of that sequence alone:

        E sum_e f_e P_e,  f_e the mean over layers and tokens of what was chosen, P_e that of the probabilities

    It is `count` for equal shares, and E at most. A sequence at a time (DeepSeek-V3), it does not depend on how a step is cut.
    """
    shape = (sequences, total_TE.shape[1])
    chosen_NE = count_TE.new_zeros(shape).index_add_(0, sequence_T, count_TE)
    length_N = torch.bincount(sequence_T, minlength=sequences)
    share_NE = chosen_NE / (layers * length_N[:, None])
    return shape[1] / layers * (share_NE[sequence_T] * total_TE).sum(-1)


def route(
    logit_TE: Tensor, count: int, normalised: bool, layer: int = 0, routes: Routes | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` experts of the largest probability p = softmax(logits) for each token, [T, K], and their weights: p, `normalised` to
    a sum of 1."""
    p_TE = torch.softmax(logit_TE, -1, dtype=torch.float32)
    weight_TK, index_TK = torch.topk(p_TE, count, dim=-1)
    if routes is not None:
        index_TK = routes.choose(layer, logit_TE, index_TK)
        weight_TK = p_TE.gather(1, index_TK)
    if normalised:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK.to(logit_TE.dtype), index_TK


def mixture(
    x_TH: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """sum_k weight_k down_k activation(gate_up_k x), with the tokens of each expert side by side. Shapes depend on those of the inputs
    alone, and nothing waits for the device, so that a CUDA graph can hold it."""
    if not _groups(x_TH, gate_up_EJH, down_EHI):
        return _every_expert(x_TH, weight_TK, index_TK, gate_up_EJH, down_EHI, activation)
    (tokens, count), experts = index_TK.shape, len(gate_up_EJH)
    narrow = torch.uint8 if experts <= 256 else torch.int16  # a radix sort takes a pass a byte
    expert_S, order_S = torch.sort(index_TK.reshape(-1).to(narrow), stable=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    numbers_E = torch.arange(experts, dtype=narrow, device=order_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
    inner_SH = _Take.apply(x_TH, order_S // count, place_S, count)  # type: ignore[no-untyped-call]
    both_SJ = F.grouped_mm(inner_SH, gate_up_EJH.transpose(1, 2), offs=ends_E)
    y_SH = F.grouped_mm(activation(both_SJ), down_EHI.transpose(1, 2), offs=ends_E)
    y_SH = _Take.apply(y_SH, place_S, order_S, 1)  # type: ignore[no-untyped-call]
    out_TH: Tensor = (y_SH.view(tokens, count, -1) * weight_TK[..., None]).sum(1)
    return out_TH


def _groups(x_TH: Tensor, gate_up_EJH: Tensor, down_EHI: Tensor) -> bool:
    """Whether torch's grouped product takes these. In a CUDA graph only its own kernel, for bfloat16 on Hopper and later, is of use:
    the others read the sizes of the groups on the host."""
    size, dtype = x_TH.element_size(), x_TH.dtype
    rows = (x_TH.shape[1], *gate_up_EJH.shape[1:], *down_EHI.shape[1:])
    if dtype == torch.float64 or any(row * size % ALIGNED for row in rows) or not len(x_TH):
        return False
    if x_TH.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(x_TH.device) >= (9, 0)


def _every_expert(
    x_TH: Tensor,
    weight_TK: Tensor,
    index_TK: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The same sum with every expert computed for every token: for types that torch has no grouped product of."""
    experts, tokens = len(gate_up_EJH), len(x_TH)
    both_ETJ = x_TH @ gate_up_EJH.transpose(1, 2)
    inner_ETI = activation(both_ETJ.flatten(0, 1)).view(experts, tokens, -1)
    y_ETH = inner_ETI @ down_EHI.transpose(1, 2)
    weight_TE = weight_TK.new_zeros(tokens, experts).scatter(1, index_TK, weight_TK)
    return torch.einsum("te,eth->th", weight_TE, y_ETH)


class _Take(torch.autograd.Function):
    """x[at], where each row of x is taken `count` times: its gradient is the sum of the rows `back` in those of the output. Unlike
    torch's own, which adds rows in any order, it is the same each time."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, at_S: Tensor, back_S: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(back_S)
        ctx.count = count
        return x_TH[at_S]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor | None, ...]:
        (back_S,) = ctx.saved_tensors
        grad_SH = grad_SH[back_S]
        if ctx.count == 1:
            return grad_SH, None, None, None
        return grad_SH.view(-1, ctx.count, grad_SH.shape[1]).sum(1), None, None, None
