"""Which wall to use: the first candidate that passes a self-test here, in this process's own circumstances. None means: refuse.

The self-test runs hostile programs against things it sets up itself: a listening socket, a secret file and a variable of the
environment, a writable folder, this process. What a mechanism cannot stop is found out now, not during training.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import UserError, unknown
from posttrain.rewards.sandbox import container
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.mechanisms import ENVIRONMENT, Infrastructure, Mechanism, Unsafe, candidates
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.session import Ended

SECRET = "posttrain-sandbox-self-test"
NAMES = ("auto", "sandlock", "bubblewrap", *container.RUNTIMES, "unsafe")
LIMITS = Limits(wall=10.0, memory=256 * MEGABYTE, threads=32)

# Each prints OPEN where it gets through the wall, and CLOSED where not. In braces: what the self-test sets up.
PROBES = {
    "runs a program": "import json, math, re, collections, random, decimal\nprint('CLOSED')",
    "network (TCP)": "import socket\nsocket.create_connection(('127.0.0.1', {tcp}), 2)\nprint('OPEN')",
    "network (UDP)": (
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp}))\nprint('OPEN')"
    ),
    "unix sockets": "import socket\nsocket.socket(socket.AF_UNIX).connect({unix!r})\nprint('OPEN')",
    "reading host files": "open({secret!r}).read()\nprint('OPEN')",
    "reading /proc of the grader": "print('OPEN' if open('/proc/{pid}/environ', 'rb').read() else 'CLOSED')",
    "writing host files": "open({written!r}, 'w').write('x')\nprint('OPEN')",
    "modes and times of host files": "import os\nos.chmod({secret!r}, 0o666)\nos.utime({secret!r})\nprint('OPEN')",
    "the environment": "import os\nprint('OPEN' if set(os.environ) & {environment} else 'CLOSED')",
    "signals to the grader": "import os\nos.kill({pid}, 0)\nprint('OPEN')",
    "other processes": (
        "import os, time\nfor _ in range({processes}):\n    if os.fork() == 0:\n"
        "        time.sleep(1)\n        os._exit(0)\nprint('OPEN')"
    ),
    "memory": "x = bytearray({memory})\nprint('OPEN')",
    "memory of a file": (
        "import os\nf = os.memfd_create('x')\nfor _ in range({memory} >> 20):\n    os.write(f, bytes(1 << 20))\nprint('OPEN')"
    ),
    "new privileges": "import os\nos.setuid(0)\nos.chroot('/')\nprint('OPEN')",
}
# Bounded by memory and time where the kernel cannot count a run's threads apart from the user's others.
EXTRA = {
    "threads": (
        "import threading, time, os\nthreading.stack_size(65536)\nfor _ in range({threads}):\n"
        "    threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\nprint('OPEN', flush=True)\nos._exit(0)"
    ),
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """A mechanism with the result of its self-test: `open` names what it does not stop."""

    mechanism: Mechanism
    open: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.mechanism.name

    def describe(self) -> str:
        """One line for a log: what protects this machine, and what was proven."""
        if self.name == "unsafe":
            return "code sandbox: unsafe (limits only; programs read, write and connect as you do)"
        if image := getattr(self.mechanism, "image", ""):
            return f"code sandbox: {self.name} (a container of {image} for each run); self-test: {len(PROBES)} ways out closed"
        groups = ", a control group for several processes" if getattr(self.mechanism, "groups", False) else ""
        user = "root becomes an ordinary user" if os.getuid() == 0 else "ordinary user"
        left = f"; not counted: {', '.join(self.open)} (bounded by memory and time)" if self.open else ""
        return f"code sandbox: {self.name} ({user}{groups}); self-test: {len(PROBES)} ways out closed{left}"


def probe(mechanism: Mechanism) -> tuple[list[str], str]:
    """What gets through this mechanism, and what kept it from starting ('' where it starts)."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.write_text(SECRET)
        secret.chmod(0o666)
        with socket.socket(socket.AF_UNIX) as unix:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen()
            udp.bind(("127.0.0.1", 0))
            unix.bind(os.path.join(folder, "s"))
            os.chmod(os.path.join(folder, "s"), 0o777)
            unix.listen()
            facts = {
                "tcp": tcp.getsockname()[1],
                "udp": udp.getsockname()[1],
                "unix": os.path.join(folder, "s"),
                "secret": str(secret),
                "written": os.path.join(folder, "written"),
                "pid": os.getpid(),
                # names only: the values are what must not get in; the last two are made by bubblewrap and by Python
                "environment": set(os.environ) - {*ENVIRONMENT, "PWD", "LC_CTYPE"} or {SECRET},
                "memory": LIMITS.memory * 2,
                "processes": LIMITS.processes,
                "threads": LIMITS.threads * 2,
            }
            return _run_probes(mechanism, facts)


def _run_probes(mechanism: Mechanism, facts: dict[str, object]) -> tuple[list[str], str]:
    pool, through = Pool(), []
    try:
        for name, text in {**PROBES, **EXTRA}.items():
            try:
                with pool.take(mechanism, LIMITS) as session:
                    session.begin("stdio", text.format(**facts))
                    session.write(b"", last=True)
                    said = session.read_all()
            except Ended as ended:
                said = ended.outcome.encode()
            if name == "runs a program" and said.strip() != b"CLOSED":
                return [], f"it cannot run a plain program ({said[:80]!r})"
            if b"OPEN" in said:
                through.append(name)
    except Infrastructure as error:
        return [], str(error)
    finally:
        pool.close()
    return through, ""


_chosen: dict[tuple[str, int], Isolation] = {}
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def choose(name: str = "auto") -> Isolation:
    """The isolation for this process: `auto` (sandlock or bubblewrap, the first that passes), either by name, a container runtime
    (`docker`, `podman`, `docker:IMAGE`), which is used only where it is named, or `unsafe` at your own risk.

    Tested once. UserError where nothing passes.
    """
    if name not in NAMES and container.named(name) is None:
        raise unknown("sandbox", name, NAMES)
    key = (name, os.getuid() if hasattr(os, "getuid") else 0)
    with _lock:
        if key not in _chosen:
            _chosen[key] = _choose(name)
        return _chosen[key]


def _choose(name: str) -> Isolation:
    if name == "unsafe":
        return Isolation(Unsafe(), open=tuple(PROBES))
    rejected: list[str] = []
    asked = container.named(name)
    for mechanism, lacking in [(asked, asked.lacking())] if asked else candidates():
        if name not in ("auto", mechanism.name) and mechanism is not asked:
            continue
        through: list[str] = []
        if not lacking:
            through, lacking = probe(mechanism)
        serious = [entry for entry in through if entry not in EXTRA]
        if not lacking and not serious:
            return Isolation(mechanism, tuple(through))
        rejected.append(f"{mechanism.name}: {lacking or 'does not stop ' + ', '.join(serious)}")
    tried = "; ".join(dict.fromkeys(rejected)) or "only Linux has one"
    if asked:
        raise UserError(f"the container sandbox does not work here ({tried}). Start the runtime, have the image {asked.image} there, "
                        "or leave the setting out for one that needs no runtime")  # fmt: skip
    raise UserError(
        f"no sandbox for code works here ({tried}). Install one (pip install 'posttrain[sandbox]', or your system's bubblewrap), "
        "or accept that programs written by the model run as you, with sandbox='unsafe'"
    )


def describe(name: str = "auto") -> str:
    return choose(name).describe()
