"""Interpreters that are started ahead and used once.

One thread that lives as long as this process starts all children: the kernel ends a child when the thread that started it ends.
Children must end with the process, but not with a thread of the caller.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from posttrain.rewards.sandbox import mechanisms
from posttrain.rewards.sandbox.limits import Limits
from posttrain.rewards.sandbox.mechanisms import Child, Infrastructure, Mechanism
from posttrain.rewards.sandbox.session import Session
from posttrain.system.threads import fulfil

SHELVES = 4  # pairs of (mechanism, limits) with interpreters in reserve
SPARE = max(2, min(8, os.cpu_count() or 1))
WAIT_SECONDS = 60.0

Key = tuple[Mechanism, Limits]


class Pool:
    def __init__(self, spare: int = SPARE) -> None:
        self.spare = spare
        self._lock = threading.Lock()
        self._shelves: OrderedDict[Key, deque[Future[Child]]] = OrderedDict()
        self._orders: queue.SimpleQueue[tuple[Key, Future[Child]] | None] = queue.SimpleQueue()
        self._starter: threading.Thread | None = None
        self._closed = False

    def take(self, mechanism: Mechanism, limits: Limits) -> Session:
        """Return a session with an interpreter that is ready, and start another in its place. Raises Infrastructure if there is
        none."""
        key = (mechanism, limits)
        with self._lock:
            if self._closed:
                raise Infrastructure("the interpreter is shutting down")
            shelf = self._shelves.setdefault(key, deque())
            self._shelves.move_to_end(key)
            ordered = shelf.popleft() if shelf else self._order(key)
            while len(shelf) < self.spare:
                shelf.append(self._order(key))
            extra = range(len(self._shelves) - SHELVES)
            stale = [self._shelves.popitem(last=False)[1] for _ in extra]
        for old in stale:
            _discard(old)
        try:
            session = Session(ordered.result(WAIT_SECONDS), limits)
        except TimeoutError as error:
            raise Infrastructure("no interpreter started in time") from error
        try:
            session.wait_until_ready()
        except BaseException:
            session.close()
            raise
        return session

    def _order(self, key: Key) -> Future[Child]:
        if self._starter is None:
            self._starter = threading.Thread(target=self._work, name="sandbox-starter", daemon=True)
            self._starter.start()
        future: Future[Child] = Future()
        self._orders.put((key, future))
        return future

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            (mechanism, limits), future = order
            fulfil(future, partial(mechanism.start, limits))

    def close(self) -> None:
        """End all waiting interpreters."""
        with self._lock:
            self._closed = True
            shelves, starter = list(self._shelves.values()), self._starter
            self._shelves.clear()
        for shelf in shelves:
            _discard(shelf)
        self._orders.put(None)
        if starter is not None and starter is not threading.current_thread():
            starter.join(5)


def _discard(shelf: deque[Future[Child]]) -> None:
    for future in shelf:
        if not future.cancel():
            with suppress(Infrastructure, TimeoutError):
                future.result(5).finish(0)


_pool = Pool()


def shared() -> Pool:
    return _pool


def _after_fork() -> None:
    """A forked process has neither the starting thread nor a right to its parent's children: it starts its own. An extra
    reference keeps the parent's from being garbage-collected here, which would end them."""
    global _pool
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mechanisms.alive()))
    mechanisms.disown()
    _pool = Pool(_pool.spare)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    _pool.close()
    for child in mechanisms.alive():  # in use by threads that will not finish
        with suppress(OSError, RuntimeError):
            child.kill()
