"""Divergences between two models' distributions over the whole vocabulary, computed from hidden states in chunks of logits."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.ops import logprobs

DIVERGENCES = ("reverse", "forward", "jensen_shannon")
Settings = tuple[str, float, float, int]


def vocabulary_divergence(
    hidden_NH: Tensor,
    head: logprobs.Head,
    teacher_NH: Tensor,
    teacher_head: logprobs.Head,
    kind: str = "reverse",
    temperature: float = 1.0,
    beta: float = 0.5,
    chunk_logits: int | None = None,
) -> Tensor:
    """[N]: the divergence of the student's p = softmax(z), z = logits / temperature, from the teacher's fixed q at every position:

        reverse          KL(p || q)    = sum_v p_v (log p_v - log q_v)            d / dz_j = p_j (log p_j - log q_j - KL(p || q))
        forward          KL(q || p)    = sum_v q_v (log q_v - log p_v)            d / dz_j = p_j - q_j
        jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p
                                                         d / dz_j = (1 - beta) p_j (log p_j - log m_j - KL(p || m))

    `reverse` seeks a mode of q, `forward` covers all of it (Hinton et al. 2015, arXiv:1503.02531), `jensen_shannon` lies between and
    is bounded: divided by beta it becomes `forward` as beta goes to 0, divided by 1 - beta `reverse` as it goes to 1 (Agarwal et al.
    2023, arXiv:2306.13649).

    The gradient is with respect to p only. The backward pass recomputes the logits of each chunk, so that memory is one chunk of both
    models' logits, whatever N is. Hidden sizes may differ. If one head has more rows than the other (models of one family are padded
    to different sizes), both distributions are over the common rows.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"unknown divergence {kind!r}: one of {', '.join(DIVERGENCES)}")
    words = min(head.weight_VH.shape[0], teacher_head.weight_VH.shape[0])
    head, teacher_head = _first_rows(head, words), _first_rows(teacher_head, words)
    if chunk_logits is None:
        chunk_logits = logprobs.chunk_size(hidden_NH.device)
    # about six tensors of so many rows are alive at once
    settings = (kind, temperature, beta, max(1, chunk_logits // (4 * words)))
    teacher_head = replace(teacher_head, weight_VH=teacher_head.weight_VH.detach())
    teacher = (teacher_NH.detach(), teacher_head)
    given = (hidden_NH, head.weight_VH, head.bias_V, head, teacher, settings)
    return _Divergence.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def _first_rows(head: logprobs.Head, words: int) -> logprobs.Head:
    if head.weight_VH.shape[0] == words:
        return head
    bias_V = None if head.bias_V is None else head.bias_V[:words]
    return replace(head, weight_VH=head.weight_VH[:words], bias_V=bias_V)


def _parts(logp_NV: Tensor, logq_NV: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """([N], [N, V]): the divergence, and its gradient with respect to z."""
    p_NV = logp_NV.exp()
    if kind == "forward":
        q_NV = logq_NV.exp()
        return (q_NV * (logq_NV - logp_NV)).sum(-1), p_NV - q_NV
    if kind == "reverse":
        ratio_NV = logp_NV - logq_NV
        value_N = (p_NV * ratio_NV).sum(-1)
        return value_N, p_NV * (ratio_NV - value_N[:, None])
    middle_NV = torch.logaddexp(logq_NV + log(beta), logp_NV + log(1 - beta))
    ratio_NV = logp_NV - middle_NV
    own_N = (p_NV * ratio_NV).sum(-1)
    value_N = beta * (logq_NV.exp() * (logq_NV - middle_NV)).sum(-1) + (1 - beta) * own_N
    return value_N, (1 - beta) * p_NV * (ratio_NV - own_N[:, None])


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        head: logprobs.Head,
        teacher: tuple[Tensor, logprobs.Head],
        settings: Settings,
    ) -> Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.scaling, ctx.teacher, ctx.settings = (head.scale, head.softcap), teacher, settings
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        value_N = hidden_NH.new_empty(hidden_NH.shape[0], dtype=wide)
        for part in logprobs.chunks(hidden_NH, settings[-1]):
            logits_NV = logprobs.head_logits(hidden_NH[part], head)
            value_N[part], _ = _Divergence.of_chunk(logits_NV, part, teacher, settings)
        return value_N

    @staticmethod
    def of_chunk(
        logits_NV: Tensor, part: slice, teacher: tuple[Tensor, logprobs.Head], settings: Settings
    ) -> tuple[Tensor, Tensor]:
        (teacher_NH, teacher_head), (kind, temperature, beta, _) = teacher, settings
        logp_NV = (logits_NV / temperature).log_softmax(-1)
        teacher_NV = logprobs.head_logits(teacher_NH[part], teacher_head)
        return _parts(logp_NV, (teacher_NV / temperature).log_softmax(-1), kind, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        head, temperature = logprobs.Head(weight_VH, bias_V, *ctx.scaling), ctx.settings[1]
        found = logprobs.HeadGradients(hidden_NH, head, ctx.needs_input_grad)
        for part in logprobs.chunks(hidden_NH, ctx.settings[-1]):
            logits_NV = logprobs.head_logits(hidden_NH[part], head)
            _, slope_NV = _Divergence.of_chunk(logits_NV, part, ctx.teacher, ctx.settings)
            slope_NV *= grad_N[part, None] / temperature
            found.add_logits(part, slope_NV, logits_NV)
        return *found.sums(), None, None, None
