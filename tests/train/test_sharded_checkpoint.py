"""Checkpoints with files of several processes: written apart, published whole, put together for any number."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from posttrain.errors import UserError
from posttrain.train import checkpoint
from posttrain.train.checkpoint import Checkpoint
from posttrain.train.saving import Store

WHOLE = {"layer.weight": torch.arange(15.0).view(5, 3), "scale": torch.arange(2.0)}


def part(rank: int, ranks: int) -> Checkpoint:
    """Rows as FSDP2 deals them: the last process may have none. What all have is in the first one's."""
    rows = {n: -(-len(t) // ranks) for n, t in WHOLE.items()}
    own = {n: t[rows[n] * rank : rows[n] * (rank + 1)].clone() for n, t in WHOLE.items()}
    moments = {f"exp_avg.{n}": 2 * t for n, t in own.items()}
    first = {} if rank else {"step.scale": torch.tensor(7.0)}
    return Checkpoint(3, own | ({} if rank else {"buffer": torch.ones(4)}), moments | first, {"stage": "rl"}, rank, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_any_number_of_processes_are_put_together(ranks: int, tmp_path: Path) -> None:
    stores = [Store(tmp_path) for _ in range(ranks)]
    for rank, store in enumerate(stores):  # each in the background, in any order
        store.save(part(rank, ranks))
    for store in stores:
        store.finish()
    path, problems = stores[0].newest()
    assert path is not None and problems == [] and [p.name for p in tmp_path.iterdir()] == ["step-3"]
    assert sorted(p.name for p in path.iterdir()) == sorted([*checkpoint.file_names(ranks), "manifest.json"])
    assert json.loads((path / "manifest.json").read_text())["format"] == (3 if ranks > 1 else 2)
    found = checkpoint.load(path)
    assert found.model.keys() == {*WHOLE, "buffer"} and float(found.optimizer["step.scale"]) == 7
    for name, tensor in WHOLE.items():
        assert torch.equal(found.model[name], tensor) and torch.equal(found.optimizer[f"exp_avg.{name}"], 2 * tensor)


def test_a_part_that_is_missing_or_damaged_is_noticed(tmp_path: Path) -> None:
    for rank in (1, 0):
        checkpoint.save(tmp_path, part(rank, 2))
    file = tmp_path / "step-3" / "optimizer-1.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"\x99")
    assert "optimizer-1.safetensors is damaged" in (checkpoint.verify(tmp_path / "step-3") or "")
    file.unlink()
    assert "optimizer-1.safetensors is missing" in (checkpoint.verify(tmp_path / "step-3") or "")
    assert checkpoint.verify(tmp_path / "step-3", contents=False) is not None


def test_a_process_that_never_writes_its_part_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is published, and parts of an attempt that was killed are not taken up by the next."""
    monkeypatch.setattr(checkpoint, "PART_SECONDS", 0.1)
    checkpoint.save(tmp_path, part(2, 3))
    with pytest.raises(UserError, match="process 1 has not written its part of a checkpoint"):
        checkpoint.save(tmp_path, part(0, 3))
    assert Store(tmp_path).newest() == (None, []) and not list(tmp_path.iterdir())


def test_the_first_process_waits_for_the_slower_ones(tmp_path: Path) -> None:
    late = threading.Timer(0.2, checkpoint.save, (tmp_path, part(1, 2)))
    late.start()
    assert checkpoint.verify(checkpoint.save(tmp_path, part(0, 2))) is None
    late.join(10)
