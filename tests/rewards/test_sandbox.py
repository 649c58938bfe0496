"""The parts of the sandbox: what may cross the wall, the filter, the choice of a wall, and that nothing outlives its use."""

from __future__ import annotations

import errno
import math
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.errors import UserError
from posttrain.rewards._code_data import fenced
from posttrain.rewards.code import CallTest, StdioTest, grade
from posttrain.rewards.sandbox import cgroup, isolation, mechanisms, pool, seccomp, wire
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.mechanisms import Bubblewrap, Infrastructure, Sandlock, Unsafe
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.session import Ended
from tests.rewards.hostile_programs import strangers

READABLE = mechanisms.readable()
ROOT = Path(__file__).parent.parent.parent
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes are for Linux")


def usable() -> str:
    try:
        isolation.choose()
    except UserError as error:
        return str(error).partition(". Install")[0]
    return ""


needs_wall = pytest.mark.skipif(bool(usable()), reason=usable())
ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.sets(KEYS) | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return wire.decode(wire.parse(wire.encode(value).encode(), 1 << 20))


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = through(value)
    assert repr(back) == repr(value) or wire.same(back, value, exact=True, tolerance=0.0)  # the order of a set may differ
    assert type(back) is type(value)


VALUES = [
    None, True, 0, -1, 2**53, -(2**53), 10**300, 0.1, -0.0, math.inf, 5e-324, 1.5 - 2j, "", "é\ud800\x00\"\\", b"\x00\xff",
    [], [[]], (1, (2,)), {1, 2}, frozenset({"a"}), {"a": [1], (1, 2): None, 2.5: ()},
]  # fmt: skip


@needs_wall
def test_values_survive_the_way_in_and_out() -> None:
    """The encoder inside the sandbox agrees with the one outside."""
    tests = [CallTest("f", [value], value, exact=True, tolerance=0.0) for value in VALUES]
    assert grade("```python\ndef f(x):\n    return x\n```", tests).outcome == "pass"
    program = "import collections as c\nP = c.namedtuple('P', 'x y')\ndef f(n):\n    return [P(1, 2), c.Counter('aab'), True]"
    test = CallTest("f", [0], [(1, 2), {"a": 2, "b": 1}, True], exact=True)
    assert grade(fenced(program), [test]).outcome == "pass"


MALFORMED = [
    b"", b"{}", b'{"a": 1}', b"1.5", b"NaN", b"Infinity", b"[1", b"[1] 2", b"\xff", b"123456789012345678901234567890", b"-0.0",
    b"1e999", b"[" * 100_000, b"[" * 50_000 + b"]" * 50_000, b"nul",
]  # fmt: skip
WRONG = [
    [], ["x"], ["l"], ["l", 1], ["l", [], 1], ["q", []], ["i", "10"], ["i", "0x"], ["i", "0x" + "f" * 200_000], ["i", 5], ["f", "1.5"],
    ["f", 1], ["f", "0x1.8p+99999"], ["f", "0x1.0p+9999"], ["b", "f"], ["b", "zz"], ["c", ["nan"]], ["d", [1]],
    ["d", [[1, 2], [1, 3]]], ["d", [[["l", []], 1]]],
    ["s", [1, 1]], ["s", [["l", []]]], [["l", []], 1], ["l", [["x", 1]]],
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: repr(text[:20]))
def test_what_is_not_in_the_form_is_refused(text: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.parse(text, 1 << 20)


@pytest.mark.parametrize("tree", WRONG, ids=lambda tree: str(tree)[:30])
def test_a_tree_that_is_no_value_is_refused(tree: Any) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(tree)


def test_size_depth_and_number_are_bounded() -> None:
    with pytest.raises(wire.Malformed, match="bytes, more than 10"):
        wire.parse(b" " * 11, 10)
    deep: Any = 1
    for _ in range(wire.DEPTH + 1):
        deep = ["l", [deep]]
    with pytest.raises(wire.Malformed, match="too deep"):
        wire.decode(deep)
    with pytest.raises(wire.Malformed, match="too large"):
        wire.decode(["l", [0] * (wire.NODES + 1)])
    with pytest.raises(wire.Malformed, match="one hash"):
        wire.decode(["s", [["i", hex(i * (2**61 - 1))] for i in range(200)]])
    with pytest.raises(wire.Malformed, match="one hash"):
        wire.decode(["d", [[["i", hex(i * (2**61 - 1))], 0] for i in range(200)]])
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(wire.Malformed, match="nested"):
        wire.encode(loop)
    with pytest.raises(wire.Malformed, match="type Sub"):
        wire.encode(type("Sub", (int,), {})(3))


SAME = [  # given, expected, as they stand, exact
    (2, 2.0, True, True),
    (2.0, 2, True, True),
    (True, 1, False, False),
    (1, True, False, False),
    (True, True, True, True),
    (None, 0, False, False),
    (math.nan, math.nan, True, True),
    (math.nan, 0.0, False, False),
    (-0.0, 0.0, True, True),
    (0.1 + 0.2, 0.3, True, True),
    (0.3001, 0.3, False, False),
    (1e300, math.inf, False, False),
    (math.inf, math.inf, True, True),
    (10**400, 1.0, False, False),
    (10**20, 10**20 + 1, False, False),
    ((1, 2), [1, 2], True, False),
    ([(1,)], [[1]], True, False),
    ([1, 2], [2, 1], False, False),
    ([1], [1, 1], False, False),
    ({1, 2}, {2, 1}, True, True),
    ({1}, [1], False, False),
    ({1: [1]}, {1: (1,)}, True, False),
    ({1: 2}, {1: 2, 3: 4}, False, False),
    ("1", 1, False, False),
    ("a", b"a", False, False),
    ("", None, False, False),
    ([True], [1], False, False),
    (1 + 0j, 1, True, True),
]


@pytest.mark.parametrize(("given_", "expected", "loose", "exact"), SAME)
def test_comparison(given_: Any, expected: Any, loose: bool, exact: bool) -> None:
    assert wire.same(given_, expected) is loose
    assert wire.same(given_, expected, exact=True) is exact


def decide(filter_: bytes, number: int, first: int = 0, architecture: int | None = None) -> int:
    """An interpreter of the few instructions that the filter uses, written from the kernel's documentation."""
    data = struct.pack("<iIQ6Q", number, architecture or seccomp.ARCHITECTURES[platform.machine()], 0, first, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("HBBI", filter_))
    position, register = 0, 0
    while True:
        code, true, false, value = steps[position]
        position += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x15:
            position += true if register == value else false
        elif code == 0x45:
            position += true if register & value else false
        elif code == 0x06:
            return value
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


@pytest.mark.skipif(not seccomp.supported(), reason="no filter for this architecture")
def test_the_filter() -> None:
    column = list(seccomp.ARCHITECTURES).index(platform.machine())
    allow, fail, kill = 0x7FFF0000, 0x00050000, 0x80000000
    one, several = seccomp.program(allow_processes=False), seccomp.program(allow_processes=True)
    numbers = {name: pair[column] for name, pair in seccomp.NUMBERS.items() if pair[column] is not None}
    thread, process = 0x3D0F00, 0x1200011  # the flags of pthread_create and of fork, as strace shows them
    assert decide(one, numbers["clone"], thread) == allow
    assert decide(one, numbers["clone"], process) == fail | errno.EAGAIN
    assert decide(several, numbers["clone"], process) == allow
    assert decide(one, numbers["clone3"]) == decide(several, numbers["clone3"]) == fail | errno.ENOSYS
    for name in set(numbers) - {"clone", "clone3", "fork", "vfork"}:
        assert decide(one, numbers[name]) == decide(several, numbers[name]) == fail | errno.EPERM, name
    for number in (0, 1, 3, 9, 202):  # read, write and others that every program needs
        assert decide(one, number) == allow
    assert decide(one, 0, architecture=0x40000003) == kill
    if platform.machine() == "x86_64":
        assert decide(one, 0x40000000 | 41) == kill
        assert decide(one, numbers["fork"]) == fail | errno.EAGAIN


@LINUX
def test_every_probe_can_find_an_open_wall() -> None:
    """Without a wall each probe gets through, but for those that plain limits or the user stop."""
    found, lacking = isolation.probe(Unsafe())
    assert lacking == ""
    stopped = {"runs a program", "memory", "memory of a file", "the environment"} | (
        set() if os.getuid() == 0 else {"new privileges"}
    )
    assert set(found) == {*isolation.PROBES, *isolation.EXTRA} - stopped


@needs_wall
@pytest.mark.parametrize(
    ("name", "value", "probes"),
    [
        ("readable", lambda: [*READABLE, tempfile.gettempdir()], {"reading host files"}),
        ("ENVIRONMENT", dict(os.environ), {"the environment"}),
    ],
)
def test_a_wall_with_a_hole_is_not_chosen(name: str, value: Any, probes: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = isolation.choose().mechanism
    monkeypatch.setattr(mechanisms, name, value)
    found, lacking = isolation.probe(mechanism)
    assert lacking == "" and set(found) == probes
    monkeypatch.setattr(isolation, "candidates", lambda: [(mechanism, "")])
    with pytest.raises(UserError, match=f"does not stop .*{next(iter(sorted(probes)))}.*sandbox='unsafe'"):
        isolation._choose("auto")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_without_its_network_wall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = Bubblewrap(privileged=os.getuid() == 0)
    walls = Bubblewrap.walls
    monkeypatch.setattr(Bubblewrap, "walls", lambda self, rules: [w for w in walls(self, rules)[:-2] if w != "--unshare-net"])
    assert {"network (TCP)", "network (UDP)"} <= set(isolation.probe(mechanism)[0])


def test_without_a_wall_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        isolation, "candidates", lambda: [(Sandlock(), "not importable"), (Bubblewrap(), "bwrap is not on PATH")]
    )
    monkeypatch.setattr(isolation, "_chosen", {})
    with pytest.raises(UserError, match=r"no sandbox .* \(sandlock: not importable; bubblewrap: bwrap is not on PATH\)"):
        grade("```python\n1\n```", [StdioTest("", "1")])
    monkeypatch.setattr(isolation, "candidates", lambda: [])
    with pytest.raises(UserError, match="only Linux has one"):
        isolation.choose("bubblewrap")


@LINUX
def test_unsafe_is_possible_when_asked_for() -> None:
    assert "unsafe" in isolation.describe("unsafe")
    assert grade("```python\nprint(2)\n```", [StdioTest("", "2")], sandbox="unsafe").outcome == "pass"


@LINUX
def test_where_a_wall_can_work_it_does() -> None:
    """So that a fault of ours cannot hide as a skip."""
    sandlock = pytest.importorskip("sandlock", exc_type=ImportError)
    if sandlock.landlock_abi_version() < sandlock.min_landlock_abi():
        pytest.skip(f"Landlock {sandlock.landlock_abi_version()} is too old for sandlock")
    assert isolation.choose("sandlock").name == "sandlock"


@needs_wall
def test_the_choice_says_what_it_is() -> None:
    text = isolation.describe()
    assert isolation.choose().name in text and "self-test" in text and "\n" not in text
    assert isolation.choose() is isolation.choose()


SEVERAL = Limits(wall=20.0, memory=256 * MEGABYTE, processes=4)
PARALLEL = """
import os
r, w = os.pipe()
for i in range(3):
    if os.fork() == 0:
        os.write(w, b"x")
        os._exit(0)
for i in range(3):
    os.wait()
print(len(os.read(r, 9)))
"""
GREEDY = """
import os, time
b = bytearray(150 << 20)
for i in range(3):
    if os.fork() == 0:
        for j in range(0, len(b), 4096):
            b[j] = 1
        time.sleep(0.3)
        os._exit(0)
print([os.wait()[1] for i in range(3)])
"""
BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        break
print(1)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print(1)
"""


@needs_wall
def test_several_processes_where_they_are_allowed() -> None:
    assert grade(fenced(PARALLEL), [StdioTest("", "3")], limits=SEVERAL).outcome == "pass"
    grade(fenced(BOMB), [StdioTest("", "1")], limits=SEVERAL)
    short = Limits(wall=1.0, memory=256 * MEGABYTE, processes=4)
    assert grade(fenced(DAEMON), [StdioTest("", "1")], limits=short).outcome in ("pass", "timeout")
    assert wait_for(lambda: not strangers())


@needs_wall
def test_memory_is_limited_in_total_where_a_group_can_be_made() -> None:
    if not getattr(isolation.choose().mechanism, "groups", False):
        pytest.skip("this process may not make control groups: several processes have a limit each")
    assert grade(fenced(GREEDY), [StdioTest("", "[0, 0, 0]")], limits=SEVERAL).outcome in (
        "memory",
        "fail",
        "crash",
    )
    roomy = Limits(wall=20.0, memory=1024 * MEGABYTE, processes=4)
    assert grade(fenced(GREEDY), [StdioTest("", "[0, 0, 0]")], limits=roomy).outcome == "pass"
    pool.shared().close()
    parents = set(cgroup._parents()[:2])
    assert wait_for(lambda: not [f for parent in parents for f in parent.glob(f"posttrain-{os.getpid()}-*")])
    pool._pool = Pool()


def wait_for(condition: Any, seconds: float = 2.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@needs_wall
def test_interpreters_are_started_ahead_and_used_once() -> None:
    own, limits = Pool(spare=2), Limits(wall=10.0)
    mechanism = isolation.choose().mechanism
    seen = set()
    try:
        for _ in range(3):
            with own.take(mechanism, limits) as session:
                seen.add(session.child.pid)
                session.begin("stdio", "import sys\nprint(hasattr(sys, 'used'))\nsys.used = 1")
                assert session.read_all() == b"False\n"
            assert len(own._shelves[mechanism, limits]) == 2
        assert len(seen) == 3
        for number in range(6):  # other limits: at most so many kinds wait
            own.take(mechanism, Limits(wall=20.0 + number)).close()
        assert len(own._shelves) == pool.SHELVES
    finally:
        own.close()
    assert wait_for(lambda: not strangers())
    with pytest.raises(Infrastructure):
        own.take(mechanism, limits)


class Stillborn:
    name = "stillborn"

    def start(self, limits: Limits) -> Any:
        line = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return mechanisms.PopenChild(subprocess.Popen(line, bufsize=0, **pipes), None, whole_group=False)  # type: ignore[call-overload]


def test_a_child_that_does_not_start_is_our_failure() -> None:
    own = Pool(spare=0)
    with pytest.raises(Infrastructure, match="did not start: crash b'no such thing"):
        own.take(Stillborn(), Limits())
    own.close()


PARENT = textwrap.dedent("""
    import os, sys, threading, time
    from posttrain.rewards.code import StdioTest, grade
    from posttrain.rewards.sandbox import isolation, mechanisms
    isolation.choose()
    busy = "import time\\ntime.sleep(50)"
    threading.Thread(target=grade, args=(f"```python\\n{busy}\\n```", [StdioTest("", "")]), daemon=True).start()
    time.sleep(0.5)
    print(mechanisms.MARK, flush=True)
    time.sleep(50) if sys.argv[1] == "kill" else None
""")


@needs_wall
@pytest.mark.parametrize("way", ["kill", "exit"])
def test_nothing_outlives_the_grader(way: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", PARENT, way], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    mark = process.stdout.readline().strip().encode()
    assert mark.startswith(b"posttrain-")

    def marked() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "cmdline").read_bytes() and "Z" not in (entry / "stat").read_text().rpartition(")")[2][:3]:
                    found.append(entry.name)
            except OSError:
                continue
        return found

    if way == "kill":
        assert marked()
        process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()
    assert wait_for(lambda: not marked(), 3.0)


@needs_wall
def test_after_a_fork_both_sides_can_grade() -> None:
    program, tests = "```python\nprint(2)\n```", [StdioTest("", "2")]
    assert grade(program, tests).outcome == "pass"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if grade(program, tests).outcome == "pass" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert [grade(program, tests).outcome for _ in range(4)] == ["pass"] * 4


@pytest.mark.parametrize(
    "change",
    [
        {"wall": 0},
        {"wall": 1e9},
        {"cpu": 0},
        {"memory": 1000},
        {"processes": 0},
        {"threads": 0},
        {"open_files": 3},
        {"output": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Limits(**change)


@needs_wall
def test_an_interpreter_that_died_while_it_waited_is_our_failure() -> None:
    own = Pool(spare=0)
    with own.take(isolation.choose().mechanism, Limits(wall=10.0)) as session:
        session.child.kill()
        with pytest.raises(Infrastructure, match="did not start"):
            session.begin("stdio", "print(1)")
    own.close()


@needs_wall
def test_processor_time_has_its_own_limit() -> None:
    busy = "```python\nwhile True: pass\n```"
    begin = time.monotonic()
    assert grade(busy, [StdioTest("", "")], limits=Limits(wall=20.0, cpu=1.0)).outcome == "timeout"
    assert time.monotonic() - begin < 10


@needs_wall
def test_a_message_before_its_time_ends_the_session() -> None:
    own = Pool(spare=0)
    early = "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'0000000a[\"loaded\"]' * 9)\n    except OSError: pass"
    with own.take(isolation.choose().mechanism, Limits(wall=10.0)) as session:
        session.begin("calls", early)
        assert session.receive() == ["loaded"]
        with pytest.raises(Ended, match="fail"):
            session.send(["f", []])
    own.close()
