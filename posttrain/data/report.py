"""What became of a data set on its way to the trainer: kept, dropped and why, and how long what is left is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from posttrain.errors import UserError, require
from posttrain.types import Example


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of examples and tokens. What is not kept was dropped for one of three reasons."""

    total: int
    kept: int
    overlong: int  # dropped for being longer than max_length
    masked: int  # dropped: no token carries loss
    empty: int  # dropped: fewer than two tokens, so nothing is predicted
    tokens: int  # of what is kept
    loss_tokens: int
    max_length: int
    percentiles: tuple[int, ...]  # length at 50, 90, 99 and 100 percent of what is kept
    unused: tuple[str, ...] = ()  # columns of the file that were not read

    def lines(self) -> list[str]:
        """Words for the console."""
        share = f"{100 * self.loss_tokens / self.tokens:.0f}%" if self.tokens else "none"
        half, ninety, ninety_nine, longest = self.percentiles
        said = [
            f"{self.kept:,} of {self.total:,} examples kept; {self.tokens:,} tokens, {self.loss_tokens:,} ({share}) carry loss",
            f"lengths: median {half}, 90% up to {ninety}, 99% up to {ninety_nine}, longest {longest} (limit {self.max_length})",
        ]
        reasons = (
            (self.overlong, f"dropped for being longer than {self.max_length} tokens"),
            (self.masked, "dropped because no token carries loss"),
            (self.empty, "dropped because they are empty"),
        )
        said += [f"columns that are not used: {', '.join(self.unused)}"] if self.unused else []
        return said + [f"{count:,} {reason}" for count, reason in reasons if count]


def prepare(examples: Iterable[Example], max_length: int) -> tuple[list[Example], DataReport]:
    """The examples that can be trained on, and what happened to the others. Examples are judged one by one, in order.

    Those longer than `max_length` are dropped: a cut demonstration teaches not to finish.
    """
    require(max_length >= 2, f"max_length must be at least 2 tokens, not {max_length}")
    kept: list[Example] = []
    counts = dict.fromkeys(("total", "overlong", "masked", "empty"), 0)
    for example in examples:
        counts["total"] += 1
        fate = _fate(example, max_length)
        if fate:
            counts[fate] += 1
        else:
            kept.append(example)
    if not kept:
        raise UserError(_nothing_left(counts, max_length))
    lengths = np.array([len(example.ids) for example in kept])
    quantiles = np.percentile(lengths, [50, 90, 99, 100], method="inverted_cdf")
    report = DataReport(
        total=counts["total"],
        kept=len(kept),
        overlong=counts["overlong"],
        masked=counts["masked"],
        empty=counts["empty"],
        tokens=int(lengths.sum()),
        loss_tokens=sum(int(example.mask.sum()) for example in kept),
        max_length=max_length,
        percentiles=tuple(int(length) for length in quantiles),
    )
    return kept, report


def _fate(example: Example, max_length: int) -> str:
    """Why an example is dropped; empty where it is kept."""
    if len(example.ids) < 2:
        return "empty"
    if len(example.ids) > max_length:
        return "overlong"
    return "" if example.mask[1:].any() else "masked"


def _nothing_left(counts: dict[str, int], max_length: int) -> str:
    if not counts["total"]:
        return "the data set is empty"
    return (
        f"no example is left to train on: of {counts['total']}, {counts['overlong']} are longer than max_length={max_length}, "
        f"{counts['masked']} have no token that carries loss, {counts['empty']} are empty"
    )
