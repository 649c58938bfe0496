"""Escapes that the self-test tries (probes.yaml), one statement each. A statement that runs to its end has escaped.

All of them run in one program, one after the other, against targets that the self-test sets up: `tcp`, `udp` (ports), `unix` (a
path), `secret` (a file), `written` (a path), `pid` (of the grader), `parent` (of its parent), `memory` (more bytes than are
allowed), `environment` (variables), `threads` (twice as many as are allowed). None does harm if it succeeds: it only sets
values that were already set.
"""

from __future__ import annotations

from pathlib import Path

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SOCKETS: dict[str, tuple[int, int, int]] = {n: tuple(v) for n, v in _TABLES["sockets"].items()}
PROBES: dict[str, str] = {
    **{f"{name} socket": f"socket.socket{numbers}" for name, numbers in SOCKETS.items()},
    **_TABLES["probes"],
}
ALONE: dict[str, str] = _TABLES["alone"]
LIMITED: dict[str, tuple[str, str, str]] = {n: tuple(v) for n, v in _TABLES["limited"].items()}
UNCOUNTED: dict[str, str] = _TABLES["uncounted"]
NAMES = (*PROBES, *ALONE, *LIMITED)


def programs(facts: dict[str, object]) -> list[str]:
    """Return the program that tries all of `PROBES`, then the other programs."""
    given = "".join(f"{name} = {value!r}\n" for name, value in facts.items())
    tried = f"{given}probes = {PROBES!r}\n{_TABLES['prelude']}"
    return [tried, *(given + text for text in ALONE.values())]
