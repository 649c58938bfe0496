"""Scores given answers: their log-probs under a served model, their KL from another model, and the reward that a reward model or
a stage of a run would give. Models are run in the sampling thread, between two bursts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Protocol

import numpy as np

from posttrain.data.chat import render_example, render_prompt
from posttrain.data.records import parse_messages
from posttrain.data.text import Decoder
from posttrain.errors import require
from posttrain.models.load import Reader, same_vocabulary
from posttrain.serve.conversations import message_row
from posttrain.serve.models import Models
from posttrain.serve.wire import MISSING, Refused, ScoreBody, ScoreItem
from posttrain.train.rating import token_logprobs
from posttrain.types import JSON, Message, Problem, Rollout, Score, Segment

UNSCORED = Score.failed("not scored")


class Reward(Protocol):
    """A loaded reward."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the models that it runs."""

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """Score rollouts with rules. This runs no model."""

    def rate(self, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Score rollouts with the reward's models, or with its rules if it has no models."""


Load = Callable[[], Reward]


@dataclass(eq=False)
class Scoring:
    """Scores with the models of a server, and with reward models and rewards of stages, by name. Each is loaded at its first
    request; as many are kept in memory as models."""

    models: Models
    reward_models: Mapping[str, Load] = field(default_factory=dict)
    stages: Mapping[str, Load] = field(default_factory=dict)
    ready: OrderedDict[str, tuple[Reward, Decoder]] = field(default_factory=OrderedDict)

    def names(self) -> dict[str, str]:
        names = dict.fromkeys(self.models.names, "policy")
        names |= dict.fromkeys(self.reward_models, "reward_model")
        return names | dict.fromkeys(self.stages, "stage")

    async def score(self, body: ScoreBody) -> JSON:
        if body.model in {**self.reward_models, **self.stages}:
            require(not body.against, "against: a reward has no log-probs to compare")
            found = await self._rewarded(body)
        else:
            found = await self._measured(body)
        data = [{"index": place, **one} for place, one in enumerate(found)]
        return {"object": "list", "model": body.model or self.models.default, "data": data}

    async def _rewarded(self, body: ScoreBody) -> list[dict[str, JSON]]:
        reward, decoder = await self._reward(body.model)
        rollouts = [_rollout(item, decoder, f"items.{n}") for n, item in enumerate(body.items)]
        ruled = await asyncio.to_thread(reward.score, rollouts)
        scores = await self.models.thread.call(lambda: reward.rate(ruled))
        return [
            {
                "tokens": rollout.length,
                "reward": score.value,
                "parts": dict(score.parts),
                "outcome": score.outcome,
                "failure": score.failure,
            }
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    async def _reward(self, name: str) -> tuple[Reward, Decoder]:
        async with self.models.loading:
            if name not in self.ready:
                while len(self.ready) >= self.models.loaded:
                    self.ready.popitem(last=False)
                loaded = await asyncio.to_thread(self.reward_models.get(name) or self.stages[name])
                self.ready[name] = loaded, Decoder(loaded.tokenizer)
            self.ready.move_to_end(name)
            return self.ready[name]

    async def _measured(self, body: ScoreBody) -> list[dict[str, JSON]]:
        """Compute log-probs at temperature 1. Their sum over an answer, minus the sum under `against`, is a one-sample estimate
        of the KL."""
        model = await self.models.model(body.model)
        decoder = model.decoder
        rollouts = [_rollout(item, decoder, f"items.{n}") for n, item in enumerate(body.items)]
        own = await self._logprobs(body.model, rollouts)
        others: list[np.ndarray] | None = None
        if body.against:
            base = await self.models.model(body.against)
            ours, theirs = (Reader(one.tokenizer, one.name) for one in (model, base))
            same_vocabulary("against", ours, theirs)
            others = await self._logprobs(body.against, rollouts)
        found = []
        for place, logprobs in enumerate(own):
            total = float(logprobs.sum())
            kl = None if others is None else total - float(others[place].sum())
            kept = np.maximum(np.nan_to_num(logprobs), MISSING).tolist()
            figures = {"logprob": _finite(total), "kl": _finite(kl)}
            found.append({"tokens": len(logprobs), "logprobs": kept, **figures})
        return found

    async def _logprobs(self, name: str, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        model = await self.models.model(name)
        for rollout in rollouts:
            model.engine.policy.check_length(len(rollout.ids))
            known = bool((rollout.ids >= 0).all() and (rollout.ids < model.vocabulary).all())
            require(known, f"ids: {model.name} has those from 0 to {model.vocabulary - 1}")
        work = partial(token_logprobs, model.engine.policy, rollouts)
        model.requests.add(work)
        try:
            return await self.models.thread.call(work)
        finally:
            model.requests.discard(work)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _rollout(item: ScoreItem, decoder: Decoder, where: str) -> Rollout:
    """Make a rollout of an answer, as if it had been sampled. Ids are used as they are. Text in a conversation gets the
    end-of-turn token."""
    tokenizer, rows = decoder.tokenizer, [message_row(message) for message in item.messages]
    messages = parse_messages(rows, where) if rows else ()
    if messages and isinstance(item.answer, str):
        turns = [*messages, Message("assistant", item.answer)]
        whole = render_example(tokenizer, turns, where, len(messages))
        at = np.flatnonzero(whole.mask)
        prompt, answer = whole.ids[: at[0]].tolist(), whole.ids[at[0] : at[-1] + 1].tolist()
    else:
        prompt = _ids(tokenizer, item.prompt, True)
        prompt = list(render_prompt(tokenizer, messages, where)) if messages else prompt
        answer = _ids(tokenizer, item.answer, False)
    if not prompt or not answer:
        raise Refused(400, f"{where}: a prompt and an answer need a token each", "invalid_item")
    given, said = (np.array(ids, np.int64) for ids in (prompt, answer))
    text, offsets = decoder.decode(said)
    before = decoder.decode(given)[0]
    empty = np.zeros(len(said), np.float32)
    reply = Segment(said, text, True, empty, offsets, empty.astype(np.int32), "stop")
    problem = Problem("asked", messages[-1].content if messages else before, item.gold)
    return Rollout(problem, 0, (Segment(given, before, False), reply), UNSCORED)


def _ids(tokenizer: Any, given: str | list[int], special: bool) -> list[int]:
    if not isinstance(given, str):
        return given
    return list(tokenizer(given, add_special_tokens=special)["input_ids"]) if given else []
