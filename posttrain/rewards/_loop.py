"""The event loop in which rewards, tools and episodes of this process run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextmanager
def no_running_loop() -> Iterator[None]:
    """Let synchronous code run its own event loop, although it is called from within one."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


def step_ends(error: BaseException) -> bool:
    """Whether the error means that this task is cancelled. Otherwise only what it awaits was cancelled, by the code that was
    called."""
    own = asyncio.current_task() if isinstance(error, asyncio.CancelledError) else None
    return own is not None and own.cancelling() > 0


@cache
def _kept(process: int) -> tuple[asyncio.Runner, threading.Lock]:
    """Return the loop of this process and the lock of its user. A forked process gets its own; its parent's loop is left
    alone."""
    return asyncio.Runner(), threading.Lock()


def run_to_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine, also from inside an event loop, as in a notebook. All calls share one loop, which stays open: an object
    that a reward keeps from step to step (a client, a semaphore) works only in the loop that first used it. If that loop is
    busy, a new one is used."""
    found: list[Result] = []

    async def run() -> None:
        # the result goes into a list: `asyncio.run` asks for the handler of SIGINT, whose name would print the task with its
        # whole result
        found.append(await coroutine)

    runner, used = _kept(os.getpid())
    with no_running_loop():
        if not used.acquire(blocking=False):
            asyncio.run(run())
            return found[0]
        try:
            runner.run(run(), context=copy_context())
        finally:
            _cancel_all(runner.get_loop())
            used.release()
    return found[0]


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel unfinished tasks, as `asyncio.run` does."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
