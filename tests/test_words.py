"""Names and sentences of the package use the words of the field, not a private vocabulary."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "posttrain"

# A word that no identifier, file, metric, event or setting may contain, and the word to use instead.
INSTEAD = {
    "mend": "fix", "mended": "fixed", "heard": "detected", "hear": "detect", "hears": "detects", "listen": "monitor",
    "listened": "monitored", "news": "messages", "told": "reported", "sound": "emit", "sounds": "emits", "planted": "synthetic",
    "honest": "control", "quiet": "idle, or cooldown", "thrown": "dry_run", "cast": "models, or roles", "visiting": "offloaded",
    "wall": "sandbox", "walls": "sandbox", "thumbs": "feedback", "dearer": "beta_increment", "tongue": "language",
    "tongues": "language_mix", "slip": "error", "slips": "error_rate", "doubt": "warning", "doubts": "warnings",
    "enough": "stop_reuse", "falls": "is_due", "strangeness": "unsupported_reason", "familiar": "llama_like",
    "stirred": "perturbed_adapters", "climb": "CurriculumState", "rhythm": "LoopSchedule", "crew": "WorkerPool",
    "helper": "worker", "helpers": "workers", "lost": "failed_workers", "beside": "auxiliary, residual or reserved",
    "reach": "ensure_rope_table", "turn": "rope", "turned": "rotated", "mixed": "qkv", "homes": "output_slots",
    "least": "min", "most": "max", "adopt": "wrap_model", "twin": "share_weights", "conduct": "decisions", "push": "perturb",
    "pushed": "perturbed", "dry": "dry_run", "guarding": "monitor", "children": "workers", "untrusted": "safe_readers",
    "house": "package", "stranger": "untrusted source", "whoever": "the process that",
}  # fmt: skip

# Identifiers in which such a word is the field's own, or belongs to another library's interface.
ALLOWED = {
    "lost": "of a lock: another process holds it",
    "most_common": "collections.Counter",
    "named_children": "torch.nn.Module",
    "children": "torch.nn.Module",
    "connection_lost": "asyncio.SubprocessProtocol",
    "twinx": "matplotlib",
    "dry": "the option of `posttrain plan`",
    "quiet": "an option of other programs",
    "mixed": "the task that mixes tasks",
    "Mixed": "the task that mixes tasks",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "MixedReward": "a weighted mix of rewards",
    "MixedRating": "a weighted mix of rewards",
    "mixed_number": "a mixed number, such as 2 1/2",
    "listen": "socket",
    "master_listen_fd": "torch.distributed.TCPStore",
    "turned_down": "of a curve; a key of published results",
    "wall": "seconds of wall-clock time",
    "end_of_turn": "a special token of Gemma",
    "push": "the command that sends a model to a hub, as git and transformers call it",
    "turn_starts": "turns of an episode",
    "turn_advantages": "turns of an episode",
    "turn_generalised_advantages": "turns of an episode",
}
DIALOGUE = {"turn"}  # a turn of a dialogue or an episode; among layers of a model it would be a rotation
# Figures of speech in docstrings, messages and comments.
PHRASES = (
    "the house", "on stage", "a person should hear", "whoever", "nobody's", "somebody else", "stranger", "mend ", "mended",
    "dearer", "thrown away", "walls", "ways out", "tongue", "goes by the name", "its own affair", "end of the story", "stands guard",
    "is heard", "are heard", "listens for", "planted", "honest run", "beside the",
)  # fmt: skip


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+|[a-z0-9_]+(/[a-z0-9_]+)+")  # of a metric, an event, a setting
FILES = sorted(PACKAGE.rglob("*.py"))


def parts(name: str) -> list[str]:
    """The words of an identifier.

    >>> parts("LoopSchedule"), parts("min_loss_T"), parts("KLTerm")
    (['loop', 'schedule'], ['min', 'loss', 't'], ['kl', 'term'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that the file names or uses by name, and of strings that are names: metrics, events, keys."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(module):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.alias):
            yield line, node.asname or node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words = NAME.fullmatch(node.value) and node.value.split("/")
            yield from ((line, name) for name in words or ())


def complaints(path: Path, module: ast.Module) -> list[str]:
    place = path.relative_to(PACKAGE)
    found = [(0, part) for part in place.with_suffix("").parts if part != "__init__"]
    wrong: dict[tuple[str, str], int] = {}
    for line, name in [*found, *identifiers(module)]:
        plain = name.replace("dry_run", "").replace("DryRun", "")  # the field's word
        words = set() if name in ALLOWED else set(parts(plain)) & INSTEAD.keys()
        for word in words if place.parts[0] in ("models", "ops") else words - DIALOGUE:
            wrong.setdefault((name, word), line)
    return [f"{place}:{line}: {name}: say {INSTEAD[word]!r}, not {word!r}" for (name, word), line in wrong.items()]


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and of strings with spaces in them."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_words_of_the_field(path: Path) -> None:
    assert complaints(path, tree(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sentences_have_no_figures_of_speech(path: Path) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {phrase.strip()!r} in {text[:90]!r}"
        for line, text in sentences(path)
        for phrase in PHRASES
        if re.search(rf"\b{re.escape(phrase.strip())}\b", text.lower())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("def mend(x): ...", "mend"), ("class Rhythm: ...", "rhythm"), ("x.news = 1", "news"), ("f(least_group=1)", "least"),
        ("from a import twin_of", "twin"), ("emit('doubts_raised')", "doubts"), ("log({'reward/slips': 1})", "slips"),
        ("climb: int = 0", "climb"), ("for told in x: pass", "told"),
    ],
)  # fmt: skip
def test_a_private_word_is_found(source: str, word: str) -> None:
    (found,) = complaints(PACKAGE / "x.py", ast.parse(source))
    assert f"not {word!r}" in found


def test_a_file_name_is_a_name() -> None:
    assert complaints(PACKAGE / "train" / "guarding.py", ast.parse("")) != []


def test_exceptions_are_used() -> None:
    used = {name for path in FILES for _, name in identifiers(tree(path))} | {path.stem for path in FILES}
    assert set(ALLOWED) - used == set(), "an exception for a name that is not there"
