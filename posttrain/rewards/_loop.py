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
    """Lets code that is not a coroutine run an event loop of its own, though it is called from within one."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


def step_ends(error: BaseException) -> bool:
    """Whether it says that this task is cancelled: what it awaits may have been cancelled alone, by the code that was called."""
    own = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling() > 0


@cache
def _kept(process: int) -> tuple[asyncio.Runner, threading.Lock]:
    """The loop of this process, and who uses it; that of the process that this one was forked from is left as it is."""
    return asyncio.Runner(), threading.Lock()


def run_to_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine, also inside of an event loop, as in a notebook. All calls share one loop, which stays open: what a reward keeps
    from step to step (a client, a semaphore) works only in the loop that first used it. Where that is busy, it is a new one."""
    found: list[Result] = []

    async def run() -> None:
        # a result that the task itself held would be printed whole: `asyncio.run` asks for the handler of SIGINT, whose name has it
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
    """Cancel what was left unfinished, as `asyncio.run` does."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
