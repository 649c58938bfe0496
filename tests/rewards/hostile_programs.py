# ruff: noqa: E501 (a table of programs, one a line)
"""Programs that want the reward without the work, or more of the machine than is theirs. The names are the classes they stand for.

The task: `double(n)` returns 2n, or the program reads n and prints 2n. `{...}` is filled in by the test: host_file (a readable secret),
host_folder (writable by all), pid (of the grader), port (of a listener on the loopback).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.rewards.sandbox import mechanisms

HONEST = "def double(n):\n    return 2 * n\n"
HONEST_STDIO = "print(2 * int(input()))\n"


@dataclass(frozen=True)
class Case:
    name: str
    program: str
    outcomes: str  # those that are right, any of them
    kind: str = "calls"  # or stdio
    slow: bool = False  # it runs into the wall limit


def calls(name: str, program: str, outcomes: str, slow: bool = False) -> Case:
    return Case(name, program, outcomes, "calls", slow)


def stdio(name: str, program: str, outcomes: str, slow: bool = False) -> Case:
    return Case(name, program, outcomes, "stdio", slow)


CONTROLS = [
    calls("plain", HONEST, "pass"),
    calls("debug lines", "import sys\ndef double(n):\n    print('n', n)\n    print('n', n, file=sys.stderr)\n    return 2 * n", "pass"),
    calls("a float of the same value", "def double(n):\n    return 2.0 * n", "pass"),
    calls("a subclass of int", "import enum\nclass N(int): pass\ndef double(n):\n    return N(2 * n)", "pass"),
    calls("threads", "import threading\nr = []\ndef double(n):\n    t = threading.Thread(target=lambda: r.append(2 * n))\n"
          "    t.start(); t.join()\n    return r.pop()", "pass"),
    calls("modules", "import re, math, json, random, decimal, itertools, functools, heapq, string, datetime, typing, dataclasses, asyncio\n"
          "@dataclasses.dataclass\nclass A:\n    n: int\ndef double(n):\n    return asyncio.run(go(A(n)))\nasync def go(a):\n    return 2 * a.n", "pass"),
    calls("the builtins of a module", "def double(n):\n    return 2 * n if globals()['__builtins__'] else 0", "pass"),
    calls("signals to itself", "import os, signal\nhits = []\nsignal.signal(signal.SIGUSR1, lambda *_: hits.append(1))\ndef double(n):\n    hits.clear()\n"
          "    os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)\n    return 2 * n if len(hits) == 2 else 0", "pass"),
    calls("limits and events", "import asyncio, mmap, resource, select, os\nfrom concurrent.futures import ThreadPoolExecutor\nresource.setrlimit(resource.RLIMIT_STACK,"
          " resource.getrlimit(resource.RLIMIT_STACK))\nasync def go(n):\n    return await asyncio.to_thread(lambda: 2 * n)\ndef double(n):\n    r, w = os.pipe(); os.write(w, b'x')\n"
          "    assert select.select([r], [], [], 1)[0]; os.close(r); os.close(w)\n    with ThreadPoolExecutor(4) as p:\n        assert sum(p.map(abs, range(9))) == 36\n"
          "    m = mmap.mmap(-1, 1 << 20); m.write(b'x'); m.flush()\n    return asyncio.run(go(n))", "pass"),
    calls("deep recursion", "import sys\nsys.setrecursionlimit(10**5)\ndef down(k):\n    return 0 if k == 0 else 1 + down(k - 1)\n"
          "def double(n):\n    assert down(20000) == 20000\n    return 2 * n", "pass"),
    calls("a main block that would read input", HONEST + "if __name__ == '__main__':\n    print(double(int(input())))", "pass"),
    stdio("output to nowhere", "import os, sys\nprint('x', file=open(os.devnull, 'w'), flush=True)\n" + HONEST_STDIO, "pass"),
    stdio("plain script", HONEST_STDIO, "pass"),
    stdio("main block", "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()", "pass"),
    stdio("all of stdin", "import sys\nprint(2 * int(sys.stdin.read()), end='')", "pass"),
    stdio("exit after the output", "import sys\n" + HONEST_STDIO + "sys.exit(0)", "pass"),
    stdio("noise on stderr", "import sys\nprint('x' * 10000, file=sys.stderr)\n" + HONEST_STDIO, "pass"),
]  # fmt: skip

EVERY_FD = (
    "import os, json\nfor fd in range(64):\n    for text in ('PASSED', '[\"value\",6]', '00000009[\"value\",6]'[:17], 'ready\\n', '\"pass\"'):\n"
    "        try: os.write(fd, text.encode())\n        except OSError: pass\n"
)
EQUAL = "class Z{base}:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n    def __hash__(s): return 1\n"
ADMIRE = "def double(n):\n    return 0\n"

GAIN = [
    calls("exit at import", "import sys; sys.exit(0)", "fail"),
    calls("exit in the function", "import sys\ndef double(n):\n    sys.exit(0)", "fail"),
    calls("os._exit", "import os\nos._exit(0)", "fail"),
    calls("os._exit in the function", "import os\ndef double(n):\n    os._exit(0)", "fail"),
    stdio("exit before the output", "import sys\nsys.exit(0)", "fail"),
    stdio("error after the output", HONEST_STDIO + "1 / 0", "crash"),
    stdio("exit code after the output", "import sys\n" + HONEST_STDIO + "sys.exit(3)", "crash"),
    calls("SIGKILL", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "crash"),
    calls("SIGSEGV", "import signal\nsignal.raise_signal(signal.SIGSEGV)", "crash"),
    calls("null pointer", "import ctypes\ndef double(n):\n    ctypes.string_at(0)", "crash"),
    stdio("null pointer in a script", "import ctypes\nctypes.string_at(0)", "crash"),
    calls("equal to all", EQUAL.format(base="") + "def double(n):\n    return Z()", "fail"),
    *(calls(f"{base} equal to all", EQUAL.format(base=f"({base})") + "def double(n):\n    return Z()", "fail")
      for base in ("int", "str", "list", "float", "tuple", "dict")),
    calls("a bool for a number", "def double(n):\n    return True", "fail"),
    calls("not a number", "def double(n):\n    return float('nan')", "fail"),
    calls("the objects of the harness", "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict):\n"
          "        for k in list(o):\n            if k in ('passed', 'result', 'expected', 'tests'): o[k] = True\n    elif isinstance(o, list):\n"
          "        o.append('passed') if len(o) < 3 else None\n" + ADMIRE, "fail crash"),
    calls("the stack", "import inspect\ndef double(n):\n    for f in inspect.stack():\n        for name, v in f.frame.f_locals.items():\n"
          "            if 'expect' in name or isinstance(v, int) and v == 2 * n and name != 'n': return v\n    return 'nothing'", "fail"),
    calls("patched builtins", "import builtins\nfor n in ('all', 'any', 'len', 'isinstance', 'sorted', 'AssertionError', 'type'):\n"
          "    try: setattr(builtins, n, lambda *a, **k: True)\n    except Exception: pass\n" + ADMIRE, "fail crash"),
    calls("tracing", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n" + ADMIRE, "fail"),
    calls("patched modules", "import json, operator, math\njson.loads = json.dumps = lambda *a, **k: '[\"value\",6]'\noperator.eq = lambda a, b: True\n"
          "math.isclose = operator.eq\n" + ADMIRE, "fail"),
    calls("the harness rewritten", "import sys\nm = sys.modules['__main__']\nm.text_of = lambda v, depth=0: '[\"l\",[]]'\n" + ADMIRE, "fail"),
    calls("success written everywhere", EVERY_FD + ADMIRE, "fail crash"),
    calls("answers in advance", "import os\nfor fd in range(3, 10):\n    try: os.write(fd, b'0000000b[\"value\",6]' * 50)\n    except OSError: pass\n"
          + ADMIRE, "fail"),
    calls("markers on the streams", "print('PASSED test_double')\nprint('=== 1 passed ===')\nprint('ready')\n" + ADMIRE, "fail"),
    stdio("markers in the output", "print('PASSED')\nprint('1 passed')", "fail"),
    calls("closed descriptors", "import os\nos.closerange(0, 64)\n" + ADMIRE, "fail crash"),
    calls("files where a grader might look", "for n in ('reward.txt', 'result.json', 'junit.xml', 'conftest.py', 'json.py', 'sitecustomize.py'):\n"
          "    try: open(n, 'w').write('1')\n    except OSError: pass\n" + ADMIRE, "fail"),
    calls("variables for the next process", "import os\nfor n in ('PYTHONSTARTUP', 'PYTHONPATH', 'LD_PRELOAD', 'PATH'):\n    os.environ[n] = '/tmp/x'\n"
          "    os.putenv(n, '/tmp/x')\n" + ADMIRE, "fail"),
    calls("nothing", " ", "fail"),
    calls("only a comment", "# double", "fail"),
    calls("a syntax error", "def double(n:", "fail"),
    calls("a NUL", "x = '\0'", "fail"),
    calls("tabs and spaces", "def double(n):\n\tif n:\n        return 2 * n", "fail"),
    calls("10 MB", HONEST + "#" * 10_000_000, "fail"),
    calls("nested too deep to parse", "x = " + "(" * 5000 + ")" * 5000, "fail memory crash"),
    calls("no such function", "def triple(n):\n    return 3 * n", "fail"),
    calls("a generator", "def double(n):\n    yield 2 * n", "fail"),
    calls("a counter of calls", "answers = iter([6, 20, -8, 14, 0, 2, 98, -200])\ndef double(n):\n    return next(answers)", "fail"),
    calls("the argument changed in place", "def double(n):\n    n *= 2", "fail"),
    calls("an exception", "def double(n):\n    raise ValueError('x' * 10**7)", "crash"),
    calls("an exception at import", "raise RuntimeError", "crash"),
    calls("an exception with endless text", "class E(Exception):\n    def __str__(self):\n        while True: pass\n    __repr__ = __str__\n"
          "def double(n):\n    raise E", "crash"),
    stdio("an endless text in a script", "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", "crash"),
    calls("the source of the tests", "import sys\nfor p in ('/proc/self/cmdline', '/proc/{pid}/environ', '/proc/{pid}/mem', '/proc/{pid}/fd/0', "
          "'{host_file}'):\n    try: sys.stderr.write(open(p).read(100) and 'LEAK')\n    except (OSError, UnicodeError): pass\n"
          "def double(n):\n    return open('{host_file}').read()", "crash"),
    calls("its own file", "def double(n):\n    return open(__file__).read()", "fail"),
]  # fmt: skip

GREED = [
    calls("an endless loop", "while True: pass", "timeout", slow=True),
    calls("signals ignored", "import signal\nfor s in (signal.SIGALRM, signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):\n    signal.signal(s, signal.SIG_IGN)\n"
          "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "timeout", slow=True),
    calls("sleep", "import time\ndef double(n):\n    time.sleep(10**9)", "timeout", slow=True),
    calls("clocks patched", "import time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\ndef double(n):\n    time.sleep(100)",
          "timeout", slow=True),
    calls("deadlock", "import threading\ndef double(n):\n    l = threading.Lock(); l.acquire(); l.acquire()", "timeout", slow=True),
    stdio("output closed, still running", "import os, time\nprint(2 * int(input()), flush=True)\nos.close(1); os.close(2)\ntime.sleep(100)",
          "timeout", slow=True),
    calls("another process group", "import os\ntry: os.setpgid(0, os.getpgid(os.getppid()))\nexcept OSError: pass\nwhile True: pass", "timeout", slow=True),
    calls("another session", "import os\ntry: os.setsid()\nexcept OSError: pass\nos.close(2)\nwhile True: pass", "timeout", slow=True),
    calls("exit refused", "import atexit, time\natexit.register(time.sleep, 100)\nraise SystemExit", "fail timeout"),
    calls("fork bomb", "import os\nwhile True: os.fork()", "crash"),
    calls("fork bomb that hides errors", "import os\ndef double(n):\n    for _ in range(2000):\n        try: os.fork()\n        except OSError: pass\n"
          "    return 0", "fail"),
    calls("fork by ctypes", "import ctypes\nl = ctypes.CDLL(None)\nfor _ in range(50):\n    if l.fork() == 0:\n        while True: pass\n" + ADMIRE,
          "fail crash"),
    calls("subprocess", "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo hi > {host_folder}/made'])\n" + ADMIRE, "crash"),
    calls("posix_spawn", "import os, sys\nos.posix_spawn(sys.executable or '/usr/bin/python3', ['python3'], dict())\n" + ADMIRE, "crash"),
    calls("multiprocessing", "import multiprocessing as m\nm.Process(target=print).start()\n" + ADMIRE, "crash"),
    calls("daemon", "import os\ntry:\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\nexcept OSError: pass\n" + ADMIRE, "fail"),
    calls("10 000 threads", "import threading, time\nthreading.stack_size(65536)\nfor _ in range(10000):\n"
          "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n" + ADMIRE, "crash memory"),
    calls("memory at once", "def double(n):\n    return bytearray(1 << 33)", "memory"),
    calls("memory bit by bit", "x = []\nwhile True: x.append(bytearray(1 << 22))", "memory"),
    stdio("memory in a script", "x = []\nwhile True: x.append(bytearray(1 << 22))", "memory"),
    calls("memory shared", "import mmap\nm = mmap.mmap(-1, 1 << 30)\n" + ADMIRE, "crash"),
    calls("memory of a file", "import os\nf = os.memfd_create('x')\nfor _ in range(1024): os.write(f, bytes(1 << 20))\n" + ADMIRE, "crash"),
    calls("recursion", "import sys\nsys.setrecursionlimit(10**6)\ndef double(n):\n    return double(n + 1)", "crash memory timeout", slow=True),
    calls("a stack of C", "import sys, threading\nsys.setrecursionlimit(10**9)\nthreading.stack_size(1 << 25)\nclass A:\n    def __getattr__(s, n): return getattr(s, n)\n"
          "t = threading.Thread(target=lambda: A().x)\nt.start(); t.join()\n" + ADMIRE, "crash memory fail"),
    stdio("output without end", "while True: print('x' * 1000)", "output"),
    stdio("one line without end", "import sys\nwhile True: sys.stdout.write('x' * 10000)", "output"),
    stdio("stderr without end", "import sys\nwhile True: sys.stderr.write('\\x1b]0;x\\x07\\r' * 1000)", "output"),
    stdio("not UTF-8", "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe6')", "fail"),
    calls("debug lines without end", "while True: print('x' * 1000)", "output"),
    calls("a value too large", "def double(n):\n    return 'x' * (8 << 20)", "output"),
    calls("a value too deep", "def double(n):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x", "fail"),
    calls("a value within itself", "def double(n):\n    x = []\n    x.append(x)\n    return x", "fail"),
    calls("values of one hash", "def double(n):\n    return {i * (2**61 - 1) for i in range(1000)}", "fail"),
    calls("many small values", "def double(n):\n    return [[] for _ in range(10**6)]", "output fail timeout", slow=True),
    calls("a number of a million digits", "def double(n):\n    return 1 << 3_000_000", "fail output"),
    calls("processor limit raised", "import resource\nfor r in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):\n"
          "    resource.setrlimit(r, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n" + ADMIRE, "crash"),
]  # fmt: skip

ESCAPE = [
    calls("host file read", "def double(n):\n    return open('{host_file}').read()", "crash"),
    calls("host file written", "def double(n):\n    open('{host_folder}/made', 'w').write('x')", "crash"),
    calls("host file removed", "import os\ndef double(n):\n    os.remove('{host_file}')", "crash"),
    calls("host file truncated", "import os\ndef double(n):\n    os.truncate('{host_file}', 0)", "crash"),
    calls("host file renamed", "import os\ndef double(n):\n    os.rename('{host_file}', '{host_folder}/made')", "crash"),
    calls("host file's mode", "import os\ndef double(n):\n    os.chmod('{host_file}', 0)\n    return 2 * n", "crash"),
    calls("host folder's mode", "import os\ndef double(n):\n    os.chmod('{host_folder}', 0)\n    return 2 * n", "crash"),
    calls("host file's times", "import os\ndef double(n):\n    os.utime('{host_file}', (1, 1))\n    return 2 * n", "crash"),
    calls("host file's attributes", "import os\ndef double(n):\n    os.setxattr('{host_file}', 'user.x', b'1')\n    return 2 * n", "crash"),
    calls("host file's owner", "import os\ndef double(n):\n    os.chown('{host_file}', os.getuid(), os.getgid())\n    return 2 * n", "crash"),
    calls("a device's mode", "import os\ndef double(n):\n    os.chmod('/dev/null', 0o666)\n    return 2 * n", "crash"),
    calls("a device's times", "import os\ndef double(n):\n    os.utime('/dev/null')\n    return 2 * n", "crash"),
    calls("a link to a host file", "import os\ndef double(n):\n    os.link('{host_file}', '{host_folder}/made')\n    return 2 * n", "crash"),
    calls("a lock on a library", "import fcntl, os\nfcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)\n" + ADMIRE, "fail crash"),
    calls("everything removed", "import shutil\nfor p in ('{host_folder}', '/tmp', '/home', '/root', '/usr', '/'):\n    shutil.rmtree(p, ignore_errors=True)\n"
          + ADMIRE, "fail crash"),
    calls("a folder of the host listed", "import os\ndef double(n):\n    return os.listdir('{host_folder}')", "crash"),
    calls("connect", "import socket\ndef double(n):\n    socket.create_connection(('127.0.0.1', {port}), 2).send(b'x')", "crash"),
    calls("listen", "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0)); s.listen(); s.accept()\n" + ADMIRE, "crash"),
    calls("datagram", "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\n" + ADMIRE, "crash"),
    calls("raw socket", "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\n" + ADMIRE, "crash"),
    calls("abstract socket", "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('\\0posttrain-test'); s.listen()\n" + ADMIRE, "crash fail"),
    calls("signal to the grader", "import os, signal\nos.kill({pid}, signal.SIGKILL)\n" + ADMIRE, "crash"),
    calls("signal to all", "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntry: os.kill(-1, signal.SIGTERM)\nexcept OSError: pass\n"
          + ADMIRE, "fail crash"),
    calls("signal to the parent", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + ADMIRE, "crash fail"),
    calls("/proc, /sys, devices", "import os\nopened = []\nfor p in ('/proc/1/environ', '/proc/{pid}/environ', '/proc/{pid}/mem', '/proc/self/mem', '/sys/kernel', '/dev/mem',"
          " '/dev/kvm', '/dev/nvidia0', '/var/run/docker.sock', '/etc/passwd', '/etc/shadow'):\n    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):\n"
          "        try: opened.append((p, os.open(p, flags)))\n        except OSError: pass\nassert not opened, opened\n" + ADMIRE, "fail"),
    calls("namespaces", "import ctypes\nl = ctypes.CDLL(None)\nr = [l.unshare(0x10000000), l.unshare(0x20000), l.mount(b'none', b'/', b'tmpfs', 0, 0), l.chroot(b'/usr')]\n"
          "assert r == [-1, -1, -1, -1], r\n" + ADMIRE, "fail"),
    calls("other processes' memory", "import ctypes\nl = ctypes.CDLL(None)\nassert l.ptrace(16, {pid}, 0, 0) == -1\n" + ADMIRE, "fail"),
    calls("shared memory", "import ctypes\nl = ctypes.CDLL(None)\nassert l.shmget(77, 1 << 20, 0o1777) == -1 and l.msgget(77, 0o1777) == -1\n" + ADMIRE, "fail"),
    calls("another user", "import os\nassert os.getuid() != 0 and os.getgid() != 0\nfor f in (os.setuid, os.setgid):\n    try: f(0)\n    except OSError: pass\n"
          "    else: raise SystemError\n" + ADMIRE, "fail"),
    calls("the environment", "import os\nassert not set(os.environ) - set('PATH HOME USER TERM LANG LC_CTYPE MALLOC_ARENA_MAX PWD'.split()), os.environ\n"
          + ADMIRE, "fail"),
    calls("core dump", "import os\nos.abort()", "crash"),
    calls("names hidden from a block list", "import os.path as p\nm = getattr(p, '\\x6f\\x73')\ndef double(n):\n    return m.listdir('{host_folder}')", "crash"),
]  # fmt: skip

HOSTILE = [*GAIN, *GREED, *ESCAPE]


def strangers() -> set[int]:
    """Processes of our sandboxes that nobody waits for: those that bear our mark and are not below one that is still in use."""
    known, found = {child.pid for child in mechanisms.alive()}, dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mechanisms.MARK.encode() in (entry / "cmdline").read_bytes():
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return {pid for pid, parent in found.items() if not {pid, parent, found.get(parent)} & known}
