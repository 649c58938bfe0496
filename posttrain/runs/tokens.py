"""The tokens of a saved rollout: each as text, with its recorded values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.runs.layout import rollout_file, sampled_tokens
from posttrain.runs.read import Run
from posttrain.system.files import read_text
from posttrain.types import JSON

TOKENS = 20_000  # tokens of one rollout that are shown one by one


def rollout_tokens(
    run: Run, stage: str, step: int, number: int, length: int, count: int
) -> dict[str, Any] | None:
    """Return text and values of each token of rollout `number`, of the `count` that the step wrote; its last `length` tokens
    were sampled. None if the step's arrays were not kept."""
    arrays = run.arrays(stage, step)
    if arrays is None or arrays.sequences != count:
        return None
    held = arrays.sequence(number)
    ids = held["ids"][:TOKENS].tolist()
    if not ids:
        return None
    figures = {
        name: [_round(v) for v in array[:TOKENS].tolist()]
        for name, array in held.items()
        if name not in ("ids", "sampled")
    }
    figures["sampled"] = sampled_tokens(held, length)[:TOKENS].tolist()
    return {"text": spell(run.directory, stage, ids), "figures": figures}


def _round(value: Any) -> JSON:
    if not isinstance(value, float):
        return value
    return round(value, 5) if np.isfinite(value) else None


def spell(directory: Path, stage: str, ids: Sequence[int]) -> list[str]:
    """Return each token as text, by the tokenizer of the stage's rollouts or of one of the run's models."""
    files = [
        rollout_file(directory, stage, 0).with_name("tokenizer.json"),
        directory / "export" / "tokenizer.json",
        *sorted(directory.glob("stages/*/model/tokenizer.json")),
    ]
    file = next((f for f in files if f.is_file() and not f.is_symlink()), None)
    if file is None:
        return [f"[{n}]" for n in ids]
    tokenizer = _tokenizer(file, file.stat().st_mtime_ns)
    return [str(tokenizer.decode([n], skip_special_tokens=False)) for n in ids]


@lru_cache(maxsize=4)
def _tokenizer(file: Path, changed: int) -> Any:
    from tokenizers import Tokenizer

    # its own reader refuses a path that is not UTF-8
    return Tokenizer.from_str(read_text(file))
