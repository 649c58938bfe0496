"""The parts of the sandbox: what may cross the wall, the filter, the choice of a wall, and that nothing outlives its use."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import deque
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.commands import doctor
from posttrain.errors import UserError
from posttrain.rewards.code import CallTest, StdioTest, grade
from posttrain.rewards.sandbox import isolation, mechanisms, pool, probes, seccomp, wire
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import Infrastructure, Landlock, Unsafe
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.session import Ended
from posttrain.tasks._code_data import fenced
from tests.rewards.hostile_programs import strangers

READABLE = mechanisms.readable()
ROOT = Path(__file__).parent.parent.parent
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sandboxes are for Linux")


def usable(name: str = "auto") -> str:
    try:
        isolation.choose(name)
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
    Fraction(-1, 3), Fraction(10**40, 7), Decimal("1.50"), Decimal("-1E+30"), Decimal("-Infinity"), range(5), range(9, -3, -2),
    date(2024, 2, 29), datetime(2024, 2, 29, 1, 2, 3, 4), datetime(2024, 7, 1, tzinfo=timezone(timedelta(hours=2))), clock(1, 2, 3),
    timedelta(days=-1, microseconds=5), UUID(int=7), deque([1, (2,)]), {Fraction(1, 2): [Decimal(3)]}, {(date(1, 1, 1), range(2))},
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
    [], ["x"], ["l"], ["l", 1], ["l", [], 1], ["u", []], ["i", "10"], ["i", "0x"], ["i", "0x" + "f" * 200_000], ["i", 5], ["f", "1.5"],
    ["f", 1], ["f", "0x1.8p+99999"], ["f", "0x1.0p+9999"], ["b", "f"], ["b", "zz"], ["c", ["nan"]], ["d", [1]],
    ["d", [[1, 2], [1, 3]]], ["d", [[["l", []], 1]]],
    ["o", []], ["o", ["Fraction", 1]], ["o", ["Fraction", 1, 0]], ["o", ["Fraction", 1, True]],
    ["o", ["Fraction", ["i", hex(1 << 40_001)], 3]], ["o", ["Decimal", "sNaN"]], ["o", ["Decimal", "1_0"]],
    ["o", ["Decimal", "1E+9999999999"]], ["o", ["Decimal", 1]], ["o", ["range", 1, 2, 0]], ["o", ["date", "2024-02-30"]],
    ["o", ["datetime", ["l", []]]], ["o", ["timedelta", 1 << 40, 0, 0]], ["o", ["eval", "1"]], ["o", ["UUID", "x"]],
    ["s", [["q", []]]], ["s", [1, 1]], ["s", [["l", []]]], [["l", []], 1], ["l", [["x", 1]]],
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
    (True, 1, True, False),
    (1, True, True, False),
    (True, 2, False, False),
    ({"a": True}, {"a": 1}, True, False),
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
    ([True], [1], True, False),
    (1 + 0j, 1, True, True),
    (Fraction(1, 2), 0.5, True, True),
    (Fraction(1, 3), 1 / 3, True, True),
    (Fraction(1, 3), Fraction(2, 6), True, True),
    (Fraction(1, 3), Decimal("0.333333333333"), False, False),
    (Decimal("2.50"), 2.5, True, True),
    (Decimal("3"), 3, True, True),
    (Decimal("1E+999999999"), 10**9, False, False),
    (Decimal("1E+999999999"), 1e308, False, False),
    (Decimal("NaN"), math.nan, True, True),
    (Fraction(10**5000, 3), 1.5, False, False),
    (Decimal("0.1"), "0.1", False, False),
    (range(3), range(0, 3), True, True),
    (range(3), [0, 1, 2], False, False),
    (deque([1]), deque([1]), True, True),
    (deque([1]), [1], False, False),
    (date(2024, 2, 29), date(2024, 2, 29), True, True),
    (datetime(2024, 2, 29), date(2024, 2, 29), False, False),
    (timedelta(days=1), timedelta(hours=24), True, True),
]


@pytest.mark.parametrize(("given_", "expected", "loose", "exact"), SAME)
def test_comparison(given_: Any, expected: Any, loose: bool, exact: bool) -> None:
    assert wire.same(given_, expected) is loose
    assert wire.same(given_, expected, exact=True) is exact


def decide(filter_: bytes, number: int, *arguments: int, architecture: int) -> int:
    """An interpreter of the few instructions that the filter uses, written from the kernel's documentation."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("HBBI", filter_))
    position, register = 0, 0
    while True:
        code, true, false, value = steps[position]
        position += 1
        if code == 0x20:
            register = struct.unpack_from("<I", data, value)[0]
        elif code == 0x15:
            position += true if register == value else false
        elif code == 0x25:
            position += true if register > value else false
        elif code == 0x45:
            position += true if register & value else false
        elif code == 0x06:
            return value
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


KILLED, DENIED, AGAIN, ABSENT = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.EAGAIN, 0x50000 | errno.ENOSYS
NO_LINK = 0x50000 | errno.EINVAL
# Numbers by hand, from the kernel's tables: (x86_64, aarch64)
NEEDED = {"read": (0, 63), "write": (1, 64), "close": (3, 57), "mmap": (9, 222), "futex": (202, 98), "openat": (257, 56)}
REFUSED = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "recvmsg": (47, 212), "recvmmsg": (299, 243), "setsockopt": (54, 208),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "tkill": (200, 130), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "kcmp": (312, 272),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "process_madvise": (440, 440), "move_pages": (279, 239),
    "migrate_pages": (256, 238), "process_vm_readv": (310, 270), "setsid": (112, 157), "setpgid": (109, 154), "setuid": (105, 146),
    "setresuid": (117, 147), "capset": (126, 91), "seccomp": (317, 277), "unshare": (272, 97), "mount": (165, 40), "bpf": (321, 280),
    "memfd_create": (319, 279), "mlockall": (151, 230), "shmget": (29, 194), "flock": (73, 32), "fchmodat": (268, 53),
    "unlinkat": (263, 35), "renameat2": (316, 276), "keyctl": (250, 219), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265),
}  # fmt: skip
THREAD, FORK, NEW_USER = 0x3D0F00, 0x1200011, 0x10000000  # the flags of pthread_create and of fork, as strace shows them
OWN = seccomp.OWN_PID
LISTED = seccomp.ALLOWED, seccomp.COMPARED, seccomp.OPEN, seccomp.OPENAT, seccomp.CLONE
COMPARED: list[tuple[tuple[int, int], list[tuple[tuple[int, ...], int]]]] = [  # a call with arguments, and what becomes of it
    ((56, 220), [((THREAD,), seccomp.ALLOW), ((FORK,), AGAIN), ((17,), AGAIN), ((THREAD | NEW_USER,), AGAIN), ((0x4111,), AGAIN),
                 ((THREAD & ~0x400,), AGAIN)]),  # a thread with open files of its own, and a limit of its own on them
    ((436, 436), [((3, 9, 0), seccomp.ALLOW), ((3, 9, 4), seccomp.ALLOW), ((3, 9, 2), DENIED), ((3, 9, 6), DENIED)]),
    ((257, 56), [((9, 9, 0x80000), seccomp.ALLOW), ((9, 9, 0x80241), seccomp.ALLOW), ((9, 9, 2), seccomp.ALLOW), ((9, 9, 3), DENIED),
                 ((9, 9, 3 | 1 << 32), DENIED), ((9, 9, 0x410003), DENIED), ((9, 9, 0x203), DENIED), ((9, 9, 0x200), DENIED),
                 ((9, 9, 0x80202), seccomp.ALLOW)]),
    ((267, 78), [((9, 9), NO_LINK)]),
    ((202, 98), [*(((9, operation), seccomp.ALLOW) for operation in (0, 1, 0x80, 0x81, 0x83, 0x84, 0x85, 0x89, 0x109, 0x189)),
                 *(((9, operation), DENIED) for operation in (6, 0x86, 7, 8, 11, 0x8B, 12, 13, 0x18D, 2))]),  # PI: names its owner
    ((302, 261), [((0, 7), seccomp.ALLOW), ((1 << 32,), seccomp.ALLOW), ((1,), DENIED), ((OWN,), DENIED)]),
    ((62, 129), [((OWN, 9), seccomp.ALLOW), ((0, 9), DENIED), ((2**32 - 1, 9), DENIED), ((2**64 - OWN, 9), DENIED)]),
    ((234, 131), [((OWN, 5, 9), seccomp.ALLOW), ((5, OWN, 9), DENIED)]),
    ((157, 167), [((15,), seccomp.ALLOW), ((1, 0), DENIED), ((1 | 1 << 32,), DENIED), ((22, 2), DENIED), ((36,), DENIED)]),
    ((72, 25), [((3, 4, 0x800), seccomp.ALLOW), ((3, 8, 1), DENIED), ((3, 10), DENIED), ((3, 15), DENIED), ((3, 1024), DENIED)]),
    ((16, 29), [((0, 0x5401), seccomp.ALLOW), ((0, 0x8901), DENIED), ((0, 0x5412), DENIED), ((0, 0x5452), DENIED)]),
    ((53, 199), [((1, 0x80001, 0), seccomp.ALLOW), ((1, 2, 0), DENIED), ((2, 1, 0), DENIED), ((1, 5, 0), DENIED)]),
    ((44, 206), [((3, 9, 1, 0, 0, 0), seccomp.ALLOW), ((3, 9, 1, 0, 9, 16), DENIED), ((3, 9, 1, 0, 9 << 32, 16), DENIED),
                 ((3, 9, 1, 0x20000000, 0, 0), DENIED), ((3, 9, 1, 1, 0, 0), DENIED)]),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter(machine: str, column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    own, other = (seccomp.ARCHITECTURES[name] for name in (machine, {"x86_64": "aarch64", "aarch64": "x86_64"}[machine]))
    rules = seccomp.program()
    for name, numbers in NEEDED.items():
        assert decide(rules, numbers[column], architecture=own) == seccomp.ALLOW, name
    for name, numbers in REFUSED.items():
        assert decide(rules, numbers[column], architecture=own) == DENIED, name
    for numbers, cases in COMPARED:
        for arguments, action in cases:
            assert decide(rules, numbers[column], *arguments, architecture=own) == action, (numbers, arguments)
    listed = {numbers[column] for table in LISTED for numbers in table.values()}
    allowed = {number for number in range(2000) if decide(rules, number, architecture=own) == seccomp.ALLOW}
    assert allowed <= listed and len(allowed) > 80, "what is not listed is denied"
    assert decide(rules, 435, architecture=own) == decide(rules, 1999, architecture=own) == ABSENT
    if machine == "x86_64":
        assert [decide(rules, 2, 9, mode, architecture=own) for mode in (0, 1, 2, 3)] == [seccomp.ALLOW] * 3 + [DENIED]  # open
        assert decide(rules, 89, architecture=own) == NO_LINK
        assert decide(rules, 57, architecture=own) == decide(rules, 58, architecture=own) == AGAIN
        assert decide(rules, 0x40000000 | 41, architecture=own) == decide(rules, 0x40000000, architecture=own) == ABSENT  # x32
    private = seccomp.program(private=True)
    for name, numbers in seccomp.PRIVATE.items():  # files of its own: what else is allowed
        if (number := numbers[column]) is not None:
            assert decide(private, number, architecture=own) == seccomp.ALLOW, name
            assert decide(rules, number, architecture=own) in (DENIED, NO_LINK), name
    more = {number for number in range(2000) if decide(private, number, architecture=own) == seccomp.ALLOW} - allowed
    assert more == {numbers[column] for numbers in seccomp.PRIVATE.values()} - {None}
    assert decide(rules, 0, architecture=0x40000003) == decide(rules, 0, architecture=other) == KILLED
    assert rules.count(OWN.to_bytes(4, "little")) == 2 and child_constant() == OWN.to_bytes(4, "little")


def child_constant() -> bytes:
    """What stands for the own pid, as child.py has it: it can import nothing of ours."""
    return bytes.fromhex(mechanisms.SOURCE.partition('OWN_PID = bytes.fromhex("')[2].partition('"')[0])


def unsupported() -> set[str]:
    """Probes of what this kernel does not have, or not for this user."""
    found = set()
    for name, numbers in probes.SOCKETS.items():
        try:
            socket.socket(*numbers).close()
        except OSError:
            found.add(f"{name} socket")
    if os.getuid() != 0:
        found |= {"new privileges", "locked memory", "process_madvise", "leases on files", "ptrace", "process_vm_readv"}
        found |= {"memory of its parent"}
    return found | {
        "io_uring",
        "migrate_pages",
        "move_pages",
        "kcmp",
        "process_madvise",
        "namespaces",
        "sockets by x32 numbers",
    }


@LINUX
def test_every_probe_can_find_an_open_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wall each probe gets through, but for those that plain limits or the user stop."""
    monkeypatch.setattr(seccomp, "supported", lambda: False)
    found, lacking = isolation.probe(Unsafe())
    assert lacking == ""
    stopped = {"memory", "memory of a file", "the environment", *probes.LIMITED}
    assert set(probes.NAMES) - set(found) - unsupported() == stopped - unsupported() and len(found) > 50


@needs_wall
def test_a_mechanism_without_the_filter_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone leaves something open that the filter closes."""
    mechanism = isolation.choose().mechanism
    monkeypatch.setattr(seccomp, "supported", lambda: False)
    monkeypatch.setattr(mechanisms, "candidates", lambda: [(mechanism, "")])
    with pytest.raises(UserError, match="does not stop .*outliving the grader"):
        isolation._choose("auto")


@LINUX
def test_what_could_not_be_tried_counts_as_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = {"TCP socket": probes.PROBES["TCP socket"], "leaves": "os._exit(0)", "after": "1 / 0"}
    monkeypatch.setattr(probes, "PROBES", tried)
    ends = {"a loop that ends": ("stdio", "timeout", "pass"), "a plain program": ("calls", "fail", "def f(): pass")}
    monkeypatch.setattr(probes, "LIMITED", ends)
    monkeypatch.setattr(probes, "NAMES", (*tried, *ends))
    assert isolation.probe(Unsafe()) == (["leaves", "after", *ends], "")


@needs_wall
@pytest.mark.parametrize(
    ("name", "value", "ways"),
    [
        ("readable", lambda: [*READABLE, tempfile.gettempdir()], {"reading host files", "names of host files"}),
        ("ENVIRONMENT", dict(os.environ), {"the environment"}),
    ],
)
def test_a_wall_with_a_hole_is_not_chosen(name: str, value: Any, ways: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = isolation.choose().mechanism
    monkeypatch.setattr(mechanisms, name, value)
    found, lacking = isolation.probe(mechanism)
    assert lacking == "" and set(found) == ways
    monkeypatch.setattr(mechanisms, "candidates", lambda: [(mechanism, "")])
    with pytest.raises(UserError, match=f"does not stop .*{max(ways)}.*sandbox='unsafe'"):
        isolation._choose("auto")


def test_without_a_wall_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "candidates", lambda: [(Landlock(), "no Landlock"), (Landlock(private=False), "none")])
    monkeypatch.setattr(isolation, "_chosen", {})
    with pytest.raises(UserError, match=r"no sandbox .* \(landlock: no Landlock; landlock: none\)"):
        grade("```python\n1\n```", [StdioTest("", "1")])
    monkeypatch.setattr(mechanisms, "candidates", lambda: [])
    with pytest.raises(UserError, match="only Linux has one"):
        isolation.choose("landlock")


@LINUX
def test_unsafe_is_possible_when_asked_for() -> None:
    assert "unsafe" in isolation.describe("unsafe")
    assert grade("```python\nprint(2)\n```", [StdioTest("", "2")], sandbox="unsafe").outcome == "pass"


@LINUX
def test_where_a_wall_can_work_it_does() -> None:
    """So that a fault of ours cannot hide as a skip."""
    version = ctypes.CDLL(None).syscall(444, None, 0, 1)
    if version < 1:
        pytest.skip("this kernel has no Landlock")
    assert isolation.choose("landlock").name == "landlock"


@needs_wall
def test_the_choice_says_what_it_is() -> None:
    text, chosen = isolation.describe(), isolation.choose()
    assert chosen.name in text and "\n" not in text
    assert f"self-test: {chosen.tried - len(chosen.open)} of {len(probes.NAMES)} escapes closed" in text
    assert doctor.sandbox().text == text.removeprefix("code sandbox: ")
    assert isolation.choose() is isolation.choose()


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


@LINUX
@pytest.mark.parametrize("name", ["landlock", "unsafe"])
def test_an_interpreter_that_is_given_up_while_it_starts_leaves_nothing(name: str) -> None:
    """At any moment."""
    if reason := "" if name == "unsafe" else usable(name):
        pytest.skip(reason)
    mechanism = isolation.choose(name).mechanism
    for step in range(30):
        child = mechanism.start(Limits())
        time.sleep(step * 0.0004)
        child.finish(0)
    assert wait_for(lambda: not strangers())


class Stillborn:
    name = "stillborn"

    def start(self, limits: Limits) -> Any:
        line = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return mechanisms.Child(subprocess.Popen(line, bufsize=0, **pipes))  # type: ignore[call-overload]


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
def test_nothing_is_dumped_and_nothing_locked() -> None:
    """A limit of 0 on core dumps is none for the host's crash handler, where there is one; the kernel starts none where it is 1."""
    core = 0 if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else 1
    text = "from resource import *\nprint(getrlimit(RLIMIT_CORE), getrlimit(RLIMIT_MEMLOCK))"
    with pool.shared().take(isolation.choose().mechanism, Limits()) as session:
        session.begin("stdio", text)
        assert session.read_all() == b"(%d, %d) (0, 0)\n" % (core, core)


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
