"""Being asked to stop, at any moment."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.commands.signals import STOP_SIGNALS, Stopped, holding_signals, run_until_stopped, stop_on_signals


@pytest.fixture
def handlers() -> Iterator[None]:
    """Our handlers, and afterwards those that were there before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(done: list[str]) -> None:
    """Work during which somebody presses Ctrl-C."""
    with holding_signals():
        signal.raise_signal(signal.SIGINT)
        done.append("work")
    done.append("more")


def test_held_signal_stops_after_the_work(handlers: None) -> None:
    done: list[str] = []

    with pytest.raises(Stopped) as stopped:
        interrupted(done)

    assert done == ["work"]
    assert stopped.value.exit_code == 130


def test_signal_after_the_work_stops_at_once(handlers: None) -> None:
    with holding_signals():
        pass

    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        stop_on_signals()
        with holding_signals():
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)

        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signal_ends_a_whole_run_whichever_of_its_tasks_it_meets(handlers: None) -> None:
    mended: list[str] = []

    async def stream() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    async def run() -> None:
        streams = [asyncio.create_task(stream()), asyncio.create_task(stream())]
        try:
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            mended.append("all")

    with pytest.raises(Stopped) as stopped:
        asyncio.run(run_until_stopped(run()))

    assert stopped.value.exit_code == 130
    assert mended == ["all"]


INTERRUPTED = """
import atexit, os, signal
import cluster.cli


class NativeThread:
    def __del__(self, end=os._exit):
        end(99)


def interrupted():
    cluster.cli.stop_on_signals()
    signal.raise_signal(signal.SIGTERM)


thread = NativeThread()
atexit.register(print, "cleaned up")
cluster.cli.app = interrupted
cluster.cli.main()
"""


def test_stopped_command_cleans_up_and_leaves_before_what_native_threads_use_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (143, "cleaned up\n", "")
