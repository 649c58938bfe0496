"""A thousand random episodes of one to eight turns, with tools, roles, limits and cancellations: what is trained on is exactly what was
sampled, and a fresh forward pass agrees on every log-prob."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from posttrain.data.text import Decoder
from posttrain.engine.engine import Engine
from posttrain.episodes import rollout_groups
from posttrain.models.policy import Policy, wrap_model
from posttrain.models.tiny import character_tokenizer, tiny_model
from posttrain.tasks.base import EpisodeEnd, Generate, Limits, Task
from posttrain.tasks.tools.calculator import Calculator
from posttrain.tasks.tools.toolbox import Toolbox
from posttrain.train.pack import pack_groups
from posttrain.types import Completion, Message, Problem, Request, Rollout, Sampling, Score

EPISODES = 1000


@dataclass(frozen=True)
class RandomTalk(Task):
    """What happens in an episode depends on its problem, and on nothing that is sampled."""

    def problems(self, split: str, level: int | None = None) -> Sequence[Problem]:
        return [Problem(str(n), f"say {n % 7}") for n in range(EPISODES // 2)]

    def limits(self, problem: Problem) -> Limits:
        dice = Random(f"limits {problem.id}")
        return Limits(turns=dice.choice([0, 0, 3]), tokens=dice.choice([0, 0, 0, 11]), seconds=60.0)

    async def run(self, problem: Problem, generate: Generate) -> list[Rollout]:
        dice = Random(problem.id)
        box = Toolbox([Calculator("calc")], generate, "call")
        other = generate.session("other") if dice.random() < 0.2 else generate
        await generate()
        for _ in range(dice.randrange(8)):
            talk = dice.choice([generate, other])
            given = [Message("user", "x" * dice.randrange(9)) for _ in range(dice.choice([1, 1, 1, 2]))]
            match dice.randrange(6):
                case 0:  # a tool, or what is wrong with a call
                    call = dice.choice(["calc(1+2)=", "calc(1/0)=", "calk(1)=", "calc(1="])
                    await talk(await box.answer(call), max_new_tokens=dice.choice([0, 2]))
                case 1:
                    await talk("so")
                case 2:
                    await talk([7, 8, 9])
                case 3:  # given up before it is submitted, or while it is decoded; then asked again
                    try:
                        async with asyncio.timeout(dice.choice([0.0, 0.003])):
                            await talk(given)
                    except TimeoutError:
                        generate.count("cancelled")
                        await talk(given)
                case 4 if dice.random() < 0.2:
                    raise EpisodeEnd("illegal", Score(0.25)) if dice.random() < 0.5 else ValueError("broken")
                case _:
                    await talk(given)
            if dice.random() < 0.3:
                talk.reward(dice.random())
        talks = [generate] if other is generate else [generate, other]
        return [one.rollout(Score(dice.random())) for one in talks if one is generate or one.segments]  # type: ignore[attr-defined]

    def score(self, problem: Problem, response: str) -> Score:
        return Score(0.5)


class Recorder(Engine):
    """An engine that writes down all that it was asked and has answered."""

    def __init__(self, policy: Policy):
        super().__init__(policy, max_rows=64, processes=1)
        self.recorded: list[list[tuple[Request, Completion]]] = []  # by session, each in its order
        self.open: dict[int, list[tuple[Request, Completion]]] = {}
        self.cancelled: Counter[int] = Counter()

    def poll(self, timeout: float | None = None) -> list[tuple[Request, Completion]]:
        found = super().poll(timeout)
        for request, completion in found:
            if not request.turn:
                self.open[request.session] = []
                self.recorded.append(self.open[request.session])
            self.open[request.session].append((request, completion))
        return found

    def cancel(self, sessions: Collection[int]) -> None:
        self.cancelled.update(s for s in sessions if s in self.sessions and self.sessions[s].waits)
        super().cancel(sessions)


def fresh_logprobs(policy: Policy, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """log p of every token but the first, by the plain model on padded rows."""
    found: list[np.ndarray] = [np.zeros(0)] * len(rollouts)
    order = sorted(range(len(rollouts)), key=lambda n: len(rollouts[n].ids))
    for first in range(0, len(order), 64):
        part = order[first : first + 64]
        rows = [torch.from_numpy(rollouts[n].ids) for n in part]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.inference_mode():
            logits = policy.model(ids).logits[:, :-1]
            chosen = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
        for row, n in enumerate(part):
            found[n] = chosen[row, : len(rows[row]) - 1].numpy()
    return found


def test_a_thousand_random_episodes_are_exact() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ().+=/;:")
    policy = wrap_model(tiny_model(tokenizer, "nano", 0), tokenizer, (tokenizer.eos_token_id, 20, 25))
    engine, task = Recorder(policy), RandomTalk()
    problems = task.problems("train")
    groups = [
        group
        for first, ordered in ((0, True), (len(problems) // 2, False))
        for group in rollout_groups(
            task,
            engine,
            Decoder(tokenizer),
            problems[first : first + len(problems) // 2],
            2,
            Sampling(5),
            first,
            ordered=ordered,
        )
    ]
    rollouts = [r for g in groups for r in g.rollouts]
    episodes = {(r.problem.id, r.sample) for r in rollouts}
    assert len(episodes) == EPISODES and {r.turns for r in rollouts} >= set(range(1, 9))
    outcomes = Counter(r.score.outcome for r in rollouts)
    assert {"turn limit", "token limit", "illegal", "episode failed"} <= set(outcomes) and outcomes["time limit"] == 0
    assert outcomes["context full"] == 0, "a conversation goes on after a turn that was given up"
    assert (
        sum(r.counts.get("tool/calls", 0) for r in rollouts) > 100 and sum(r.counts.get("cancelled", 0) for r in rollouts) > 100
    )
    assert sum(engine.cancelled.values()) > 10, "some were being decoded"
    # every sampled segment is a completion as the sampler gave it, and all that was read before it is what the sampler had read
    answered = {id(c.ids): (s, n) for s, turns in enumerate(engine.recorded) for n, (_, c) in enumerate(turns)}
    used: set[int] = set()
    for rollout in rollouts:
        before = np.zeros(0, np.int64)
        for segment in rollout.segments:
            if segment.sampled:
                session, number = answered[id(segment.ids)]
                turns = engine.recorded[session][: number + 1]
                seen = np.concatenate([part for q, c in turns for part in (q.ids, c.ids)])
                assert (seen == np.concatenate([before, segment.ids])).all() and id(segment.ids) not in used
                assert segment.logprobs is turns[-1][1].logprobs
                used.add(id(segment.ids))
            before = np.concatenate([before, segment.ids])
        assert (rollout.mask == np.concatenate([np.full(len(s.ids), s.sampled) for s in rollout.segments])).all()
    batch = pack_groups(groups, 1.0)
    assert batch.ids_T.tolist() == [i for r in rollouts for i in r.ids.tolist()]
    assert batch.mask_T.tolist() == [m for r in rollouts for m in r.mask.tolist()]
    for rollout, by_hand in zip(rollouts, fresh_logprobs(policy, rollouts), strict=True):
        sampled = np.concatenate([s.logprobs for s in rollout.segments if s.sampled])  # type: ignore[misc]
        np.testing.assert_allclose(sampled, by_hand[rollout.mask[1:]], atol=1e-4, rtol=0)
    assert not engine.sessions, "every session was given back"
