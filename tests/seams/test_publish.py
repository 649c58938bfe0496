"""Weights published under a new version while requests wait and are written: every token says which weights sampled it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.models.policy import wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.train.pack import pack_groups, token_versions
from posttrain.types import Completion, Request, Sampling, Statistics

TASK = Arithmetic(level=2)


class Publishing:
    """An engine whose weights change after its second burst."""

    def __init__(self, engine: Engine, other: dict[str, torch.Tensor]):
        self.engine, self.other, self.polls = engine, other, 0

    @property
    def capacity(self) -> int:
        return self.engine.capacity

    @property
    def statistics(self) -> Statistics:
        return self.engine.statistics

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        found, self.polls = self.engine.poll(timeout), self.polls + 1
        if self.polls == 2:
            self.engine.policy.model.load_state_dict(self.other)
            self.engine.publish(1)
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        self.engine.cancel(sessions)

    def publish(self, version: int, weights: object = None) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


def test_versions_of_tokens_say_which_weights_sampled_them() -> None:
    tokenizer = character_tokenizer(str(TASK.alphabet))
    old, new = tiny_model(tokenizer, "nano", 0), tiny_model(tokenizer, "nano", 1)
    policy = wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, ())  # which never stops by itself
    sampler = Publishing(Engine(policy, 4, processes=1), new.state_dict())
    problems, decoder = TASK.problems("train")[:6], Decoder(tokenizer)
    groups = rollout_groups(TASK, sampler, decoder, problems, 2, Sampling(40), 3, ordered=False)
    batch = pack_groups(groups, 1.0)
    versions = token_versions(groups, batch)
    assert set(versions.tolist()) == {-1, 0, 1}
    assert torch.equal(versions >= 0, batch.mask_T)
    whole = [versions[a:b][batch.mask_T[a:b]].tolist() for a, b in zip(batch.starts, batch.starts[1:], strict=False)]
    assert all(one == sorted(one) for one in whole) and any(set(one) == {0, 1} for one in whole), "rows in flight go on"
    assert [1] * 40 in whole, "a request that waited is sampled with the new weights alone"
    with torch.no_grad():
        for start, end in zip(batch.starts, batch.starts[1:], strict=False):
            ids = batch.ids_T[start:end]
            by_hand = [
                model(ids[None]).logits[0].log_softmax(-1)[torch.arange(end - start - 1), ids[1:]] for model in (old, new)
            ]
            for version, logprobs in enumerate(by_hand):
                own = (versions[start + 1 : end] == version).numpy()
                np.testing.assert_allclose(batch.behaviour_T[start + 1 : end].numpy()[own], logprobs.numpy()[own], atol=1e-5)
