"""Mixtures of experts: the router's choice of experts for each token, and the weighted sum of the experts' outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGNED = 16  # row sizes of torch's grouped product must be multiples of this many bytes


@dataclass(slots=True, eq=False)
class Routes:
    """Records the routers of a forward pass, by layer: their logits, and the experts with the largest logits. If `chosen_TK` names
    experts, these are used instead, with the current weights (router replay, arXiv:2510.11370); a token whose first entry is -1 is
    routed freely."""

    chosen_TK: Mapping[int, Tensor] = field(default_factory=dict)
    logit_TE: dict[int, Tensor] = field(default_factory=dict)
    index_TK: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, logit_TE: Tensor, index_TK: Tensor) -> Tensor:
        """Record the router's choice `index_TK`, and return the experts to use."""
        self.logit_TE[layer], self.index_TK[layer] = logit_TE, index_TK
        if layer not in self.chosen_TK:
            return index_TK
        chosen_TK = self.chosen_TK[layer].to(index_TK.dtype)
        return torch.where(chosen_TK[:, :1] >= 0, chosen_TK, index_TK)

    def replay(self) -> Routes:
        """Routes that make another pass use the experts of this one."""
        return Routes(dict(self.index_TK))

    def choices(self) -> Tensor:
        """[T, L K], int16: the routers' choices, layer after layer."""
        return torch.cat([self.index_TK[n] for n in sorted(self.index_TK)], 1).to(torch.int16)

    def take(self, at_K: Tensor) -> None:
        """Keep the routes of the tokens that are computed."""
        self.chosen_TK = {n: chosen_TK[at_K] for n, chosen_TK in self.chosen_TK.items()}

    @torch.no_grad()
    def differing(self, source_T: Tensor | None) -> Tensor | None:
        """[T]: the share of layers in which the router's choice differs from the replayed experts; NaN for tokens that are routed
        freely. None if nothing is replayed."""
        if not self.chosen_TK:
            return None
        pairs = [(self.chosen_TK[n], self.index_TK[n]) for n in self.chosen_TK]
        same = [(a.sort(1)[0] == b.sort(1)[0]).all(1) for a, b in pairs]
        share_T = 1 - torch.stack(same).float().mean(0)
        share_T = share_T.where(pairs[0][0][:, 0] >= 0, torch.nan)
        return share_T if source_T is None else share_T[source_T]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """([T, E], [T, E]): probabilities and choices (1 if chosen, else 0), each summed over layers."""
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
    """[T]: terms whose mean over a sequence is its load-balancing loss (Switch Transformer, arXiv:2101.03961, equations 4 to 6), as
    transformers computes it for that sequence alone:

        E sum_e f_e P_e,  f_e the mean over layers and tokens of the choices, P_e that of the probabilities

    It is `count` for equal shares, and at most E. It is computed per sequence (DeepSeek-V3), so that it does not depend on how a step
    is cut.
    """
    shape = (sequences, total_TE.shape[1])
    chosen_NE = count_TE.new_zeros(shape).index_add_(0, sequence_T, count_TE)
    length_N = torch.bincount(sequence_T, minlength=sequences)
    share_NE = chosen_NE / (layers * length_N[:, None])
    return shape[1] / layers * (share_NE[sequence_T] * total_TE).sum(-1)


def route(
    logit_TE: Tensor, count: int, normalised: bool, layer: int = 0, routes: Routes | None = None
) -> tuple[Tensor, Tensor]:
    """(weights, experts), [T, K] each: the `count` experts with the largest probability p = softmax(logits) for each token. The weights
    are p, normalised to a sum of 1 if `normalised`."""
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
    """sum_k weight_k down_k activation(gate_up_k x), with the tokens sorted by expert. Shapes depend only on those of the inputs, and
    nothing waits for the device, so that a CUDA graph can contain it."""
    (tokens, count), experts = index_TK.shape, len(gate_up_EJH)
    if not _groups(x_TH, gate_up_EJH, down_EHI):  # every expert for every token
        both_ETJ = x_TH @ gate_up_EJH.transpose(1, 2)
        inner_ETI = activation(both_ETJ.flatten(0, 1)).view(experts, tokens, -1)
        y_ETH = inner_ETI @ down_EHI.transpose(1, 2)
        weight_TE = weight_TK.new_zeros(tokens, experts).scatter(1, index_TK, weight_TK)
        return torch.einsum("te,eth->th", weight_TE, y_ETH)
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
    """Whether torch's grouped product supports these tensors. A CUDA graph can contain only its kernel for bfloat16 on Hopper and
    later: the others read the sizes of the groups on the host."""
    size, dtype = x_TH.element_size(), x_TH.dtype
    rows = (x_TH.shape[1], *gate_up_EJH.shape[1:], *down_EHI.shape[1:])
    if dtype == torch.float64 or any(row * size % ALIGNED for row in rows) or not len(x_TH):
        return False
    if x_TH.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return True
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(x_TH.device) >= (9, 0)


class _Take(torch.autograd.Function):
    """x[at], which takes each row of x `count` times. The gradient of a row is the sum of its rows in the output, which `back` lists.
    Unlike torch's own indexing, which adds rows in any order, the sum is deterministic."""

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
