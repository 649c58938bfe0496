"""Measurements of a step's rollouts for the rules, in addition to the usual metrics.

Traits of responses that the reward pays for, and what they do to the gold, measured on the rollouts of a few steps.

Price's equation: under selection by a reward r the mean of a trait f of the responses moves as Cov(f, r), and the gold moves with it as
Cov(f, g). A trait that is paid and does harm, Cov(f, r) > 0 > Cov(f, g), is how a reward is gamed, and both signs can be seen while
the gold still rises. Within groups (or within the step, where a prompt has one response), x~ = x - mean(x), over the last steps:

    z_r = sum f~ r~ / sqrt(sum (f~ r~)^2),    z_g = sum f~ g~ / sqrt(sum (f~ g~)^2),    moved = (mean f now - at first) / standard error

Where reward and gold all but agree within groups (a correlation above AGREE), as with a small reward for the form of an answer,
nothing is gamed. Traits are length, repetition, format, the spread of reward models, and every word (its presence, less what length
explains of it).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.monitor.series import START
from posttrain.runs.metrics import GOLD_PARTS
from posttrain.types import Group, Rollout

MIN_LENGTH = 16  # tokens; shorter responses do not count in the mean repetition
HEAD = 64  # tokens of a response in which distinct 2-grams are counted, so that length alone does not move the figure
COMMON = 0.2  # share of responses with a word
LARGEST = 1e6  # a larger reward would outweigh every other one
MIN_SQUARE = 1e-12  # sums of squared differences below this are rounding
WINDOW = 10  # steps that are added up
PAID, SURE, HARM, HARM_LENGTH = 4.0, 5.0, 3.5, 3.0  # standard errors
REWARD = "reward"
AGREE = 0.9  # synthetic hacks lie below, control runs with a reward for form above
FAR = 0.15  # a share of what a trait was in the first steps
# lengths that few had at first: what is good at one length need not be at twice that
TAIL, SHORT, LONG = 0.1, "short", "long"
TAIL_PAID = 1.0  # standard errors by which the reward is for such lengths: one that is against them games nothing
RARE = 0.02  # a word is measured where more than this share of responses have it, and more lack it
MAX_WORDS = 60  # how many words are measured in a step
WORD = 3  # letters, at least
# every byte but the letters as a space
LETTERS = bytes(b if chr(b).isalpha() and b < 128 else 32 for b in range(256))
MULTIPLIERS = 2_654_435_761 * np.array([1_000_003, 10_000_019, 100_000_007, 1_000_000_007])


def rollout_figures(groups: Sequence[Group]) -> dict[str, float]:
    """The spread of rewards, the share of groups with equal rewards, repetition within responses, and distinct 2-grams over all
    responses."""
    figures: dict[str, float] = {}
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [value for g in groups for value in g.rewards]
    if len(rewards) > 1:
        figures["reward_spread"] = float(np.std(rewards))
    compared = [g.rewards for g in groups if len(g.rollouts) > 1]
    if compared:
        equal = sum(not r or max(r) == min(r) for r in compared)
        figures["groups/zero_variance"] = equal / len(compared)
    long_N = np.array([r.length >= MIN_LENGTH for r in rollouts], dtype=bool)
    if long_N.any():
        figures["repetition"] = float(np.mean(repetition(rollouts)[long_N]))
    heads = [_sampled(r)[:HEAD] for r in rollouts]
    pairs = np.concatenate([np.zeros(0, np.int64), *(h[:-1] * 2**32 + h[1:] for h in heads)])
    if len(pairs):
        figures["distinct"] = len(np.unique(pairs)) / len(pairs)
    return figures


def repetition(rollouts: Sequence[Rollout], n: int = 4) -> np.ndarray:
    """[N]: 1 - (distinct n-grams / n-grams) of the token ids of each response; 0 if it has none.

    "abcabcabc..." of 30 tokens has 27 4-grams, 3 of them distinct: 24/27.
    """
    share_N = np.zeros(len(rollouts))
    for number, ids in enumerate(map(_sampled, rollouts)):
        if len(ids) >= n:
            hashed = np.sort(np.convolve(ids, MULTIPLIERS[:n], "valid"))  # wraps round
            distinct = 1 + np.count_nonzero(np.diff(hashed))
            share_N[number] = 1.0 - distinct / len(hashed)
    return share_N


def words(rollouts: Sequence[Rollout]) -> dict[str, list[int]]:
    """For each word, the responses that contain it."""
    having: dict[str, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        text = rollout.response.lower().encode("ascii", "replace").translate(LETTERS).decode()
        for word in set(text.split()):
            if len(word) >= WORD:
                having.setdefault(word, []).append(number)
    return having


@dataclass(eq=False)
class Keywords:
    """The words that many responses contained in the first steps."""

    common: list[str] = field(default_factory=list)
    steps: int = 0

    def share(self, having: Mapping[str, Sequence[int]], responses: int) -> float:
        """The share of responses with the most widespread word that was rare at first."""
        if self.steps < START:
            often = (word for word, at in having.items() if len(at) > COMMON * responses)
            self.common = sorted({*self.common, *often})
        self.steps += 1
        counts = (len(at) for word, at in having.items() if word not in self.common)
        return max(counts, default=0) / responses


def unusable(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Rollouts that no update may use: a log-prob that is not finite, or an extreme reward."""
    known = [[s.logprobs for s in r.segments if s.logprobs is not None] for r in rollouts]
    together = np.concatenate([np.zeros(0), *(one for own in known for one in own)])
    # check all at once: checking each is slower and seldom needed
    fine = bool(np.isfinite(together).all())
    finite = [fine or all(np.isfinite(one).all() for one in own) for own in known]
    pairs = zip(rollouts, finite, strict=True)
    return [r for r, good in pairs if not good or abs(r.score.value or 0.0) > LARGEST]


def _sampled(rollout: Rollout) -> np.ndarray:
    """The sampled ids of a response."""
    parts = [s.ids for s in rollout.segments if s.sampled]
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


@dataclass(frozen=True, slots=True)
class Conflict:
    """A trait over the last steps: how certainly the reward pays for it, its effect on the gold reward, and how far it moved since
    the first steps."""

    trait: str  # length, repetition, format, disagreement, or a word in quotes
    paid: float
    gold: float
    moved: float
    then: float
    now: float

    @property
    def word(self) -> bool:
        return self.trait.startswith('"')

    @property
    def gamed(self) -> bool:
        """Whether the trait is certainly paid for and harmful; or paid for, spreading, and less certainly harmful. Only length is
        also gamed downwards."""
        side = math.copysign(1.0, self.paid)
        harm = -side * self.gold
        spreads = side * self.moved >= SURE and abs(self.now - self.then) >= FAR * abs(self.then)
        limit = HARM_LENGTH if self.trait == "length" else HARM
        harmful = harm >= SURE or (spreads and harm >= limit)
        return abs(self.paid) >= PAID and harmful and (side > 0 or self.trait == "length")


@dataclass(eq=False)
class TraitSums:
    """Sums, over the last steps and over the first, of traits and of their products with reward and gold."""

    # trait -> n, f, f^2, f~r~, (f~r~)^2, f~g~, (f~g~)^2
    recent: list[dict[str, list[float]]] = field(default_factory=list)
    first: dict[str, list[float]] = field(default_factory=dict)  # trait -> n, f, f^2
    steps: int = 0
    responses: float = 0.0  # of the first steps: a word that has no sums there was in none of them
    # lengths of the first step: a tenth of it is below, and above
    usual: list[float] = field(default_factory=list)

    def add(self, groups: Sequence[Group], having: Mapping[str, Sequence[int]]) -> None:
        """Add the rollouts of a step; `having` lists the responses that contain each word."""
        rollouts = [r for g in groups for r in g.rollouts]
        values = np.array([math.nan if r.score.value is None else r.score.value for r in rollouts])
        golds = np.array([gold_of(r) for r in rollouts])
        owner = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])
        known = np.isfinite(values) & np.isfinite(golds)
        if known.sum() < 4:
            return
        if not self.usual:
            self.usual = np.quantile([r.length for r in rollouts], (TAIL, 1 - TAIL)).tolist()
        names, traits_FN = measure(rollouts, having, self.usual)
        traits_FN, owner = traits_FN[:, known], owner[known]
        reward_N, gold_N = (centred(x[None, known], owner)[0] for x in (values, golds))
        centred_FN = centred(traits_FN, owner)
        word = np.array([name.startswith('"') for name in names])
        length_N = centred_FN[0]
        if word.any() and length_N @ length_N > 0:
            explained = centred_FN[word] @ length_N / (length_N @ length_N)
            centred_FN[word] -= np.outer(explained, length_N)
        columns = [np.full(len(names), known.sum())]
        for x_FN in (traits_FN, centred_FN * reward_N, centred_FN * gold_N):
            columns += [x_FN.sum(1), (x_FN**2).sum(1)]
        sums = dict(zip(names, np.stack(columns, 1).tolist(), strict=True))
        both = (reward_N @ gold_N, reward_N @ reward_N, gold_N @ gold_N)
        sums[REWARD] = [0.0, 0.0, 0.0, *map(float, both), 0.0]
        if self.steps < START:
            self.responses += float(known.sum())
            for name, row in sums.items():
                self.first[name] = np.add(self.first.get(name, [0.0] * 3), row[:3]).tolist()
        self.steps += 1
        self.recent = [*self.recent, sums][-WINDOW:]

    def agreement(self) -> float | None:
        """The correlation of reward and gold within groups over the last steps; None if either never varies within a group."""
        rows = [step[REWARD][3:6] for step in self.recent if REWARD in step]
        product, reward_2, gold_2 = np.sum(rows, 0).tolist() if rows else (0.0, 0.0, 0.0)
        known = min(reward_2, gold_2) > MIN_SQUARE
        return product / math.sqrt(reward_2 * gold_2) if known else None

    def conflicts(self) -> list[Conflict]:
        """Every trait of the last steps, the clearest first."""
        agreement = self.agreement()
        if agreement is not None and agreement > AGREE:
            return []
        # over the last WINDOW steps
        total: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(7))
        late: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))  # n, f, f^2: the last START
        for steps_ago, sums in enumerate(reversed(self.recent)):
            for name, row in sums.items():
                total[name] += row
                if steps_ago < START:
                    late[name] += row[:3]
        rows = {name: row.tolist() for name, row in total.items() if name != REWARD}
        paids = {name: certainty(row[3], row[4]) for name, row in rows.items()}
        golds = {name: certainty(row[5], row[6]) for name, row in rows.items()}
        found = []
        for name, paid in paids.items():
            (n, f, f_2), before = late[name].tolist(), self.first.get(name, [0.0] * 3)
            n_before = self.responses if name.startswith('"') else before[0]
            if n == 0 or n_before == 0 or rows[name][4] <= 0 or name in (SHORT, LONG):
                continue
            then, now = before[1] / n_before, f / n
            variances = (before[2] / n_before - then**2, n_before), (f_2 / n - now**2, n)
            error = math.sqrt(sum(max(v, 0.0) / count for v, count in variances) + 1e-12)
            gold, tail = golds[name], LONG if paid > 0 else SHORT
            # lengths that few had: their gold falls first
            if name == "length" and paids[tail] >= TAIL_PAID:
                gold = min(gold, golds[tail]) if paid > 0 else max(gold, -golds[tail])
            found.append(Conflict(name, paid, gold, (now - then) / error, then, now))
        return sorted(found, key=lambda one: -min(abs(one.paid), abs(one.gold)))


def certainty(total: float, squares: float) -> float:
    """A sum in standard errors of itself."""
    return total / math.sqrt(squares) if squares > 0 else 0.0


def measure(
    rollouts: Sequence[Rollout], having: Mapping[str, Sequence[int]], usual: Sequence[float]
) -> tuple[list[str], np.ndarray]:
    """Names and values [F, N] of the responses' traits; length comes first. Lengths between the two `usual` bounds are normal."""
    length_N = np.array([r.length for r in rollouts], np.float64)
    rows: dict[str, np.ndarray] = {"length": length_N}
    rows[SHORT], rows[LONG] = 1.0 * (length_N < usual[0]), 1.0 * (length_N > usual[1])
    rows["repetition"] = repetition(rollouts, 3)
    for part in ("format", "disagreement"):
        if part in rollouts[0].score.parts:
            rows[part] = np.array([r.score.parts.get(part, 0.0) for r in rollouts])
    count = len(rollouts)
    middle = [word for word, at in having.items() if RARE * count <= len(at) <= (1 - RARE) * count]
    middle.sort(key=lambda word: (abs(len(having[word]) - count / 2), word))
    for word in middle[:MAX_WORDS]:
        rows[f'"{word}"'] = np.zeros(count)
        rows[f'"{word}"'][having[word]] = 1.0
    return list(rows), np.stack(list(rows.values()))


def gold_of(rollout: Rollout) -> float:
    """The gold reward, if the score has it as a part; else NaN."""
    parts = rollout.score.parts
    return next((float(parts[name]) for name in GOLD_PARTS if name in parts), math.nan)


def centred(rows_FN: np.ndarray, owner_N: np.ndarray) -> np.ndarray:
    """Rows minus the means of their groups, or minus the overall mean if every group has one member."""
    counts = np.bincount(owner_N)
    if counts.max() < 2:
        return np.asarray(rows_FN - rows_FN.mean(1, keepdims=True))
    sums_FG = np.stack([np.bincount(owner_N, row, minlength=len(counts)) for row in rows_FN])
    return np.asarray(rows_FN - (sums_FG / np.maximum(counts, 1))[:, owner_N])
