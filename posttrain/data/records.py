"""Reads records from files: JSON objects, one per line, or a list of them in a .json file; rows of .csv, .tsv and .parquet. All but
the last may be gzipped. Published data sets come from the hub through `datasets`, or from files in a folder."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line, optional, require
from posttrain.types import JSON, Message

ROLES = ("system", "user", "assistant", "tool")
Tools = list[dict[str, JSON]] | None  # tools that a conversation may call, as JSON schemas
KINDS = "one JSON object a line, a list of them in a .json file, or .csv, .tsv, .parquet"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
Row = tuple[str, dict[str, Any]]  # (origin, for messages; contents)
Columns = Mapping[str, str]  # our name of a column -> the file's
MAX_UNPACKED, MAX_LINE = 4 * 2**30, 256 * 2**20  # bytes: of a packed file, of a line
UNPACK = "unpack it yourself if you trust it"
TABLE_ROWS = 16  # rows of a compressed table that are read at a time


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of a key that is there twice, Python would keep the last value without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise UserError(f"the key {twice!r} is there twice; remove or rename one")
    return made


def _refuse_constant(name: str) -> None:
    """Python reads NaN and Infinity, which are no JSON: as an answer, nothing would be equal to them."""
    raise UserError(f"{name} is not JSON; write null for a missing value")


# made once: functions of `json` with arguments make them anew at each call
_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


def check_whole(text: str, where: str) -> None:
    """Raise an error for text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "half a character (an escape such as \\ud83d without the other one)"
        raise UserError(f"{where}: {what}; no tokenizer reads it") from None


def read_jsonl(file: str | Path, lists: bool = False) -> Iterator[Row]:
    """Each object of a file with "FILE line N"; with `lists`, those of a .json file with "FILE entry N". Blank lines are skipped; a
    file without objects is an error."""
    found, size, packed = False, 0, str(file).endswith((".gz", ".parquet"))
    for where, record in _records(Path(file).expanduser(), f"{file}", lists):
        if isinstance(record, dict) and record and not any(v is not None for v in record.values()):
            continue  # an empty row of a table
        found, kind = True, type(record).__name__
        talk = '; a conversation is {"messages": [...]}' if isinstance(record, list) else ""
        require(isinstance(record, dict), f"{where}: expected a JSON object, not {kind}{talk}")
        spelled = _encode(record)
        size += len(spelled)
        large = f"{file} is larger than {MAX_UNPACKED / 2**30:g} GiB unpacked"
        require(not packed or size <= MAX_UNPACKED, f"{large}; {UNPACK}")
        check_whole(spelled, where)
        yield where, record
    require(found, f"{file} is empty: expected one JSON object a line")


def _records(path: Path, file: str, lists: bool) -> Iterator[tuple[str, Any]]:
    """The objects of a file, by its ending."""
    kind = Path(path.name.removesuffix(".gz")).suffix.lower()
    if kind == ".parquet":
        return _parquet(path, file)
    if kind in (".csv", ".tsv"):
        return _table(path, file, "," if kind == ".csv" else "\t")
    sheet = kind in (".xlsx", ".xls", ".ods")
    require(not sheet, f"cannot read {file}, a spreadsheet; save it as CSV, in UTF-8")
    lines = _lines(path, file)
    first = next(lines, None)
    whole = chain([] if first is None else [first], lines)
    if kind == ".json" and (lists or (first is not None and first[1].lstrip().startswith("["))):
        return _entries(whole, file)
    return ((where, _parsed(text, where)) for where, text in whole)


def _table(path: Path, file: str, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Rows of text under the names in the first line. Rows without any text, as spreadsheets leave them behind, are skipped."""
    lines = (text for _, text in _lines(path, file, blank=True))
    csv.field_size_limit(2**31 - 1)  # of all of Python; a long text is no mistake
    first = next(lines, "")
    plain = re.sub(r'"[^"]*"', "", first)  # without quoted names
    if delimiter == ",":  # spreadsheets also write ; where a comma is decimal, and tabs
        delimiter = max(",;\t", key=plain.count)
    reader = csv.DictReader(chain([first], lines), delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames or ()
        # columns without a name, as spreadsheets leave them behind, are ignored
        twice = next((name for name, count in Counter(names).items() if count > 1 and name), "")
        require(not twice, f"{file} line 1: the column {twice!r} is there twice; rename one")
        for row in filter(lambda row: any(row.values()), reader):
            where = f"{file} line {reader.line_num}"
            whole = None not in row and None not in row.values()
            require(whole, f"{where}: expected {len(names)} cells, as in the first line")
            yield where, row
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: not CSV: {error}") from error


def _parquet(path: Path, file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    pyarrow = optional("pyarrow", f"{file}: to read parquet, pip install 'posttrain[data]'")
    from pyarrow import parquet  # type: ignore[import-untyped]

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=TABLE_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def header_hint(where: str) -> str:
    """For an error about the columns of a table's row: its first line named them.

    >>> header_hint("a.csv line 2"), header_hint("a.jsonl line 2")
    ('; the first line was read as names of columns: if it is a row, put a line of names above it', '')
    """
    hint = "; the first line was read as names of columns: if it is a row, put a line of names above it"
    return hint if re.search(r"\.[ct]sv(\.gz)? line \d+$", where, re.IGNORECASE) else ""


def read_rows(file: str | Path, columns: Columns | None = None) -> Iterator[Row]:
    """`read_jsonl` without null fields, because tables fill missing values with null. With columns = {"prompt": "question"}, the
    column question is read as prompt."""
    names = {theirs: ours for ours, theirs in (columns or {}).items()}
    for where, record in read_jsonl(file):
        for theirs, ours in names.items():
            both = theirs != ours and theirs in record and record.get(ours) is not None
            said = f"{where}: the column {theirs} is to be read as {ours}, which is there too"
            require(not both, f"{said}; rename one of them")
        kept = {names.get(key, key): value for key, value in record.items() if value is not None}
        yield where, kept


def _lines(path: Path, file: str, blank: bool = False) -> Iterator[tuple[str, str]]:
    """Lines that are not blank (with `blank`, all), one at a time and within limits, because a few compressed bytes may expand a
    thousandfold."""
    number, size = 0, 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            while line := lines.readline(MAX_LINE):
                number, size = number + 1, size + len(line)
                long = f"{file} line {number} has {MAX_LINE / 2**20:g} MiB or more"
                require(len(line) < MAX_LINE, long)
                large = f"{file} is larger than {MAX_UNPACKED / 2**30:g} GiB unpacked"
                require(size <= MAX_UNPACKED or path.suffix != ".gz", f"{large}; {UNPACK}")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if blank or text.strip():
                    yield f"{file} line {number}", text
    except UnicodeDecodeError as error:
        raise UserError(f"{file} line {number}: not UTF-8 text; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "; name a file in it" if path.is_dir() else ""
        raise UserError(f"cannot read {file}: {reason}{hint}") from error


def _entries(lines: Iterable[tuple[str, str]], file: str) -> Iterator[tuple[str, Any]]:
    parts, size = [], 0
    for _, line in lines:
        parts.append(line)
        size += len(line)
        large = f"{file} has over {MAX_LINE / 2**20:g} MiB, which is much for one list"
        require(size <= MAX_LINE, f"{large}; write one object a line, as .jsonl")
    text = "".join(parts)
    records = _parsed(text, file) if text else []
    expected = "expected a list of JSON objects; one object a line goes into a .jsonl file"
    require(isinstance(records, list), f"{file}: {expected}")
    return ((f"{file} entry {number}", record) for number, record in enumerate(records, start=1))


def _parsed(text: str, where: str) -> Any:
    try:
        return _decode(text)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        first = where.endswith(" line 1")  # the file may be no JSONL at all
        hint = f"; rows are {KINDS}" if first else ""
        raise UserError(f"{where}: not JSON: {error.msg}{hint}") from error
    except ValueError as error:
        raise UserError(f"{where}: not JSON: a number of too many digits") from error
    except RecursionError as error:
        raise UserError(f"{where}: not JSON: nested too deep") from error


def parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Parse and check a conversation as files write it. All fields of a message are kept, except null and empty ones."""
    or_text = "" if where.endswith("messages") else ", or text"
    found = "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:40]!r}"
    found += "; write numbers as text" if isinstance(value, int | float) else ""
    fine = isinstance(value, list) and len(value) > 0
    require(fine, f"{where}: expected a list of messages{or_text}, not {found}")
    messages = []
    for number, item in enumerate(value):
        at = f"{where}: message {number}"
        require(isinstance(item, dict), f"{at} is not an object")
        item = present(item)
        role, content = item.get("role"), item.get("content")
        known = f"expected one of {', '.join(ROLES)}"
        if {"from", "value"} <= item.keys():
            known = "turns with from and value are read in the column conversations of sft rows"
        require(role in ROLES, f"{at} has role {role!r}; {known}")
        more = more_of(item)
        if "tool_calls" in more:
            more["tool_calls"] = _parse_calls(more["tool_calls"], at)
        if content is None and more.keys() & {"tool_calls", "function_call"}:
            content = ""  # a turn that only calls
        parts: list[Any] = content if isinstance(content, list) else [None]
        if all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in parts):
            content = "".join(str(part["text"]) for part in parts)
        require(isinstance(content, str), f"{at} has no content that is a string or parts of text")
        messages.append(Message(str(role), str(content), more))
    return tuple(messages)


def present(value: Any) -> Any:
    """A value without the null fields of its objects: tables (parquet, `datasets`) give all objects of a column the fields of all."""
    if isinstance(value, list):
        return [present(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: present(item) for key, item in value.items() if item is not None}


def more_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message besides role and content, without null and empty ones."""
    rest = {key: v for key, v in message.items() if key not in ("role", "content")}
    return {key: v for key, v in rest.items() if v not in (None, "", [], {})}


def _parse_calls(value: Any, where: str) -> list[dict[str, JSON]]:
    """Tool calls with their arguments as an object: templates would encode a JSON text a second time, in quotes."""
    calls = []
    for call in _objects(value, f"{where}: tool_calls"):
        inner = call.get("function", call)
        named = isinstance(inner, dict) and isinstance(inner.get("name"), str)
        require(named, f"{where}: a tool call has no function with a name")
        arguments, at = inner.get("arguments") or {}, f"{where}: the arguments of {inner['name']}"
        if isinstance(arguments, str):
            arguments = _parsed(arguments, at)
        require(isinstance(arguments, dict), f"{at} are not an object")
        changed = {**inner, "arguments": arguments}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return calls


def parse_tools(value: Any, where: str) -> Tools:
    """Parse the column `tools`: a list of schemas, or the same as JSON text."""
    return _objects(value, f"{where}: tools") if value not in (None, "", []) else None


def _objects(value: Any, where: str) -> list[dict[str, JSON]]:
    found = _parsed(value, where) if isinstance(value, str) else present(value)
    fine = isinstance(found, list) and all(isinstance(item, dict) for item in found)
    require(fine, f"{where}: expected a list of objects")
    return list(found)


def read_set(
    task: str, data: str, files: Sequence[str], dataset: str, config: str = "", split: str = "train"
) -> list[Row]:
    """The rows of the file `data`, or of the file in the folder `data` with one of the names in `files`; else those of a split of
    the hub's `dataset`."""
    if not data:
        advice = "; or name a folder that holds the files: task.data=FOLDER"
        rows = load_hub(dataset, config, split, "", task, advice)
        return [(f"{dataset} {split} row {number}", row) for number, row in enumerate(rows)]
    path = Path(data).expanduser()
    require(path.exists(), f"{task}: there is no folder or file {data}")
    return list(read_jsonl(find_file(data, files, task) if path.is_dir() else data, lists=True))


def find_file(folder: str, stems: Sequence[str], task: str) -> str:
    """The first file in `folder` with one of the names `stems` and any known extension."""
    names = [f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
    for name in names:
        if Path(folder, name).expanduser().is_file():
            return str(Path(folder, name))
    tried = ", ".join(names[:4])
    hint = "name the files with data and test_data"
    raise UserError(f"{task}: {folder} holds none of {tried}, ...; {hint}")


@lru_cache(maxsize=8)
def load_hub(
    dataset: str, config: str, split: str, revision: str, task: str, advice: str = ""
) -> tuple[dict[str, Any], ...]:
    """The records of a data set's split through `datasets`: from the hub, its cache, a local folder, or a folder written by
    `save_to_disk`. `advice` ends the line that says why it cannot be read."""
    needs = f"reading {dataset} needs the package datasets: pip install 'posttrain[data]'"
    datasets = optional("datasets", f"{task}: {needs}{advice}")
    place = Path(dataset).expanduser()
    # a bare name may be that of a builder (text, json, csv, ...), which would read all such files of the working directory
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) is not None
    called = "a data set of the hub is called org/name, such as openai/gsm8k"
    require(named or place.is_dir(), f"{task}: {dataset!r} is no folder here; {called}")
    try:
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            whole: Any = datasets.load_from_disk(str(place))
        else:
            path = str(place) if place.is_dir() else dataset
            whole = datasets.load_dataset(path, config or None, revision=revision or None)
    except Exception as error:  # the network, a hub's answer, files of others: none of them ours
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{task}: cannot load {dataset}: {reason}{advice}") from error
    if not hasattr(whole, "keys"):
        whole = {"train": whole}
        hint = "no splits; leave test_split empty to hold out a share of it"
    else:
        hint = f"no split {split!r}; it has {', '.join(whole)}"
    require(split in whole, f"{task}: {dataset} has {hint}")
    return tuple(dict(row) for row in whole[split])
