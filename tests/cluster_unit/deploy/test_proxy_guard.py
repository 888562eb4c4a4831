"""The limit on what Serve's proxy buffers, in front of an application that accepts everything, like that proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
import uvicorn.config
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path
from starlette.types import Receive, Scope, Send

from cluster.deploy.http_middlewares import DecodableHeadersMiddleware, IncomingRequestIdMiddleware
from cluster.deploy.proxy_guard import STARTING_S, ProxyGuard, ProxyLimits
from cluster.deploy.serve_env import HTTP_CALLBACK
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import until

MIB = 1 << 20
LIMITS = ProxyLimits(max_body_bytes=2 * MIB, max_reading_bytes=4 * MIB, reading_wait_s=0.05)


class EagerProxy:
    """Takes every body at once, and answers when it is told to. ``num_held`` is what it has of bodies."""

    def __init__(self) -> None:
        self.num_held = 0
        self.num_requests = 0
        self.may_answer = asyncio.Event()
        self.knows_routes = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_requests += 1
        held = 0
        gone, whole = asyncio.Event(), asyncio.Event()

        async def take() -> None:
            nonlocal held
            while (message := await receive())["type"] == "http.request":
                held += len(message["body"])
                self.num_held += len(message["body"])
                if not message.get("more_body"):
                    whole.set()
            gone.set()

        async def may_answer() -> None:
            await whole.wait()
            await self.may_answer.wait()

        taking = asyncio.create_task(take())
        waits = [asyncio.create_task(may_answer()), asyncio.create_task(gone.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not gone.is_set():
            kind = b"application/json" if self.knows_routes else b"text/plain"
            status = 200 if self.knows_routes else 404
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
            await send({"type": "http.response.body", "body": str(held).encode()})
        for task in (taking, *waits):
            task.cancel()
        await asyncio.gather(taking, *waits, return_exceptions=True)
        self.num_held -= held


class Clock:
    """Time that stands at the moment when the proxy had started long ago, unless it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Front:
    """A guarded proxy, and its clients."""

    def __init__(self, proxy: EagerProxy, client: httpx.AsyncClient, clock: Clock) -> None:
        self.proxy = proxy
        self.client = client
        self.clock = clock

    async def post(self, num_bytes: int, *, is_chunked: bool = False) -> httpx.Response:
        """Send a body."""
        return await self.client.post("/v1/completions", content=body(num_bytes) if is_chunked else b"x" * num_bytes)


async def body(num_bytes: int) -> AsyncIterator[bytes]:
    for start in range(0, num_bytes, MIB // 4):
        yield b"x" * min(MIB // 4, num_bytes - start)


@asynccontextmanager
async def front(limits: ProxyLimits = LIMITS, *, is_new: bool = False) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        proxy, clock = EagerProxy(), Clock()
        guard = ProxyGuard(proxy, limits=limits, clock=clock)
        clock.now_s = 0.0 if is_new else STARTING_S
        url = await stack.enter_async_context(live_app(guard))
        pool = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=120, limits=pool, trust_env=False)
        )
        yield Front(proxy, client, clock)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_on_their_way_are_bounded_and_the_rest_is_told_to_come_again(is_chunked: bool) -> None:
    async with front() as guarded:
        posts = [asyncio.create_task(guarded.post(MIB, is_chunked=is_chunked)) for _ in range(20)]
        await until(lambda: sum(post.done() for post in posts) >= 16)
        held = guarded.proxy.num_held
        guarded.proxy.may_answer.set()
        answers = await asyncio.gather(*posts)

    # What is not known to be large before it is read may have a chunk of each connection on top.
    assert held <= LIMITS.max_reading_bytes + (20 * MIB // 4 if is_chunked else 0)
    refused = [answer for answer in answers if answer.status_code != httpx.codes.OK]
    assert len(refused) >= 16
    assert {answer.status_code for answer in refused} == {httpx.codes.SERVICE_UNAVAILABLE}
    assert {answer.json()["error"]["code"] for answer in refused} == {"bodies_full"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)


async def test_room_is_free_again_when_answers_begin() -> None:
    async with front() as guarded:
        guarded.proxy.may_answer.set()
        for _ in range(3):
            answers = await asyncio.gather(*(guarded.post(MIB) for _ in range(4)))
            assert [answer.text for answer in answers] == [str(MIB)] * 4


async def test_room_of_clients_that_leave_is_free_again() -> None:
    async with front() as guarded:
        posts = [asyncio.create_task(guarded.post(MIB)) for _ in range(4)]
        await until(lambda: guarded.proxy.num_held == 4 * MIB)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        await until(lambda: guarded.proxy.num_held == 0)
        guarded.proxy.may_answer.set()

        assert (await guarded.post(2 * MIB)).status_code == httpx.codes.OK


async def test_who_waits_for_room_gets_it_in_time() -> None:
    async with front(ProxyLimits(max_body_bytes=4 * MIB, max_reading_bytes=4 * MIB, reading_wait_s=30)) as guarded:
        first = asyncio.create_task(guarded.post(4 * MIB))
        await until(lambda: guarded.proxy.num_held == 4 * MIB)
        second = asyncio.create_task(guarded.post(3 * MIB))
        await until(lambda: guarded.proxy.num_requests == 2)
        assert guarded.proxy.num_held == 4 * MIB
        guarded.proxy.may_answer.set()

        assert [(await first).text, (await second).text] == [str(4 * MIB), str(3 * MIB)]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_that_is_too_large_is_refused_in_front(is_chunked: bool) -> None:
    async with front() as guarded:
        answer = await guarded.post(2 * MIB + 1, is_chunked=is_chunked)

        assert answer.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
        assert answer.json()["error"]["code"] == "body_too_large"
        assert guarded.proxy.num_held == 0


async def test_small_bodies_pass_whatever_waits() -> None:
    async with front() as guarded:
        posts = [asyncio.create_task(guarded.post(2 * MIB)) for _ in range(2)]
        await until(lambda: guarded.proxy.num_held == 4 * MIB)
        small = asyncio.create_task(guarded.post(1000))
        await until(lambda: guarded.proxy.num_held == 4 * MIB + 1000)
        guarded.proxy.may_answer.set()

        assert (await small).text == "1000"
        await asyncio.gather(*posts)


async def test_proxy_that_has_just_begun_asks_to_come_again_instead_of_not_finding_the_path() -> None:
    async with front(is_new=True) as guarded:
        guarded.proxy.may_answer.set()
        guarded.proxy.knows_routes = False
        early = await guarded.post(10)
        guarded.proxy.knows_routes = True
        right = await guarded.post(10)
        guarded.proxy.knows_routes = False
        guarded.clock.now_s = STARTING_S
        late = await guarded.post(10)

    assert (early.status_code, early.json()["error"]["code"]) == (503, "no_healthy_replica")
    assert "retry-after" in early.headers
    assert right.text == "10"
    assert late.status_code == httpx.codes.NOT_FOUND


def test_serve_finds_the_guard_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    found = validate_http_proxy_callback_return(call_function_from_import_path(HTTP_CALLBACK))

    expected = [IncomingRequestIdMiddleware, DecodableHeadersMiddleware, ProxyGuard]
    assert [middleware.cls for middleware in found] == expected


def test_limits_are_those_of_the_environment() -> None:
    told = {
        "BATON_PROXY_MAX_BODY_BYTES": "5",
        "BATON_PROXY_MAX_READING_BYTES": "50",
        "BATON_PROXY_READING_WAIT_S": "0.5",
    }

    assert ProxyLimits.of_environment(told) == ProxyLimits(max_body_bytes=5, max_reading_bytes=50, reading_wait_s=0.5)
    assert ProxyLimits.of_environment({}) == ProxyLimits()
