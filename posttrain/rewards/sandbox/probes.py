"""What a hostile program tries, for the self-test: one statement each. To get to its end is to get out.

All of them run in one program, one after the other, against things that the self-test sets up: `tcp`, `udp` (ports), `unix` (a path),
`secret` (a file), `written` (a path), `pid` (of the grader), `parent` (of its parent), `memory` (more bytes than are allowed),
`environment` (variables), `threads` (twice as many as are allowed). None does harm where it succeeds: what it sets is what was there
before.
"""

from __future__ import annotations

# name, then family, type and protocol
_SOCKETS = """
TCP 2 1 0, MPTCP 2 1 262, SCTP 2 1 132, DCCP 2 6 33, SMC 43 1 0, UDP 2 2 0, UDP-Lite 2 2 136, ping 2 2 1, raw
IP 2 3 255, TCP over IPv6 10 1 0, MPTCP over IPv6 10 1 262, UDP over IPv6 10 2 0, raw IPv6 10 3 255, unix
stream 1 1 0, unix datagram 1 2 0, unix packets 1 5 0, netlink 16 3 0, packet 17 3 768, vsock 40 1 0, kernel
crypto 38 5 0, Bluetooth 31 3 1, TIPC 30 5 0, RDS 21 5 0, CAN 29 3 1, KCM 41 2 0, XDP 44 3 0
"""
SOCKETS = {
    name: (int(family), int(kind), int(protocol))
    for row in _SOCKETS.replace("\n", " ").split(",")
    for name, family, kind, protocol in [row.strip().rsplit(" ", 3)]
}

# `call` makes a system call by its number, (x86_64, aarch64), and raises where it fails; `check` raises for -1
PRELUDE = """
import collections, ctypes, decimal, fcntl, json, math, os, platform, random, re, resource, signal, socket
library = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1: raise OSError(ctypes.get_errno(), '')
    return result
def call(numbers, *arguments):
    return check(library.syscall(numbers[platform.machine() == 'aarch64'], *arguments))
def pidfd():
    return call((434, 434), pid, 0)
def attempt(number, action, *arguments):  # this error says that the call was looked at
    try: action(*arguments)
    except OSError as error: assert error.errno == number
def iov(address):
    return (ctypes.c_size_t * 2)(address, 8)
space = ctypes.create_string_buffer(256)
print('ready', flush=True)
for name, text in probes.items():
    try: exec(text)
    except BaseException: print('closed', name, flush=True)
    else: print('open', name, flush=True)
"""
PROBES = {
    **{f"{name} socket": f"socket.socket{numbers}" for name, numbers in SOCKETS.items()},
    "connecting by TCP": "socket.create_connection(('127.0.0.1', tcp), 2)",
    "connecting by MPTCP": "s = socket.socket(2, 1, 262); s.settimeout(2); s.connect(('127.0.0.1', tcp))",
    "TCP fast open": "s = socket.socket(); s.sendto(b'x', 0x20000000, ('127.0.0.1', tcp))",
    "sending by UDP": "socket.socket(2, 2).sendto(b'x', ('127.0.0.1', udp))",
    "connecting to a unix socket": "socket.socket(1).connect(unix)",
    "listening": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "listening on an abstract unix socket": "s = socket.socket(1); s.bind('\\0posttrain' + str(os.getpid())); s.listen()",
    "a pair of datagram sockets": "socket.socketpair(1, 2)",
    "a message through a pair": "pair = socket.socketpair(); pair[0].sendmsg([b'x'])",
    "io_uring": "call((425, 425), 8, space)",
    "reading host files": "open(secret).read()",
    "names of host files": "os.stat(secret)",
    "opening host files for neither": "os.open(secret, 3)",  # reading nor writing: Landlock has no name for it
    "writing host files": "open(written, 'w')",
    "modes and times of host files": "os.chmod(secret, 0o666); os.utime(secret)",
    "locks on host files": "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH)",
    "leases on files": "fcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "reading /proc of the grader": "assert open(f'/proc/{pid}/environ', 'rb').read()",
    "memory of its parent": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "links of another process": "os.readlink(f'/proc/{parent}/cwd')",
    "the grader's out-of-memory score": "open(f'/proc/{pid}/oom_score_adj', 'r+')",
    "the environment": "assert set(os.environ) & environment",
    "kill": "os.kill(pid, 0)",
    "kill of a group": "os.kill(-os.getpgid(pid), 0)",
    "kill of its own group": "os.kill(0, 0)",
    "kill of all": "os.kill(-1, 0)",
    "tkill": "call((200, 130), pid, 0)",
    "tgkill": "call((234, 131), pid, pid, 0)",
    "rt_sigqueueinfo": "call((129, 138), pid, 0, bytes(8) + b'\\xff' * 4 + bytes(116))",
    "pidfd_send_signal": "call((424, 424), pidfd(), 0, None, 0)",
    "an owner of signals": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, pid)",
    "a group that owns signals": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, -os.getpgid(pid))",
    "prlimit": "resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))",
    "setpriority": "os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))",
    "setpriority of a group": "attempt(3, os.setpriority, os.PRIO_PGRP, 0x7FFFFFF0, 0)",
    "setpriority of a user": "attempt(3, os.setpriority, os.PRIO_USER, 0x7FFFFFF0, 0)",
    "priority inheritance": "attempt(110, call, (202, 98), (ctypes.c_uint * 1)(pid), 6, 0, bytes(16))",
    "sched_setaffinity": "os.sched_setaffinity(pid, os.sched_getaffinity(pid))",
    "sched_setscheduler": "os.sched_setscheduler(pid, os.sched_getscheduler(pid), os.sched_getparam(pid))",
    "sched_setparam": "os.sched_setparam(pid, os.sched_getparam(pid))",
    "sched_setattr": "call((315, 275), pid, space, 48, 0); call((314, 274), pid, space, 0)",
    "ioprio_set": "call((251, 30), 1, pid, call((252, 31), 1, pid))",
    "ioprio_set of a user": "attempt(22, call, (251, 30), 3, os.getuid(), 7 << 13)",
    "ptrace": "check(library.ptrace(0x4206, pid, None, None))",  # PTRACE_SEIZE, which does not stop the other
    "process_vm_readv": "attempt(14, call, (310, 270), pid, iov(ctypes.addressof(space)), 1, iov(4096), 1, 0)",
    "kcmp": "call((312, 272), pid, pid, 0, 0, 0)",
    "get_robust_list": "call((274, 100), pid, space, ctypes.byref(space, 64))",
    "process_madvise": "call((440, 440), pidfd(), space, 0, 20, 0)",
    "migrate_pages": "call((256, 238), pid, 64, iov(1), iov(1))",
    "move_pages": "call((279, 239), pid, 0, None, None, None, 0)",
    "a process by fork": "os.fork() or os._exit(0)",
    "a process by clone": "call((56, 220), 17, 0, 0, 0, 0) or os._exit(0)",
    "another program": "attempt(2, os.execv, '/nonexistent', ['x'])",
    "outliving the grader": "check(library.prctl(1, 0, 0, 0, 0))",
    "adopting processes": "check(library.prctl(36, 1, 0, 0, 0))",
    "another user": "os.setresuid(os.getuid(), os.getuid(), os.getuid())",
    "new privileges": "os.setuid(0); os.chroot('/')",
    "another table of open files": "call((436, 436), 900, 901, 2)",
    "memory": "bytearray(memory)",
    "memory of a file": "f = os.memfd_create('x'); [os.write(f, bytes(1 << 20)) for _ in range(memory >> 20)]",
    "locked memory": "check(library.mlockall(1))",
    "shared memory": "check(library.shmctl(check(library.shmget(0, 4096, 0o600)), 0, None))",
    "namespaces": "check(library.unshare(0x10000000))",
}
# Programs of their own, which may be ended for what they try: open where they print so.
ALONE = {
    "threads": """
import os, threading, time
threading.stack_size(65536)
for _ in range(threads): threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
print('open threads', flush=True)
os._exit(0)
""",
    "sockets by x32 numbers": """
import ctypes, platform
if platform.machine() == 'x86_64' and ctypes.CDLL(None).syscall(0x40000029, 2, 1, 0) >= 0: print('open sockets by x32 numbers')
""",
    # mov eax, 359 (socket); mov ebx, 2; mov ecx, 1; xor edx, edx; int 0x80; ret
    "sockets by 32-bit calls": """
import ctypes, mmap, platform
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex('53b867010000bb02000000b90100000031d2cd805bc3'))
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
if platform.machine() == 'x86_64' and function() >= 0: print('open sockets by 32-bit calls')
""",
}
# Programs that would rather have no outcome than that of a wrong answer: how each is run, the outcome that it must have, and its text.
LIMITED = {
    "an endless loop": ("stdio", "timeout", "while True: pass"),
    "stopping itself": ("stdio", "timeout", "import os\nos.kill(os.getpid(), 19)"),
    "closing its output": (
        "stdio",
        "timeout",
        "import os, time\nos.closerange(0, 64)\ntime.sleep(99)",
    ),
    "output without end": ("stdio", "output", "import os\nwhile True: os.write(1, bytes(65536))"),
    "killing itself": ("stdio", "crash", "import os\nos.kill(os.getpid(), 9)"),
    "a forged message": (
        "calls",
        "fail",
        "import os\nfor f in range(3, 9):\n    try: os.write(f, b'0000000a[\"loaded\"]' * 9)\n    except OSError: pass",
    ),
}
# what is open without namespaces, and is said so
UNCOUNTED = {
    "threads": "counted with those of the user",
    "names of host files": "not what is in them",
}
NAMES = (*PROBES, *ALONE, *LIMITED)


def programs(facts: dict[str, object]) -> list[str]:
    """The program that tries all of `PROBES`, then the others."""
    given = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
    return [f"{given}probes = {PROBES!r}\n{PRELUDE}", *(given + text for text in ALONE.values())]
