"""Reads and writes files of a run directory. A run directory may come from an untrusted source: links, pipes and devices in it are
refused, and reads are limited. Files and folders are written atomically: under a temporary name, flushed, then renamed."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from posttrain.errors import UserError, require

MAX_FILE = 1 << 30  # largest file with many lines, in bytes
MAX_JSON = 1 << 26  # largest file that is read at once, in bytes
TRACKERS = ("wandb", "tensorboard", "trackio")  # folders that posttrain never reads
MODES = {os.O_RDONLY: "rb", os.O_RDWR: "r+b"}
# kinds of OSError that another directory avoids
REFUSED = (PermissionError, FileNotFoundError, NotADirectoryError, FileExistsError)


@contextmanager
def same_folder() -> Iterator[None]:
    """Return to the working directory at the end: a user's code may change it, and the path of the run may be relative to it."""
    before = None
    with suppress(OSError):  # the folder no longer exists
        before = os.getcwd()
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.chdir(before)


def open_file(path: Path, flags: int = os.O_RDONLY, limit: int = MAX_FILE) -> IO[bytes]:
    """The only way to open a file of a run directory: a regular file, with at most `limit` bytes if it is read."""
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags | safe, 0o644)
    except OSError as error:
        odd = error.errno in (errno.ELOOP, errno.ENXIO)  # a link, or a pipe without a reader
        require(not odd, f"{path} is a link or a pipe, not a file; remove it")
        raise
    about, kind = os.fstat(handle), flags & (os.O_RDONLY | os.O_WRONLY | os.O_RDWR)
    try:
        require(stat.S_ISREG(about.st_mode), f"{path} is not a plain file; remove it")
        fits = kind == os.O_WRONLY or about.st_size <= limit
        require(fits, f"{path} is larger than {limit >> 20} MiB, which nothing here writes")
    except UserError:
        os.close(handle)
        raise
    return open(handle, MODES.get(kind, "ab" if flags & os.O_APPEND else "wb"))


def read_bytes(path: Path, limit: int = MAX_FILE) -> bytes:
    """The contents of a file of a run directory."""
    with open_file(path, limit=limit) as file:
        return file.read(limit)


def read_text(path: Path, limit: int = MAX_FILE) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: it is not UTF-8 text") from None


def read_json(path: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """The object in a JSON file of a run directory; an error of one line if there is none."""
    try:
        found = json.loads(read_bytes(path, limit))
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "it is nested too deep" if deep else "it is not valid JSON"
        raise UserError(f"{path} is damaged: {why}") from None
    require(isinstance(found, dict), f"{path} is damaged: it does not hold a JSON object")
    return dict(found)


def check_tree(root: Path) -> None:
    """Raise an error for a run directory with anything but files and folders: through a link, a write would change, and a read
    would reveal, a file of the user's elsewhere."""
    pending = [str(root)] if os.path.isdir(root) else []
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                folder = entry.is_dir(follow_symlinks=False)
                plain = folder or entry.is_file(follow_symlinks=False)
                text = "is a link, a pipe or a device, and a run has only files; remove it"
                require(plain, f"{root}: {entry.path} {text}")
                if folder and entry.path not in [os.path.join(root, own) for own in TRACKERS]:
                    pending.append(entry.path)


@contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn errors that a user can fix (a full disk, a directory that cannot be written) into one line; others propagate."""
    try:
        yield
    except Exception as error:  # also errors of safetensors and shutil, which have their own types
        kind = error.errno if isinstance(error, OSError) else None
        said = str(error)
        if isinstance(error, UserError):
            raise
        again = "start it again"
        if begun(directory):
            again = f"continue with: {how_to_continue(directory)}"
        if kind in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in said:
            text = f"no space left on the disk of {directory}; free some, then {again}"
        elif kind == errno.EFBIG or "File too large" in said:
            text = f"a file in {directory} has reached the largest size allowed here; raise it (ulimit -f), then {again}"
        elif isinstance(error, REFUSED) or kind in (errno.EROFS, errno.ENAMETOOLONG):
            file = Path(str(getattr(error, "filename", None) or directory)).absolute()
            place = directory.absolute()
            ours = file.is_relative_to(place) or place.is_relative_to(file)
            text = f"cannot write the run directory {directory}: {os.strerror(kind or 0)}; choose another"
            if not ours or begun(directory):  # a file that it reads, or that was writable before
                text = f"{file}: {os.strerror(kind or 0)}; put it right, then {again}"
        else:
            raise
        raise UserError(text) from error


def how_to_continue(directory: Path) -> str:
    """Return the command that continues a run, or the call, if its settings name a function of the program that began it."""
    path = directory / "config.yaml"
    if path.is_file():
        with open_file(path) as file:
            if re.search(rb"(?:: |- )python:\S", file.read()):
                return "the same call with its out= and again=True"
    return f"posttrain resume {shlex.quote(str(directory))}"


def begun(directory: Path) -> bool:
    """Whether a run has trained or measured anything. One that has not is deleted if it fails, and there is nothing to resume."""
    patterns = ("metrics.jsonl", "stages/*/result.json", "checkpoints/*/step-*/manifest.json")
    found = (path for pattern in patterns for path in directory.glob(pattern))
    # isdir says no also where the name is too long
    return os.path.isdir(directory) and any(path.stat().st_size for path in found)


def model_folder(path: Path) -> Path:
    """The folder of the model that a directory refers to: a run's export, or a stage's model."""
    inside = () if (path / "config.json").is_file() else (path / "export", path / "model")
    return next((folder for folder in inside if folder.is_dir()), path)


def is_reward_model(folder: Path) -> bool:
    """Whether the model in a folder is a reward model, by the class that its configuration names."""
    return b"ForSequenceClassification" in read_bytes(folder / "config.json", MAX_JSON)


def atomic_write(path: Path, data: str | bytes, durable: bool = True, folder: bool = False) -> None:
    """Write a file (text as UTF-8) so that readers see the old or the new one, never a part. `durable` makes it survive a power
    cut; without it, a file that is written at every step does not wait for the disk. `folder`: make the folder that it lies in."""
    if folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process, or put there by others
        with open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
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
    """A new folder to fill, which replaces `target` if the block ends without an error. The previous folder is removed last, and
    restored if the renaming fails. `mark` distinguishes what several processes write at the same time.

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
    """Flush a file, or a folder's list of files, to the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return  # Windows cannot flush a directory
    # Windows flushes only files that are open for writing
    handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
