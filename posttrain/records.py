"""Records in files of others: JSON objects, one a line, or a list of them in a file called .json; either may be packed by gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, require

UNPACKED, LONGEST = 4 * 2**30, 256 * 2**20  # bytes: of a packed file, of a line


def read_jsonl(file: str | Path, lists: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a file with "FILE line N"; with `lists`, those of a .json file with "FILE entry N". Blank lines are skipped; a
    file without an object is an error."""
    path, found = Path(file).expanduser(), False
    listed = lists and path.name.removesuffix(".gz").endswith(".json")
    lines = _lines(path, f"{file}")
    for where, record in _entries(lines, f"{file}") if listed else ((where, _parsed(text, where)) for where, text in lines):
        found = True
        require(isinstance(record, dict), f"{where}: expected a JSON object, not {type(record).__name__}")
        half = any("\ud800" <= c <= "\udfff" for c in json.dumps(record, ensure_ascii=False))
        require(not half, f"{where}: half a character (an escape such as \\ud83d without the other one); no tokenizer reads it")
        yield where, record
    require(found, f"{file} is empty: expected one JSON object a line")


def _lines(path: Path, file: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, one at a time and within limits: a few packed bytes may stand for a thousand times as many."""
    number, size = 0, 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            while line := lines.readline(LONGEST):
                number, size = number + 1, size + len(line)
                require(len(line) < LONGEST, f"{file} line {number} has {LONGEST / 2**20:g} MiB or more")
                require(size <= UNPACKED or path.suffix != ".gz", f"{file} is larger than {UNPACKED / 2**30:g} GiB unpacked; unpack it "
                        "yourself if you trust it")  # fmt: skip
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{file} line {number}", text
    except UnicodeDecodeError as error:
        raise UserError(f"{file} line {number}: not UTF-8 text") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def _entries(lines: Iterator[tuple[str, str]], file: str) -> Iterator[tuple[str, Any]]:
    text = "".join(line for _, line in lines)
    records = _parsed(text, file) if text else []
    require(isinstance(records, list), f"{file}: expected a list of JSON objects; one object a line goes into a .jsonl file")
    return ((f"{file} entry {number}", record) for number, record in enumerate(records, start=1))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        plain = "a number of too many digits" if isinstance(error, ValueError) else "nested too deep"
        raise UserError(f"{where}: not JSON: {error.msg if isinstance(error, json.JSONDecodeError) else plain}") from error
