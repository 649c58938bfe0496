"""Files and folders that appear whole or not at all: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def model_folder(path: Path) -> Path:
    """Where the model is that a directory stands for: that of a run is its export, that of a stage its model."""
    inside = () if (path / "config.json").is_file() else (path / "export", path / "model")
    return next((folder for folder in inside if folder.is_dir()), path)


def atomic_write(path: Path, data: str | bytes, durable: bool = True) -> None:
    """Write a file (text as UTF-8), so that readers see the old or the new one, never a part. `durable`: it survives a power cut;
    without it, a file that is written at every step does not wait for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def atomic_folder(target: Path, mark: str = "") -> Iterator[Path]:
    """A new folder to fill, which takes the place of `target` when the block ends without an error; whatever was there is removed
    last, and comes back where the renaming fails. `mark` tells apart what several processes write at the same time.

    A process that dies between the two renames leaves the earlier folder as `.NAME.old` and the new one as `.NAME.tmp`.
    """
    partial, retired = (target.with_name(f".{target.name}{mark}.{kind}") for kind in ("tmp", "old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        inner = sorted(partial.rglob("*"), reverse=True)  # files before the folder that lists them
        for path in (*inner, partial):
            sync(path)
        if target.exists():
            target.rename(retired)
        try:
            partial.rename(target)
        except BaseException:
            if retired.exists():
                retired.rename(target)
            raise
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if target.exists():
            shutil.rmtree(retired, ignore_errors=True)


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return  # Windows has no handle to flush a directory by
    # Windows flushes only what may be written
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
