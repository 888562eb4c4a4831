"""Waits on Ray that end: signals, and a Ray that is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.commands import ray_waits
from cluster.commands.ray_waits import GONE_SIGNAL, RayEndedError, ending_waits
from cluster.commands.signals import STOP_SIGNALS, Stopped
from cluster.deploy.claim import Claim

WAIT_S = 60.0


class Home:
    """A Ray that is there until a test says otherwise."""

    logs = "nowhere"

    def __init__(self) -> None:
        self.there = True

    def start(self) -> Claim | None:
        """Nothing to start."""
        return None

    def is_alive(self) -> bool:
        """True if the test set it."""
        return self.there

    def is_there(self) -> bool:
        """True if the test set it."""
        return self.there

    def kill(self) -> None:
        """Must not be needed: the main thread here always notices."""
        raise AssertionError("killed")

    def stop(self) -> None:
        """Nothing to stop."""

    def remove_logs(self) -> None:
        """No logs."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, GONE_SIGNAL)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def wait() -> None:
    """Like Ray: if a signal handler raises, another KeyboardInterrupt is raised instead."""
    try:
        assert not threading.Event().wait(WAIT_S)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None


def wait_and_fail() -> None:
    """Like Ray, if a call notices by itself that its servers are gone."""
    try:
        wait()
    except KeyboardInterrupt:
        raise RuntimeError("connection refused") from None


def send_and_wait(number: signal.Signals) -> None:
    """Get a signal in the middle of a wait."""
    os.kill(os.getpid(), number)
    wait()


def test_a_ray_that_is_gone_ends_the_wait() -> None:
    home = Home()
    home.there = False

    with pytest.raises(RayEndedError), ending_waits(home, period_s=0.01):
        wait()

    assert signal.getsignal(GONE_SIGNAL) is not signal.SIG_IGN


def test_what_ray_says_meanwhile_is_said_to_be_its_end() -> None:
    home = Home()
    home.there = False

    with pytest.raises(RayEndedError), ending_waits(home, period_s=0.01):
        wait_and_fail()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_ends_the_wait_and_further_ones_are_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.default_int_handler)

    with pytest.raises(Stopped) as stopped, ending_waits():
        send_and_wait(number)

    assert stopped.value.signal_number == number
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with ending_waits():
        os.kill(os.getpid(), signal.SIGHUP)


def test_handlers_and_errors_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(ValueError, match="x"), ending_waits(Home(), period_s=0.01):
        raise ValueError("x")

    assert signal.getsignal(signal.SIGINT) is before
    assert not watchers()


def watchers() -> list[threading.Thread]:
    """The threads that would end this process if nobody noticed that Ray is gone."""
    return [thread for thread in threading.enumerate() if thread.name == "ray-watch"]


def test_a_ray_that_is_gone_before_the_wait_begins_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowlyStarted(threading.Thread):
        """A thread that works before the one that starts it goes on, as on a busy machine."""

        def start(self) -> None:
            super().start()
            wait()

    home = Home()
    home.there = False
    monkeypatch.setattr(threading, "Thread", SlowlyStarted)

    with pytest.raises(RayEndedError), ending_waits(home, period_s=0.01):
        pytest.fail("the signal came before")

    assert not watchers()


def test_a_ray_that_is_gone_when_the_wait_has_just_ended_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    home, is_seen, main_thread_id = Home(), threading.Event(), threading.get_ident()
    kill = signal.pthread_kill

    def kill_once_the_wait_has_ended(*arguments: Any) -> None:
        is_seen.set()
        while sys._current_frames()[main_thread_id].f_code.co_name != ray_waits._watched.__name__:
            pass
        kill(*arguments)

    monkeypatch.setattr(signal, "pthread_kill", kill_once_the_wait_has_ended)

    def wait_until_it_is_seen() -> None:
        home.there = False
        assert is_seen.wait(WAIT_S)

    with pytest.raises(RayEndedError), ending_waits(home, period_s=0.01):
        wait_until_it_is_seen()

    assert not watchers()
