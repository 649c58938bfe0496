"""Checkpoints in safetensors and JSON: written atomically, verified on load.

A checkpoint is a directory `step-N` with `model.safetensors`, `optimizer.safetensors`, `state.json` and, written last,
`manifest.json` with the size and sha256 of each; where the state has arrays (rollouts that wait for their step), these are in
`arrays.safetensors`. It is made under a temporary name, synced to disk and published by rename. Writing in
the background is `saving.py`.

Where weights are spread over processes, each writes its part as a folder `part-N-RANK` beside, and the first one takes the files into
the checkpoint, as `model-RANK.safetensors` and `optimizer-RANK.safetensors`. What is in several of them is rows of one tensor, which
`load` puts together for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.errors import UserError, require
from posttrain.system.files import MAX_FILE, atomic_folder, atomic_write, open_file, read_json
from posttrain.train.parts import own_part, part_of
from posttrain.types import JSON

MANIFEST = "manifest.json"
KINDS = ("model", "optimizer")
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
# the file of the state's arrays, and the key that stands for each in the JSON
ARRAYS, ARRAY = ("arrays.safetensors", "@array")
FORMAT = 2  # 2: state.json names the frozen models by their weights
SHARDED = 3  # the same with files of several processes, and their number in the manifest
READABLE = (1, 2, 3)
PART_SECONDS = 1800.0  # how long to wait for the other processes' parts
# errors from reading a manifest that another program wrote
UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
OTHER = "the checkpoint is of another model"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The contents of a checkpoint: weights, optimizer state, random generators, and everything else as JSON."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: JSON  # may hold NumPy arrays
    rank: int = 0  # the process of this part; of how many
    ranks: int = 1


def without_arrays(state: JSON) -> tuple[JSON, dict[str, Tensor]]:
    """(a copy of a state as plain JSON, with names in place of its arrays; the arrays by name).

    >>> without_arrays({"ids": np.arange(2)})
    ({'ids': {'@array': '0'}}, {'0': tensor([0, 1])})
    """
    arrays: dict[str, Tensor] = {}

    def name(one: object) -> JSON:
        if not isinstance(one, np.ndarray):
            raise TypeError(f"{type(one).__name__} cannot be saved in a checkpoint")
        arrays[key := str(len(arrays))] = torch.from_numpy(one.copy())
        return {ARRAY: key}

    return json.loads(json.dumps(state, default=name, allow_nan=False)), arrays


def with_arrays(state: JSON, arrays: Mapping[str, Tensor]) -> JSON:
    """The inverse of `without_arrays`, with NumPy arrays."""
    if isinstance(state, list):
        return [with_arrays(one, arrays) for one in state]
    if not isinstance(state, dict):
        return state
    if [*state] == [ARRAY]:
        return arrays[state[ARRAY]].numpy()
    return {name: with_arrays(one, arrays) for name, one in state.items()}


def file_names(ranks: int) -> list[str]:
    """The files of a checkpoint besides its manifest."""
    more = [f"{kind}-{rank}.safetensors" for rank in range(1, ranks) for kind in KINDS]
    return [*FILES, *more]


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters and persistent buffers by name, each once even if tied. Frozen weights (with LoRA, all but the adapters)
    are in the model that training starts from."""
    persistent = module.state_dict(keep_vars=True)
    tensors = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    tensors |= {n: b.detach() for n, b in module.named_buffers() if n in persistent}
    return tensors


def restore_weights(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy saved weights into the module in place. Names and shapes must match exactly."""
    own = weights(module)
    if set(own) != set(tensors):
        missing, extra = sorted(set(own) - set(tensors))[:3], sorted(set(tensors) - set(own))[:3]
        raise UserError(f"{OTHER}: missing {missing}, unexpected {extra}")
    with torch.no_grad():
        for name, tensor in own.items():
            saved, shape = tensors[name], tuple(tensor.shape)
            require(saved.shape == shape, f"{OTHER}: {name} is {tuple(saved.shape)}, not {shape}")
            own_part(tensor).copy_(part_of(saved, tensor))


def identity(module: nn.Module) -> str:
    """The sha256 of a module's parameters and persistent buffers with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def save(
    directory: Path, checkpoint: Checkpoint, keep: int = 2, spare: Collection[Path] = ()
) -> Path:
    """Publish `checkpoint` as directory/step-N, then remove all but the newest `keep` up to it and those in `spare`. A process
    other than the first writes its part."""
    final, step, ranks = directory / f"step-{checkpoint.step}", checkpoint.step, checkpoint.ranks
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if checkpoint.rank:
            with atomic_folder(_part(directory, step, checkpoint.rank)) as folder:
                _write_tensors(folder, checkpoint)
            return final
        _recover(directory)
        sweep(directory)
        with atomic_folder(final) as folder:
            _write_tensors(folder, checkpoint)
            state, arrays = without_arrays(checkpoint.state)
            if arrays:
                save_file(arrays, folder / ARRAYS)
            _write_json(folder / "state.json", state)
            for rank in range(1, ranks):
                _take_part(_part(directory, step, rank), folder, rank)
            made = sorted(folder.iterdir())
            files = {p.name: {"size": p.stat().st_size, "sha256": _digest(p)} for p in made}
            manifest = {"format": FORMAT, "step": step, "files": files}
            if ranks > 1:
                manifest |= {"format": SHARDED, "ranks": ranks}
            _write_json(folder / MANIFEST, manifest)
    finally:
        if not checkpoint.rank:
            _recover(directory)
            sweep(directory)
    prune(directory, keep, checkpoint.step, spare)
    return final


def _part(directory: Path, step: int, rank: int) -> Path:
    return directory / f"part-{step}-{rank}"


def _write_tensors(folder: Path, checkpoint: Checkpoint) -> None:
    for name, tensors in zip(KINDS, (checkpoint.model, checkpoint.optimizer), strict=True):
        # copied first: safetensors must see one consistent set of values, contiguous and untied
        copies = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
        save_file(copies, folder / f"{name}.safetensors")


def _take_part(part: Path, folder: Path, rank: int) -> None:
    """Move the part that another process wrote into the checkpoint, as soon as it exists."""
    deadline = time.monotonic() + PART_SECONDS
    late = f"process {rank} has not written its part of a checkpoint within {PART_SECONDS:.0f} s; look at its disk, and resume"
    while not part.is_dir():
        require(time.monotonic() < deadline, late)
        time.sleep(0.01)
    for kind in KINDS:
        (part / f"{kind}.safetensors").rename(folder / f"{kind}-{rank}.safetensors")
    part.rmdir()


def prune(directory: Path, keep: int, step: int, spare: Collection[Path] = ()) -> None:
    """Keep the newest `keep` checkpoints up to `step`, which was just written. Later ones are removed: they are damaged, or the run
    went back to a step before them, and a resume must not use them. Nothing is removed while the newest is incomplete. A checkpoint
    that cannot be removed costs space and does not end the run."""
    found = steps(directory)
    past = [path for path in found if _number(path) <= step]
    if not past or verify(past[0], contents=False) is not None:
        return
    for path in (*past[max(1, keep) :], *(path for path in found if _number(path) > step)):
        if path in spare:
            continue
        # renamed first, because a kill must not leave half of one behind
        going = path.with_name(f".{path.name}.gone")
        with suppress(OSError):
            path.rename(going)
            shutil.rmtree(going, ignore_errors=True)


def steps(directory: Path) -> list[Path]:
    """Published checkpoints, newest first."""
    found = [p for p in directory.glob("step-*") if p.is_dir() and p.name[5:].isdigit()]
    return sorted(found, key=_number, reverse=True)


def verify(path: Path, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. Without `contents` files are not read, and only their sizes are compared."""
    try:
        manifest = read_json(path / MANIFEST)
        if manifest["format"] not in READABLE:
            known = " and ".join(map(str, READABLE))
            return f"{path / MANIFEST} is of format {manifest['format']}, this version of posttrain reads {known}"
        if f"step-{manifest['step']}" != path.name:
            return f"{path / MANIFEST} says step {manifest['step']}"
        if ("ranks" in manifest) != (manifest["format"] == SHARDED):
            return f"{path / MANIFEST} is damaged: its format does not go with its files"
        for name in (*file_names(manifest.get("ranks", 1)), *({ARRAYS} & {*manifest["files"]})):
            file, facts = path / name, manifest["files"][name]
            if not file.exists():
                return f"{file} is missing"
            same = file.stat().st_size == facts["size"]
            if not same or (contents and _digest(file) != facts["sha256"]):
                return f"{file} is damaged: its contents do not match the manifest"
    except UNREADABLE as error:
        text = str(error) if isinstance(error, UserError) else type(error).__name__
        return f"{path / MANIFEST} cannot be read: {text}"
    return None


def newest(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with newer ones. The caller must hold the run's lock. A checkpoint of a newer
    format is an error: continuing without it would replace it."""
    _recover(directory)
    problems: list[str] = []
    for path in steps(directory):
        problem = verify(path)
        if problem is not None and _newer(path):
            raise UserError(f"{problem}: pip install --upgrade posttrain, then resume")
        if problem is None:
            return path, problems
        problems.append(problem)
    return None, problems


def _newer(path: Path) -> bool:
    """Whether a checkpoint was written by a newer version of posttrain."""
    try:
        return int(read_json(path / MANIFEST)["format"]) > max(READABLE)
    except UNREADABLE:
        return False


def size(path: Path) -> int:
    """Bytes of a checkpoint on the disk."""
    return sum(file.stat().st_size for file in path.iterdir())


def load(path: Path) -> Checkpoint:
    """Read a verified checkpoint, of this format or an older one."""
    try:
        state = read_json(path / "state.json", MAX_FILE)
        ranks = read_json(path / MANIFEST).get("ranks", 1)
        model, optimizer = (_joined(path, kind, ranks) for kind in KINDS)
        arrays = load_file(path / ARRAYS) if (path / ARRAYS).exists() else {}
        return Checkpoint(_number(path), model, optimizer, with_arrays(state, arrays))
    # its checksums are right, so it was written like this
    except (SafetensorError, ValueError, KeyError, UserError) as error:
        raise UserError(f"{path} is not a checkpoint: {str(error)[:200]}; remove it") from None


def _joined(path: Path, kind: str, ranks: int) -> dict[str, Tensor]:
    """The tensors of all processes, joined."""
    found = load_file(path / f"{kind}.safetensors")
    parts = [load_file(path / f"{kind}-{rank}.safetensors") for rank in range(1, ranks)]
    for name in list(parts[0]) if parts else ():
        found[name] = torch.cat([found[name], *(part.pop(name) for part in parts)])
    return found


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _recover(directory: Path) -> None:
    """Restore a checkpoint that was being replaced by another of the same step when the process died between the two renames."""
    for retired in directory.glob(".step-*.old"):
        final = directory / retired.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            with suppress(OSError):
                retired.rename(final)


def sweep(directory: Path, parts: bool = False) -> None:
    """Remove the leftovers of an interrupted save; only one process at a time writes to a run. `parts` are directories that other
    processes may be writing now."""
    for pattern in (".step-*", ".part-*", "part-*") if parts else (".step-*",):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _digest(path: Path) -> str:
    with open_file(path, limit=1 << 62) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _write_json(path: Path, value: JSON) -> None:
    atomic_write(path, json.dumps(value, allow_nan=False), durable=False)
