"""A model in this process as a judge. It is restricted to the form of a verdict by scoring every reply that the form allows.

    p(o) = exp(log pi(text_o | conversation)) / sum over options o' of exp(log pi(text_o' | conversation))

is the model's own distribution given that it answers in the form, and the reply is its likeliest. Nothing is sampled, nothing is
parsed out of prose, and the reply cannot be malformed. In a list the places are decided one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from posttrain.data.chat import NO_TEMPLATE, harmless, render_prompt, special_texts
from posttrain.errors import UserError, require
from posttrain.models.policy import Policy
from posttrain.rewards._asking import Endpoint, Form, Messages, Replies, Reply, Unanswered, Usage
from posttrain.rewards.judge import CANARY_QUESTION, SCORE, Judge, check_mode, read_rubric
from posttrain.train.checkpoint import identity
from posttrain.train.pack import pack_examples
from posttrain.train.rating import sequence_logprobs
from posttrain.types import Example, Message, Rollout, Score


@dataclass(frozen=True, eq=False)
class LocalModel:
    """A judge that answers with the likeliest reply of a form. `cache` is a folder for replies, under a hash of the weights."""

    policy: Policy
    token_budget: int = 8192
    cache: str = ""
    usage: Usage = field(default_factory=Usage)

    def ask(self, conversations: Sequence[Messages], form: Form) -> list[Reply]:
        prompts = [self.prompt(messages) for messages in conversations]
        replies, weights = Replies(self.cache), identity(self.policy.model) if self.cache else ""
        asked = (form.field, list(form.options), form.count)
        keys = [[weights, list(prompt), *asked] for prompt in prompts]
        found: list[Reply | None] = [replies.recall(key) for key in keys]
        fresh = [n for n, known in enumerate(found) if known is None]
        self.usage.requests += len(fresh)
        self.usage.cached += len(prompts) - len(fresh)
        for n in fresh:  # no verdict: the others still have theirs
            if reason := self.too_long(prompts[n], form):
                found[n] = Unanswered(reason)
        fresh = [n for n in fresh if found[n] is None]
        for n, reply in zip(fresh, self.decide([prompts[n] for n in fresh], form), strict=True):
            found[n] = reply or Unanswered("its probability is not a number")
            if reply is not None:
                replies.remember(keys[n], reply)
        self.usage.failures += sum(isinstance(reply, Unanswered) for reply in found)
        return [reply for reply in found if reply is not None]

    def prompt(self, messages: Messages) -> tuple[int, ...]:
        """The ids of the conversation. Text that spells a control token of this tokenizer is broken up, so that a response can
        neither end its turn nor make the prompt unrenderable to escape judgement."""
        turns, control = [], special_texts(self.policy.tokenizer)
        images = "a judge in this process reads text; ask one behind an address about images"
        for message in messages:
            require(isinstance(message["content"], str), images)
            turns.append(Message(message["role"], harmless(message["content"], control)))
        require(self.policy.tokenizer.chat_template, f"the judge: {NO_TEMPLATE}")
        return render_prompt(self.policy.tokenizer, turns, "a question to the judge")

    def too_long(self, prompt: Sequence[int], form: Form) -> str:
        """Why a prompt with its longest reply exceeds the model's context, or ''."""
        reply = sum(max(len(self.encode(t)) for t in texts) for texts in form.places())
        try:
            self.policy.check_length(len(prompt) + reply)
        except UserError as error:
            return f"too_long: {error}"
        return ""

    def encode(self, text: str) -> list[int]:
        return list(self.policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decide(self, prompts: Sequence[tuple[int, ...]], form: Form) -> list[str | None]:
        """The likeliest reply to each prompt; None if its probability is NaN."""
        given, said = [list(prompt) for prompt in prompts], [""] * len(prompts)
        lost = [False] * len(prompts)
        for texts in form.places():
            tails = [self.encode(text) for text in texts]
            for n, logprob_O in enumerate(self.logprobs(given, tails)):
                lost[n] |= not np.isfinite(logprob_O).all()
                best = int(np.nan_to_num(logprob_O, nan=-np.inf).argmax())
                given[n], said[n] = given[n] + tails[best], said[n] + texts[best]
                self.usage.completion_tokens += len(tails[best])
        self.usage.prompt_tokens += sum(map(len, prompts))
        return [None if bad else text for bad, text in zip(lost, said, strict=True)]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], tails: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """[N, O]: log pi(tail | prompt) of each whole tail. The tails of a prompt share its computation."""
        self.policy.check_length(max((len(p) for p in prompts), default=0) + max(map(len, tails)))
        examples = []
        for prompt in prompts:
            for tail in tails:
                mask = np.arange(len(prompt) + len(tail)) >= len(prompt)
                examples.append(Example(np.array([*prompt, *tail], dtype=np.int64), mask))
        if not examples:
            return np.zeros((0, len(tails)))
        batch = pack_examples(examples, self.policy.device)
        found = sequence_logprobs(self.policy, batch, self.token_budget)
        return np.array(found).reshape(len(prompts), len(tails))


class JudgeRating:
    """A judge as a reward: it rates all responses to a problem together, by `mode`, on a scale from 0 to 1. The judge is a model in
    this process or behind an address."""

    def __init__(self, model: LocalModel | Endpoint, mode: str = "points", rubric: str = ""):
        check_mode(mode)
        self.mode, self.model, self.judge = mode, model, Judge(model, read_rubric(rubric))
        if reason := self.too_long(CANARY_QUESTION, ""):
            raise UserError(f"the model cannot judge: its questions are {reason}")
        self.judge.check_canaries(CANARY_QUESTION)
        # the network, for a checkpoint to name it by its weights
        self.models = (model.policy.model,) if isinstance(model, LocalModel) else ()

    def too_long(self, question: str, response: str) -> str:
        """Why the judge cannot read a response even alone, or ''."""
        if not isinstance(self.model, LocalModel):
            return ""  # the server reports it
        return self.model.too_long(self.model.prompt(self.judge.single(question, response)), SCORE)

    def rate(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return one score for each rollout, in order. Neighbours with the same problem form a group. A response that the judge
        cannot read fails alone; the others are judged together."""
        reasons = [self.too_long(r.problem.question, r.response) for r in rollouts]
        rows: list[tuple[str, list[str]]] = []
        readable = [r for r, reason in zip(rollouts, reasons, strict=True) if not reason]
        for _, group in groupby(readable, key=lambda rollout: rollout.problem.id):
            members = list(group)
            rows.append((members[0].problem.question, [r.response for r in members]))
        self.model.usage.failures += len(rollouts) - len(readable)
        judged = iter([score for row in self.judge.scores(self.mode, rows) for score in row])
        failed = (Score.failed(why, "infrastructure") if why else None for why in reasons)
        return [score or next(judged) for score in failed]
