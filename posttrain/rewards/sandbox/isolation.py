"""Chooses the sandbox: the first candidate that passes a self-test in this process. If none passes, nothing is run.

The self-test runs hostile programs against targets that it sets up itself: a listening socket, a secret file and an environment
variable, a writable folder, this process. So a gap in a mechanism is found now, and not during training.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import UserError, unknown
from posttrain.rewards.sandbox import mechanisms, probes, seccomp
from posttrain.rewards.sandbox.limits import MEGABYTE, Limits
from posttrain.rewards.sandbox.mechanisms import ENVIRONMENT, Infrastructure, Mechanism
from posttrain.rewards.sandbox.pool import Pool
from posttrain.rewards.sandbox.session import Budget, Ended
from posttrain.trust import active

SECRET = "posttrain-sandbox-self-test"
NAMES = ("auto", "landlock", *mechanisms.RUNTIMES, "unsafe")
LIMITS = Limits(wall=10.0, memory=256 * MEGABYTE, threads=32)
SHORT = 0.2  # seconds for a program that must time out


@dataclass(frozen=True, slots=True)
class Isolation:
    """A mechanism with the result of its self-test: how many escapes were tried, and the names of those that it does not
    stop."""

    mechanism: Mechanism
    tried: int = 0
    open: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.mechanism.name

    def describe(self) -> str:
        """Return one line for the log: the mechanism on this machine, and the result of its self-test."""
        if self.name == "unsafe":
            filtered = ", no sockets, no other processes" if seccomp.supported() else " only"
            risk = "programs read your files and variables as you do"
            return f"code sandbox: unsafe (limits{filtered}; {risk})"
        image = getattr(self.mechanism, "image", "")
        user = "root becomes an ordinary user" if os.getuid() == 0 else "ordinary user"
        kind = f"a container of {image} for each run" if image else user
        found = f"{self.tried - len(self.open)} of {self.tried} escapes closed"
        if not getattr(self.mechanism, "private", True):
            kind += ", no namespaces and so no temporary files"
        if self.open:
            found += "; open: " + ", ".join(f"{n} ({probes.UNCOUNTED[n]})" for n in self.open)
        return f"code sandbox: {self.name} ({kind}); self-test: {found}"


def probe(mechanism: Mechanism) -> tuple[list[str], str]:
    """Return the escapes that this mechanism does not stop, and what kept it from starting ('' if it starts)."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        os.chmod(folder, 0o777)
        secret, path = Path(folder, "secret"), os.path.join(folder, "s")
        secret.write_text(SECRET)
        secret.chmod(0o666)
        tcp = stack.enter_context(socket.socket())
        udp = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        unix.bind(path)
        os.chmod(path, 0o777)
        tcp.listen()
        unix.listen()
        facts = {
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": path,
            "secret": str(secret),
            "written": os.path.join(folder, "written"),
            "pid": os.getpid(),
            "parent": os.getppid(),
            # names only, because the values must not get in; Python sets the last one
            "environment": set(os.environ) - {*ENVIRONMENT, "LC_CTYPE"} or {SECRET},
            "memory": LIMITS.memory * 2,
            "threads": LIMITS.threads * 2,
        }
        through, lacking = _run_probes(mechanism, facts)
        if select.select([tcp, udp, unix], [], [], 0)[0]:
            through.append("something reached a socket of the host")
        return through, lacking


def _run_probes(mechanism: Mechanism, facts: dict[str, object]) -> tuple[list[str], str]:
    """Run the probes. A probe counts as closed only if the program reports so, or ends with the required outcome; a probe that
    could not be tried counts as open."""
    pool, said = Pool(spare=1), list[str]()

    def run(kind: str, text: str, seconds: float) -> str:
        with pool.take(mechanism, LIMITS) as session:
            how = "stopped"
            try:
                session.begin(kind, text, budget=Budget(seconds))
                if kind == "calls":
                    session.receive()
                    session.send(["", [], []])
                session.write(b"", last=True)
                session.read_all()
            except Ended as ended:
                how = ended.outcome
            said.extend(session.incoming.decode(errors="replace")[:99_999].splitlines())
        return how if how == "stopped" else f"{how}: {session.errors[-80:]!r}"

    try:
        for text in probes.programs(facts):
            how = run("stdio", text, LIMITS.wall)
            if "ready" not in said:
                return [], f"it cannot run a plain program ({how})"
        for name, (kind, outcome, text) in probes.LIMITED.items():
            how = run(kind, text, SHORT if outcome == "timeout" else LIMITS.wall)
            said.append(f"closed {name}" if how.startswith(outcome) else "")
    except Infrastructure as error:
        return [], str(error)
    finally:
        pool.close()
    through = {name for name in probes.NAMES if f"open {name}" in said}
    through |= {name for name in (*probes.PROBES, *probes.LIMITED) if f"closed {name}" not in said}
    return [name for name in probes.NAMES if name in through], ""


_chosen: dict[tuple[str, int], Isolation] = {}
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    release = _lock.release
    os.register_at_fork(before=_lock.acquire, after_in_parent=release, after_in_child=release)


def choose(name: str = "auto") -> Isolation:
    """Return the isolation of this process: `auto` (`landlock`, in the first form that passes), a container runtime (`docker`,
    `podman`, `docker:IMAGE`), which is used only if it is named, or `unsafe` at your own risk.

    The self-test runs once. Raises UserError if nothing passes.
    """
    if name not in NAMES and mechanisms.container_named(name) is None:
        raise unknown("sandbox", name, NAMES)
    active().require_sandbox(name)
    key = (name, os.getuid() if hasattr(os, "getuid") else 0)
    with _lock:
        if key not in _chosen:
            _chosen[key] = _choose(name)
        return _chosen[key]


def _choose(name: str) -> Isolation:
    if name == "unsafe":
        return Isolation(mechanisms.Unsafe())
    rejected: list[str] = []
    asked = mechanisms.container_named(name)
    for mechanism, lacking in [(asked, asked.lacking())] if asked else mechanisms.candidates():
        if name not in ("auto", mechanism.name) and mechanism is not asked:
            continue
        through: list[str] = []
        if not lacking:
            through, lacking = probe(mechanism)
        serious = [entry for entry in through if entry not in probes.UNCOUNTED]
        if not lacking and not serious:
            return Isolation(mechanism, len(probes.NAMES), tuple(through))
        rejected.append(f"{mechanism.name}: {lacking or 'does not stop ' + ', '.join(serious)}")
    tried = "; ".join(dict.fromkeys(rejected)) or "only Linux has one"
    if asked:
        hint = f"Start the runtime, have the image {asked.image} there, or leave the setting out for one that needs no runtime"
        raise UserError(f"the container sandbox does not work here ({tried}). {hint}")
    hint = "It needs Linux 5.13 or newer with Landlock; or name a container runtime"
    hint += " (sandbox='podman')"
    unsafe = "accept that programs written by the model run as you, with sandbox='unsafe'"
    raise UserError(f"no sandbox for code works here ({tried}). {hint}, or {unsafe}")


def describe(name: str = "auto") -> str:
    return choose(name).describe()
