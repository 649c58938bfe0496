"""What became of a data set on its way to the trainer: kept, dropped and why, and how long what is left is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from posttrain.errors import require
from posttrain.types import Example


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of examples and tokens, and of what was dropped for which reason."""

    total: int
    kept: int
    dropped: Mapping[
        str, int
    ]  # overlong, masked (no token carries loss), empty (nothing is predicted)
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
        reasons = {
            "overlong": f"for being longer than {self.max_length} tokens",
            "masked": "because no token carries loss",
            "empty": "because they are empty",
        }
        counted = ((self.dropped[name], reason) for name, reason in reasons.items())
        said += [f"columns that are not used: {', '.join(self.unused)}"] if self.unused else []
        return said + [f"{count:,} dropped {reason}" for count, reason in counted if count]


def prepare(examples: Iterable[Example], max_length: int) -> tuple[list[Example], DataReport]:
    """The examples that can be trained on, and what happened to the others. Examples are judged one by one, in order.

    Those longer than `max_length` are dropped: a cut demonstration teaches not to finish.
    """
    require(max_length >= 2, f"max_length must be at least 2 tokens, not {max_length}")
    kept: list[Example] = []
    dropped = dict.fromkeys(("overlong", "masked", "empty"), 0)
    for example in examples:
        if fate := _fate(example, max_length):
            dropped[fate] += 1
        else:
            kept.append(example)
    total = len(kept) + sum(dropped.values())
    require(total > 0, "the data set is empty")
    require(
        bool(kept),
        f"no example is left to train on: of {total}, {dropped['overlong']} are longer than max_length={max_length}, "
        f"{dropped['masked']} have no token that carries loss, {dropped['empty']} are empty",
    )
    lengths = np.array([len(example.ids) for example in kept])
    tokens, loss = int(lengths.sum()), sum(int(example.mask.sum()) for example in kept)
    quantiles = np.percentile(lengths, [50, 90, 99, 100], method="inverted_cdf")
    percentiles = tuple(int(length) for length in quantiles)
    return kept, DataReport(total, len(kept), dropped, tokens, loss, max_length, percentiles)


def _fate(example: Example, max_length: int) -> str:
    """Why an example is dropped; empty where it is kept."""
    if len(example.ids) < 2:
        return "empty"
    if len(example.ids) > max_length:
        return "overlong"
    return "" if example.mask[1:].any() else "masked"
