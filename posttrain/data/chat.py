"""Conversations to token ids, through the tokenizer's own chat template, with loss on what the assistant wrote alone.

Which tokens are the assistant's is taken from the template's `{% generation %}` blocks where it has them. Elsewhere it is found
by rendering: the conversation up to a turn, with the generation prompt, must begin the conversation with that turn; what was
added is the turn. The token that ends the turn belongs to it, so that stopping is learned.

What a message holds beside its content (tool_calls, name, ...) and the tools of a conversation go to the template too. A field whose
removal does not change the text is refused: the template would drop it in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from posttrain.data.records import Tools
from posttrain.data.safe_readers import limited
from posttrain.errors import UserError, require
from posttrain.types import JSON, Example, Message

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Tokenizer = Any  # a transformers tokenizer; its classes carry no types


# of a tool's answer, which call it belongs to: templates that write both in order need not show it
LINKS = ("tool_call_id", "name")
REPLY = "reply0marker"  # stands for an assistant's turn where only what follows it is rendered


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str = "a prompt", tools: Tools = None
) -> tuple[int, ...]:
    """The ids a policy continues: the conversation and the generation prompt. The template alone decides on a BOS token.

    Text in a message that spells a control token is refused: a reader must not be able to end a turn or to open another.
    """
    _check(tokenizer, messages, where, tools)
    text = _render(tokenizer, messages, where, True, tools)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_turn(
    tokenizer: Tokenizer,
    history: Sequence[Message],
    given: Sequence[Message],
    stop: int | None,
    where: str = "a turn",
) -> tuple[int, ...]:
    """The ids between the assistant's turn that follows `history` and its next one, as the template continues the conversation: what
    closes the turn after the control token `stop` that was sampled (None: it was cut off), the given messages, the generation prompt.

    The history itself is not rendered anew: what a template writes of earlier turns (without their thinking, say) never replaces the
    ids that were sampled. Text in the given messages that spells a control token is broken up: a tool must not be able to end a turn.
    """
    given = [replace(m, content=_broken_up(tokenizer, m.content)) for m in given]
    before = history or [Message("user", ".")]
    text = _render(tokenizer, [*before, Message("assistant", REPLY), *given], where, True, None)
    after = text.rpartition(REPLY)[2]
    require(
        text.count(REPLY) == 1,
        f"{where}: the chat template does not show an assistant's turn as it is, so it cannot be continued",
    )
    closing = "" if stop is None else str(tokenizer.decode([stop]))
    if not closing or not after.startswith(closing):
        return tuple(tokenizer(after, add_special_tokens=False)["input_ids"])
    # with the control token before it, so that a tokenizer adds no space at the beginning
    return tuple(tokenizer(after, add_special_tokens=False)["input_ids"][1:])


def _broken_up(tokenizer: Tokenizer, text: str) -> str:
    for control in special_texts(tokenizer):
        text = text.replace(control, f"{control[:1]} {control[1:]}" if control[1:] else " ")
    return text


def render_example(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    where: str = "a conversation",
    given: int = 0,
    tools: Tools = None,
) -> Example:
    """The whole conversation, with loss on the assistant's turns but not on those among the first `given` messages."""
    _check(tokenizer, messages, where, tools)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    require(any(i >= given for i in turns), f"{where}: no assistant turn to learn from")
    require(
        bool(tokenizer.is_fast),
        f"{where}: finding the assistant's tokens needs a fast tokenizer, one with offsets",
    )
    if GENERATION.search(tokenizer.get_chat_template(tools=tools)):
        text, spans = _marked_spans(tokenizer, messages, where, tools)
        require(
            len(spans) == len(turns),
            f"{where}: the chat template marks {len(spans)} of {len(turns)} assistant turns",
        )
        lost = _lost(
            messages, turns, lambda changed: _marked_texts(tokenizer, changed, where, tools)
        )
        require(
            not lost,
            f"{where}: the chat template writes the {lost} outside of its generation block: it would not be learned",
        )
    else:
        text, spans = _rendered_spans(tokenizer, messages, turns, where, tools)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = (
        np.array(encoded["input_ids"], dtype=np.int64),
        [start for start, _ in encoded["offset_mapping"]],
    )
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


def _check(tokenizer: Tokenizer, messages: Sequence[Message], where: str, tools: Tools) -> None:
    require(len(messages) > 0, f"{where}: an empty conversation")
    require(
        bool(tokenizer.chat_template),
        f"{where}: this tokenizer has no chat template; use a chat model's, or plain text",
    )
    control = special_texts(tokenizer)
    said = [
        (f"a {m.role} message contains", text)
        for m in messages
        for text in (m.content, *_strings(m.more))
    ]
    for what, words in [*said, *(("the tools contain", text) for text in _strings(tools))]:
        for text in control:
            if text in words:
                raise UserError(f"{where}: {what} the control token {text!r} as text; rewrite it")
    if tools and _render(tokenizer, messages, where, False, tools) == _render(
        tokenizer, messages, where, False, None
    ):
        raise UserError(
            f"{where}: the chat template does not show the tools; use a template that does, or remove them"
        )
    lost = _lost(
        messages,
        range(len(messages)),
        lambda changed: _render(tokenizer, changed, where, False, tools),
    )
    require(
        not lost,
        f"{where}: the chat template does not show the {lost}; use a template that does, or remove it",
    )


def _strings(value: JSON) -> Iterator[str]:
    """Every text in a tree, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from (str(key), *_strings(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _lost(
    messages: Sequence[Message],
    places: Iterable[int],
    render: Callable[[Sequence[Message]], object],
) -> str:
    """The first field of these messages without which the same is rendered, in words; "" where every field is shown.

    To render once for each field takes seconds for a long conversation, so one rendering with a marker for every text of a field
    comes first: a field whose marker is there is shown.
    """
    fields = [
        (n, name)
        for n in places
        if messages[n].more
        for name in (*messages[n].more, "content")
        if _counts(messages[n], name)
    ]
    if not fields:
        return ""
    marks = {field: f"shown{number}field" for number, field in enumerate(fields)}
    try:
        shown = str(render([replace(m, **_marked(m, n, marks)) for n, m in enumerate(messages)]))
    except UserError:  # the template reads the texts
        shown = ""
    doubtful = [field for field, mark in marks.items() if mark not in shown]
    full = render(messages) if doubtful else None
    for n, name in doubtful:
        message = messages[n]
        rest = {key: value for key, value in message.more.items() if key != name}
        changed = replace(message, content="" if name == "content" else message.content, more=rest)
        try:
            same = render([*messages[:n], changed, *messages[n + 1 :]]) == full
        except UserError:  # without it the template refuses the conversation
            continue
        if same:
            return f"{name} of message {n} ({message.role})"
    return ""


def _counts(message: Message, name: str) -> bool:
    """Whether a template must show a field."""
    if name == "content":
        return bool(message.content)
    return not (name in LINKS and message.role == "tool")


def _marked(message: Message, place: int, marks: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    """The parts of a message with each text of a field replaced by the field's marker."""
    more = {
        name: _filled(value, marks[place, name]) if (place, name) in marks else value
        for name, value in message.more.items()
    }
    return {"content": marks.get((place, "content"), message.content), "more": more}


def _filled(value: JSON, text: str) -> JSON:
    """A tree with every text in it, names apart, replaced."""
    if isinstance(value, Mapping):
        return {key: _filled(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, text) for item in value]
    return text if isinstance(value, str) else value


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


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    where: str,
    generation_prompt: bool,
    tools: Tools,
) -> str:
    conversation, more = [m.row() for m in messages], {"add_generation_prompt": generation_prompt}
    with _template_errors(where):
        return limited(
            lambda: str(tokenizer.apply_chat_template(conversation, tools, tokenize=False, **more))
        )


def _marked_texts(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str, tools: Tools
) -> list[str]:
    text, spans = _marked_spans(tokenizer, messages, where, tools)
    return [text[start:end] for start, end in spans]


def _marked_spans(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str, tools: Tools
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation and the character spans of its generation blocks.

    Taken from the renderer: the token mask that `apply_chat_template` makes of them loses the end of a last character that is
    more than one token.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    with _template_errors(where):
        texts, spans = limited(
            lambda: render_jinja_template(
                conversations=[[m.row() for m in messages]],
                tools=tools,
                chat_template=tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
        )
    return texts[0], spans[0]


def _rendered_spans(
    tokenizer: Tokenizer, messages: Sequence[Message], turns: list[int], where: str, tools: Tools
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation and the character spans of the assistant's turns, found by rendering it up to and with each of them."""
    require(
        0 not in turns,
        f"{where}: it begins with an assistant turn, which only a template with generation blocks can show",
    )
    full = _render(tokenizer, messages, where, False, tools)
    spans = []
    for turn in turns:
        before = _render(tokenizer, messages[:turn], where, True, tools)
        if turn == len(messages) - 1:
            after = full
        else:
            after = _render(tokenizer, messages[: turn + 1], where, False, tools)
        require(
            after.startswith(before) and full.startswith(after),
            f"{where}: the chat template rewrites earlier turns once later ones follow (as some drop earlier thinking), so "
            f"assistant turn {turn} cannot be found; use a template with generation blocks, or one example per turn",
        )
        spans.append((len(before), len(after)))
    return full, spans
