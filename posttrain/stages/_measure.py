"""What can be measured of a model besides its answers: how far it is from another one, and how well it predicts given text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from posttrain.errors import require
from posttrain.evals.evaluate import prompts
from posttrain.evals.statistics import Interval, mean_interval, score_interval
from posttrain.stages._material import Data, gather
from posttrain.types import Example, Group, Sampling

if TYPE_CHECKING:
    from posttrain.models.policy import Policy

# tokens of a text that are predicted together; fewer where the model has fewer positions
WINDOW = 4096
BUDGET = 8192  # tokens in one forward pass


def kl_known(sampling: Sampling) -> bool:
    """Whether answers drawn this way tell a KL: argmax is no sample, and a cut vocabulary is another distribution."""
    return sampling.temperature > 0 and not sampling.truncated


def kl_to(groups: Sequence[Group], other: Policy, sampling: Sampling) -> Interval:
    """KL(sampler || other) in nats a response, from the sampler's own answers: the mean of sum_t log p(a_t) - log q(a_t).

    Unbiased, and so negative by chance where the two are near. The interval is over prompts.
    """
    import torch

    from posttrain.train.forward import forward
    from posttrain.train.pack import micro_batches, pack_groups

    require(
        kl_known(sampling),
        "a KL is estimated from samples: it needs a temperature above 0, and no top_k or top_p",
    )
    batch = pack_groups(groups, sampling.temperature, other.device)
    with torch.no_grad():
        theirs_T = torch.cat(
            [forward(other, piece).logprob_T for piece in micro_batches(batch, BUDGET)]
        )
    ratio_T = (batch.behaviour_T - theirs_T).where(batch.mask_T, 0.0).double()
    ratio_N = torch.zeros(batch.sequences, dtype=torch.float64, device=ratio_T.device).index_add(
        0, batch.sequence_T, ratio_T
    )
    members = [
        [float(ratio_N[n]) for n in torch.nonzero(batch.group_N == g).flatten().tolist()]
        for g in range(len(groups))
    ]
    return mean_interval([sum(values) / len(values) for values in members], prompts(groups))


def proxy_gold_kl(
    groups: Sequence[Group], reference: Policy, sampling: Sampling
) -> dict[str, Interval]:
    """What rated samples say of over-optimisation: the reward that was trained for (proxy), the task's own score (gold), and KL from
    `reference` in nats a response. Of the rewards, samples without a score are left out."""
    scored = [
        (rollout.score, key)
        for group, key in zip(groups, prompts(groups), strict=True)
        for rollout in group.rollouts
        if rollout.score.valid
    ]
    proxy = [(score.value, key) for score, key in scored if score.value is not None]
    gold = [(score.parts["task"], key) for score, key in scored if "task" in score.parts]
    require(
        len(proxy) > 1 and len(gold) > 1,
        "hardly any sample could be scored: proxy and gold reward need at least 2",
    )
    (rewards, asked), (golds, gold_asked) = zip(*proxy, strict=True), zip(*gold, strict=True)
    return {
        "proxy": mean_interval(rewards, asked),
        "gold": score_interval(golds, gold_asked),
        "kl": kl_to(groups, reference, sampling),
    }


def perplexity(policy: Policy, sources: Sequence[Data], seed: int) -> float:
    """exp(-mean log p) over every token of the sources but the first of each text. A long text is cut into windows that share one
    token, which the next begins with and the one before predicts."""
    import torch

    from posttrain.train.forward import forward
    from posttrain.train.pack import micro_batches, pack_examples

    positions = (
        getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    )
    material = gather(sources, policy.tokenizer, seed, sys.maxsize, all_tokens=True)
    texts = [e.ids for examples in material.sets for e in examples]
    pieces = [window for ids in texts for window in windows(ids, min(WINDOW, positions))]
    batch = pack_examples([Example(ids, np.arange(len(ids)) > 0) for ids in pieces], policy.device)
    with torch.no_grad():
        logprob = sum(
            float(forward(policy, piece).logprob_T.sum()) for piece in micro_batches(batch, BUDGET)
        )
    return float(torch.tensor(-logprob / int(batch.mask_T.sum())).exp())


def windows(ids: np.ndarray, size: int) -> list[np.ndarray]:
    """Pieces of at most `size` tokens in which each token but the first is predicted once.

    >>> [piece.tolist() for piece in windows(np.arange(6), 3)]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    """
    return [ids[start : start + size] for start in range(0, max(1, len(ids) - 1), size - 1)]
