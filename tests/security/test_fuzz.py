"""The fuzzer itself: a few cases of each reader, and that it finds what it looks for. `make fuzz` runs it for 5 minutes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.security import fuzz

QUICK = {"gguf": 60, "math": 40, "wire": 300, "jsonl": 10, "yaml": 10, "run": 5}


@pytest.mark.parametrize("name", QUICK)
def test_damaged_input_is_one_line(name: str, tmp_path: Path) -> None:
    seeds = fuzz.READERS[name][1]()
    for number in range(QUICK[name]):
        fuzz.case(name, 12345, number, seeds, tmp_path)


def test_every_reader_reads_its_seeds(tmp_path: Path) -> None:
    """Else all cases would end in the first check."""
    for name in ("math", "wire", "jsonl", "run"):
        for seed in fuzz.READERS[name][1]():
            fuzz.READERS[name][0](seed, tmp_path)


def test_a_case_is_the_same_every_time() -> None:
    import random

    first, second = (fuzz.mutated(fuzz.gguf_seeds(), random.Random("0 gguf 7")) for _ in range(2))
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("find", ["error", "lines", "hang", "growth", "end"])
def test_the_fuzzer_can_find(find: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: multiprocessing.context.ForkContext())
    monkeypatch.setattr(fuzz, "CASE_SECONDS", 1.0)
    kept = []

    def broken(data: bytes, folder: Path) -> object:
        import os

        from posttrain.errors import UserError

        broken.number = getattr(broken, "number", 0) + 1  # type: ignore[attr-defined]
        if find == "growth" and broken.number < 120:  # type: ignore[attr-defined]
            kept.append(b"x" * (4 << 20))
        if broken.number == 3:  # type: ignore[attr-defined]
            if find == "error":
                raise KeyError("x")
            if find == "lines":
                raise UserError("one\ntwo")
            if find == "hang":
                time.sleep(30)
            if find == "end":
                os._exit(9)
        return None

    monkeypatch.setitem(fuzz.READERS, "broken", (broken, lambda: [b"x"]))
    assert fuzz.fuzz("broken", 0, 3.0)[1]
