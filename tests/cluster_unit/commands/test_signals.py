"""Stop signals at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import run_serve
from cluster.commands.signals import (
    STOP_SIGNALS,
    Stopped,
    ending_event_loops,
    holding_signals,
    run_until_stopped,
    stop_on_signals,
)
from cluster.config.config import BatonConfig
from simulation.virtual_loop import run_virtually


@pytest.fixture
def handlers() -> Iterator[None]:
    """Our handlers, and afterwards those that were there before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(done: list[str]) -> None:
    """Work during which Ctrl-C is pressed."""
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


def test_signal_while_the_session_folder_is_made_leaves_none(
    handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make_and_be_interrupted() -> Path:
        made.append(tmp_path / "session")
        made[0].mkdir()
        signal.raise_signal(signal.SIGINT)
        return made[0]

    monkeypatch.setattr("cluster.plan.preflight.preflight", lambda _: None)
    monkeypatch.setattr("cluster.deploy.address_hold.holding_address", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("cluster.deploy.serve_env.make_session_folder", make_and_be_interrupted)

    with pytest.raises(Stopped):
        run_serve(BatonConfig())

    assert made
    assert not made[0].exists()


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


async def hours_of_callbacks() -> None:
    """In virtual time; a signal comes in one of them."""
    loop = asyncio.get_running_loop()
    for hour in range(1, 9):
        loop.call_later(3600.0 * hour, signal.raise_signal if hour == 2 else abs, signal.SIGTERM)
    await asyncio.sleep(9 * 3600.0)


def test_signal_in_a_callback_ends_a_simulation(handlers: None) -> None:
    with pytest.raises(Stopped) as stopped, ending_event_loops():
        run_virtually(hours_of_callbacks())

    assert stopped.value.exit_code == 143


def test_behind_a_simulation_signals_stop_as_before_it(handlers: None) -> None:
    with ending_event_loops():
        run_virtually(asyncio.sleep(3600.0))

    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGINT)


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
