"""A sampler in another process that answers the last first: groups come out in order, with what the engine here would have sampled."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from sampler_for_tests import ScriptedSampler, completion

from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.tasks.arithmetic import Arithmetic
from posttrain.types import Completion, Request, Sampling

TASK = Arithmetic(level=2)
PROBLEMS = TASK.problems("train")[:4]


def make_policy(seed: int) -> Policy:
    tokenizer = character_tokenizer(str(TASK.alphabet))
    return wrap_model(tiny_model(tokenizer, "nano", seed), tokenizer, (tokenizer.eos_token_id,))


def serve(connection: Any) -> None:
    engine = Engine(make_policy(0), processes=1)
    for version, given in iter(connection.recv, None):
        if version:
            engine.publish(version, given)
        else:
            engine.submit(given)
            answers: list[tuple[Request, Completion]] = []
            while len(answers) < len(given):
                answers += engine.poll()
            connection.send(answers[::-1])


class Elsewhere(ScriptedSampler):
    def __init__(self) -> None:
        super().__init__(lambda request: completion([]))
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()

    def submit(self, requests: Sequence[Request]) -> None:
        self.connection.send((0, list(requests)))

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        return list(self.connection.recv()) if self.connection.poll(timeout) else []

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        self.connection.send((version, [(name, tensor.detach().clone()) for name, tensor in weights or ()]))

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(30)


def test_groups_are_those_of_the_engine_in_this_process() -> None:
    with closing(Elsewhere()) as sampler:
        for version, policy in enumerate((make_policy(0), make_policy(1))):
            if version:
                sampler.publish(version, policy.model.named_parameters())
            here, there = (
                rollout_groups(TASK, one, Decoder(policy.tokenizer), PROBLEMS, 3, Sampling(6), 5, ordered=bool(version))
                for one in (Engine(policy, processes=1), sampler)
            )
            assert [g.problem.id for g in there] == [p.id for p in PROBLEMS]
            for a, b in zip((r for g in here for r in g.rollouts), (r for g in there for r in g.rollouts), strict=True):
                assert a.sample == b.sample and a.ids.tolist() == b.ids.tolist() and a.score == b.score
                np.testing.assert_allclose(a.segments[1].logprobs, b.segments[1].logprobs, atol=1e-5)
                assert set(b.segments[1].versions.tolist()) == {version}  # type: ignore[union-attr]
