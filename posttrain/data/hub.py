"""Records of published data sets: from the hub through `datasets`, or from files in a folder of the user's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.data.records import read_jsonl
from posttrain.errors import UserError, require

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
Row = tuple[str, dict[str, Any]]  # where it is from, for messages, and what it holds


def read_split(
    task: str,
    split: str,
    data: str,
    test_data: str,
    sources: Mapping[str, tuple[str, str]],
    files: Mapping[str, Sequence[str]],
) -> list[Row]:
    """The rows of a split: from the folder `data`, or from the training file `data` and the file `test_data`, else from the hub.
    `sources` has the hub's data set and configuration of each split, `files` what its file may be called."""
    if not data:
        name, config = sources[split]
        rows = load_hub(name, config, split, "", task)
        return [(f"{name} {split} row {number}", row) for number, row in enumerate(rows)]
    path = Path(data).expanduser()
    require(path.exists(), f"{task}: there is no folder or file {data}")
    file = find_file(data, files[split], task) if path.is_dir() else data
    both = path.is_dir() or bool(test_data)
    require(both, f"{task}: give test_data, the held-out file, with data")
    return list(read_jsonl(test_data if test_data and split == "test" else file, lists=True))


def find_file(folder: str, stems: Sequence[str], task: str) -> str:
    """The first file in `folder` that is called one of `stems`, with any of the known endings."""
    names = [f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
    for name in names:
        if Path(folder, name).expanduser().is_file():
            return str(Path(folder, name))
    tried = ", ".join(names[:4])
    hint = "name the files with data and test_data"
    raise UserError(f"{task}: {folder} holds none of {tried}, ...; {hint}")


@lru_cache(maxsize=8)
def load_hub(
    dataset: str, config: str, split: str, revision: str, task: str
) -> tuple[dict[str, Any], ...]:
    """The records of a data set's split through `datasets`: from the hub, its cache, a local folder, or what `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        hint = "" if task == "hub" else "; or name a folder that holds the files: task.data=FOLDER"
        needs = f"reading {dataset} needs the package datasets: pip install 'posttrain[data]'"
        raise UserError(f"{task}: {needs}{hint}") from None
    place = Path(dataset).expanduser()
    # a bare name may be that of a builder (text, json, csv, ...), which would read all such files of the working directory
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", dataset) is not None
    require(
        named or place.is_dir(),
        f"{task}: {dataset!r} is no folder here; a data set of the hub is called org/name, such as openai/gsm8k",
    )
    try:
        if (place / "dataset_dict.json").is_file() or (place / "state.json").is_file():
            whole: Any = datasets.load_from_disk(str(place))
        else:
            path = str(place) if place.is_dir() else dataset
            whole = datasets.load_dataset(path, config or None, revision=revision or None)
    except Exception as error:  # the network, a hub's answer, files of others: none of them ours
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"{task}: cannot load {dataset}: {reason}") from error
    if not hasattr(whole, "keys"):
        whole = {"train": whole}
        hint = "no splits; leave test_split empty to hold out a share of it"
    else:
        hint = f"no split {split!r}; it has {', '.join(whole)}"
    require(split in whole, f"{task}: {dataset} has {hint}")
    return tuple(dict(row) for row in whole[split])
