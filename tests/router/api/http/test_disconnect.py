"""Clients that leave, over real sockets: their requests end on both sides, wherever they were."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.grammar.checker import GrammarChecker
from router.grammar.readers import GrammarReaders
from tests.support.grammar.costly import INTERSECTION, processes
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig, until

ENDLESS = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_everything(model_dir: Path, stage: str, stream: bool) -> None:
    async with (
        router_rig(model_dir) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):
        replica = (rig.prefill if stage == "prefill" else rig.decode)[0]
        replica.gate.clear()
        answer = asyncio.create_task(client.post("/v1/completions", json={**ENDLESS, "stream": stream}))
        await until(lambda: bool(replica.running))
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answer

        await until(lambda: replica.seen[0].request_id in replica.aborted)
        replica.gate.set()
        await until(rig.is_at_rest)
        assert rig.service.counters.num_cancelled == 1


async def test_client_that_leaves_in_the_middle_of_a_stream_stops_the_tokens(model_dir: Path) -> None:
    async with (
        router_rig(model_dir) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):
        rig.decode[0].gate.clear()
        async with client.stream("POST", "/v1/chat/completions", json=chat_body()) as response:
            async for line in response.aiter_lines():
                if line:
                    break

        # Only the first token was ever there: prefill's went out before decode made any.
        await until(lambda: bool(rig.decode[0].aborted))
        assert rig.decode[0].num_tokens == 0
        rig.decode[0].gate.set()
        await until(rig.is_at_rest)
        assert rig.service.counters.num_cancelled == 1


async def test_connection_that_is_lost_with_the_proxy_in_front_frees_everything(model_dir: Path) -> None:
    """Serve does not report a client whose proxy is gone: waiting for the client's next message raises instead."""
    async with router_rig(model_dir) as rig:
        is_proxy_gone = asyncio.Event()

        async def through_proxy(scope: Scope, receive: Receive, send: Send) -> None:
            messages = iter([await receive()])

            async def receive_of_proxy() -> Message:
                for message in messages:
                    return message
                await is_proxy_gone.wait()
                raise RuntimeError("the proxy is dead")

            await rig.app(scope, receive_of_proxy, send)

        async with live_app(through_proxy) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            rig.decode[0].gate.clear()
            answer = asyncio.create_task(client.post("/v1/completions", json={**ENDLESS, "stream": True}))
            await until(lambda: bool(rig.decode[0].running))
            is_proxy_gone.set()
            try:
                await until(lambda: rig.decode[0].seen[0].request_id in rig.decode[0].aborted)
            finally:
                rig.decode[0].gate.set()
                with contextlib.suppress(httpx.RemoteProtocolError):  # nobody writes the rest of it
                    await answer
            await until(rig.is_at_rest)
        assert rig.service.counters.num_cancelled == 1


async def test_clients_that_leave_at_random_moments_leave_nothing(model_dir: Path) -> None:
    source = random.Random(5)

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        body = {**ENDLESS, "prompt": f"visitor {number}", "stream": source.random() < 0.7}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(source.random() * 0.2):
                await client.post("/v1/completions", json=body)

    limits = httpx.Limits(max_connections=None)
    async with (
        router_rig(model_dir, num_prefill=2, num_decode=2) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0) as client,
    ):
        counters, num_rounds = rig.service.counters, 0
        while num_rounds < 4 or not counters.num_cancelled:  # on a busy machine few come as far as to be served
            await asyncio.gather(*(visit(client, number) for number in range(30)))
            num_rounds += 1
        await until(rig.is_at_rest)
        assert counters.num_requests == counters.num_finished + counters.num_cancelled + counters.num_failed


def chat_body() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True, "stream": True}


async def test_client_that_leaves_while_its_grammar_is_read_ends_the_reading(model_dir: Path) -> None:
    async with (
        router_rig(model_dir) as rig,
        live_app(rig.app) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0) as client,
    ):
        rig.service.grammars.close()
        rig.service.grammars = GrammarChecker(GrammarReaders(cpu_s=600))
        body = {"prompt": "hello", "structured_outputs": {"grammar": INTERSECTION}}
        before = {process.pid for process in processes()}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool({process.pid for process in processes()} - before))
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

        await until(lambda: not {process.pid for process in processes()} - before)
        answer = await client.post("/v1/completions", json={**body, "structured_outputs": {"choice": ["a"]}})
        assert answer.status_code == 200
        await until(rig.is_at_rest)
