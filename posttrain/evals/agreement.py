"""The progress of labelling, and how far annotators agree."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from posttrain.data.labels import SKIP, Labels
from posttrain.evals.statistics import Interval, share_interval


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of labelling, and the agreement of annotators."""

    items: int
    labelled: int  # items on which somebody has voted
    usable: int  # of which a preference follows
    annotators: Mapping[str, int]
    pace: float | None  # seconds a vote, in the middle
    cohen: Mapping[str, float | None]  # kappa of each two
    krippendorff: float | None  # alpha over all of them
    first_side: Interval | None  # how often what was shown first was chosen, over prompts


def report(labels: Labels) -> Report:
    """Report on the valid votes. Several votes on one prompt are one observation of the share of the first side."""
    counted = [vote for vote in labels.votes() if vote.choice != SKIP]
    said: dict[str, dict[str, str]] = {}  # annotator, item -> what
    sided: dict[str, list[bool]] = {}  # by prompt
    for vote in counted:
        category = vote.choice if isinstance(vote.choice, str) else str(vote.choice[0])
        said.setdefault(vote.annotator, {})[vote.item] = category
        if isinstance(vote.choice, list):
            first = vote.shown.index(vote.choice[0]) == 0
            sided.setdefault(str(labels.items[vote.item].prompt), []).append(first)
    even = all(len(item.responses) == 2 for item in labels.items.values())
    shares = [sum(own) / len(own) for own in sided.values()]
    pairs = combinations(sorted(said), 2)
    paces = [vote.seconds for vote in counted if vote.seconds > 0]
    return Report(
        items=len(labels.items),
        labelled=labels.labelled(),
        usable=sum(1 for _ in labels.rows()),
        annotators=dict(Counter(vote.annotator for vote in counted)),
        pace=statistics.median(paces) if paces else None,
        cohen={f"{a} and {b}": cohen_kappa(said[a], said[b]) for a, b in pairs},
        krippendorff=krippendorff_alpha(list(said.values())),
        first_side=share_interval(shares) if even and shares else None,
    )


def cohen_kappa(first: Mapping[Any, str], second: Mapping[Any, str]) -> float | None:
    """Agreement of two annotators beyond chance, (p - e) / (1 - e), on items that both labelled; None if it is undefined.

    >>> cohen_kappa({"a": "0", "b": "1", "c": "0", "d": "1"}, {"a": "0", "b": "1", "c": "1", "d": "1"})
    0.5
    """
    both = [(first[item], second[item]) for item in first if item in second]
    if not both:
        return None
    observed = sum(a == b for a, b in both) / len(both)
    ours, theirs = (Counter(side) for side in zip(*both, strict=True))
    expected = sum(ours[word] * theirs[word] for word in ours) / len(both) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(said: Sequence[Mapping[str, str]]) -> float | None:
    """Agreement of any number of annotators, 1 - D_o / D_e for categories. Items with a single annotator do not count.

    >>> krippendorff_alpha([{"a": "0", "b": "1", "c": "0"}, {"a": "0", "b": "1", "c": "1"}])
    0.4444444444444444
    """
    items: dict[str, list[str]] = {}
    for votes in said:
        for item, word in votes.items():
            items.setdefault(item, []).append(word)
    shared = [words for words in items.values() if len(words) > 1]
    total, apart = Counter(word for words in shared for word in words), 0.0
    for words in shared:
        apart += sum(a != b for a in words for b in words) / (len(words) - 1)
    chance = sum(total[a] * total[b] for a in total for b in total if a != b)
    return 1 - (sum(total.values()) - 1) * apart / chance if chance else None
