"""Samples of one prompt, prefilled once."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.types import Sampling


@dataclass(frozen=True, slots=True)
class Work:
    """Rows that share a prompt and its sampling; each draws with a seed of its own."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling

    @property
    def group(self) -> int:
        return len(self.seeds)
