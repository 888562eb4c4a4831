"""A deadline that begins to cost something only where something has to be waited for."""

from __future__ import annotations

import asyncio

import pytest

from router.api.http.patience import within


async def test_what_need_not_wait_is_done_on_the_spot() -> None:
    done: list[int] = []

    async def quick() -> None:
        done.append(1)

    await within(quick(), 0.0)

    assert done == [1]


async def test_what_waits_goes_on_where_it_was() -> None:
    steps: list[str] = []
    event = asyncio.Event()

    async def slow() -> None:
        steps.append("begun")
        await event.wait()
        await asyncio.sleep(0)
        steps.append("ended")

    task = asyncio.create_task(within(slow(), 5.0))
    await asyncio.sleep(0)
    assert steps == ["begun"]
    event.set()
    await task

    assert steps == ["begun", "ended"]


async def test_what_waits_too_long_is_cancelled() -> None:
    ends: list[BaseException] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            ends.append(error)
            raise

    with pytest.raises(TimeoutError):
        await within(endless(), 0.01)

    assert isinstance(ends[0], asyncio.CancelledError)


@pytest.mark.parametrize("waits_first", [False, True])
async def test_errors_are_the_callers(waits_first: bool) -> None:
    async def failing() -> None:
        if waits_first:
            await asyncio.sleep(0)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await within(failing(), 5.0)


async def test_cancellation_reaches_what_is_waited_for() -> None:
    was_cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    task = asyncio.create_task(within(endless(), 5.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert was_cancelled.is_set()


async def test_any_awaitable_will_do() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)

    await within(future, 1.0)
