"""One event loop for all that is awaited in this process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from posttrain.rewards._loop import run_to_end


async def here() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_all_calls_share_one_loop_that_stays_open_also_from_a_thread_and_inside_of_another_loop() -> None:
    found = [run_to_end(here())]
    thread = threading.Thread(target=lambda: found.append(run_to_end(here())))
    thread.start()
    thread.join(30)

    async def outer() -> None:
        found.append(run_to_end(here()))

    asyncio.run(outer())
    assert len(found) == 3 and {*map(id, found)} == {id(found[0])} and not found[0].is_closed()


def test_a_call_within_a_call_has_a_loop_of_its_own() -> None:
    async def outer() -> tuple[bool, bool]:
        inner = run_to_end(here())
        return inner is await here(), inner.is_closed()

    assert run_to_end(outer()) == (False, True)


def test_what_is_left_unfinished_is_cancelled_also_after_an_error() -> None:
    ended = []

    async def endless() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(1)

    async def fails() -> None:
        ended.append(asyncio.ensure_future(endless()))
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_to_end(fails())
    assert ended[1:] == [1] and not asyncio.all_tasks(run_to_end(here()))
