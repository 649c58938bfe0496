"""Conversations to token ids, through the tokenizer's own chat template, with loss on what the assistant wrote alone.

Which tokens are the assistant's is taken from the template's `{% generation %}` blocks where it has them. Elsewhere it is found
by rendering: the conversation up to a turn, with the generation prompt, must begin the conversation with that turn; what was
added is the turn. The token that ends the turn belongs to it, so that stopping is learned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from posttrain.errors import UserError, require
from posttrain.types import Example, Message
from posttrain.untrusted import limited

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Tokenizer = Any  # a transformers tokenizer; its classes carry no types


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message], where: str = "a prompt") -> tuple[int, ...]:
    """The ids a policy continues: the conversation and the generation prompt. The template alone decides on a BOS token.

    Text in a message that spells a control token is refused: a reader must not be able to end a turn or to open another.
    """
    _check(tokenizer, messages, where)
    text = _render(tokenizer, messages, where, generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_example(tokenizer: Tokenizer, messages: Sequence[Message], where: str = "a conversation", given: int = 0) -> Example:
    """The whole conversation, with loss on the assistant's turns but not on those among the first `given` messages."""
    _check(tokenizer, messages, where)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    require(any(i >= given for i in turns), f"{where}: no assistant turn to learn from")
    require(bool(tokenizer.is_fast), f"{where}: finding the assistant's tokens needs a fast tokenizer, one with offsets")
    if GENERATION.search(tokenizer.get_chat_template()):
        text, spans = _marked_spans(tokenizer, messages, where)
        require(len(spans) == len(turns), f"{where}: the chat template marks {len(spans)} of {len(turns)} assistant turns")
    else:
        text, spans = _rendered_spans(tokenizer, messages, turns, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = np.array(encoded["input_ids"], dtype=np.int64), [start for start, _ in encoded["offset_mapping"]]
    special = np.isin(ids, tokenizer.convert_tokens_to_ids(list(special_texts(tokenizer))))
    mask = np.zeros(len(ids), dtype=bool)
    for turn, span in zip(turns, spans, strict=True):
        start, end = (int(i) for i in np.searchsorted(starts, span))
        mask[start : _turn_end(start, end, special)] = turn >= given
    mask[:1] = False  # the first token of a sequence has no log-probability
    return Example(ids, mask)


def _turn_end(start: int, end: int, special: np.ndarray) -> int:
    """Where the turn in tokens [start, end) ends: after its last control token, or after the one that follows at once.

    What a template writes after that (a line break, say) is never sampled, because sampling stops at the control token.
    """
    inside = np.flatnonzero(special[start:end])
    if len(inside):
        return start + int(inside[-1]) + 1
    return end + 1 if special[end : end + 1].any() else end


def _check(tokenizer: Tokenizer, messages: Sequence[Message], where: str) -> None:
    require(len(messages) > 0, f"{where}: an empty conversation")
    require(bool(tokenizer.chat_template), f"{where}: this tokenizer has no chat template; use a chat model's, or plain text")
    control = special_texts(tokenizer)
    for message in messages:
        for text in control:
            if text in message.content:
                raise UserError(f"{where}: a {message.role} message contains the control token {text!r} as text; rewrite it")


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts that a tokenizer reads as control tokens. Added tokens that are ordinary text, as `<think>` may be, are not."""
    return _special_texts(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_texts(tokenizer: Tokenizer, size: int) -> tuple[str, ...]:
    """Cached, because some tokenizers hold thousands; `size` is there so that tokens added later are seen."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


@contextmanager
def _template_errors(where: str) -> Iterator[None]:
    """A template is the model author's program, and may refuse a conversation: two user turns in a row, a system turn."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where}: the chat template refused the conversation: {reason}") from error


def _render(tokenizer: Tokenizer, messages: Sequence[Message], where: str, generation_prompt: bool) -> str:
    conversation = [{"role": m.role, "content": m.content} for m in messages]
    with _template_errors(where):
        return limited(
            lambda: str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generation_prompt))
        )


def _marked_spans(tokenizer: Tokenizer, messages: Sequence[Message], where: str) -> tuple[str, list[tuple[int, int]]]:
    """The conversation and the character spans of its generation blocks.

    Taken from the renderer: the token mask that `apply_chat_template` makes of them loses the end of a last character that is
    more than one token.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    with _template_errors(where):
        texts, spans = limited(
            lambda: render_jinja_template(
                conversations=[[{"role": m.role, "content": m.content} for m in messages]],
                chat_template=tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
        )
    return texts[0], spans[0]


def _rendered_spans(
    tokenizer: Tokenizer, messages: Sequence[Message], turns: list[int], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation and the character spans of the assistant's turns, found by rendering it up to and with each of them."""
    require(0 not in turns, f"{where}: it begins with an assistant turn, which only a template with generation blocks can show")
    full = _render(tokenizer, messages, where, generation_prompt=False)
    spans = []
    for turn in turns:
        before = _render(tokenizer, messages[:turn], where, generation_prompt=True)
        after = full if turn == len(messages) - 1 else _render(tokenizer, messages[: turn + 1], where, generation_prompt=False)
        require(
            after.startswith(before) and full.startswith(after),
            f"{where}: the chat template rewrites earlier turns once later ones follow (as some drop earlier thinking), so "
            f"assistant turn {turn} cannot be found; use a template with generation blocks, or one example per turn",
        )
        spans.append((len(before), len(after)))
    return full, spans
