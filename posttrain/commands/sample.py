"""Samples from a model: answers to one prompt, or to each message of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from posttrain import config_tree
from posttrain.collect import Prompt, generate_groups
from posttrain.commands.models import MachineOptions, open_policy, stage_models, take_options
from posttrain.data.chat import render_prompt, text_ids
from posttrain.data.text import Decoder, unknown_tokens
from posttrain.errors import Count, refuse_unknown, require
from posttrain.stages.base import make_sampler
from posttrain.types import Message, Sampler, Sampling


@dataclass(frozen=True, kw_only=True)
class SampleOptions(MachineOptions):
    """Options of `posttrain sample` that are not settings of sampling."""

    plain: bool = False
    n: Count = 1  # answers to each prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of a prompt; `logprob` is the mean over its tokens."""

    text: str
    tokens: int
    finish: str
    logprob: float
    warnings: Sequence[str] = ()  # about the prompt


def sample(model: str, prompt: str, settings: Sequence[str]) -> Iterator[Answer]:
    """Yield a model's answers to a prompt: through its chat template, or as plain text without one (or with `plain=true`)."""
    options, sampling = sample_options(settings)
    yield from _asker(model, options, sampling)(prompt, options.seed)


def sample_options(settings: Sequence[str]) -> tuple[SampleOptions, Sampling]:
    pairs = dict(map(config_tree.pair, settings))
    known = [field.name for kind in (SampleOptions, Sampling) for field in fields(kind)]
    refuse_unknown("key of sample", pairs, known, ["posttrain sample"])
    options = take_options(pairs, SampleOptions, "sample")
    return options, config_tree.from_tree(pairs, Sampling, "sample")


def _asker(
    model: str, options: SampleOptions, sampling: Sampling
) -> Callable[[str | Sequence[Message], int], list[Answer]]:
    """Load a model and return a function that answers a prompt or a conversation, given a seed."""
    policy = open_policy(model, options.device)
    sampler = make_sampler(policy)

    def ask(prompt: str | Sequence[Message], seed: int) -> list[Answer]:
        if not isinstance(prompt, str) and (options.plain or not policy.tokenizer.chat_template):
            prompt = prompt[-1].content  # without a template each message stands alone
        ids = prompt_ids(policy.tokenizer, prompt, options.plain)
        [group] = answers(sampler, policy.tokenizer, [Prompt(ids, options.n, seed, sampling)])
        warnings = unknown_tokens(policy.tokenizer, [ids])
        return [replace(answer, warnings=warnings) for answer in group]

    return ask


def sample_stages(
    directory: Path, prompt: str, settings: Sequence[str]
) -> Iterator[tuple[str, Answer]]:
    """Yield the answers of every stage of a run to the same prompt, with the same seed."""
    options, sampling = sample_options(settings)
    for name, folder in stage_models(directory).items():
        for answer in _asker(str(folder), options, sampling)(prompt, options.seed):
            yield name, answer


def chat(model: str, said: Iterable[str], settings: Sequence[str]) -> Iterator[Answer]:
    """Yield the answer to each message of a person, given the conversation so far; `/new` begins another conversation."""
    options, sampling = sample_options(settings)
    require(options.n == 1, "chat: a message has one answer; leave out n")
    ask, history = _asker(model, options, sampling), list[Message]()
    for number, text in enumerate(said):
        if text.strip() == "/new":
            history.clear()
        elif text.strip():
            history.append(Message("user", text))
            [answer] = ask(tuple(history), options.seed + number)
            history.append(Message("assistant", answer.text))
            yield answer


def prompt_ids(
    tokenizer: Any, prompt: str | Sequence[Message], plain: bool = False
) -> tuple[int, ...]:
    """Return a prompt as ids."""
    turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
    said = "".join(turn.content for turn in turns)
    require(said.encode("utf-8", "ignore").decode() == said, "the prompt is not UTF-8 text")
    bare = isinstance(prompt, str) and (plain or not tokenizer.chat_template)
    ids = tuple(text_ids(tokenizer, said) if bare else render_prompt(tokenizer, turns))
    require(ids, "the prompt has no tokens")
    return ids


def answers(sampler: Sampler, tokenizer: Any, prompts: Sequence[Prompt]) -> Iterator[list[Answer]]:
    """Yield the completions of each prompt, as text."""
    decoder = Decoder(tokenizer)
    for group in generate_groups(sampler, prompts):
        yield [
            Answer(decoder.decode(c.ids)[0], len(c.ids), c.finish, float(c.logprobs.mean()))
            for c in group
        ]
