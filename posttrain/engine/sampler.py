"""Samples ids from hidden states, with their log-probs under exactly the distribution that was sampled from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.ops.logprobs import Head, head_logits

BLOCK = 256  # ids whose probabilities are summed together in a large vocabulary


@dataclass(slots=True, eq=False)
class Choices:
    """Sampling settings of the live rows, as tensors, with Python flags that let common cases skip work."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    plain: bool = False  # temperature 1 and no truncation in every row
    cold: bool = False  # temperature 0 in every row

    @classmethod
    def of(
        cls, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, device: torch.device
    ) -> Choices:
        plain = bool((temperature == 1).all() and (top_k == 0).all() and (top_p == 1).all())
        settings = map(np.ascontiguousarray, (temperature, top_k, top_p))
        temperature_N, top_k_N, top_p_N = (torch.from_numpy(a).to(device) for a in settings)
        return cls(temperature_N, top_k_N, top_p_N, plain, cold=not temperature.any())

    def rest(self, first: int) -> Choices:
        """The settings of the rows from `first` on."""
        settings = (self.temperature_N, self.top_k_N, self.top_p_N)
        temperature_N, top_k_N, top_p_N = (column[first:] for column in settings)
        return Choices(temperature_N, top_k_N, top_p_N, self.plain, self.cold)


def sample(
    hidden_NH: Tensor, head: Head, choices: Choices, uniform_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row by inverting the CDF at the row's own uniform number (engine/random.py). Temperature 0 is argmax
    with log-prob 0."""
    logits_NV = head_logits(hidden_NH, head)
    if choices.cold:
        return logits_NV.argmax(-1), logits_NV.new_zeros(logits_NV.shape[0])
    if not choices.plain:
        truncated = bool((choices.top_k_N > 0).any()) or bool((choices.top_p_N < 1).any())
        return draw(logits_NV, choices, uniform_N, truncated)
    logprob_NV = torch.log_softmax(logits_NV, -1)
    id_N = invert(logprob_NV, uniform_N)
    return id_N, logprob_NV.gather(-1, id_N[:, None])[:, 0]


def draw(
    logits_NV: Tensor, choices: Choices, uniform_N: Tensor, truncated: bool
) -> tuple[Tensor, Tensor]:
    """`sample` from logits, each row with its own settings. Without `truncated`, no row uses top-k or top-p. Nothing here waits for
    the device."""
    greedy_N = choices.temperature_N == 0
    scaled_NV = logits_NV / torch.where(greedy_N, 1.0, choices.temperature_N)[:, None]
    logprob_NV = torch.log_softmax(scaled_NV, -1)
    if truncated:
        logprob_NV = truncate(logprob_NV, choices.top_k_N, choices.top_p_N)
    id_N = torch.where(greedy_N, logits_NV.argmax(-1), invert(logprob_NV, uniform_N))
    return id_N, torch.where(greedy_N, 0.0, logprob_NV.gather(-1, id_N[:, None])[:, 0])


def invert(logprob_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds the uniform number. Sums are float64, so that the tail has its exact
    probability. A large vocabulary is summed by blocks, and only the block with the id is searched."""
    p_NV = logprob_NV.exp()
    size = p_NV.shape[-1]
    if size <= 4 * BLOCK:
        cumulative_NV = p_NV.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative_NV, uniform_N[:, None] * cumulative_NV[:, -1:])[:, 0]
    whole = size // BLOCK * BLOCK
    mass_NB = p_NV[:, :whole].view(-1, whole // BLOCK, BLOCK).sum(-1, dtype=torch.float64)
    if whole < size:
        rest_N1 = p_NV[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        mass_NB = torch.cat([mass_NB, rest_N1], -1)
    cumulative_NB = mass_NB.cumsum(-1)
    level_N1 = uniform_N[:, None] * cumulative_NB[:, -1:]
    block_N1 = _first_above(cumulative_NB, level_N1)
    level_N1 = level_N1 - (cumulative_NB - mass_NB).gather(-1, block_N1)
    at_NV = block_N1 * BLOCK + torch.arange(BLOCK, device=p_NV.device)
    inside_NV = p_NV.gather(-1, at_NV.clamp(max=size - 1)).where(at_NV < size, 0.0)
    place_N1 = _first_above(inside_NV.cumsum(-1, dtype=torch.float64), level_N1)
    return (block_N1 * BLOCK + place_N1)[:, 0]


def _first_above(cumulative_NV: Tensor, level_N1: Tensor) -> Tensor:
    """The first position where a cumulative sum exceeds the level. Rounding may raise the level to the whole sum, so it is kept
    below: after the last nonzero probability there is nothing to draw."""
    below_N1 = torch.nextafter(cumulative_NV[:, -1:], torch.zeros_like(level_N1))
    return torch.searchsorted(cumulative_NV, torch.minimum(level_N1, below_N1), right=True)


def truncate(logprob_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor) -> Tensor:
    """Keep the top k, then the smallest set whose mass reaches p, and renormalise. Rows with k = 0 and p = 1 are unchanged."""
    ordered_NV, index_NV = logprob_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logprob_NV.shape[-1], device=logprob_NV.device)
    keep_NV = (top_k_N[:, None] <= 0) | (rank_V[None, :] < top_k_N[:, None])
    kept_NV = torch.where(keep_NV, ordered_NV.exp(), 0.0)
    kept_NV = kept_NV / kept_NV.sum(-1, keepdim=True)
    before_NV = kept_NV.cumsum(-1) - kept_NV
    # rounding may bring a sum past 1: p = 1 cuts nothing
    keep_NV &= (top_p_N[:, None] >= 1) | (before_NV < top_p_N[:, None])
    keep_NV[:, 0] = True
    renormalised = torch.log_softmax(ordered_NV.masked_fill(~keep_NV, -torch.inf), -1)
    cut_N = (top_k_N > 0) | (top_p_N < 1)
    placed_NV = torch.empty_like(renormalised).scatter(-1, index_NV, renormalised)
    return torch.where(cut_N[:, None], placed_NV, logprob_NV)
