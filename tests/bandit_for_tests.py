"""A contextual bandit that any online algorithm can learn in a second or two: one token is sampled, a third of them are right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from material_for_tests import group, rollout, segment, shared_policy, trainer_for

from posttrain.algorithms.base import Algorithm, State
from posttrain.collect import Prompt, generate_groups
from posttrain.engine.engine import Engine
from posttrain.models.policy import Policy
from posttrain.train.forward import forward
from posttrain.train.optimizer import Optimization
from posttrain.train.pack import mini_batches, pack_examples, pack_groups
from posttrain.types import Example, Metric, Sampling

PROMPTS = [(5, 6, 7), (9, 4), (11, 12, 13, 14)]


def good(prompt: tuple[int, ...]) -> range:
    """A third of the vocabulary is right; which third depends on the prompt."""
    return range(8 * (prompt[0] % 3), 8 * (prompt[0] % 3) + 8)


def chance_of_good(policy: Policy) -> float:
    """The exact probability of a right first token, averaged over prompts."""
    examples = [Example(np.array([*p, token]), np.arange(len(p) + 1) == len(p)) for p in PROMPTS for token in good(p)]
    batch = pack_examples(examples)
    with torch.no_grad():
        return float(forward(policy, batch).logprob_T[batch.mask_T].exp().sum()) / len(PROMPTS)


def right(prompt: tuple[int, ...], token: int) -> float:
    return float(token in good(prompt))


def train(
    policy: Policy,
    algorithm: Algorithm,
    steps: int,
    reward: Callable[[tuple[int, ...], int], float] = right,
    lr: float = 1e-2,
    seed: int = 0,
) -> State:
    """The loop in small: sample, select, fill, prepare, update, finish. Returns the algorithm's last State."""
    engine = Engine(policy)
    trainer = trainer_for(algorithm, policy, Optimization(lr=lr), shared_policy(1, torch.float32))
    state, (epochs, pieces) = algorithm.start(), (algorithm.reuse.epochs, algorithm.reuse.mini_batches)
    for step in range(steps):
        chances = [1_000_000 * seed + 1000 * step + i for i in range(len(PROMPTS))]
        requests = [Prompt(p, algorithm.group_size, c, Sampling(1)) for p, c in zip(PROMPTS, chances, strict=True)]
        groups = []
        for request, completions in zip(requests, generate_groups(engine, requests), strict=True):
            prompt = request.ids
            parts = [[segment(prompt, False), segment(c.ids, True, c.logprobs)] for c in completions]
            scores = [reward(prompt, int(c.ids[0])) for c in completions]
            groups.append(group([rollout(p, s) for p, s in zip(parts, scores, strict=True)]))
        filled = trainer.fill(pack_groups(algorithm.select(groups, state).groups or groups, 1.0))
        for piece in [p for epoch in range(epochs) for p in mini_batches(filled, pieces, epoch)]:
            trainer.update(algorithm.prepare(piece, state), lr)
        values = [v for g in groups for v in g.rewards]
        state = algorithm.finish(state, [Metric("reward", sum(values), len(values))])
    return state
