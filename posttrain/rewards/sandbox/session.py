"""A conversation with one child: bytes in both directions, bounded in time and size. It uses no signals and no threads."""

from __future__ import annotations

import json
import os
import selectors
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from posttrain.rewards.sandbox import wire
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import OUT_OF_MEMORY, SYNTAX, Child, Exit, Infrastructure

READY, BEGAN = b"ready\n", b"began\n"
START_SECONDS = 30.0
# a wait that ends this many seconds late: the machine was suspended, or this process was stopped
STOPPED = 2.0
CHUNK = 1 << 16
HEADER = 8
XCPU = 24


class Ended(Exception):
    """The program ended or was ended before it sent what was asked; `outcome` names how."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(slots=True)
class Budget:
    """The seconds that a program has for all of its tests together. They count from `start`, when a program is handed over, to
    `stop`, also while a value of the program is read and compared."""

    left: float
    since: float | None = None

    def start(self) -> float:
        """Start the clock and return the time at which the budget ends."""
        self.since = time.monotonic() if self.since is None else self.since
        return self.since + self.left

    def stop(self) -> None:
        if self.since is not None:
            self.left, self.since = self.left - (time.monotonic() - self.since), None


class Session(AbstractContextManager["Session"]):
    """A child that was started ahead and is used once. Use it in a `with` block, which ends the child and everything it
    started."""

    def __init__(self, child: Child, limits: Limits) -> None:
        self.child, self.limits = child, limits
        self.outgoing, self.incoming, self.noise, self.errors = bytearray(), bytearray(), 0, b""
        self.closing = False
        self.deadline = float("inf")
        self.budget: Budget | None = None
        self.selector = selectors.DefaultSelector()
        for descriptor in (child.stdin, child.stdout, child.stderr):
            os.set_blocking(descriptor, False)
        self.selector.register(child.stdout, selectors.EVENT_READ)
        self.selector.register(child.stderr, selectors.EVENT_READ)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.selector.close()
        self.child.finish(0)

    def wait_until_ready(self) -> None:
        self._await(READY)

    def _await(self, word: bytes) -> None:
        """Wait for a message of the harness. No line of the program has run yet, so an error here is not the program's."""
        self.deadline = time.monotonic() + START_SECONDS
        try:
            while len(self.incoming) < len(word):
                self._turn()
        except Ended as ended:
            how = f"{ended.outcome} {self.errors[-500:]!r}"
            raise Infrastructure(f"the sandbox did not start: {how}") from ended
        if not self.incoming.startswith(word):
            said = bytes(self.incoming[:40])
            raise Infrastructure(f"the sandbox did not start: it said {said!r}")
        del self.incoming[: len(word)]

    def begin(
        self, kind: str, source: str, functions: tuple[str, ...] = (), budget: Budget | None = None
    ) -> None:
        """Hand over the program. The clock starts when it has arrived; an interpreter may have died while it waited."""
        self.send({"kind": kind, "source": source, "functions": functions})
        self._await(BEGAN)
        self.budget = budget = budget or Budget(self.limits.wall)
        self.deadline = budget.start()

    def send(self, tree: Any) -> None:
        if self.incoming:
            raise Ended("fail")  # it answered before it was asked
        data = json.dumps(tree).encode()
        self.write(b"%08x" % len(data) + data)

    def write(self, data: bytes, last: bool = False) -> None:
        self.outgoing += data
        self.closing = last
        if self.child.stdin not in self.selector.get_map():
            self.selector.register(self.child.stdin, selectors.EVENT_WRITE)

    def receive(self) -> list[Any]:
        """Return one message of the child: a list that begins with a word."""
        while len(self.incoming) < HEADER:
            self._turn()
        try:
            count = int(bytes(self.incoming[:HEADER]), 16)
        except ValueError:
            raise Ended("fail") from None
        if not 0 <= count <= self.limits.result:
            raise Ended("output")
        while len(self.incoming) < HEADER + count:
            self._turn()
        text = bytes(self.incoming[HEADER : HEADER + count])
        del self.incoming[: HEADER + count]
        try:
            message = wire.parse(text, self.limits.result)
        except wire.Malformed:
            raise Ended("fail") from None
        if not (isinstance(message, list) and message and isinstance(message[0], str)):
            raise Ended("fail")
        return message

    def read_all(self) -> bytes:
        """Return everything that the program prints until it ends by itself, without error."""
        try:
            while True:
                self._turn()
        except Ended as ended:
            if ended.outcome != "stopped":
                raise
        return bytes(self.incoming)

    def _turn(self) -> None:
        """Wait for a pipe and move the available bytes."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Ended("timeout")
        began = time.monotonic()
        ready = self.selector.select(left)
        waited = time.monotonic() - began
        if waited > left + STOPPED:  # that time does not count against the program
            self.deadline += waited
            if self.budget is not None and self.budget.since is not None:
                self.budget.since += waited
        for key, _ in ready:
            if key.fd == self.child.stdin:
                self._write_some()
            elif key.fd == self.child.stdout:
                self._read_some()
            else:
                self._read_noise()

    def _write_some(self) -> None:
        try:
            del self.outgoing[: os.write(self.child.stdin, self.outgoing[:CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # it closed its end; what it printed still counts
            self.outgoing.clear()
        if not self.outgoing:
            self.selector.unregister(self.child.stdin)
            if self.closing:
                self.child.close_input()

    def _read_some(self) -> None:
        try:
            data = os.read(self.child.stdout, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(self.child.stdout)
            if self.child.stderr in self.selector.get_map():
                self._read_noise()
            raise Ended(self._how(self.child.finish(self.deadline - time.monotonic())))
        self.incoming += data
        if len(self.incoming) > max(self.limits.output, self.limits.result + HEADER):
            raise Ended("output")

    def _read_noise(self) -> None:
        try:
            data = os.read(self.child.stderr, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self.selector.unregister(self.child.stderr)
        self.errors = (self.errors + data)[-2000:]
        self.noise += len(data)
        if self.noise > self.limits.output:
            raise Ended("output")

    @staticmethod
    def _how(end: Exit) -> str:
        """Return the outcome of a program that has ended. `stopped`: it exited without an error, which is not an answer."""
        if end.ended or end.signal == XCPU:
            return "timeout"
        if end.code == OUT_OF_MEMORY:
            return "memory"
        if end.code == SYNTAX:
            return "syntax"
        return "crash" if end.signal or end.code else "stopped"
