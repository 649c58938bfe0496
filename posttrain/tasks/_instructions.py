"""The 25 verifiable instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911).

Each is a function of the response and of what the prompt asked for. `strict` checks the response as it is; `loose` also checks
it without its first or last line and without asterisks, which are often a greeting, a farewell and emphasis around the answer.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from operator import ge, lt
from typing import Any

from posttrain.errors import UserError, require, unknown
from posttrain.rewards.language import written_in

Check = Callable[..., bool]

ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {"at least": ge, "less than": lt}
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|Inc|Ltd|Co|No|Fig|e\.g|i\.e|a\.m|p\.m|U\.S)|\b[A-Z])$"
)
SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]*]*(?=\s|$)")


def follows(name: str, asked: Mapping[str, Any], response: str) -> bool:
    """Whether a response follows one instruction; an empty response follows none."""
    return bool(response.strip()) and CHECKS[name](response, **asked)


def loosened(response: str) -> list[str]:
    """Return the response, without its first line, without its last line and without both, each also without asterisks.

    >>> loosened("Sure!\\n*a*")
    ['Sure!\\n*a*', '*a*', 'Sure!', '', 'Sure!\\na', 'a', 'Sure!', '']
    """
    lines = response.split("\n")
    texts = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [*texts, *(text.replace("*", "") for text in texts)]


def read_instruction(name: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the checked arguments of an instruction. A table with all columns holds None for arguments that a row does not
    use."""
    if name not in CHECKS:
        raise UserError(f"{where}: {unknown('instruction', name, CHECKS)}")
    asked = {key: value for key, value in given.items() if value is not None}
    given_by = inspect.signature(CHECKS[name]).parameters.items()
    wanted = {key: p.annotation for key, p in given_by if p.kind is p.KEYWORD_ONLY}
    names = ", ".join(wanted) or "nothing"
    require(asked.keys() == wanted.keys(), f"{where}: {name} takes {names}, not {[*asked]}")
    for key, kind in wanted.items():
        value = asked[key]
        if kind == "int" and isinstance(value, float) and value.is_integer():
            asked[key] = value = int(value)
        fine = {
            "int": lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0,
            "str": lambda v: isinstance(v, str) and bool(v),
            "list[str]": lambda v: isinstance(v, list) and all(isinstance(word, str) for word in v),
        }[kind](value)
        require(fine, f"{where}: {key} of {name} is {value!r}, not a {kind}")
        if key in RELATION_KEYS:
            known = " or ".join(RELATIONS)
            require(value in RELATIONS, f"{where}: {key} of {name} is {known}, not {value!r}")
        if name == "language:response_language":
            written_in("", value)  # raises an error for an unknown language
    return asked


def sentences(text: str) -> int:
    """Count the sentences: each ends with . ! or ? before a space, unless the full stop belongs to an abbreviation or an
    initial, or the text goes on in lower case.

    >>> sentences("Mr. Smith met J. Doe, e.g. at 5 p.m. on Monday. Really?! Yes")
    3
    """
    count, start = 0, 0
    for found in SENTENCE_END.finditer(text):
        before, after = text[start : found.start()], text[found.end() :].lstrip()
        goes_on = after and (ABBREVIATION.search(before[-8:]) or after[0].islower())
        if before.strip() and not (goes_on and found[0].startswith(".")):
            count += 1
            start = found.end()
    return count + bool(text[start:].strip())


def existence(response: str, *, keywords: list[str]) -> bool:
    return all(word.lower() in response.lower() for word in keywords)


def frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](response.lower().count(keyword.strip().lower()), frequency)


def forbidden_words(response: str, *, forbidden_words: list[str]) -> bool:
    spelled = (rf"\b{re.escape(word)}\b" for word in forbidden_words)
    return not any(re.search(word, response, re.IGNORECASE) for word in spelled)


def letter_frequency(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](response.lower().count(letter.lower()), let_frequency)


def response_language(response: str, *, language: str) -> bool:
    return written_in(response, language)


def number_sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](sentences(response), num_sentences)


def number_paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Count paragraphs between the dividers ***; an empty one is ignored at the beginning and the end, and is wrong
    elsewhere."""
    return _between(response, r"\s?\*\*\*\s?", num_paragraphs) is not None


def _between(response: str, divider: str, count: int) -> list[str] | None:
    """Return the `count` parts of a response between dividers; None if the count differs, or one between two dividers is
    empty."""
    parts = [part.strip() for part in re.split(divider, response)]
    kept = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return kept if all(kept) and len(kept) == count else None


def number_words(response: str, *, num_words: int, relation: str) -> bool:
    return RELATIONS[relation](len(re.findall(r"\w+", response)), num_words)


def nth_paragraph_first_word(
    response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Paragraphs are separated by an empty line. Quotation marks before the word and punctuation after it are ignored."""
    paragraphs = response.split("\n\n")
    counted = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if counted != num_paragraphs or not 1 <= nth_paragraph <= counted:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0] if words else ""
    return word.lower() == first_word.lower()


def number_placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\]\n]*\]", response)) >= num_placeholders


def postscript(response: str, *, postscript_marker: str) -> bool:
    """Look for the marker, in any case, with or without a space between its letters."""
    letters = [letter for letter in postscript_marker.lower() if letter.isalnum()]
    spelled = r"\.\s?".join(map(re.escape, letters)) + (r"\." if len(letters) == 2 else "")
    return re.search(spelled, response, re.IGNORECASE) is not None


def number_bullet_lists(response: str, *, num_bullets: int) -> bool:
    starred = re.findall(r"^[ \t]*\*[^*\n].*$", response, re.MULTILINE)
    return len(starred) + len(re.findall(r"^[ \t]*-.*$", response, re.MULTILINE)) == num_bullets


def constrained_response(response: str) -> bool:
    return any(answer in response for answer in ANSWERS)


def number_highlighted_sections(response: str, *, num_highlights: int) -> bool:
    """Count *highlighted* and **highlighted** sections with text, each on one line."""
    double = re.findall(r"\*\*([^\n*]*)\*\*", response)
    single = re.findall(r"\*([^\n*]*)\*", response)
    return sum(bool(text.strip()) for text in (*single, *double)) >= num_highlights


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def json_format(response: str) -> bool:
    """Whether the whole response is JSON, with or without a fence."""
    inner = re.sub(r"^```(?:json)?", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(inner.removesuffix("```"))
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    return any(text.strip(" <>") for text in re.findall(r"<<([^\n]+)>>", response))


def two_responses(response: str) -> bool:
    parts = _between(response, r"\*{6}", 2)
    return parts is not None and parts[0] != parts[1]


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, *, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(response: str, *, capital_relation: str, capital_frequency: int) -> bool:
    words = re.findall(r"\w+(?:[-'’]\w+)*", response)
    return RELATIONS[capital_relation](sum(map(str.isupper, words)), capital_frequency)


def english_capital(response: str) -> bool:
    return response.isupper() and written_in(response, "en")


def english_lowercase(response: str) -> bool:
    return response.islower() and written_in(response, "en")


def no_comma(response: str) -> bool:
    return "," not in response


def quotation(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


GROUPS: tuple[tuple[str, *tuple[Check, ...]], ...] = (
    ("keywords", existence, frequency, forbidden_words, letter_frequency),
    ("language", response_language),
    ("length_constraints", number_sentences, number_paragraphs, number_words),
    ("length_constraints", nth_paragraph_first_word),
    ("detectable_content", number_placeholders, postscript),
    ("detectable_format", number_bullet_lists, constrained_response, json_format, title),
    ("detectable_format", number_highlighted_sections, multiple_sections),
    ("combination", two_responses, repeat_prompt),
    ("startend", end_checker, quotation),
    ("change_case", capital_word_frequency, english_capital, english_lowercase),
    ("punctuation", no_comma),
)
CHECKS = {f"{group}:{c.__name__}": c for group, *checks in GROUPS for c in checks}
RELATION_KEYS = ("relation", "let_relation", "capital_relation")
