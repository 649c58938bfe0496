"""Converts conversations to token ids with the tokenizer's own chat template, with loss on the assistant's text only. Without a
template, a prompt that is a single user message is read as its text.

Which tokens are the assistant's is taken from the template's `{% generation %}` blocks where it has them. Elsewhere it is found
by rendering: the conversation up to a turn, with the generation prompt, must begin the conversation with that turn; what was
added is the turn. The token that ends the turn belongs to it, so that stopping is learned.

What a message holds besides its content (tool_calls, name, ...) and the tools of a conversation go to the template too. A field whose
removal does not change the text is refused: the template would drop it in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, islice
from typing import Any

import numpy as np

from posttrain.data.records import Tools
from posttrain.data.safe_readers import Rendered, TemplateError, render_template
from posttrain.errors import UserError, require
from posttrain.trust import texts
from posttrain.types import JSON, Example, Message

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Tokenizer = Any  # a transformers tokenizer; its classes carry no types
Rendering = Callable[[Sequence[Message]], object]

TOGETHER = 1 << 22  # characters that are rendered together, unless one conversation has more
# fields that link a tool's answer to its call; a template that writes both in order need not show them
LINKS = ("tool_call_id", "name")
NO_TEMPLATE = "this tokenizer has no chat template; take a chat model, or put chat_template.jinja into the model's folder"
REPLY = "reply0marker"  # stands for an assistant's turn where only what follows it is rendered


def preceded(messages: Sequence[Message], text: str) -> list[Message]:
    """The conversation with a system message before it; if it has a system message, the text goes in front of that.

    >>> preceded([Message("system", "Be brief."), Message("user", "2+2=")], "The answer is 4.")[0].content
    'The answer is 4.\\n\\nBe brief.'
    """
    own = messages[0].content if messages and messages[0].role == "system" else ""
    return [Message("system", f"{text}\n\n{own}" if own else text), *messages[1 if own else 0 :]]


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str = "a prompt", tools: Tools = None
) -> tuple[int, ...]:
    """The ids that the policy continues: the conversation and the generation prompt. Only the template decides about a BOS token.

    Text in a message that spells a control token is refused: a reader must not be able to end a turn or to open another.
    """
    return render_prompts(tokenizer, [(where, messages)], tools)[0]


def render_prompts(
    tokenizer: Tokenizer, prompts: Iterable[tuple[str, Sequence[Message]]], tools: Tools = None
) -> list[tuple[int, ...]]:
    """`render_prompt` for many conversations, each with its origin; tokenizers use all cores for many texts."""
    listed = list(prompts)
    for where, messages in listed:
        _Template(tokenizer, where, tools).check(messages)
    if not tokenizer.chat_template:
        return [tuple(text_ids(tokenizer, messages[0].content)) for _, messages in listed]
    asked = [([m.row() for m in messages], True) for _, messages in listed]
    found = zip(listed, render_template(tokenizer, asked, tools), strict=True)
    texts = [_rendered(where, result)[0] for (where, _), result in found]
    return list(map(tuple, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def is_text(messages: Sequence[Message], tools: Tools = None) -> bool:
    """Whether a prompt needs no chat template: it is one message of the user, and nothing else."""
    return len(messages) == 1 and messages[0].role == "user" and not messages[0].more and not tools


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that is to be continued: with the token that opens every text, without one that would close it."""
    ids = list(tokenizer(text)["input_ids"])
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def following_ids(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The ids of a text that goes on after another. Alone, tokenizers with marks on words (Llama 2) would put a space before it. A
    line break stands for a text whose last token would join its first."""
    for anchor in (before, "\n"):
        own, both = tokenizer([anchor, anchor + text], add_special_tokens=False)["input_ids"]
        if both[: len(own)] == own:
            return list(both[len(own) :])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_turn(
    tokenizer: Tokenizer, given: Sequence[Message], stop: int | None, where: str = "a turn"
) -> tuple[int, ...]:
    """The ids between a turn of the assistant and its next one, as the template continues a conversation: what closes the turn
    after the sampled control token `stop` (None: the turn was cut off), the given messages, and the generation prompt.

    They are taken from a conversation that stands for the history, which is not rendered anew: what a template writes of earlier
    turns (without their thinking, say) never replaces the ids that were sampled, and a turn costs what it adds. Text in the given
    messages that spells a control token is broken up: a tool must not be able to end a turn.
    """
    given = [replace(m, content=_broken_up(tokenizer, m.content)) for m in given]
    template = _Template(tokenizer, where, None)
    whole = template.render([*_turn(REPLY), *given], generation_prompt=True)
    _, found, after = whole.partition(REPLY)
    shown = f"{where}: the chat template does not show an assistant's turn as it is"
    require(found, f"{shown}, so it cannot be continued")
    ids = tuple(tokenizer(after, add_special_tokens=False)["input_ids"])
    return ids[1:] if ids[:1] == (stop,) else ids


def _turn(reply: str) -> list[Message]:
    """A conversation that ends with an assistant's turn."""
    return [Message("user", "."), Message("assistant", reply)]


def check_continues(tokenizer: Tokenizer, roles: Iterable[str]) -> None:
    """Raise an error for a chat template that renders an earlier turn of the assistant differently once a message of these roles
    follows: training continues from the sampled ids, and a server that renders the conversation would show others."""
    for role in roles:
        require(tokenizer.chat_template, NO_TEMPLATE)
        problem = _not_continued(tokenizer, len(tokenizer), str(tokenizer.chat_template), role)
        require(not problem, problem)


@lru_cache(maxsize=32)
def _not_continued(tokenizer: Tokenizer, size: int, text: str, role: str) -> str:
    """Why a conversation cannot continue with a message of `role`, and what to use instead; "" if it can."""
    instead = 'give later turns as text or ids (generate("...")), or a copy of the model whose chat_template.jinja '
    template = _Template(tokenizer, f"a {role} message after a turn", None)
    try:
        prompt = template.render(_turn("")[:1], generation_prompt=True)
        thought = f"<think>\n{REPLY}1\n</think>\n\n{REPLY}2"
        whole = template.render([*_turn(thought), Message(role, "seen0marker")])
        plain = template.render([*_turn(REPLY), Message(role, "seen0marker")])
    except UserError as error:
        other = "user" if role != "user" else "tool"
        return f"{error}; give it as a message of the role {other}, or {instead}takes it"
    if "seen0marker" not in plain or REPLY not in plain:
        return f"the chat template does not show {role} messages after a turn of the assistant; {instead}does"
    if f"{REPLY}1" not in whole:
        after = ", or messages of the role tool where it keeps it for those" * (role != "tool")
        return (
            f"the chat template drops the reasoning of earlier turns once a {role} message follows, so a later turn would be "
            f"trained on a history that nobody is shown; {instead}keeps it{after}"
        )
    if not plain.startswith(prompt) and not whole.startswith(prompt):
        return f"the chat template rewrites an earlier turn once a {role} message follows; {instead}does not"
    return ""


def unopened(tokenizer: Tokenizer) -> str:
    """What a chat template without a generation prompt writes before the assistant's words: a policy has to write it itself. "" where
    there is none, or where the template refuses such a conversation."""
    if not tokenizer.chat_template:
        return ""
    template = _Template(tokenizer, "a prompt", None)
    try:
        asked = [(_turn(REPLY)[:1], False), (_turn(REPLY)[:1], True), (_turn(REPLY), False)]
        plain, prompt, whole = template.render_all(asked)
    except UserError:
        return ""
    if plain != prompt or not whole.startswith(prompt) or REPLY not in whole[len(prompt) :]:
        return ""
    return whole[len(prompt) :].partition(REPLY)[0]


def _broken_up(tokenizer: Tokenizer, text: str) -> str:
    # half a character, which no tokenizer reads, is a mark
    return harmless(text.encode("utf-8", "replace").decode(), special_texts(tokenizer))


def harmless(text: str, control: Sequence[str]) -> str:
    """The text with a space inserted into everything that spells a control token.

    >>> harmless("so <|end|> it is", ("<|end|>",))
    'so < |end|> it is'
    """
    # breaking one up could complete another; what is left is refused where it is rendered
    for _ in range(8):
        found = [word for word in control if word and word in text]
        if not found:
            break
        for word in found:
            text = text.replace(word, f"{word[0]} {word[1:]}" if len(word) > 1 else " ")
    return text


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to learn from, with its origin: loss is on the assistant's turns but not on those among the first `given`
    messages."""

    messages: Sequence[Message]
    where: str = "a conversation"
    given: int = 0
    tools: Tools = None


def render_example(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str = "a conversation", given: int = 0
) -> Example:
    """The whole conversation, with loss on the assistant's turns but not on those among the first `given` messages."""
    return or_raise(render_examples(tokenizer, [Conversation(messages, where, given)])[0])


def or_raise(found: Example | UserError) -> Example:
    if isinstance(found, UserError):
        raise found
    return found


def render_examples(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[Example | UserError]:
    """Of each conversation its example, or why there is none. Many are rendered together, and then read by the tokenizer together: for
    one, asking the process that renders takes longer than rendering, and tokenizers use all cores for many."""
    parts = zip(accumulate(map(_characters, conversations)), conversations, strict=True)
    together = groupby(parts, key=lambda part: part[0] // TOGETHER)
    return [e for _, few in together for e in _render_together(tokenizer, [one for _, one in few])]


def _characters(said: Conversation) -> int:
    """About as many as are rendered: a template without generation blocks shows all that was before once more for each turn."""
    length = sum(len(m.content) + len(str(m.more)) for m in said.messages)
    return length * sum(m.role == "assistant" for m in said.messages)


def _render_together(
    tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> list[Example | UserError]:
    found: dict[int, Example | UserError] = {}
    steps = [_example_steps(tokenizer, one) for one in conversations]

    def advance(given: Mapping[int, Any]) -> dict[int, Any]:
        asked = {}
        for n, value in given.items():
            try:
                asked[n] = steps[n].send(value)
            except StopIteration as end:
                found[n] = end.value
            except UserError as error:
                found[n] = error
        return asked

    asked = advance(dict.fromkeys(range(len(steps))))
    alike: dict[tuple[str, bool], list[int]] = {}
    for n, (_, marked) in asked.items():
        alike.setdefault((json.dumps(conversations[n].tools), marked), []).append(n)
    rendered = dict[int, list[Rendered | TemplateError]]()
    for (_, marked), members in alike.items():
        rows = [([m.row() for m in said], open_) for n in members for said, open_ in asked[n][0]]
        answers = iter(render_template(tokenizer, rows, conversations[members[0]].tools, marked))
        rendered |= {n: list(islice(answers, len(asked[n][0]))) for n in members}
    texts = advance(rendered)
    if texts:
        encoded = tokenizer(
            list(texts.values()),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,  # making columns that are not read takes as long as encoding
            return_token_type_ids=False,
        )
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        advance(dict(zip(texts, tokens, strict=True)))
    return [found[n] for n in range(len(conversations))]


def _example_steps(tokenizer: Tokenizer, said: Conversation) -> Generator[Any, Any, Example]:
    """Make an example. Yields the renderings that it needs, and whether they are marked; then the text that is to be encoded."""
    messages, where, given = said.messages, said.where, said.given
    template = _Template(tokenizer, where, said.tools)
    template.check(messages)
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    require(any(i >= given for i in turns), f"{where}: no assistant turn to learn from")
    needs = "finding the assistant's tokens needs a fast tokenizer, one with offsets"
    require(tokenizer.is_fast, f"{where}: {needs}")
    if GENERATION.search(tokenizer.get_chat_template(tools=said.tools)):
        # The renderer's spans: the token mask that `apply_chat_template` makes of them loses the end of a last character that is more
        # than one token.
        rendered = yield [(messages, False)], True
        text, spans = _rendered(where, rendered[0])
        marked = f"marks {len(spans)} of {len(turns)} assistant turns"
        require(len(spans) == len(turns), f"{where}: the chat template {marked}")
        hidden = _hidden(messages, turns, template.marked_texts)
        outside = f"writes the {hidden} outside of its generation block: it would not be learned"
        require(not hidden, f"{where}: the chat template {outside}")
    else:
        rendered = yield template.prefixes(messages, turns), False
        text, spans = template.spans(turns, [_rendered(where, one)[0] for one in rendered])
    ids, offsets = yield text
    ids = np.array(ids, dtype=np.int64)
    starts = [start for start, _ in offsets]
    special = _is_special(tokenizer, len(tokenizer))[ids]
    mask = np.zeros(len(ids), dtype=bool)
    for turn, span in zip(turns, spans, strict=True):
        start, end = (int(i) for i in np.searchsorted(starts, span))
        mask[start : _turn_end(start, end, special)] = turn >= given
    mask[:1] = False  # the first token of a sequence has no log-probability
    return Example(ids, mask)


def _turn_end(start: int, end: int, special: np.ndarray) -> int:
    """The end of the turn in tokens [start, end): after its last control token, or after the one that follows at once.

    What a template writes after that (a line break, say) is never sampled, because sampling stops at the control token.
    """
    inside = np.flatnonzero(special[start:end])
    if len(inside):
        return start + int(inside[-1]) + 1
    return end + 1 if special[end : end + 1].any() else end


def _hidden(messages: Sequence[Message], places: Iterable[int], render: Rendering) -> str:
    """The first field of these messages that does not change the rendering, in words; "" if every field is shown.

    To render once for each field takes seconds for a long conversation, so one rendering with a marker for every text of a field
    comes first: a field whose marker is there is shown.
    """
    marks: dict[tuple[int, str], str] = {}
    marked = list(messages)
    for n in (n for n in places if messages[n].more):
        optional = LINKS if messages[n].role == "tool" else ()
        shown_by = [name for name in messages[n].more if name not in optional]
        for name in (*shown_by, *(["content"] if messages[n].content else [])):
            mark = marks[n, name] = f"shown{len(marks)}field"
            marked[n] = _changed(marked[n], name, mark)
    try:
        shown = str(render(marked)) if marks else ""
    except UserError:  # the template reads the texts
        shown = ""
    doubtful = [field for field, mark in marks.items() if mark not in shown]
    full = render(messages) if doubtful else None
    for n, name in doubtful:
        with suppress(UserError):  # without it the template may refuse the conversation
            if render([*messages[:n], _changed(messages[n], name), *messages[n + 1 :]]) == full:
                return f"{name} of message {n} ({messages[n].role})"
    return ""


def _changed(message: Message, name: str, text: str = "") -> Message:
    """The message with `text` in place of every text of a field; without the field if `text` is empty."""
    if name == "content":
        return replace(message, content=text)
    more = {key: v for key, v in message.more.items() if text or key != name}
    return replace(message, more={**more, name: _filled(more[name], text)} if text else more)


def _filled(value: JSON, text: str) -> JSON:
    """The tree with every text in it, except keys, replaced."""
    if isinstance(value, Mapping):
        return {key: _filled(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, text) for item in value]
    return text if isinstance(value, str) else value


def special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The texts that a tokenizer reads as control tokens. Added tokens that are ordinary text, as `<think>` may be, do not count."""
    return _special_texts(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _special_texts(tokenizer: Tokenizer, size: int) -> tuple[str, ...]:
    """Cached, because some tokenizers have thousands; `size` makes the cache see tokens added later."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens)))


@lru_cache(maxsize=8)
def _is_special(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """[V], true for control tokens; cached as their texts are. Ids of some vocabularies have gaps, so V is not their number."""
    found = np.zeros(max(tokenizer.get_vocab().values()) + 1, dtype=bool)
    found[tokenizer.convert_tokens_to_ids(list(_special_texts(tokenizer, size)))] = True
    return found


def unended(tokenizer: Tokenizer, examples: Iterable[Example]) -> list[str]:
    """A line where no answer ends with a control token: the model would not learn to end its own."""
    special = _is_special(tokenizer, len(tokenizer))
    if any(special[e.ids[e.mask][-1:]].any() for e in examples):
        return []
    advice = "set eos_token in tokenizer_config.json, or use a template that ends a turn with one"
    return [f"no row ends with an end token: the model does not learn to end its answers; {advice}"]


def _rendered(where: str, found: Rendered | TemplateError) -> Rendered:
    """Turn a template's refusal of a conversation (two user turns in a row, a system turn) into an error: a template is the model
    author's program."""
    if isinstance(found, TemplateError):
        raise UserError(f"{where}: the chat template refused the conversation: {found}")
    return found


@dataclass(frozen=True, slots=True)
class _Template:
    """The chat template of a tokenizer, with the tools of a conversation and its origin, for messages."""

    tokenizer: Tokenizer
    where: str
    tools: Tools

    def check(self, messages: Sequence[Message]) -> None:
        where, tools = self.where, self.tools
        require(len(messages) > 0, f"{where}: an empty conversation")
        plain = not self.tokenizer.chat_template
        require(not plain or is_text(messages, tools), f"{where}: {NO_TEMPLATE}")
        said = [
            (f"a message of the {m.role} contains", (m.content, *texts(m.more, keys=True)))
            for m in messages
        ]
        for what, found in (*said, ("the tools contain", tuple(texts(tools, keys=True)))):
            joined = "\0".join(found)  # one search for each control token
            for control in special_texts(self.tokenizer):
                if control in joined:
                    spelled = f"the control token {control!r} as text; rewrite it"
                    raise UserError(f"{where}: {what} {spelled}")
        if plain:
            return
        hint = "use a template that does, or remove"
        shown = not tools or self.render(messages) != replace(self, tools=None).render(messages)
        require(shown, f"{where}: the chat template does not show the tools; {hint} them")
        hidden = _hidden(messages, range(len(messages)), self.render)
        require(not hidden, f"{where}: the chat template does not show the {hidden}; {hint} it")

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        return self.render_all([(messages, generation_prompt)])[0]

    def render_all(self, asked: Sequence[tuple[Sequence[Message], bool]]) -> list[str]:
        """Render several conversations at once, each with or without the generation prompt."""
        rows = [([m.row() for m in messages], prompt) for messages, prompt in asked]
        found = render_template(self.tokenizer, rows, self.tools)
        return [_rendered(self.where, one)[0] for one in found]

    def marked_texts(self, messages: Sequence[Message]) -> list[str]:
        """The texts of the conversation's generation blocks."""
        rows = [m.row() for m in messages]
        found = render_template(self.tokenizer, [(rows, False)], self.tools, marked=True)
        text, spans = _rendered(self.where, found[0])
        return [text[start:end] for start, end in spans]

    def prefixes(
        self, messages: Sequence[Message], turns: list[int]
    ) -> list[tuple[Sequence[Message], bool]]:
        """What is rendered to find the assistant's turns: the conversation; up to each of them, with the generation prompt; and with
        each of them, but for one that ends the conversation."""
        first = "it begins with an assistant turn, which only a template with generation blocks can show"
        require(0 not in turns, f"{self.where}: {first}")
        asked = [(messages, False), *((messages[:turn], True) for turn in turns)]
        return asked + [(messages[: n + 1], False) for n in turns if n + 1 < len(messages)]

    def spans(self, turns: list[int], prefixes: Sequence[str]) -> Rendered:
        """The conversation and the character spans of the assistant's turns."""
        full, *rest = prefixes
        spans = []
        for turn, before, after in zip(turns, rest, [*rest[len(turns) :], full], strict=False):
            text = f"{self.where}: the chat template rewrites earlier turns once later ones follow (as some drop earlier thinking)"
            advice = "use a template with generation blocks, or one example per turn"
            found = after.startswith(before) and full.startswith(after)
            require(found, f"{text}, so assistant turn {turn} cannot be found; {advice}")
            spans.append((len(before), len(after)))
        return full, spans
