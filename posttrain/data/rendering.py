"""Renders the inputs of the policy in the episodes of a step as segments of ids: prompts of problems, and messages between turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.data.chat import check_continues, render_prompt, render_prompts, render_turn
from posttrain.data.text import Decoder
from posttrain.types import JSON, Message, Problem, Segment

MAX_GIVEN = 1_000_000  # characters that a task may give at once


@dataclass(eq=False)
class Renderer:
    """Renders each text once for all episodes of its problem."""

    decoder: Decoder
    problems: Sequence[Problem]
    prompt_of: Callable[[Problem], Sequence[Message]]
    # every episode asks for its problem's prompt: the first one has all of them rendered
    at_once: bool
    prompts: dict[int, Segment] = field(default_factory=dict)  # by the problem's index
    prompt_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    # other messages, by the place of the problem (-1: after a turn), the token that ended the turn, tools
    others: dict[tuple[int, int | None, tuple[Message, ...], str], Segment] = field(
        default_factory=dict
    )

    def prompt(self, draw: int) -> Segment:
        """The task's prompt of the problem at this index."""
        if draw not in self.prompts:
            draws = range(len(self.problems)) if self.at_once else (draw,)
            problems = [self.problems[n] for n in draws]
            given = ((f"problem {p.id}", tuple(self.prompt_of(p))) for p in problems)
            for n, ids in zip(draws, render_prompts(self.decoder.tokenizer, given), strict=True):
                self.prompts[n], self.prompt_ids[n] = self.segment(ids), ids
        return self.prompts[draw]

    def given(
        self,
        draw: int,
        last: Segment | None,
        given: Sequence[Message] | str | Sequence[int],
        tools: Sequence[JSON] | None,
    ) -> Segment:
        """Render the messages, text or ids that a task gives before a turn: the first turn, or the one after `last`."""
        tokenizer, first = self.decoder.tokenizer, last is None
        items: tuple[Any, ...] = () if isinstance(given, str | bytes) else tuple(given)
        # check the set of types: checking each of many ids takes as long as decoding a turn
        if items and all(issubclass(kind, int | np.integer) for kind in set(map(type, items))):
            if min(items) < 0:
                raise ValueError(f"the task gives a negative token id, {min(items)}")
            return self.segment([*map(int, items)])
        messages = tuple(item for item in items if isinstance(item, Message))
        size = len(given) if isinstance(given, str) else sum(len(m.content) for m in messages)
        if size > MAX_GIVEN:
            raise ValueError(f"the task gives {size:,} characters at once, more than {MAX_GIVEN:,}")
        if isinstance(given, str):
            return self.segment(tokenizer(given, add_special_tokens=first)["input_ids"])
        if not messages or len(messages) < len(items):
            raise TypeError("generate takes text, ids, or messages, such as [Message('user', ...)]")
        stop = int(last.ids[-1]) if last is not None and last.finish == "stop" else None
        key = (draw if first else -1, stop, messages, json.dumps(tools))
        if key not in self.others:
            where = f"problem {self.problems[draw].id}"
            if first:
                ids = render_prompt(tokenizer, messages, where, list(tools) if tools else None)
            else:
                check_continues(tokenizer, sorted({m.role for m in messages}))
                ids = render_turn(tokenizer, messages, stop, where)
            self.others[key] = self.segment(ids)
        return self.others[key]

    def segment(self, ids: Sequence[int]) -> Segment:
        text, offsets = self.decoder.decode(ids)
        return Segment(np.array(ids, dtype=np.int64), text, sampled=False, offsets=offsets)
