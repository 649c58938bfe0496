"""The teacher: a frozen model whose distribution the policy learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from posttrain.models.policy import Policy
from posttrain.train.forward import forward
from posttrain.train.pack import host_ids, host_mask, pack_examples
from posttrain.train.roles.base import Role
from posttrain.types import Batch, Example, Group, Outputs, Problem

# makes the teacher's prompts, which replace the policy's
Prompts = Callable[[Sequence[Problem]], Sequence[Sequence[int]]]


class Teacher(Role):
    """For every micro-batch, returns the hidden states that predict the loss tokens, and the head: `Outputs.predictions["teacher"]`.
    A divergence is computed from them in chunks (ops/divergence.py); probabilities [T, V] are never stored. With `by_token`, it
    instead fills a column with its log-probs of the loss tokens, once a step.

    With `prompts` it reads the same responses after its own prompt.
    """

    name = "teacher"

    def __init__(self, policy: Policy, by_token: bool = False, prompts: Prompts | None = None):
        self.policy, self.frozen, self.prompts = policy, policy.model, prompts
        self.columns = ("teacher_T",) if by_token else ()
        # for each rollout of the step: the length of the policy's prompt, and the ids that replace it
        self.instead: list[tuple[int, np.ndarray]] = []

    def read(self, groups: Sequence[Group]) -> None:
        if self.prompts is None:
            return
        found = zip(groups, self.prompts([group.problem for group in groups]), strict=True)
        self.instead = [
            (len(rollout.segments[0].ids), np.array(ids, np.int64))
            for group, ids in found
            for rollout in group.rollouts
        ]

    def fill(self, piece: Batch) -> Mapping[str, Tensor]:
        at_T, shown = piece.mask_T, self.shown(piece)
        found_T = forward(self.policy, shown).logprob_T
        empty_T = found_T.new_zeros(piece.tokens)
        return {"teacher_T": empty_T.masked_scatter(at_T, found_T[shown.mask_T])}

    @torch.no_grad()
    def outputs(self, piece: Batch) -> Outputs:
        if self.columns:
            return Outputs()
        with self.resident(piece.ids_T.device):
            found = forward(self.policy, self.shown(piece))
        return Outputs(predictions={self.name: found.predictions["policy"]})

    def shown(self, piece: Batch) -> Batch:
        """The batch as the teacher reads it: the same loss tokens in the same order."""
        if self.prompts is None:
            return piece
        ids_T, mask_T, examples = host_ids(piece), host_mask(piece), []
        for n, (start, end) in zip(piece.rollout_N.tolist(), pairwise(piece.starts), strict=True):
            length, prompt = self.instead[n]
            rest = slice(start + length, end)
            mask = np.concatenate([np.zeros(len(prompt), bool), mask_T[rest]])
            examples.append(Example(np.concatenate([prompt, ids_T[rest]]), mask))
        return pack_examples(examples, piece.ids_T.device).replace(temperature=piece.temperature)
