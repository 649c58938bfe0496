"""The lineage of a stage's result: its settings and the content of its inputs. A stage runs again only if these changed.

Inputs are found, not declared. They are every string in a stage's settings that names an earlier stage, a file, or a directory (with
a slash in its name, or in a field for paths), and the files of a user's own classes and functions. They are compared by content: if a
stage runs again with the same outcome, later stages are unchanged.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
from abc import ABC
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path

from posttrain import catalogue
from posttrain.algorithms.base import Algorithm
from posttrain.errors import require
from posttrain.models import given
from posttrain.rewards import _functions as functions
from posttrain.runs.layout import dump_line
from posttrain.runs.resume_policy import HARMLESS, MEASURED, WHOLE, flatten, short
from posttrain.system.files import model_folder, read_json
from posttrain.trust import PREFIX, code_place
from posttrain.types import JSON

# settings of how the work is done, which do not change its outcome; "name" here is that of the run, and `evaluate_units` does change
# a stage's result
NEUTRAL = HARMLESS - {"name", "evaluate_units"}
RECORD, RESULT = "lineage.json", "result.json"
OWN = ("name", "cache")
# fields of a result that may differ without a new run
CLOCKS = ("seconds", "train_seconds", "lineage", "best_score")
# fields that name models: models are read as tensors and settings, and their content is not sent anywhere
_JUDGES = ("critic", "reward_model", "reward_models", "judge", "process", "outcome")
MODELS = ("model", "models", "against", "reference", "teacher", "trained", *_JUDGES)
# fields that name a file, a directory, or a stage of the run
_FILES = ("file", "test_file", "dataset", "rubric", "problems", "before", "again")
PLACES = (*MODELS, *_FILES, "data", "test_data", "held_out_data")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Settings by dotted key, and the sha256 of every input by its name."""

    config: Mapping[str, JSON]
    inputs: Mapping[str, str]

    def hashes(self) -> dict[str, JSON]:
        """The hashes that a summary stores."""
        inputs = {"inputs": dict(self.inputs), "inputs_sha256": digest(self.inputs)}
        return {"config_sha256": digest(self.config), **inputs}

    def changes(self, before: Lineage, config: bool = True) -> list[str]:
        """The differences from `before`. A setting that the version of posttrain that wrote `before` did not have is not a
        difference, and neither is a file that it did not look at: if a new one is named, a setting differs."""
        found = []
        for key, was in before.config.items() if config else ():
            if key not in self.config or self.config[key] != was:
                now = self.config.get(key, "other settings")
                found.append(f"{key}: {short(was)} -> {short(now)}")
        for name, was in before.inputs.items():
            if self.inputs.get(name) != was:
                file = Path(name.removesuffix(" (code)"))
                there = PREFIX in name or not file.suffix or file.is_absolute() or file.exists()
                lost = "is gone" if there else f"is not in {Path.cwd()}"
                what = "has changed" if name in self.inputs else lost
                found.append(f"its input {name} {what}")
        return found


def read(folder: Path) -> Lineage | None:
    """The lineage that a stage began with; None if an older version of posttrain did not write it."""
    path = folder / RECORD
    if not path.is_file():
        return None
    tree = read_json(path)
    config, inputs = (tree.get(key) for key in ("config", "inputs"))
    whole = isinstance(config, dict) and isinstance(inputs, dict)
    require(whole, f"{path} is damaged: no settings and inputs in it")
    return Lineage(_whole(config), inputs)  # type: ignore[arg-type]


def reopen(folder: Path) -> None:
    """Remove a stage's result, to train it further from its newest checkpoint. The result is removed first. Its lineage stays, so
    that changed inputs are refused."""
    (folder / RESULT).unlink(missing_ok=True)
    for path in folder.glob("*"):
        if path.name != RECORD:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _whole(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Settings with options as one value, and functions without their line numbers, as older versions of posttrain stored them."""
    kept: dict[str, JSON] = {}
    for key, value in config.items():
        head, inside, rest = f".{key}".partition(f".{WHOLE}.")
        if not inside:
            kept[key] = functions.without_places(value) if isinstance(value, str) else value
            continue
        place = kept.setdefault(f"{head}.{WHOLE}"[1:], {})
        *above, last = rest.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return kept


def trace(stage: object, seed: int, folders: Mapping[str, Path]) -> Lineage:
    """The current lineage of a stage. `folders` are those of the stages before it."""
    config = flatten({"seed": seed, "stage": Path(catalogue.name_of(stage)).name, **_plain(stage)})
    inputs = {
        name: content(folders[name])
        for name in references(stage, folders)
        if (folders[name] / RESULT).is_file()
    }
    for field, word in dict.fromkeys(_words(stage)):
        if word not in folders and (path := place(word, field)) is not None:
            path = model_folder(path) if field in MODELS else path
            inputs[word] = sha256(path) if path.is_file() else content(path)
        if field in MODELS and word.startswith(PREFIX):
            inputs[word] = given.content(word)
        if (own := functions.code_of(word)) is not None:
            inputs[f"{functions.without_places(word)} (code)"] = digest({"code": own})
    for kind in dict.fromkeys(type(value) for _, value in inside(stage) if is_dataclass(value)):
        if (name := catalogue.name_of(kind)).startswith(PREFIX):
            inputs[f"{name} (code)"] = digest({"code": functions.class_code(kind)})
    code = _code(stage)
    alike = Counter(path.name for path in code)
    for path in code:
        inputs[f"{path.name if alike[path.name] == 1 else path} (code)"] = sha256(path)
    return Lineage(json.loads(dump_line(config)), inputs)


def place(word: str, field: str) -> Path | None:
    """The file or directory that a setting names. Most words are not paths, even if a file has that name: a word without a slash
    must have an extension or be in a field for paths."""
    try:
        path = Path(word).expanduser()
        if path.name in ("", ".."):  # "." and "/" are not paths to hash
            return None
        named = os.sep in word or field in PLACES
        there = (path.is_file() and (named or path.suffix)) or (path.is_dir() and named)
        return path if there else None
    # it does not exist, cannot be read, or is no path: too long, or with a null character
    except (OSError, ValueError, RuntimeError):
        return None


def references(stage: object, names: Collection[str]) -> list[str]:
    """The stages that a stage refers to."""
    return [word for word in dict.fromkeys(word for _, word in _words(stage)) if word in names]


def digest(tree: Mapping[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def content(folder: Path, result: Mapping[str, JSON] | None = None) -> str:
    """A hash of the files of a folder, and of a stage's result without its times; `result` if it is not written yet."""
    tree: dict[str, JSON] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".tmp")):
        name = path.relative_to(folder).as_posix()
        if name == RESULT:
            result = read_json(path)
        elif name != RECORD:
            tree[name] = sha256(path)
    if result is not None:
        tree[RESULT] = {key: value for key, value in result.items() if key not in CLOCKS}
    return digest(tree)


def sha256(path: Path) -> str:
    about = path.stat()
    return _sha256(str(path), about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(path: str, size: int, modified: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _plain(value: object) -> JSON:
    """Settings as plain data, without those that only affect how the work is done. Classes are distinguished by name."""
    if is_dataclass(value) and not isinstance(value, type):
        plateau = getattr(getattr(value, "stop", None), "plateau", 0)
        decides = plateau or getattr(value, "keep", "") == "best"
        neutral = NEUTRAL - MEASURED if decides else NEUTRAL
        names = [f.name for f in fields(value) if f.init and f.name not in neutral]
        tree = {name: _plain(getattr(value, name)) for name in names}
        shipped = type(value).__module__.startswith("posttrain.")
        named = isinstance(value, Algorithm | ABC) or not shipped
        return {"kind": Path(catalogue.name_of(value)).name, **tree} if named else tree
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return functions.without_places(value) if isinstance(value, str) else value


def inside(value: object, field: str = "") -> Iterator[tuple[str, object]]:
    """A value and everything inside it, each with its field, except the stage's own name, and caches, which the work itself fills."""
    yield field, value
    if is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            if f.init and f.name not in OWN:
                yield from inside(getattr(value, f.name), f.name)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in OWN:
                yield from inside(inner, str(key))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from inside(inner, field)


def _words(stage: object) -> Iterator[tuple[str, str]]:
    """Every text in a stage's settings, with its field."""
    return ((field, value) for field, value in inside(stage) if isinstance(value, str) and value)


def _code(stage: object) -> list[Path]:
    """The files of a user's own classes, and of functions that are named FILE.py:FUNCTION, with the neighbours that they import."""
    names = [catalogue.name_of(value) for _, value in inside(stage) if is_dataclass(value)]
    places = map(code_place, [*names, *(word for _, word in _words(stage))])
    files = [found[0] for found in places if found is not None and found[0].is_file()]
    return list(dict.fromkeys(near for path in files for near in _with_imports(path)))


def _with_imports(file: Path) -> list[Path]:
    """A file, and those in its folder and below that it imports, directly or not. posttrain itself, which may be there, is not
    among them: a run may go on with another version."""
    files = [file]
    for path in files:  # which grows
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):  # is reported where it is run
            continue
        for node in nodes:
            folder, names = file.parent, list[str]()
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom):
                folder = path.parents[: node.level][-1] if node.level else folder
                above = f"{node.module}." if node.module else ""
                names = [f"{above}{one.name}" for one in node.names]
            for parts in (name.split(".") for name in names):
                if parts[0] == "posttrain":
                    continue
                for near in (folder.joinpath(*parts[: n + 1]) for n in range(len(parts))):
                    found = (near.with_suffix(".py"), near / "__init__.py")
                    files += [one for one in found if one.is_file() and one not in files]
    return files
