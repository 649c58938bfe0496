"""One writer a run: who is dead, who is only far away, and what a network file system cannot do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from posttrain.errors import UserError
from posttrain.runs import lock
from posttrain.runs.lock import Holder, Lock
from posttrain.runs.write import RunWriter


@pytest.fixture
def no_system_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, or one that keeps them to one host: the claim alone must do."""

    def unsupported(fd: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(lock, "_lock", unsupported)


def claim(folder: Path, holder: Holder, age: float = 0.0) -> Path:
    file = folder / "lock.holder"
    file.write_text(json.dumps(asdict(holder)))
    os.utime(file, (time.time() - age,) * 2)
    return file


def other_host() -> Holder:
    return replace(Holder.me(), host="elsewhere", process=1)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_taken_and_given_back(tmp_path: Path) -> None:
    held = Lock(tmp_path / "lock")
    assert json.loads((tmp_path / "lock.holder").read_text())["process"] == os.getpid()
    assert names(tmp_path) == ["lock", "lock.holder"], "nothing temporary stays"
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on .*; wait for it, stop it, or choose"):
        Lock(tmp_path / "lock")
    held.release()
    assert names(tmp_path) == ["lock"]
    Lock(tmp_path / "lock").release()


def test_the_claim_alone_keeps_a_second_writer_out(tmp_path: Path, no_system_lock: None) -> None:
    held = Lock(tmp_path / "lock")
    with pytest.raises(UserError, match=f"process {os.getpid()} on "):
        Lock(tmp_path / "lock")
    held.release()
    Lock(tmp_path / "lock").release()


def test_without_hard_links(tmp_path: Path, no_system_lock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    held = Lock(tmp_path / "lock")
    with pytest.raises(UserError, match="is being written by"):
        Lock(tmp_path / "lock")
    held.release()


def test_a_dead_process_of_this_host_holds_nothing(tmp_path: Path, no_system_lock: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    claim(tmp_path, replace(Holder.me(), process=child.pid, started="5"))
    Lock(tmp_path / "lock").release()


def test_a_zombie_holds_nothing(tmp_path: Path, no_system_lock: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = replace(Holder.me(), process=child.pid, started=lock._started(child.pid))
    claim(tmp_path, holder)
    try:
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            Lock(tmp_path / "lock")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
        Lock(tmp_path / "lock").release()
    finally:
        child.kill()
        child.wait(30)


def test_another_process_that_got_the_number_of_a_dead_one(tmp_path: Path, no_system_lock: None) -> None:
    claim(tmp_path, replace(Holder.me(), process=os.getppid(), started="1"))
    Lock(tmp_path / "lock").release()


def test_a_host_that_was_started_anew_holds_nothing(tmp_path: Path, no_system_lock: None) -> None:
    claim(tmp_path, replace(Holder.me(), boot="before the power cut"))
    Lock(tmp_path / "lock").release()


@pytest.mark.parametrize("age", [0.0, lock.STALE - 5])
def test_another_host_that_was_heard_of_lately_has_the_run(age: float, tmp_path: Path) -> None:
    claim(tmp_path, other_host(), age)
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lock(tmp_path / "lock")
    assert json.loads((tmp_path / "lock.holder").read_text())["host"] == "elsewhere", "its claim is untouched"
    assert names(tmp_path) == ["lock", "lock.holder"]


def test_another_host_that_was_silent_for_long_has_not(tmp_path: Path) -> None:
    claim(tmp_path, other_host(), lock.STALE + 5)
    held = Lock(tmp_path / "lock")
    assert json.loads((tmp_path / "lock.holder").read_text())["process"] == os.getpid()
    held.release()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"process": 1}'])
def test_a_claim_that_says_nothing_goes_by_its_age(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lock.holder"
    file.write_text(text)
    with pytest.raises(UserError, match="by another process"):
        Lock(tmp_path / "lock")
    os.utime(file, (time.time() - 100,) * 2)
    Lock(tmp_path / "lock").release()


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.05)
    held = Lock(tmp_path / "lock")
    os.utime(tmp_path / "lock.holder", (0, 0))
    deadline = time.monotonic() + 10
    while (tmp_path / "lock.holder").stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - (tmp_path / "lock.holder").stat().st_mtime < 60
    held.release()
    assert not held._beating.is_alive()


def test_a_writer_whose_run_was_taken_over_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that slept for an hour comes back, and finds another one at work."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 1.0})
        claim(tmp_path, other_host())
        deadline = time.monotonic() + 10
        while not writer._lock.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(UserError, match="process 1 on elsewhere has taken the run over; this process stops"):
            writer.metrics("rl", 2, {"reward": 1.0})
    assert json.loads((tmp_path / "lock.holder").read_text())["host"] == "elsewhere", "not ours to remove"


def test_of_many_who_find_a_stale_claim_one_gets_it(tmp_path: Path) -> None:
    claim(tmp_path, replace(Holder.me(), boot="before the power cut"))
    program = (
        "import sys, time, errno\nfrom pathlib import Path\nfrom posttrain.runs import lock\n"
        "def none(fd): raise OSError(errno.ENOSYS, 'none')\nlock._lock = none\n"
        "while not Path(sys.argv[1], 'go').exists(): time.sleep(0.001)\n"
        "try:\n    lock.Lock(Path(sys.argv[1], 'lock'))\nexcept Exception: print('no', flush=True)\nelse: print('yes', flush=True)\n"
        "sys.stdin.readline()"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        time.sleep(0.5)
        (tmp_path / "go").touch()
        answers = [child.stdout.readline().strip() for child in children if child.stdout is not None]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert sorted(answers) == ["no", "no", "no", "yes"]
