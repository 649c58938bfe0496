r"""Compares the last complete \boxed{} after the reasoning with the gold answer, by this package's own grammar of mathematics.

`grade(response, gold)` returns correct (1.0), wrong (0.0), unparseable (0.0: no box, an empty box, or text outside the
grammar), or error (no value): the gold answer cannot be parsed, which is a fault of the data and not of the policy. No text is
evaluated and no clock or signal is used. Counts of characters, brackets, operations and bits bound time and memory, so the
verdict is the same in a thread, an event loop, a forked or a spawned process, and on any machine.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from posttrain.errors import check_fields
from posttrain.rewards.compose import CORRECT, UNPARSEABLE, WRONG
from posttrain.rewards.mathematics.compare import Comparison, Conventions
from posttrain.rewards.mathematics.form import settled, undone
from posttrain.rewards.mathematics.latex import NESTING, read
from posttrain.rewards.mathematics.naming import is_name
from posttrain.rewards.mathematics.numbers import Exhausted, Undefined
from posttrain.rewards.mathematics.tokens import LENGTH, Unevaluated, Unreadable
from posttrain.rewards.mathematics.tree import Node, node, symbols
from posttrain.types import Score

RESPONSE_LENGTH = 1_000_000  # characters searched for a box, from the end
MAX_BOXES = 64  # the most boxes read as one answer
MAX_SPELLINGS = 4  # the most boxes that may hold the same value
_BOXES = (r"\boxed", r"\fbox", r"\framebox")
_BOX = re.compile(
    r"\\(?:boxed|f(?:rame)?box)\s*\{"
    # \boxed 5, \boxed\frac12: a number or a letter, and nothing after it that belongs to it
    r"|\\boxed(?:\s*(?P<number>-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\\[dt]?frac\s*(?:[0-9]\s*[0-9]|\{[0-9]+\}\s*\{[0-9]+\}))"
    r"|\s+(?P<letter>[A-Za-z]))(?=\s*(?:$|[$\n;)}\]]|[.,](?![0-9])|\\[)\]]|(?:or|and)\b))"
    r"|\\[\s\S]|[{}]"
)
_HEDGE = re.compile(r"[\s$]*[,;/]?[\s$]*(?:or|and|\\text\s*\{\s*(?:or|and)\s*\})?[\s$]*")
_LITERAL = re.compile(
    r"(-?)(?:(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3}){1,9}|[0-9]{1,30})(?:\.[0-9]{1,30})?)"
    r"|\\[dt]?frac\{(?P<above>[0-9]{1,30})\}\{(?P<below>[0-9]{1,30})\}|(?P<over>[0-9]{1,30})/(?P<under>[0-9]{1,30}))"
)
_EXPRESSIONS = ("add", "multiply", "divide", "power", "function", "root", "relation")
_DECIMAL_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
_SPACE = re.compile(r"\s+|\\[,;:! ]|\\(?:left|right|d(?=frac)|t(?=frac))(?![A-Za-z])|[$]")


@dataclass(frozen=True, slots=True)
class MathReward(Conventions):
    r"""How answers are found and parsed. The defaults are strict; a data set with other conventions declares them here.

    >>> MathReward(percent="bare")("?", r"\boxed{50}", r"50\%").outcome
    'correct'
    """

    # only the text after the last one is searched; "" if the format has none
    reasoning_end: str = "</think>"
    # search the text after the last one of these (such as "####") instead of a box
    marker: str = ""
    # without a box, the answer is the rest of the line after the last one of these, in upper or lower case: "final answer:"
    phrase: str = ""
    decimal_comma: bool = False  # 1,5 is 1.5
    variables: tuple[str, ...] = ()  # the declared order in which (5, 6) means x = 5, y = 6

    def __post_init__(self) -> None:
        # a config file gives a list, and settings must be hashable
        object.__setattr__(self, "variables", tuple(self.variables))
        check_fields(self, "math: ")

    def __call__(self, prompt: str, response: str, answer: str) -> Score:
        """Grade a response. An answer that only repeats an expression of the prompt is wrong."""
        return grade(response, answer, self, prompt)


STRICT = math = MathReward()  # the reward `math`; a task's options are its fields


def grade(
    response: str, gold: str | None, reward: MathReward = STRICT, question: str = ""
) -> Score:
    r"""Grade the final answer of a response against the gold one.

    >>> [grade(r, "5").outcome for r in (r"so \boxed{5}", r"so \boxed{x = 6 = 5}", r"so \boxed{2+3}", "so 5")]
    ['correct', 'wrong', 'wrong', 'unparseable']
    >>> grade(r"\boxed{5}", r"\frac{1}{").failure
    'gold answer cannot be read: ends too early'
    """
    if gold is None:
        return Score.failed("gold answer cannot be read: there is none")
    answers = _answers(response, reward)
    score = _graded(", ".join(answers), gold, reward, question)
    if score is WRONG and 1 < len(answers) <= MAX_SPELLINGS:
        # \boxed{2\frac12} or \boxed{2.5}: one value in several spellings
        each = (_graded(answer, gold, reward, question) for answer in answers)
        return CORRECT if all(one is CORRECT for one in each) else WRONG
    return score


def _graded(answer: str, gold: str, reward: MathReward, question: str) -> Score:
    if answer and not reward.decimal_comma:
        literal, number = _literal(gold), _literal(answer)
        if literal is not None and literal == number:
            return CORRECT
        if literal is not None and number is not None and not reward.rounding:
            return WRONG
    try:
        wanted = _read_gold(gold, reward)
    except (Unreadable, Undefined, Exhausted) as problem:
        return Score.failed(f"gold answer cannot be read: {problem}")
    if not answer:
        return UNPARSEABLE
    try:
        given = _read_given(answer, wanted, reward)
        if given == wanted:
            return CORRECT
        if given is not None and _agrees(wanted, given, answer, gold, reward, question):
            return CORRECT
        return WRONG
    except (Unevaluated, Exhausted, Undefined):
        # an integral, a sum or a limit; a number beyond the bounds; not a number at all
        return WRONG
    except Unreadable:
        return UNPARSEABLE
    except Exception as fault:
        # a fault of the grader, on text from the policy: the response is masked and counted, neither rewarded nor punished
        return Score.failed(f"grader fault: {type(fault).__name__}")


def final_answer(response: str, reward: MathReward = STRICT) -> str | None:
    r"""Return the text of the answer: after the end of the reasoning, the last complete box, or the text after the last marker
    or phrase.

    Boxes that are joined by "or", "and" or commas are one answer with several values.

    >>> final_answer(r"<think>\boxed{7}</think> none"), final_answer(r"\boxed{5} no, \boxed{\frac{1}{2}} \boxed{")
    (None, '\\frac{1}{2}')
    >>> final_answer(r"\boxed{5} or \boxed{6}")
    '5, 6'
    """
    answers = _answers(response, reward)
    return ", ".join(answers) if answers else None


def _answers(response: str, reward: MathReward) -> list[str]:
    response = response[-RESPONSE_LENGTH:]
    if reward.reasoning_end:
        response = response.rpartition(reward.reasoning_end)[2]
        if reward.reasoning_end.replace("/", "", 1) in response:
            return []  # the reasoning did not end
    if reward.marker:
        _, found, rest = response.rpartition(reward.marker)
        return [rest.strip()] if found else []
    boxes = _boxes(response)
    if not boxes:
        return _after(reward.phrase, response)
    contents = [response[slice(*boxes[-1])].strip()]
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        between = response[before[1] : response.rindex("\\", 0, after[0])].removeprefix("}")
        if len(contents) == MAX_BOXES or len(between) > 40:
            break
        if not between.strip("$ \n") or not _HEDGE.fullmatch(between):
            break
        contents.insert(0, response[slice(*before)].strip())
    return list(dict.fromkeys(contents))  # an answer given twice is one answer


def _after(phrase: str, response: str) -> list[str]:
    """Return the rest of the line after the last `phrase`, if any, without emphasis and a full stop."""
    found = response.lower().rfind(phrase.lower()) if phrase else -1
    rest = response[found + len(phrase) :].strip().partition("\n")[0].strip("*$ .")
    return [rest] if found >= 0 and rest else []


def _literal(text: str) -> Fraction | None:
    r"""Return the value of a plain number or fraction, without the grammar. Most answers are one.

    >>> _literal("-1,250.50"), _literal(r"\frac{3}{6}"), _literal("3/0"), _literal("2+2")
    (Fraction(-2501, 2), Fraction(1, 2), None, None)
    """
    found = _LITERAL.fullmatch(text)
    if not found:
        return None
    if found["number"]:
        digits = found["number"].replace(",", "")
        value = Fraction(int(digits)) if "." not in digits else Fraction(digits)
    else:
        above, below = int(found["above"] or found["over"]), int(found["below"] or found["under"])
        if not below:
            return None
        value = Fraction(above, below)
    return -value if found[1] else value


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Return (start, end) of the contents of every complete box that is not inside another, in one pass. Braces before the
    first box change nothing, but the backslashes right before it do: \\boxed is a new line and a word."""
    places = [place for word in _BOXES if (place := text.find(word)) >= 0]
    if not places:
        return []
    first = len(text[: min(places)].rstrip("\\"))
    found: list[tuple[int, int]] = []
    # for each open brace: the start of its contents if it opens a box, else -1
    opened: list[int] = []
    for match in _BOX.finditer(text, first):
        token = match[0]
        if bare := match["number"] or match["letter"]:
            found.append((match.end() - len(bare), match.end()))
        elif token == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                while found and found[-1][0] >= start:
                    found.pop()
                found.append((start, match.start()))
        elif token[-1] == "{" and token != r"\{":
            opened.append(match.end() if len(token) > 1 else -1)
    return found


@lru_cache(maxsize=4096)
def _read_gold(gold: str, reward: MathReward) -> Node:
    boxes = _boxes(gold)
    text = gold[slice(*boxes[-1])] if boxes else gold
    if not text.strip():
        raise Unreadable("it is empty")
    wanted = settled(read(_localised(text, reward)))
    if not Comparison(reward).same(wanted, wanted):
        raise Unreadable("it does not equal itself")
    return wanted


def _read_given(answer: str, wanted: Node, reward: MathReward) -> Node | None:
    """Return the tree of an answer, or None if it is too long to be right."""
    if len(answer) > LENGTH:
        if max(accumulate((c in "([{") - (c in ")]}") for c in answer)) > NESTING:
            raise Unreadable("nested too deeply")
        return None
    return settled(read(_localised(answer, reward), wanted.kind not in ("list", "set")))


def _agrees(
    wanted: Node, given: Node, answer: str, gold: str, reward: MathReward, question: str
) -> bool:
    named = given.kind == "relation" != wanted.kind and is_name(given.nodes[0])
    left = undone(given.nodes[1] if named else given) - undone(wanted)
    if wanted.kind == "relation":
        left -= {"sum"}  # an equation may be moved to one side
    if left or _restates(wanted, given, answer, gold, question):
        return False
    if reward.variables:
        wanted, given = _ordered(wanted, reward.variables), _ordered(given, reward.variables)
    return Comparison(reward).same(wanted, given)


def _restates(wanted: Node, given: Node, answer: str, gold: str, question: str) -> bool:
    """Whether the answer is an expression of the question, while the gold answer is not in the question and does not have the
    same terms in another order."""
    if not question or given.kind not in _EXPRESSIONS or not symbols(given):
        return False
    if given.kind == wanted.kind and Counter(given.parts) == Counter(wanted.parts):
        return False
    said, asked, expected = (_SPACE.sub("", text) for text in (answer, question, gold))
    return len(said) >= 3 and said in asked and expected not in asked


def _ordered(value: Node, variables: tuple[str, ...]) -> Node:
    """Read a tuple as the values of the declared variables."""
    if value.kind not in ("interval", "tuple") or len(value.nodes) != len(variables):
        return value
    names = node(value.kind, *value.labels, *(node("symbol", name) for name in variables))
    return node("relation", "=", names, value)


def _localised(text: str, reward: MathReward) -> str:
    return _DECIMAL_COMMA.sub(".", text) if reward.decimal_comma else text
