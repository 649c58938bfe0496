"""Randomness that belongs to the request: a pure function of (seed, sample, position), whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(value: int) -> int:
    """The same 64 bits as a signed integer, as torch.int64 holds them."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """SplitMix64's finaliser on a Python integer.

    >>> hex(mix(GOLDEN))  # the first output of SplitMix64 seeded with 0
    '0xe220a8397b1dcdaf'
    """
    value &= MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def derive(*keys: int) -> int:
    """A 64-bit seed from a path of integers: run seed, step, problem, sample."""
    state = 0
    for key in keys:
        state = mix(state + GOLDEN + mix(key + GOLDEN))
    return state


def derive_each(*keys: Iterable[int]) -> list[int]:
    """`derive` of many paths at once: each of `keys` has the key of every path at its place.

    >>> derive_each((1, 1), (5, 6)) == [derive(1, 5), derive(1, 6)]
    True
    """
    columns: Any = [np.array([key & MASK for key in column], np.uint64) for column in keys]
    found: Any = derive(*columns)  # arithmetic of uint64 arrays wraps
    return list(found.tolist())


def uniforms(seed_N: Tensor, position_N: Tensor) -> Tensor:
    """float64 uniforms in [0, 1), one for each row: the position-th output of SplitMix64 seeded with the row's seed."""
    x = seed_N + (position_N + 1) * signed(GOLDEN)  # int64 arithmetic wraps, as SplitMix64 wants
    x = (x ^ _shift(x, 30)) * signed(FIRST)
    x = (x ^ _shift(x, 27)) * signed(SECOND)
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
