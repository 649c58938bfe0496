"""Decides what a name may refer to, by its source. A user of the command line or of Python may name anything. A recipe in YAML or a
run directory may come from an untrusted source. It may not name code to run, a sandbox that isolates nothing, an address that
receives the user's key and texts, the key itself, or files elsewhere. One `Trust` object is made where names are read. It is checked
wherever a name is used: before the first stage of the resolved pipeline (config.py), and again when code is loaded, an address is
used or a sandbox is chosen."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import UserError, require

if TYPE_CHECKING:  # it imports numpy, and the command line imports this file
    from posttrain.types import JSON

# the default variable of the key that a judge's server receives
KEY_VARIABLE = "OPENAI_API_KEY"
HOSTS_VARIABLE = "POSTTRAIN_JUDGE_HOSTS"  # hosts that may receive texts and the key: HOST or HOST:PORT, separated by commas
# It excludes everything that two parsers of addresses could read differently: a user, a query, a fragment, escapes in the host.
ADDRESS = re.compile(
    r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(?::([0-9]{1,5}))?(/[A-Za-z0-9._~/%+-]*)?"
)
PREFIX = "python:"  # begins the name of what exists only in the process of a program
WANDB_SETTINGS = ("wandb/settings", ".wandb/settings")
TRUST_IT = "pass --allow-code if you trust it (in Python allow_code=True)"


def known_as(given: Mapping[str, Any], base: str, same: Callable[[Any], bool]) -> str:
    """The name of something that a program gives: that of the same thing in `given`, or one that is free."""
    name, number = f"{PREFIX}{base}", 1
    while name in given and not same(given[name]):
        name, number = f"{PREFIX}{base} #{number + 1}", number + 1
    return name


def elsewhere(what: str, name: str, kind: str, instead: str = "") -> str:
    """The error about a name whose process has ended."""
    gone = f"the {what} {name.removeprefix(PREFIX)} is a {kind} of another Python process, and no directory holds it"
    again = "call the function that began the run again, with its out= and again=True"
    instead = instead or f"put the {what} into a file and name it FILE.py:NAME"
    return f"{gone}: {again}; or {instead}"


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is written as; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, and no other can reach it."""
    ip = ip_of(host)
    return host == "localhost" or (ip is not None and ip.is_loopback)


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of an address that decide which server is asked."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        found = ADDRESS.fullmatch(url)
        if found is None:
            form = "http or https, a host, a port, a path; put a key into an environment variable, not into the address"
            raise UserError(f"judge: {url!r} is no http address ({form})")
        scheme, host, given, _ = found.groups()
        port = int(given) if given else {"http": 80, "https": 443}[scheme]
        require(0 < port < 2**16, f"judge: {url!r} has no port of 1 to 65535")
        return cls(scheme, host.lower().strip("[]"), port)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def listed(self) -> bool:
        """Whether the environment permits this address. A host alone is permitted by https. A host with its port is also permitted by
        http, which others can read."""
        names = [name.strip().lower() for name in os.environ.get(HOSTS_VARIABLE, "").split(",")]
        private = self.scheme == "https" or self.loopback
        return self.place in names or (self.host in names and private)

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Trust:
    """What `file` may name, given the settings that the user typed (`typed`, key: value). Without a file, the user typed
    everything."""

    file: str = ""
    typed: Mapping[str, JSON] = field(default_factory=dict)
    # True: files must lie within the folder. False: only if texts leave the machine.
    strict: bool = True

    @property
    def whole(self) -> bool:
        return not self.file

    @property
    def folder(self) -> Path:
        return Path(self.file).parent.resolve()

    def said(self, text: str) -> bool:
        """Whether the user typed this text, alone or within a value."""
        return text in texts(self.typed)

    def _require(self, fine: bool, text: str, permit: str = "") -> None:
        """Refuse what an untrusted file names, unless it is `fine`. `permit` says what else would permit it."""
        require(self.whole or fine, f"{self.file}{text}{permit and f'{permit}, or '}{TRUST_IT}")

    def require_code(self, kind: str, name: str) -> None:
        """Refuse FILE.py:NAME unless the user named it."""
        place = code_place(name)
        said = place is None or place in map(code_place, texts(self.typed))
        self._require(said, f": {kind} {name!r} would run code from a file; ")

    def require_evaluation(self, name: str) -> None:
        """Refuse a task that evaluates text from a model as code, unless the user named it."""
        self._require_task(name, f"{name} evaluates what the model writes, outside of a sandbox")

    def require_package(self, name: str) -> None:
        """Refuse a task that runs episodes of an installed package, unless the user named the package."""
        self._require_task(name, f"the environment {name} would run code of an installed package")

    def _require_task(self, name: str, text: str) -> None:
        said = name in (typed.rpartition(":")[2] for typed in texts(self.typed))
        self._require(said, f": {text}; ", "name the task on the command line")

    def require_program(self, command: JSON) -> None:
        said = not command or self.typed.get("checkpoint_hook") == command
        self._require(said, ": checkpoint_hook would run a program; ")

    def require_command(self, command: str) -> None:
        """Refuse a task whose episodes are a program, unless the user named the program."""
        self._require(self.said(command), f": the command {command!r} would run a program; ")

    def require_trackers(self, names: Sequence[str]) -> None:
        """Refuse W&B if the working directory has a settings file for it, unless the user typed `trackers`. W&B reads the server that
        receives its key, and more, from that file, which may be untrusted."""
        given = next((place for place in WANDB_SETTINGS if Path(place).is_file()), "")
        fine = "trackers" in self.typed or "wandb" not in names or not given
        text = f": trackers: wandb would follow {given} of this folder; "
        self._require(fine, text, "type trackers=wandb")

    def require_sandbox(self, name: str) -> None:
        """Refuse a sandbox that a file may not choose. It may choose among sandboxes that test themselves, but not the image of a
        container."""
        fine = self.said(name) or (name != "unsafe" and ":" not in name)
        what = "runs a model's programs as you" if name == "unsafe" else "names a container image"
        self._require(fine, f": sandbox: {name} {what}; ")

    def require_variable(self, name: str) -> None:
        fine = self.said(name) or name in ("", KEY_VARIABLE)
        self._require(fine, f": key_variable: {name} would send that variable to an address; ")

    def require_address(self, url: str) -> None:
        """Refuse an address unless the user named its host, or it is on this machine."""
        address = Address.of(url)
        fine = self.whole or self.said(url) or address.listed or address.loopback
        permitted = address.host if address.scheme == "https" else address.place
        sends = f"{self.file} would send texts and your key to {url}"
        permit = f"set the environment variable {HOSTS_VARIABLE}={permitted}, or type the url on the command line"
        require(fine, f"{sends}: to permit it, {permit}")

    def key(self, url: str, variable: str) -> str:
        """The key that the server at `url` may receive; "" for none. A server on this machine gets none if only a file names its
        address. No key crosses a network unencrypted."""
        address, key = Address.of(url), os.environ.get(variable, "") if variable else ""
        clear = bool(key) and address.scheme == "http" and not address.loopback
        sent = f"judge: the key in {variable} is not sent to {address.host} over plain http"
        without = f"ask without a key (unset {variable}, or key_variable: '' in the options of a judge reward)"
        require(not clear, f"{sent}; use https, or {without}")
        return key if self.whole or self.said(url) or address.listed else ""

    def require_file(self, name: str, path: Path) -> None:
        """Refuse a file or folder, including everything that symbolic links in it lead to, unless it lies in the folder of the
        file that names it, or the user chose it."""
        # the user's permission to write to a place is no permission to read it
        own = {key: value for key, value in self.typed.items() if key != "out"}
        if _real_path(path) in map(_real, texts(own)):
            return
        links = (link for link in path.rglob("*") if link.is_symlink())
        for place in chain([path], links):  # lazily: a folder elsewhere is not searched
            what = f"names {name}" if place is path else f"names {name}, where {place.name} leads"
            begins = f"paths begin at {Path.cwd()}: cd to that folder, give the path on the command line, or {TRUST_IT}"
            text = f"{self.file} {what} outside of its folder {self.folder}; {begins}"
            require(_within(place, self.folder), text)

    def require_output(self, out: str, replacing: Mapping[str, JSON]) -> None:
        """Refuse a directory to write, unless it is below the working directory or next to the file, is not hidden, and holds no run.
        `replacing` has the settings that permit replacing a run."""
        if self.whole:
            return
        for key, value in replacing.items():
            text = f": {key} would change a run that is there; "
            self._require(not value or key in self.typed, text, f"type {key}= on the command line")
        roots = (Path.cwd(), self.folder)
        fine = not out or self.said(out) or any(_below(Path(out), root) for root in roots)
        self._require(fine, f" would write to {out}: ", "give out= on the command line")


EVERYTHING = Trust()
_active = EVERYTHING


def active() -> Trust:
    """The trust that applies now. By default it is that of Python code, which may do anything."""
    return _active


@contextmanager
def trusting(trust: Trust) -> Iterator[Trust]:
    """Apply a trust within the block, in all threads and in processes forked there."""
    global _active
    before, _active = _active, trust
    try:
        yield trust
    finally:
        _active = before


def texts(value: JSON, keys: bool = False) -> Iterator[str]:
    """Every text in plain data; those of its keys only with `keys`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        yield from map(str, value) if keys and isinstance(value, Mapping) else ()
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts(inner, keys)


def code_place(name: str) -> tuple[Path, str] | None:
    """The file and the name in FILE.py:NAME; None for other names, and for text that cannot be a path.

    >>> code_place("/x/../mine.py:reward"), code_place("math"), code_place("x.PY:f")
    ((PosixPath('/mine.py'), 'reward'), None, None)
    """
    file, _, attribute = name.rpartition(":")
    path = _real(file) if file.endswith(".py") else None
    return None if path is None else (path, attribute)


def _real_path(path: Path) -> Path:
    """The path with symbolic links resolved. A loop of links, or text that cannot be a path, is returned unchanged."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path


def _within(path: Path, folder: Path) -> bool:
    return _real_path(path).is_relative_to(_real_path(folder))


def _below(path: Path, folder: Path) -> bool:
    """Whether a path is in the folder, and not in a hidden folder there (.ssh, .config, .git)."""
    if not _within(path, folder):
        return False
    parts = _real_path(path).relative_to(_real_path(folder)).parts
    return not any(part[0] == "." for part in parts)


def _real(text: str) -> Path | None:
    try:
        return Path(text).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # a null, a loop of links, or an unknown user
        return None
