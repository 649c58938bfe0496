"""Rollouts that a notebook shows as HTML and a terminal as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, SupportsIndex, overload

from posttrain.events import printable
from posttrain.runs import html, read
from posttrain.runs.tokens import rollout_tokens

TEXT_ROWS, TEXT_WIDTH = 10, 60  # of the text in a terminal


class Rollout(dict[str, Any]):
    """A response with its reward: a dict. A notebook shows its tokens, coloured by advantage, log-prob and KL."""

    def __init__(self, row: dict[str, Any], tokens: Callable[[], dict[str, Any] | None]) -> None:
        super().__init__(row)
        self._tokens = tokens

    def tokens(self) -> dict[str, Any] | None:
        """`text` and `figures` of each token, or None if they were not kept: the last steps and every 50th have them."""
        return self._tokens()

    def _repr_html_(self) -> str:
        return html.rollout_html(self, self.tokens())


class Rollouts(list[dict[str, Any]]):
    """The rollouts of a step: a list of dicts, which a notebook shows as a table."""

    def __init__(self, rows: Iterable[dict[str, Any]], title: str) -> None:
        super().__init__(rows)
        self.title = title

    @overload
    def __getitem__(self, place: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Rollouts: ...
    def __getitem__(self, place: SupportsIndex | slice) -> dict[str, Any] | Rollouts:
        if isinstance(place, slice):
            return Rollouts(super().__getitem__(place), self.title)
        return super().__getitem__(place)

    def __repr__(self) -> str:
        """One line for each of the first rollouts."""
        lines = [f"{len(self)} {self.title}"]
        for row in self[:TEXT_ROWS]:
            question, response, paid, advantage = html.cells_of(row)
            said = printable(f"{question} -> {response}"[:TEXT_WIDTH])
            lines.append(f"  {paid:>6} {advantage:>6}  {said}")
        more = len(self) - TEXT_ROWS
        return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        return html.rollouts_html(self, f"{len(self)} {self.title}")


def rollouts(run: read.Run, stage: str, step: int) -> Rollouts:
    """The rollouts of a step, if the run directory has them."""
    rows = run.rollouts(stage, step)
    tokens = partial(rollout_tokens, run, stage, step)
    kept = [partial(tokens, n, row.length, len(rows)) for n, row in enumerate(rows)]
    found = [Rollout(asdict(row), own) for row, own in zip(rows, kept, strict=True)]
    return Rollouts(found, f"rollouts of {stage} step {step}")
