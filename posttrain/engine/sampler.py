"""From hidden states to sampled ids and their log-probs under exactly the distribution that was sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.engine.random import uniforms
from posttrain.ops.logprobs import Head, head_logits
from posttrain.types import Sampling


@dataclass(slots=True, eq=False)
class Choices:
    """Sampling settings of the live rows, as tensors; plain Python flags let the common case skip work."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor

    @classmethod
    def of(cls, settings: list[Sampling], device: torch.device) -> Choices:
        return cls(
            torch.tensor([s.temperature for s in settings], dtype=torch.float32, device=device),
            torch.tensor([s.top_k for s in settings], device=device),
            torch.tensor([s.top_p for s in settings], dtype=torch.float32, device=device),
        )


def sample(
    hidden_NH: Tensor, head: Head, choices: Choices, seed_N: Tensor, position_N: Tensor, plain: bool
) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the CDF at the row's own uniform.

    `plain` promises temperature 1 and no truncation for every row. Temperature 0 is argmax with log-prob 0: a certain choice.
    """
    logits_NV = head_logits(hidden_NH, head)
    if plain:
        logprob_NV = torch.log_softmax(logits_NV, -1)
        greedy_N = None
    else:
        greedy_N = choices.temperature_N == 0
        scaled_NV = logits_NV / torch.where(greedy_N, 1.0, choices.temperature_N)[:, None]
        logprob_NV = truncate(torch.log_softmax(scaled_NV, -1), choices.top_k_N, choices.top_p_N)
    id_N = invert(logprob_NV, uniforms(seed_N, position_N))
    if greedy_N is not None:
        id_N = torch.where(greedy_N, logits_NV.argmax(-1), id_N)
    logprob_N = logprob_NV.gather(-1, id_N[:, None])[:, 0]
    if greedy_N is not None:
        logprob_N = torch.where(greedy_N, 0.0, logprob_N)
    return id_N, logprob_N


def invert(logprob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds the uniform; float64, so that the tail is drawn as often as it should."""
    cumulative_NV = logprob_NV.double().exp().cumsum(-1)
    level_N = uniform_N[:, None] * cumulative_NV[:, -1:]
    return torch.searchsorted(cumulative_NV, level_N, right=True)[:, 0].clamp(max=logprob_NV.shape[-1] - 1)


def truncate(logprob_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Keep the top k, then the smallest set whose mass reaches p, and renormalise. Rows with k = 0 and p = 1 are untouched."""
    if not (bool((top_k_N > 0).any()) or bool((top_p_N < 1).any())):
        return logprob_NV
    ordered_NV, index_NV = logprob_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logprob_NV.shape[-1], device=logprob_NV.device)
    keep_NV = (top_k_N[:, None] <= 0) | (rank_V[None, :] < top_k_N[:, None])
    kept_NV = torch.where(keep_NV, ordered_NV.exp(), 0.0)
    kept_NV = kept_NV / kept_NV.sum(-1, keepdim=True)
    before_NV = kept_NV.cumsum(-1) - kept_NV
    keep_NV &= (top_p_N[:, None] >= 1) | (before_NV < top_p_N[:, None])  # rounding may bring a sum past 1: p = 1 cuts nothing
    keep_NV[:, 0] = True
    renormalised = torch.log_softmax(ordered_NV.masked_fill(~keep_NV, -torch.inf), -1)
    cut_N = (top_k_N > 0) | (top_p_N < 1)
    return torch.where(cut_N[:, None], torch.empty_like(renormalised).scatter(-1, index_NV, renormalised), logprob_NV)
