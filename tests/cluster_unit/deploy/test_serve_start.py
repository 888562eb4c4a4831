"""Proxies of Serve that start slowly, are replaced meanwhile, or find their port taken."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from cluster.deploy.serve_start import PORT_PATIENCE_S, ProxyError, wait_for_proxies

ENDED = ActorDiedError()
TAKEN = RayTaskError("ready", "RuntimeError: Failed to bind to address '127.0.0.1:8000'.", RuntimeError())
TIMEOUT_S = 100.0


class Proxies:
    """What each generation of proxies does when it is waited for: raise an error, or listen after some seconds."""

    def __init__(self, *generations: Exception | float) -> None:
        self._generations = generations
        self._number = 0
        self.now_s = 0.0

    def wait(self, first: Sequence[int] | None = (0,), timeout_s: float = TIMEOUT_S) -> None:
        """Wait for them as a start of the cluster does."""
        wait_for_proxies(
            first, timeout_s=timeout_s, ask=self._ask, get=self._get, clock=lambda: self.now_s, pause=self._pause
        )

    def _ask(self) -> Sequence[int]:
        self._number = min(self._number + 1, len(self._generations) - 1)
        return [self._number]

    def _get(self, proxies: Sequence[int], *, timeout: float) -> None:
        said = self._generations[proxies[0]]
        if isinstance(said, Exception):
            raise said
        self.now_s += min(said, timeout)
        if said > timeout:
            raise GetTimeoutError("Get timed out: some object(s) not ready.")

    def _pause(self, seconds: float) -> None:
        self.now_s += seconds


def test_proxy_that_serve_gave_up_as_too_slow_is_waited_for_in_its_successor() -> None:
    proxies = Proxies(ENDED, ENDED, 20.0)

    proxies.wait()

    assert proxies.now_s >= 20.0


def test_proxies_that_serve_has_not_begun_to_start_are_waited_for() -> None:
    proxies = Proxies(0.0, ENDED, 20.0)

    proxies.wait(first=())

    assert proxies.now_s >= 20.0


def test_serve_that_ran_before_is_not_waited_for() -> None:
    proxies = Proxies(ENDED)

    proxies.wait(first=None)

    assert proxies.now_s == 0


@pytest.mark.parametrize("generations", [[200.0], [ENDED, 200.0], [ENDED]])
def test_proxies_that_are_too_slow_are_not_called_a_port_in_use(generations: list[Exception | float]) -> None:
    proxies = Proxies(*generations)

    with pytest.raises(ProxyError, match=r"not ready within 100 s.*busy") as late:
        proxies.wait()

    assert "`port`" not in str(late.value)
    assert TIMEOUT_S <= proxies.now_s < 1.1 * TIMEOUT_S


def test_port_that_a_proxy_which_ends_still_holds_is_waited_for() -> None:
    proxies = Proxies(ENDED, TAKEN, 1.0)

    proxies.wait()

    assert proxies.now_s < PORT_PATIENCE_S


def test_port_in_use_is_named_with_the_remedy() -> None:
    proxies = Proxies(TAKEN)

    with pytest.raises(ProxyError, match=r"cannot listen: .*127\.0\.0\.1:8000.*choose another `host` or `port`"):
        proxies.wait()

    assert PORT_PATIENCE_S <= proxies.now_s < 2 * PORT_PATIENCE_S


def test_proxy_that_fails_otherwise_is_told_at_once() -> None:
    proxies = Proxies(RayTaskError("ready", "ValueError: no certificate", ValueError()))

    with pytest.raises(ProxyError, match="no certificate") as failed:
        proxies.wait()

    assert "`port`" not in str(failed.value)


def test_serve_that_was_ended_meanwhile_is_not_waited_for() -> None:
    class Ended(Proxies):
        def _ask(self) -> Sequence[int]:
            raise ActorDiedError

    proxies = Ended(ENDED)

    with pytest.raises(ProxyError, match="Serve ended"):
        proxies.wait()

    assert proxies.now_s < TIMEOUT_S
