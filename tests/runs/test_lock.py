"""One writer a run: dead holders, holders on other hosts, and file systems without locks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import OwnerRecord, SoftFileLease

from posttrain.errors import UserError
from posttrain.runs import lock
from posttrain.runs.lock import Lock
from posttrain.runs.write import RunWriter


@pytest.fixture
def no_system_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, or one that keeps them to one host: the lease alone must do."""
    monkeypatch.setattr(lock, "system_lock", lambda path: None)


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> OwnerRecord:
    """What filelock writes of this process."""
    with SoftFileLease(tmp_path_factory.mktemp("me") / "lock", lease_duration=lock.STALE) as held:
        owner = held.owner
    assert owner is not None
    return owner


def claim(folder: Path, owner: OwnerRecord, age: float = 0.0) -> Path:
    """A lease of another process, as filelock writes it, last touched `age` seconds ago."""
    names = {
        "pid": owner.pid,
        "host": owner.hostname,
        "mode": owner.mode,
        "token": owner.token,
        "duration": owner.lease_duration,
    }
    lines = [f"{key}={value}" for key, value in {**names, "start": owner.start}.items() if value is not None]
    file, new = folder / "lock.holder", folder / "new"
    new.write_text("".join(f"{line}\n" for line in ("filelock/2", *lines)))
    os.utime(new, (time.time() - age,) * 2)
    new.replace(file)
    return file


def other_host(me: OwnerRecord) -> OwnerRecord:
    return me._replace(hostname="elsewhere", pid=1)


def holder(folder: Path) -> list[str]:
    return (folder / "lock.holder").read_text().splitlines()[1:3]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_taken_and_given_back(tmp_path: Path) -> None:
    held = Lock(tmp_path / "lock")
    assert holder(tmp_path)[0] == f"pid={os.getpid()}"
    assert names(tmp_path) == ["lock", "lock.holder"], "nothing temporary stays"
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on .*; wait for it, stop it, or choose"):
        Lock(tmp_path / "lock")
    held.release()
    assert names(tmp_path) == ["lock"]
    Lock(tmp_path / "lock").release()


def test_the_lease_alone_keeps_a_second_writer_out(tmp_path: Path, no_system_lock: None) -> None:
    held = Lock(tmp_path / "lock")
    with pytest.raises(UserError, match=f"process {os.getpid()} on "):
        Lock(tmp_path / "lock")
    held.release()
    Lock(tmp_path / "lock").release()


def test_a_dead_process_of_this_host_holds_nothing(tmp_path: Path, me: OwnerRecord, no_system_lock: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    claim(tmp_path, me._replace(pid=child.pid))
    Lock(tmp_path / "lock").release()


def start_of(pid: int, me: OwnerRecord) -> int:
    """The start of another process of this boot, as filelock writes it."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return (me.start or 0) >> 64 << 64 | int(ticks)


@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
def test_a_zombie_holds_nothing(tmp_path: Path, me: OwnerRecord, no_system_lock: None) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    claim(tmp_path, me._replace(pid=child.pid, start=start_of(child.pid, me)))
    try:
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            Lock(tmp_path / "lock")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
        Lock(tmp_path / "lock").release()
    finally:
        child.kill()
        child.wait(30)


def test_another_process_that_got_the_number_of_a_dead_one(tmp_path: Path, me: OwnerRecord, no_system_lock: None) -> None:
    claim(tmp_path, me._replace(pid=os.getppid(), start=1))
    Lock(tmp_path / "lock").release()


def before_the_power_cut(me: OwnerRecord) -> OwnerRecord:
    """The same process of another boot, whose id is in the high bits of filelock's start token."""
    assert me.start is not None
    return me._replace(start=me.start ^ (1 << 100))


def test_a_host_that_was_started_anew_holds_nothing(tmp_path: Path, me: OwnerRecord, no_system_lock: None) -> None:
    claim(tmp_path, before_the_power_cut(me))
    Lock(tmp_path / "lock").release()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_a_process_here_is_not_that_of_another_container_or_host_with_its_number(
    tmp_path: Path, me: OwnerRecord, no_system_lock: None
) -> None:
    """Containers and cloned machines share a host name, and a run in each has the same low number."""
    away = me._replace(hostname=f"{lock.host(me)}?pidns-1")
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
        claim(tmp_path, away._replace(pid=child.pid))
        with pytest.raises(UserError, match=f"process {child.pid} on "):
            Lock(tmp_path / "lock")
    finally:
        child.wait(30)
    claim(tmp_path, before_the_power_cut(away), 3600.0)
    assert lock.live_owner(tmp_path / "lock") is None, "this process started in the same tick of another boot"
    Lock(tmp_path / "lock").release()


@pytest.mark.parametrize("age", [0.0, lock.STALE - 5])
def test_another_host_that_touched_its_lease_lately_has_the_run(age: float, tmp_path: Path, me: OwnerRecord) -> None:
    claim(tmp_path, other_host(me), age)
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        Lock(tmp_path / "lock")
    assert holder(tmp_path) == ["pid=1", "host=elsewhere"], "its lease is untouched"
    assert names(tmp_path) == ["lock", "lock.holder"]


@pytest.mark.skipif(sys.platform != "linux", reason="the start of a process is read from /proc")
@pytest.mark.parametrize("age", [-3600.0, 3600.0])
def test_a_clock_that_jumps_does_not_end_a_process_of_this_host(
    age: float, tmp_path: Path, me: OwnerRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system has no locks of its own."""
    monkeypatch.setattr(lock, "system_lock", lambda path: None)
    claim(tmp_path, me, age)
    assert lock.live_owner(tmp_path / "lock") == os.getpid()
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on"):
        Lock(tmp_path / "lock")
    assert me.start is not None
    claim(tmp_path, me._replace(start=me.start + 1), 3600.0)
    assert lock.live_owner(tmp_path / "lock") is None, "another process with its number"
    Lock(tmp_path / "lock").release()


def test_another_host_that_was_silent_for_long_has_not(tmp_path: Path, me: OwnerRecord) -> None:
    claim(tmp_path, other_host(me), lock.STALE + 5)
    held = Lock(tmp_path / "lock")
    assert holder(tmp_path)[0] == f"pid={os.getpid()}"
    held.release()


@pytest.mark.parametrize("text", ["", "{", "filelock/2\\npid=1\\n", '{"process": 1}'])
def test_a_damaged_lease_counts_by_its_age(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lock.holder"
    file.write_text(text)
    with pytest.raises(UserError, match="by another process"):
        Lock(tmp_path / "lock")
    os.utime(file, (time.time() - 100,) * 2)
    Lock(tmp_path / "lock").release()


def test_the_holder_touches_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    held = Lock(tmp_path / "lock")
    os.utime(tmp_path / "lock.holder", (0, 0))
    deadline = time.monotonic() + 10
    while (tmp_path / "lock.holder").stat().st_mtime == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - (tmp_path / "lock.holder").stat().st_mtime < 60
    held.release()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("filelock")]


def test_a_writer_whose_run_was_taken_over_stops(tmp_path: Path, me: OwnerRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that slept for an hour comes back, and finds another one at work."""
    monkeypatch.setattr(lock, "HEARTBEAT", 0.05)
    with RunWriter.create(tmp_path, {}) as writer:
        writer.metrics("rl", 1, {"reward": 1.0})
        claim(tmp_path, other_host(me))
        deadline = time.monotonic() + 10
        while not writer._lock.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(UserError, match="process 1 on elsewhere has taken the run over; this process stops"):
            writer.metrics("rl", 2, {"reward": 1.0})
    assert holder(tmp_path) == ["pid=1", "host=elsewhere"], "not ours to remove"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_of_many_who_find_a_stale_lease_one_gets_it(where: str, tmp_path: Path, me: OwnerRecord) -> None:
    if where == "here":
        claim(tmp_path, before_the_power_cut(me))
    else:
        claim(tmp_path, other_host(me), lock.STALE + 5)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom posttrain.runs import lock\n"
        "lock.system_lock = lambda path: None\n"
        "while not Path(sys.argv[1], 'go').exists(): time.sleep(0.001)\n"
        "try:\n    held = lock.Lock(Path(sys.argv[1], 'lock'))\nexcept Exception: print('no', flush=True)\n"
        "else: print('yes', flush=True)\n"
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
