"""Decides what a name may do, by its source. A user of the command line or of Python may name anything. A recipe in YAML or a run
directory may come from an untrusted source: it may not name code to run, a sandbox that isolates nothing, an address for the user's key
and texts, the key itself, or files elsewhere. One object, made where names are read, is asked wherever one is used: before the
first stage of the resolved pipeline (config.py), and again where code is loaded, an address is used, a sandbox is chosen.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.errors import UserError, require

if TYPE_CHECKING:  # imports numpy, and the command line imports this
    from posttrain.types import JSON

# the key that a judge's server is sent where the user says nothing else
KEY_VARIABLE = "OPENAI_API_KEY"
HOSTS_VARIABLE = "POSTTRAIN_JUDGE_HOSTS"  # HOST or HOST:PORT, with commas between: who may be sent texts and the key
# Nothing that two readers of addresses could disagree about: no user, no query, no fragment, no escapes in the host.
ADDRESS = re.compile(
    r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(?::([0-9]{1,5}))?(/[A-Za-z0-9._~/%+-]*)?"
)
WANDB_SETTINGS = ("wandb/settings", ".wandb/settings")
TRUST_IT = "pass --allow-code if you trust it (in Python allow_code=True)"


@dataclass(frozen=True, slots=True)
class Address:
    """An address in the parts that decide who is asked."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        found = ADDRESS.fullmatch(url)
        if found is None:
            raise UserError(
                f"judge: {url!r} is no http address (http or https, a host, a port, a path; put a key into an "
                "environment variable, not into the address)"
            )
        scheme, host, given, _ = found.groups()
        port = int(given) if given else {"http": 80, "https": 443}[scheme]
        require(0 < port < 2**16, f"judge: {url!r} has no port of 1 to 65535")
        return cls(scheme, host.lower().strip("[]"), port)

    @property
    def loopback(self) -> bool:
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def listed(self) -> bool:
        """Whether the environment permits it: a host alone by https, and one with its port by http too, which others can read."""
        names = [name.strip().lower() for name in os.environ.get(HOSTS_VARIABLE, "").split(",")]
        private = self.scheme == "https" or self.loopback
        return self.place in names or (self.host in names and private)

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Trust:
    """What `file` may name, when the user has typed `typed` (key: value). Without a file everything was typed."""

    file: str = ""
    typed: Mapping[str, JSON] = field(default_factory=dict)
    # files lie within the folder always; else only where texts leave the machine
    strict: bool = True

    @property
    def whole(self) -> bool:
        return not self.file

    @property
    def folder(self) -> Path:
        return Path(self.file).parent.resolve()

    def said(self, text: str) -> bool:
        """Whether the user has typed this, alone or within a value."""
        return text in texts(self.typed)

    def _require(self, fine: bool, text: str, permit: str = "") -> None:
        """Refuse what an untrusted file names, unless it is fine; `permit` says what else would permit it."""
        require(self.whole or fine, f"{self.file}{text}{permit and f'{permit}, or '}{TRUST_IT}")

    def require_code(self, kind: str, name: str) -> None:
        """For FILE.py:NAME: that the user named it himself."""
        place = code_place(name)
        said = place is None or place in map(code_place, texts(self.typed))
        self._require(said, f": {kind} {name!r} would run code from a file; ")

    def require_evaluation(self, name: str) -> None:
        """For a task that evaluates what a model writes."""
        self._require_task(name, f"{name} evaluates what the model writes, outside of a sandbox")

    def require_package(self, name: str) -> None:
        """For a task whose episodes are those of an installed package that it names."""
        text = f"the environment {name} would run code of an installed package"
        self._require_task(name, text)

    def _require_task(self, name: str, text: str) -> None:
        said = name in (typed.rpartition(":")[2] for typed in texts(self.typed))
        self._require(said, f": {text}; ", "name the task on the command line")

    def require_program(self, command: JSON) -> None:
        said = not command or self.typed.get("checkpoint_hook") == command
        self._require(said, ": checkpoint_hook would run a program; ")

    def require_command(self, command: str) -> None:
        """For a task whose episodes are a program of the user's."""
        self._require(self.said(command), f": the command {command!r} would run a program; ")

    def require_trackers(self, names: Sequence[str]) -> None:
        """W&B takes the server that is sent its key, and more, from a file in the working directory, which may be untrusted."""
        given = next((place for place in WANDB_SETTINGS if Path(place).is_file()), "")
        fine = "trackers" in self.typed or "wandb" not in names or not given
        text = f": trackers: wandb would follow {given} of this folder; "
        self._require(fine, text, "type trackers=wandb")

    def require_sandbox(self, name: str) -> None:
        """A file may choose among sandboxes that test themselves, not what is in a container."""
        fine = self.said(name) or (name != "unsafe" and ":" not in name)
        what = "runs a model's programs as you" if name == "unsafe" else "names a container image"
        self._require(fine, f": sandbox: {name} {what}; ")

    def require_variable(self, name: str) -> None:
        fine = self.said(name) or name in ("", KEY_VARIABLE)
        self._require(fine, f": key_variable: {name} would send that variable to an address; ")

    def require_address(self, url: str) -> None:
        """Texts go to hosts that the user named, and to servers on this machine."""
        address = Address.of(url)
        fine = self.whole or self.said(url) or address.listed or address.loopback
        permitted = address.host if address.scheme == "https" else address.place
        sends = f"{self.file} would send texts and your key to {url}"
        permit = f"set the environment variable {HOSTS_VARIABLE}={permitted}, or type the url on the command line"
        require(fine, f"{sends}: to permit it, {permit}")

    def key(self, url: str, variable: str) -> str:
        """The secret that the server at `url` may see, "" for none. A server on this machine whose address only a file names gets none,
        and none crosses a network in the clear."""
        address, key = Address.of(url), os.environ.get(variable, "") if variable else ""
        clear = bool(key) and address.scheme == "http" and not address.loopback
        sent = f"judge: the key in {variable} is not sent to {address.host} over plain http"
        without = f"ask without a key (unset {variable}, or key_variable: '' in the options of a judge reward)"
        require(not clear, f"{sent}; use https, or {without}")
        return key if self.whole or self.said(url) or address.listed else ""

    def require_file(self, name: str, path: Path) -> None:
        """That a file or folder, with all that symbolic links in it lead to, lies next to the file that names it, or is the user's own
        choice."""
        # where to write is no leave to read
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
        """A file may name a directory to write, below the working directory or beside itself and not hidden; not one that holds a run.
        `replacing` has the settings that let it."""
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
    """The trust in what is being read or run now; that of Python code, which may do anything, where nobody has said otherwise."""
    return _active


@contextmanager
def trusting(trust: Trust) -> Iterator[Trust]:
    """Within this, names are those of a file that is trusted so far. It holds for all threads, and for processes forked within."""
    global _active
    before, _active = _active, trust
    try:
        yield trust
    finally:
        _active = before


def texts(value: JSON) -> Iterator[str]:
    """Every text in plain data, but for keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts(inner)


def code_place(name: str) -> tuple[Path, str] | None:
    """The file and the name within it of FILE.py:NAME; None for other names, and for what can be no path.

    >>> code_place("/x/../mine.py:reward"), code_place("math"), code_place("x.PY:f")
    ((PosixPath('/mine.py'), 'reward'), None, None)
    """
    file, _, attribute = name.rpartition(":")
    path = _real(file) if file.endswith(".py") else None
    return None if path is None else (path, attribute)


def _real_path(path: Path) -> Path:
    """Without links. A loop of them, and what can be no path, stays as it is."""
    try:
        return Path(os.path.realpath(path))
    except ValueError:
        return path


def _within(path: Path, folder: Path) -> bool:
    return _real_path(path).is_relative_to(_real_path(folder))


def _below(path: Path, folder: Path) -> bool:
    """Whether it is in the folder, and not in a hidden one there (.ssh, .config, .git)."""
    if not _within(path, folder):
        return False
    parts = _real_path(path).relative_to(_real_path(folder)).parts
    return not any(part[0] == "." for part in parts)


def _real(text: str) -> Path | None:
    try:
        return Path(text).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # a null, a loop of links, a user who is not there
        return None
