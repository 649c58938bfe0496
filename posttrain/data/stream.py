"""Endless, shuffled, resumable streams of indices. Each epoch visits every index once, even if a run stops in the middle of it.

Randomness is Philox, keyed by what is drawn and counted by how often, and read as raw words: those are the same in every
version of NumPy, as its shuffles are not. No global generator is touched; `take(3)` then `take(4)` gives what `take(7)` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from posttrain.errors import require
from posttrain.types import JSON


def philox(*key: str | int, counter: int = 0) -> np.random.Philox:
    """A generator whose stream depends only on its key and starting counter.

    >>> int(philox("epoch", 1).random_raw()) == int(philox("epoch", 1).random_raw()) != int(philox("epoch", 2).random_raw())
    True
    """
    digest = hashlib.blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64), counter=counter)


def permutation(count: int, *key: str | int) -> np.ndarray:
    """A permutation of range(count) that depends only on the key."""
    return np.argsort(philox(*key).random_raw(count), kind="stable")


class Stream:
    """Indices of `count` examples, in a new order every epoch.

    >>> stream = Stream(3, seed=0)
    >>> sorted(stream.take(3)), sorted(stream.take(3)), stream.state()
    ([0, 1, 2], [0, 1, 2], {'count': 3, 'seed': 0, 'epoch': 2, 'position': 0})
    """

    def __init__(self, count: int, seed: int) -> None:
        require(count > 0, "a stream needs at least one example")
        self.count, self.seed = count, seed
        self.epoch = self.position = 0
        self._order = permutation(count, "stream", seed, 0)

    def take(self, number: int) -> list[int]:
        """The next indices, continuing into the next epochs."""
        taken: list[int] = []
        while len(taken) < number:
            piece = self._order[self.position : self.position + number - len(taken)]
            taken.extend(piece.tolist())
            self.position += len(piece)
            if self.position == self.count:
                self._seek(self.epoch + 1, 0)
        return taken

    def state(self) -> dict[str, JSON]:
        return {name: getattr(self, name) for name in ("count", "seed", "epoch", "position")}

    def restore(self, state: dict[str, JSON]) -> None:
        """Continue from a saved `state`. An error if the data or the seed is another, because the order would differ."""
        for name, mine in (("count", self.count), ("seed", self.seed)):
            changed = f"its {name} was {state[name]} and is now {mine}"
            require(state[name] == mine, f"cannot resume the data stream: {changed}")
        epoch, position = int(state["epoch"]), int(state["position"])
        inside = epoch >= 0 and 0 <= position < self.count
        require(inside, f"cannot resume the data stream: no position {position} in epoch {epoch}")
        self._seek(epoch, position)

    def _seek(self, epoch: int, position: int) -> None:
        if epoch != self.epoch:
            self._order = permutation(self.count, "stream", self.seed, epoch)
        self.epoch, self.position = epoch, position


class Mixture:
    """Several streams mixed by weight: the source of draw number n depends only on n and the seed."""

    def __init__(self, weights: Sequence[float], streams: Sequence[Stream], seed: int = 0) -> None:
        paired = len(weights) == len(streams) > 0
        require(paired, "a mixture needs one weight for each of its streams")
        fine = all(np.isfinite(w) and w >= 0 for w in weights) and sum(weights) > 0
        allowed = "mixture weights are finite, not negative, and not all 0"
        require(fine, f"{allowed}, unlike {list(weights)}")
        self.weights, self.seed = tuple(float(w) for w in weights), seed
        self.streams = tuple(streams)
        self.counter = 0

    def take(self, number: int) -> list[tuple[int, int]]:
        """The next (source, index) pairs."""
        sources = self._sources(number)
        drawn = [iter(s.take(sources.count(n))) for n, s in enumerate(self.streams)]
        return [(source, next(drawn[source])) for source in sources]

    def _sources(self, number: int) -> list[int]:
        # a counter yields four words
        words = philox("mixture", self.seed, counter=self.counter).random_raw(4 * number)[::4]
        self.counter += number
        share = np.cumsum(self.weights)
        uniform = (words >> np.uint64(11)) * 2.0**-53
        return [int(n) for n in np.searchsorted(share, uniform * share[-1], side="right")]

    def state(self) -> dict[str, JSON]:
        return {
            "seed": self.seed,
            "weights": list(self.weights),
            "counter": self.counter,
            "streams": [stream.state() for stream in self.streams],
        }

    def restore(self, state: dict[str, JSON]) -> None:
        """Continue from a saved `state`. New weights apply from there on; another number of sources is an error."""
        changed = f"its seed was {state['seed']} and is now {self.seed}"
        require(state["seed"] == self.seed, f"cannot resume the mixture: {changed}")
        was, now = len(state["streams"]), len(self.streams)
        require(was == now, f"cannot resume the mixture: it had {was} sources and now has {now}")
        for stream, saved in zip(self.streams, state["streams"], strict=True):
            stream.restore(saved)
        self.counter = int(state["counter"])
