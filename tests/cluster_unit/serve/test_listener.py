"""Routers that listen themselves: they share a port, and stop without losing an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse, StreamingResponse

from cluster.serve.listener import ListenError, ListenSettings, RouterListener
from router.api.http.bounded_protocol import HttpLimits
from tests.support.router.raw_http import exchange, raw_request

HOST = "127.0.0.1"
NUM_CONNECTIONS = 64
LIMITS = HttpLimits()


class Router:
    """An application that says who it is, and one answer that ends when the test lets it."""

    def __init__(self, name: str, port: int = 0, *, drain_timeout_s: float = 30.0, limits: HttpLimits = LIMITS) -> None:
        self.app = FastAPI(lifespan=self._lifespan)
        self.app.add_api_route("/name", lambda: JSONResponse(name), methods=["POST"])
        self.app.add_api_route("/slow", self._slow, methods=["POST"])
        self.events: list[str] = []
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.listener = RouterListener(
            ListenSettings(host=HOST, port=port, drain_timeout_s=drain_timeout_s, limits=limits)
        )
        self._context = self.listener.around(self.app.router.lifespan_context)(self.app)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.events.append("start")
        yield
        self.events.append("close")

    async def _slow(self) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun "
            self.has_begun.set()
            await self.may_end.wait()
            self.events.append("answered")
            yield b"ended"

        return StreamingResponse(parts())

    async def __aenter__(self) -> Router:
        await self._context.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may_end.set()
        await self.stop()

    async def stop(self) -> None:
        """Serve's call when it ends a replica."""
        if "close" not in self.events:
            await self._context.__aexit__(None, None, None)


async def name_at(port: int) -> Any:
    return json.loads((await exchange(port, raw_request("/name", {}))).body)


async def test_routers_of_a_host_share_a_port_and_one_that_ends_gets_no_more() -> None:
    async with Router("a") as first, Router("b", first.listener.port) as second:
        port = first.listener.port
        assert second.listener.port == port
        both = {await name_at(port) for _ in range(NUM_CONNECTIONS)}
        await first.stop()
        rest = {await name_at(port) for _ in range(NUM_CONNECTIONS)}

    assert both == {"a", "b"}
    assert rest == {"b"}


async def test_answers_that_began_are_completed_before_the_service_closes() -> None:
    async with Router("a") as router:
        answering = asyncio.create_task(exchange(router.listener.port, raw_request("/slow", {})))
        await router.has_begun.wait()
        stopping = asyncio.create_task(router.stop())
        await _wait_until_refused(router.listener)
        router.may_end.set()
        answer = await answering
        await stopping

    assert answer.body == b"begun ended"
    assert router.events == ["start", "answered", "close"]


async def test_answers_that_do_not_end_are_given_up_at_the_timeout() -> None:
    async with Router("a", drain_timeout_s=1.0) as router:
        answering = asyncio.create_task(exchange(router.listener.port, raw_request("/slow", {})))
        await router.has_begun.wait()
        await router.stop()
        with contextlib.suppress(Exception):
            await answering

    assert router.events == ["start", "close"]


async def test_port_of_somebody_else_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ListenError, match=rf"cannot listen on {HOST}:{port}: .*another `host` or `port`"):
            RouterListener(ListenSettings(host=HOST, port=port, drain_timeout_s=1.0))


async def test_headers_are_bounded_as_the_settings_say() -> None:
    many = b"GET /name HTTP/1.1\r\n" + b"a:b\r\n" * 6
    async with Router("a", limits=HttpLimits(max_num_headers=4)) as router:
        assert (await exchange(router.listener.port, many)).status == 431


def test_name_that_is_none_is_refused() -> None:
    with pytest.raises(ListenError, match=r"no-such-host\.invalid"):
        RouterListener(ListenSettings(host="no-such-host.invalid", port=1, drain_timeout_s=1.0))


async def test_server_that_ended_by_itself_is_told_to_serve() -> None:
    async with Router("a") as router:
        router.listener.check()
        serving = router.listener._serving
        assert serving is not None
        serving.cancel()
        await asyncio.wait([serving])

        with pytest.raises(ListenError, match="stopped"):
            router.listener.check()


async def _wait_until_refused(listener: RouterListener) -> None:
    """Until the socket that took connections is closed."""
    while listener._socket.fileno() != -1:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0)
