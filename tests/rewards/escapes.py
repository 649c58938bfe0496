"""A grader of its own, started by test_escapes.py as root or as an ordinary user, that runs what wants out and looks at the effect.

    python -m tests.rewards.escapes MECHANISM attack     what each attack changed, outside the sandbox, as one line of JSON
    python -m tests.rewards.escapes MECHANISM outlive    programs that want to outlive this process, which then waits to be killed
    python -m tests.rewards.escapes MECHANISM start      as many interpreters as it can start

`shared` is Landlock without a file system of its own; `bare` is a process without the filter, in which the attacks must succeed: else
they would show nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.rewards.sandbox import mechanisms, seccomp
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.session import Ended, Session

LIMITS = Limits(wall=50.0, memory=256 * MEGABYTE)

# Each ends with data that arrives at a socket of the grader.
NETWORK = {
    "TCP": "s = socket.create_connection(('127.0.0.1', tcp), 2); s.send(b'x')",
    "MPTCP": "s = socket.socket(2, 1, 262); s.connect(('127.0.0.1', tcp)); s.send(b'x')",
    "fast open": "s = socket.socket(); s.sendto(b'x', 0x20000000, ('127.0.0.1', tcp))",
    "fast open by sendmsg": "s = socket.socket(); s.sendmsg([b'x'], [], 0x20000000, ('127.0.0.1', tcp))",
    "fast open of MPTCP": "s = socket.socket(2, 1, 262); s.sendto(b'x', 0x20000000, ('127.0.0.1', tcp))",
    "UDP": "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', udp))",
    "UDP, connected": "s = socket.socket(2, 2); s.connect(('127.0.0.1', udp)); os.write(s.fileno(), b'x')",
    "UDP by sendmsg": "socket.socket(2, 2).sendmsg([b'x'], [], 0, ('127.0.0.1', udp))",
    "unix stream": "s = socket.socket(1); s.connect(unix); s.send(b'x')",
    "unix abstract": "s = socket.socket(1); s.connect(abstract); s.send(b'x')",
    "unix datagram": "socket.socket(1, 2).sendto(b'x', datagram)",
    "a datagram pair with an address": "a, b = socket.socketpair(1, 2); a.sendto(b'x', datagram)",
    "a pair that connects elsewhere": "a, b = socket.socketpair(1, 2); a.connect(datagram); a.send(b'x')",
    "raw socket number": "f = call((41, 198), 2, 2, 0); socket.socket(fileno=f).sendto(b'x', ('127.0.0.1', udp))",
}
# Each ends with a change of the grader, or of another process of its user.
PROCESS = {
    "kill": "os.kill(grader, USR1)",
    "kill of a group": "os.kill(-group, USR1)",
    "tkill": "call((200, 130), grader, USR1)",
    "tgkill": "call((234, 131), grader, grader, USR1)",
    "rt_sigqueueinfo": "call((129, 138), grader, USR1, struct.pack('iii', 0, 0, -1) + bytes(116))",
    "rt_tgsigqueueinfo": "call((297, 240), grader, grader, USR1, struct.pack('iii', 0, 0, -1) + bytes(116))",
    "pidfd_send_signal": "call((424, 424), call((434, 434), grader, 0), USR1, None, 0)",
    "a pipe whose owner is the grader": "r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, grader); fcntl.fcntl(r, 10, USR1)\n"
    "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
    "a pair whose owner is the grader": "a, b = socket.socketpair(); fcntl.ioctl(a, 0x8901, struct.pack('i', grader))\n"
    "fcntl.fcntl(a, 10, USR1); fcntl.ioctl(a, 0x5452, struct.pack('i', 1)); b.send(b'x')",  # FIOSETOWN, FIOASYNC
    "prlimit": "resource.prlimit(grader, resource.RLIMIT_NOFILE, (99, 99))",
    "prlimit of another": "resource.prlimit(other, resource.RLIMIT_CPU, (1, 1))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, grader, os.getpriority(os.PRIO_PROCESS, grader) + 1)",
    "setpriority of a group": "os.setpriority(os.PRIO_PGRP, group, os.getpriority(os.PRIO_PROCESS, grader) + 1)",
    "setpriority of a user": "os.setpriority(os.PRIO_USER, os.getuid(), os.getpriority(os.PRIO_PROCESS, grader) + 1)",
    "priority inheritance": "lock = (ctypes.c_uint * 1)(other)\n"  # FUTEX_LOCK_PI of a lock that another is said to hold
    "threading.Thread(target=call, args=((202, 98), lock, 6, 0, None), daemon=True).start(); time.sleep(0.2)",
    "sched_setattr": "b = ctypes.create_string_buffer(48); call((315, 275), grader, b, 48, 0)\n"
    "b[16] = b[16][0] + 1; call((314, 274), grader, b, 0)",
    "sched_setscheduler": "os.sched_setscheduler(grader, 3, os.sched_param(0))",
    "sched_setaffinity": "os.sched_setaffinity(grader, {max(os.sched_getaffinity(grader))})",
    "sched_setaffinity of another": "os.sched_setaffinity(other, {max(os.sched_getaffinity(other))})",
    "ioprio_set": "call((251, 30), 1, grader, 2 << 13 | 6)",
    "ioprio_set of a group": "call((251, 30), 2, group, 2 << 13 | 5)",
    "ioprio_set of a user": "call((251, 30), 3, os.getuid(), 2 << 13 | 7)",
    "the out-of-memory score": "open(f'/proc/{grader}/oom_score_adj', 'w').write('900')",
    "kill of another": "os.kill(other, 9)",
    "kill of all": "signal.signal(USR1, signal.SIG_IGN); os.kill(-1, USR1)",
}
WIDE = {"kill of all", "setpriority of a user", "ioprio_set of a user"}  # what they reach is more than what the tests started
USERS = range(60_000, 61_000)  # users without processes of their own
IOPRIO_GET = {"aarch64": 31}.get(platform.machine(), 252)
PRELUDE = """
import ctypes, fcntl, os, platform, resource, signal, socket, struct, sys, threading, time
USR1 = signal.SIGUSR1
library = ctypes.CDLL(None, use_errno=True)
def call(numbers, *arguments):
    result = library.syscall(numbers[platform.machine() == 'aarch64'], *arguments)
    if result == -1: raise OSError(ctypes.get_errno(), '')
    return result
"""
ATTACK = f"""{PRELUDE}
for name, text in attacks.items():
    sys.stdin.readline()
    try: exec(text)
    except BaseException: print('failed', flush=True)
    else: print('done', flush=True)
"""

# Programs that want to go on without their grader.
OUTLIVE = {
    "death signal": "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",
    "death signal by number": "call((157, 167), 1, 0, 0, 0, 0)",
    "session": "os.setsid()",
    "descriptors": "say(); os.closerange(0, 64)",
    "stopped": "say(); os.kill(os.getpid(), signal.SIGSTOP)",
    "signals ignored and blocked": "[signal.signal(s, 1) for s in range(1, 32) if s not in (9, 19)]\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
    "another thread": "threading.Thread(target=time.sleep, args=(99,)).start(); say(); call((60, 93), 0)",
    "two forks": "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)",
    "clone with the parent's parent": "call((56, 220), 0x8011, 0, 0, 0, 0)",
    "another program": "say(); os.execv('/bin/sleep', ['sleep', '99'])",
    "another user": "os.setresuid(-1, os.getuid(), -1); os.setresgid(-1, os.getgid(), -1)",
    "a loop": "say()\nwhile True: pass",
    "a blocked read": "say(); os.read(os.pipe()[0], 1)",
}
STAY = f"""{PRELUDE}
def say(): os.write(1, b'up\\n')
try:
    exec(text)
except BaseException: pass
say()
time.sleep(99)
"""


def mechanism(name: str) -> Any:
    if name == "bare":
        seccomp.supported = lambda: False
    return mechanisms.Unsafe() if name in ("bare", "unsafe") else mechanisms.Landlock(private=name == "landlock")


class Host:
    """The grader and another process of its user, looked at before and after; and sockets that notice what arrives."""

    def __init__(self, folder: str) -> None:
        self.signals: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: self.signals.append(number))
        self.other = subprocess.Popen(
            ["nice", "-n", "5", "/bin/sleep", "30"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.sockets = {"tcp": socket.create_server(("127.0.0.1", 0)), "udp": socket.socket(type=socket.SOCK_DGRAM)}
        self.sockets["udp"].bind(("127.0.0.1", 0))
        self.facts: dict[str, Any] = {name: s.getsockname()[1] for name, s in self.sockets.items()}
        names = {"unix": f"{folder}/s", "abstract": f"\0escape-{os.getpid()}", "datagram": f"{folder}/d"}
        for name, path in names.items():
            self.sockets[name] = s = socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM if name == "datagram" else socket.SOCK_STREAM
            )
            s.bind(path)
            if name != "datagram":
                s.listen()
            if path[0] == "/":
                os.chmod(path, 0o777)
        self.facts |= {**names, "grader": os.getpid(), "group": os.getpgid(0), "other": self.other.pid}

    def arrived(self) -> list[str]:
        """Which sockets something arrived at since the last look."""
        found = []
        for name, s in self.sockets.items():
            while select.select([s], [], [], 0)[0]:
                found.append(name)
                if s.type == socket.SOCK_DGRAM:
                    s.recv(9)
                else:
                    s.accept()[0].close()
        return found

    def state(self) -> dict[str, Any]:
        pids = {"grader": os.getpid(), "other": self.other.pid}
        state: dict[str, Any] = {"signals": len(self.signals)}
        for who, pid in pids.items():
            state |= {
                f"{who} limits": [resource.prlimit(pid, limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
                f"{who} priority": os.getpriority(os.PRIO_PROCESS, pid),
                f"{who} priority now": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[15],
                f"{who} processors": sorted(os.sched_getaffinity(pid)),
                f"{who} scheduler": os.sched_getscheduler(pid),
                f"{who} io": ctypes.CDLL(None).syscall(IOPRIO_GET, 1, pid),
                f"{who} memory": Path(f"/proc/{pid}/oom_score_adj").read_text(),
            }
        return state


def attack(name: str) -> dict[str, list[str]]:
    """For each attack, what it changed. An attack that ended the program changed nothing, and the next one has a new program."""
    kind, own, changed = mechanism(name), Pool(spare=0), dict[str, list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        host = Host(folder)
        left = {attempt: text for attempt, text in (NETWORK | PROCESS).items() if private() or attempt not in WIDE}
        while left:
            given = "".join(f"{fact} = {value!r}\n" for fact, value in host.facts.items())
            with own.take(kind, LIMITS) as session:
                session.begin("stdio", f"{given}attacks = {left!r}\n{ATTACK}")
                try:
                    for attempt in list(left):
                        before = host.state()
                        session.write(b"\n")
                        left.pop(attempt)
                        lines(session, 1)
                        after = host.state()
                        effects = [key for key in before if before[key] != after.get(key)]
                        changed[attempt] = [*effects, *host.arrived()]
                        session.incoming.clear()
                except Ended:
                    changed.setdefault(attempt, host.arrived())
        with suppress(subprocess.TimeoutExpired):  # it takes a moment to die
            host.other.wait(0.3)
            changed["kill of another"].append("dead")
        host.other.kill()
        host.other.wait(5)
    own.close()
    return changed


def private() -> bool:
    """Whether all processes of the program's user are ours; under root it becomes a user of its own."""
    return os.getuid() == 0 or os.getuid() in USERS


def lines(session: Session, count: int) -> None:
    while session.incoming.count(b"\n") < count:
        session._turn()


def outlive(name: str) -> None:
    """All at once; a program that ended in the attempt is none that goes on."""
    kind, own, sessions = mechanism(name), Pool(spare=len(OUTLIVE)), dict[str, Session]()
    for variant, text in OUTLIVE.items():
        session = own.take(kind, LIMITS)
        session.begin("stdio", f"text = {text!r}\n{STAY}")
        session.write(b"")
        sessions[variant] = session
    for session in sessions.values():
        try:
            lines(session, 1)
        except Ended:
            continue
    print("up", flush=True)
    time.sleep(60)


def start(name: str) -> None:
    own, kind = Pool(spare=12), mechanism(name)
    print("up", flush=True)
    own.take(kind, LIMITS)
    time.sleep(60)


if __name__ == "__main__":
    if sys.argv[2] == "attack":
        print(json.dumps(attack(sys.argv[1])))
    else:
        {"outlive": outlive, "start": start}[sys.argv[2]](sys.argv[1])
