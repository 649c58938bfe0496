"""Well-formedness: does a response follow a template such as `<think>{text}</think>{space}<answer>{text}</answer>`?

A template is literal text with fields: {text} is any text without the template's own literals, {line} the same on one line,
{space} is whitespace or nothing, {digits} is a row of digits and {integer} an integer. {text} stops at a literal and the other
fields are possessive, so matching takes time linear in the response, whatever it holds; a literal inside a {text} makes the
response malformed. ({text} itself is not possessive: a shorter match could not be followed by its literal, and CPython 3.11.2
has a bug in possessive groups.)
"""

from __future__ import annotations

import re
from functools import lru_cache

from posttrain.errors import UserError, require
from posttrain.rewards.answer import INTEGER
from posttrain.rewards.math import MathReward, final_answer
from posttrain.types import Score

THINK_ANSWER = "<think>{text}</think>{space}<answer>{text}</answer>"
LIMIT = 200_000  # characters; a longer response is malformed without matching
ANYWHERE = MathReward(reasoning_end="")
FIELD = re.compile(r"\{([a-z]*)\}")
FIELDS = {
    "text": r"((?:(?!LITERALS)[\s\S])*)",
    "line": r"((?:(?!LITERALS)[^\r\n])*)",
    "space": r"(\s*+)",
    "digits": r"([0-9]++)",
    "integer": f"((?>{INTEGER.pattern}))",
}


@lru_cache(maxsize=256)
def compile_template(template: str) -> re.Pattern[str]:
    """Return the pattern of a template, with one group per field.

    >>> compile_template("{digits}+{digits}").fullmatch("12+34").groups()
    ('12', '34')
    >>> compile_template("{text}{line}")
    Traceback (most recent call last):
    posttrain.errors.UserError: template '{text}{line}': {text} needs literal text after it, or the end
    """
    pieces = FIELD.split(template)  # literal, field, literal, ..., literal
    literals, fields = pieces[::2], pieces[1::2]
    for name in fields:
        if name not in FIELDS:
            known = ", ".join(FIELDS)
            raise UserError(f"template {template!r}: unknown field {{{name}}}; known: {known}")
    for name, following in list(zip(fields, literals[1:], strict=True))[:-1]:
        bounded = name not in ("text", "line") or following != ""
        needs = "needs literal text after it, or the end"
        require(bounded, f"template {template!r}: {{{name}}} {needs}")
    # no literals: a pattern that never matches
    barred = "|".join(re.escape(text) for text in literals if text) or r"[^\s\S]"
    built = re.escape(literals[0])
    for name, following in zip(fields, literals[1:], strict=True):
        built += FIELDS[name].replace("LITERALS", barred) + re.escape(following)
    return re.compile(built)


def match(template: str, response: str) -> tuple[str, ...] | None:
    """Return the contents of the fields if the whole response, except for whitespace around it, follows the template; else
    None.

    >>> match(THINK_ANSWER, "<think>2+2</think> <answer>4</answer>")
    ('2+2', ' ', '4')
    >>> match(THINK_ANSWER, "<think>a</think><answer>4</answer><answer>5</answer>") is None
    True
    """
    if len(response) > LIMIT:
        return None
    found = compile_template(template).fullmatch(response.strip())
    return found.groups() if found else None


def format(
    prompt: str, response: str, answer: str, template: str = THINK_ANSWER, announce: bool = False
) -> Score:
    """The reward: 1 if the response follows the template and no {text} or {line} between two literals is blank, else 0; with
    `announce`, how clearly it marks its answer (see `announced`). It does not check whether the answer is right."""
    if announce:
        value = announced(response)
        return Score(value, parts={"format": value})
    found, pieces = match(template, response), FIELD.split(template)
    said = zip(pieces[:-1:2], pieces[1::2], pieces[2::2], found or (), strict=False)
    blank = any(
        name in ("text", "line") and before and after and not text.strip()
        for before, name, after, text in said
    )
    value = float(found is not None and not blank)
    return Score(value, parts={"format": value}, outcome="formed" if value else "malformed")


def announced(response: str) -> float:
    """How clearly a response marks its answer: in a complete box that is not empty, after "final answer:", or not at all.

    >>> announced("so \\\\boxed{4}"), announced("Final answer: 4"), announced("4"), announced("\\\\boxed{4"), announced("\\\\boxed{}")
    (1.0, 0.7, 0.3, 0.3, 0.3)
    """
    text = response[-LIMIT:]
    if final_answer(text, ANYWHERE):
        return 1.0
    return 0.7 if re.search(r"final answer\s*(?:is)?\s*:\s*\S", text, re.IGNORECASE) else 0.3
