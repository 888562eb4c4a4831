"""Time that jumps: nothing really waits, and code that would have to is refused."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from simulation.virtual_loop import RealWaitError, VirtualDeadlockError, VirtualLoop, run_virtually


def test_an_hour_passes_at_once() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600.0)
        return asyncio.get_running_loop().time()

    began_s = time.perf_counter()

    assert run_virtually(sleep()) == 3600.0
    assert time.perf_counter() - began_s < 60.0


def test_timers_fire_in_the_order_of_their_times() -> None:
    fired: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name, delay_s in (("late", 2.0), ("first", 1.0), ("second", 1.1), ("soon", 0.5)):
            loop.call_later(delay_s, fired.append, name)
        await asyncio.sleep(3.0)

    run_virtually(main())

    assert fired == ["soon", "first", "second", "late"]


def test_a_timeout_is_over_when_its_time_has_come() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 5.0


def test_sums_of_small_times_leave_no_timer_behind() -> None:
    async def main() -> float:
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(1000.0)


def test_waiting_for_what_nothing_brings_is_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    with pytest.raises(VirtualDeadlockError, match=r"at virtual time 2\.000000 s"):
        run_virtually(main())


async def _thread() -> None:
    await asyncio.to_thread(time.time)


async def _connection() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _server() -> None:
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


async def _process() -> None:
    await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize("real", [_thread, _connection, _server, _process])
def test_what_takes_real_time_is_refused(real: object) -> None:
    with pytest.raises(RealWaitError):
        run_virtually(real())  # type: ignore[operator]


def test_calls_from_another_thread_are_refused() -> None:
    loop = VirtualLoop()
    caught: list[Exception] = []

    def call() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except RealWaitError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    loop.close()

    assert len(caught) == 1
