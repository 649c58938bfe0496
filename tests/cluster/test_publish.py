"""Weights through buckets, and receipts: whatever is not what the trainer has is named."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from posttrain.cluster import publish
from posttrain.cluster.publish import (
    PROBES,
    Buckets,
    Receipt,
    Receipts,
    fill,
    hashes,
    layout,
    opened,
    unpack,
)
from posttrain.errors import GuardStop
from posttrain.types import Completion


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "odd": torch.randn(33, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(40, 50, generator=generator),
        "transposed": torch.randn(17, 3, generator=generator).t(),
        "counts": torch.arange(100),
        "double": torch.randn(7, generator=generator, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "long": torch.randn(3000, generator=generator, dtype=torch.float16),
    }
    return found


def sent(weights: dict[str, Tensor], buckets: Buckets) -> Iterator[tuple[str, Tensor]]:
    """What arrives at the other end of the same memory, one bucket ahead."""
    filling = fill(weights.values(), buckets.memory)
    freed: list[int] = []
    return unpack(layout(weights), opened(buckets.describe()), lambda: next(filling), lambda: freed.append(1))


@pytest.mark.parametrize("size", [16, 64, 4096, 1 << 20])
def test_tensors_of_any_kind_arrive_through_buckets_of_any_size(size: int) -> None:
    weights, buckets = tensors(), Buckets(size)
    found = {name: weight.clone() for name, weight in sent(weights, buckets)}
    assert list(found) == list(weights)
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype and torch.equal(found[name], weight), name
    assert hashes(found) == hashes(weights)
    buckets.close()


def hash_of(tensor: torch.Tensor) -> int:
    return hashes({"": tensor})[""]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_the_hash_sees_one_bit_and_the_order_of_elements(kind: torch.dtype) -> None:
    for count in (2, 1023, 1024, 1025, 5000):
        plain = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(count)).to(kind)
        plain[0], plain[-1] = 3, 5
        own = hash_of(plain)
        assert own == hash_of(plain.clone().view(count, 1)), "it depends on bits alone"
        changed = plain.clone()
        changed[count // 2] += 1
        exchanged = plain.clone()
        exchanged[0], exchanged[-1] = 5, 3
        rotated = plain.roll(1)
        found = {hash_of(x) for x in (changed, exchanged, rotated, plain[:-1])}
        assert own not in found and len(found) == 4 - (count == 2), "with two elements, to exchange them is to rotate them"


@pytest.mark.parametrize("count", [1, 1024, 1024 * 1024 + 7])
def test_the_hash_sees_each_bit_of_a_word(count: int) -> None:
    words = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(count))
    own, found = hash_of(words), set[int]()
    for bit in range(64):
        other = words.clone()
        other[count // 2] ^= 1 << bit if bit < 63 else -(2**63)
        found.add(hash_of(other))
    assert own not in found and len(found) == 64


@pytest.mark.parametrize("size", [8 << 10, 64 << 10, 1 << 20])
def test_the_hash_of_tensors_that_are_gathered_is_that_of_each(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gathers them in pieces of memory, a CPU takes them one by one: the integers are the same."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (30 * 1024 + 7,), generator=generator)
    bits = words[:3000].view(torch.uint8)
    weights = tensors() | {"long": words, "bytes": bits[3:23456], "misaligned": bits[4:20].view(torch.float32)}
    one_by_one = hashes(weights)
    monkeypatch.setattr(publish, "PIECE", size)
    monkeypatch.setattr(publish, "_one_by_one", publish._gathered)
    assert hashes(weights) == one_by_one == {name: hash_of(weight) for name, weight in weights.items()}


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1), (torch.float8_e4m3fn, 0.3)])
def test_a_probe_allows_what_the_sampler_s_type_rounds(dtype: torch.dtype, limit: float) -> None:
    def probed(gap: float) -> None:
        receipts = Receipts()
        receipts.expect(4, {}, dtype)
        receipts.logprobs_PV[4] = torch.zeros(PROBES, 8)
        for n in range(PROBES):
            given = (np.array([3]), np.array([gap], np.float32), np.array([4], np.int32))
            receipts.probe(-1 - n, Completion(*given, "length"), "it")

    probed(0.9 * limit)
    with pytest.raises(GuardStop, match=f"and at most {limit:g} is rounding"):
        probed(1.1 * limit)


def test_a_receipt_of_other_weights_is_named() -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(5)}
    receipts, own = Receipts(), hashes(weights)
    receipts.expect(4, weights, torch.float32)
    receipts.check(Receipt(4, own), "it")
    receipts.check(Receipt(4, own | {"b": None}), "it")
    for receipt, text in (
        (Receipt(3, own), "it has the weights of version 3, and version 4 was published"),
        (Receipt(4, own | {"b": 1}), "it has other weights than the trainer at version 4: b;"),
        (Receipt(4, {"a": own["a"]}), "at version 4: b;"),
        (Receipt(4, own | {"c": 1}), "at version 4: c;"),
    ):
        with pytest.raises(GuardStop, match=text):
            receipts.check(receipt, "it")
