"""Clients that send what is no HTTP do not fill the log."""

from __future__ import annotations

import logging

import pytest
from starlette.types import Receive, Scope, Send

from router.api.http.sparse_log import PERIOD_S, SparseLog
from tests.support.clock import ManualClock
from tests.support.router.live_app import live_app
from tests.support.router.raw_http import exchange

logger = logging.getLogger("baton.tests.sparse")


def test_same_warning_comes_once_a_period_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = SparseLog(logger, clock=clock)
    for _ in range(5):
        log.warning("bad")
    log.warning("worse")
    clock.advance(PERIOD_S)
    log.warning("bad")
    clock.advance(PERIOD_S)
    log.warning("bad")

    assert [record.getMessage() for record in caplog.records] == [
        "bad",
        "worse",
        f"bad (and 4 more times in the last {PERIOD_S:.0f} s)",
        "bad",
    ]


def test_everything_else_is_the_loggers() -> None:
    assert SparseLog(logger).level == logger.level
    assert SparseLog(logger).name == logger.name


async def test_malformed_requests_write_a_line_and_not_one_each(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("no request comes")

    async with live_app(app) as url:
        port = int(url.rsplit(":", 1)[1])
        servers_log = logging.getLogger("uvicorn.error")  # its lines go to handlers of its own
        servers_log.addHandler(caplog.handler)
        try:
            answers = [await exchange(port, b"no HTTP at all\r\n\r\n") for _ in range(20)]
        finally:
            servers_log.removeHandler(caplog.handler)

    assert [answer.status for answer in answers] == [400] * 20
    told = [record for record in caplog.records if "Invalid HTTP request" in record.getMessage()]
    assert len(told) <= 1
