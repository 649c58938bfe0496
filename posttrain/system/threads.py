"""Calls in threads of their own, whose results or errors are waited for elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a call in a thread that ends with the process: one that never returns blocks nothing else."""
    future: Future[Result] = Future()
    threading.Thread(target=fulfil, args=(future, call), name=name, daemon=True).start()
    return future


def fulfil(future: Future[Result], call: Callable[[], Result]) -> None:
    """Make a call whose result or error the future gets, unless that was cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # raised again in the thread that waits
            future.set_exception(error)
