"""Records in files of others: JSON objects, one a line, or a list of them in a file called .json; either may be packed by gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, require

UNPACKED = 4 * 2**30  # bytes


def read_jsonl(file: str | Path, lists: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a file with "FILE line N"; with `lists`, those of a .json file with "FILE entry N". Blank lines are skipped; a
    file without an object is an error."""
    path = Path(file).expanduser()
    try:
        data = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].count(b"\n")
        raise UserError(f"{file} line {before + 1}: not UTF-8 text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    found, escaped = False, "\\u" in text
    listed = lists and path.name.removesuffix(".gz").endswith(".json")
    for where, record in _entries(text, f"{file}") if listed else _lines(text, f"{file}"):
        found = True
        require(isinstance(record, dict), f"{where}: expected a JSON object, not {type(record).__name__}")
        half = escaped and any("\ud800" <= c <= "\udfff" for c in json.dumps(record, ensure_ascii=False))
        require(not half, f"{where}: half a character (an escape such as \\ud83d without the other one); no tokenizer reads it")
        yield where, record
    require(found, f"{file} is empty: expected one JSON object a line")


def _unpacked(path: Path) -> bytes:
    """What a gzip file holds, within limits: a few bytes may stand for a thousand times as many."""
    with gzip.open(path) as file:
        data = file.read(UNPACKED + 1)
    require(
        len(data) <= UNPACKED, f"{path} is larger than {UNPACKED / 2**30:g} GiB unpacked; unpack it yourself if you trust it"
    )
    return data


def _lines(text: str, file: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file} line {number}", _parsed(line, f"{file} line {number}")


def _entries(text: str, file: str) -> Iterator[tuple[str, Any]]:
    records = _parsed(text, file)
    require(isinstance(records, list), f"{file}: expected a list of JSON objects; one object a line goes into a .jsonl file")
    return ((f"{file} entry {number}", record) for number, record in enumerate(records, start=1))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        plain = "a number of too many digits" if isinstance(error, ValueError) else "nested too deep"
        raise UserError(f"{where}: not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else plain}") from error
