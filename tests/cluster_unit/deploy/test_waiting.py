"""The messages to a user who waits for a cluster."""

from __future__ import annotations

import io
import signal
import socket

import httpx
import pytest
from rich.console import Console

from cluster.commands.deploy import saying_what_goes_on
from cluster.commands.signals import Stopped
from cluster.config.api_url import base_url
from cluster.config.config import BatonConfig
from cluster.deploy.deployment import StartError
from cluster.deploy.readiness import wait_until_ready


def test_address_that_does_not_answer_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"

        with pytest.raises(StartError, match=f"^{url} was not ready within 0 s: ConnectError"):
            wait_until_ready(url, timeout_s=0)


def test_who_stops_waiting_is_told_that_serve_does_not_stop() -> None:
    said = io.StringIO()

    with pytest.raises(Stopped), saying_what_goes_on(Console(file=said)):
        raise Stopped(signal.SIGINT)

    assert all(word in said.getvalue() for word in ("Serve continues", "`baton deploy`", "`baton shutdown`"))


def test_who_waits_to_the_end_is_told_nothing() -> None:
    said = io.StringIO()

    with saying_what_goes_on(Console(file=said)):
        pass

    assert said.getvalue() == ""


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_url_is_one_for_every_host(host: str, url: str) -> None:
    assert base_url(BatonConfig(host=host)) == url
    assert str(httpx.URL(base_url(BatonConfig(host=host)))) == url
