"""The tokens of a saved rollout: each as text, with the figures that were written down of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.runs.layout import sampled_tokens
from posttrain.runs.read import Run
from posttrain.types import JSON

TOKENS = 20_000  # of one rollout that are shown one by one


def rollout_tokens(
    run: Run, stage: str, step: int, number: int, length: int, count: int
) -> dict[str, Any] | None:
    """Text and figures of each token of rollout `number` of a step that wrote `count` of them, the last `length` tokens sampled. None
    where the step's arrays were not kept."""
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
    return {"text": _spell(run.directory, ids), "figures": figures}


def _round(value: Any) -> JSON:
    if not isinstance(value, float):
        return value
    return round(value, 5) if np.isfinite(value) else None


def _spell(directory: Path, ids: Sequence[int]) -> list[str]:
    """Each token as text, by the tokenizer of one of the run's models."""
    files = [
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

    return Tokenizer.from_file(str(file))
