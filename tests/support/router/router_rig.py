"""A router over fake workers with an HTTP client: the start of most router tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from engine.contract.messages import SamplingParams
from router.api.app import build_app
from router.report.cluster_view import WantedWorkers
from router.report.router_report import RouterPeers
from router.security import SecuritySettings
from router.service import RouterService
from router.settings import RouterSettings
from router.telemetry.tracer import ProcessTracer
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool, NextToken, counting

FAST = RouterSettings(
    report_period_s=0.05,
    backoff_min_s=0.02,
    backoff_max_s=0.1,
    recovery_wait_s=60.0,
    status_timeout_s=60.0,
    connect_timeout_s=60.0,
    abort_timeout_s=60.0,
    roles="fixed",
)
"""Settings for tests: short periods, so that things happen soon; timeouts that even busy machines do not reach, so that
only what a test breaks fails; and deterministic placement.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class RouterRig:
    """All parts of one test."""

    prefill: FakePrefillPool
    decode: FakeDecodePool
    service: RouterService
    app: FastAPI
    client: httpx.AsyncClient

    async def complete(self, prompt: str | list[int] = "hello", **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"prompt": prompt, **body})

    async def chat(self, content: str = "hello", **body: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        return await self.client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **body}
        )

    async def begin_anew(self) -> None:
        """Forget what workers were asked, once nothing is in progress: before each of the tests that share a rig."""
        await until(self.is_at_rest)
        for replica in (*self.prefill.replicas.values(), *self.decode.replicas.values()):
            replica.seen.clear()

    def is_at_rest(self) -> bool:
        """True if no request is in progress, and nothing is leased or reserved."""
        replicas = [*self.prefill.replicas.values(), *self.decode.replicas.values()]
        pools = (self.service.prefill_pool, self.service.decode_pool)
        return (
            self.service.num_alive == 0
            and not any(replica.running or replica.leases for replica in replicas)
            and not any(item.num_reserved or item.reserved_blocks for pool in pools for item in pool.replicas)
        )


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Let the event loop run until a condition holds; fails if it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (any condition, on objects without events)
            await asyncio.sleep(0.001)


@asynccontextmanager
async def router_rig(
    model_dir: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    next_token: NextToken = counting,
    settings: RouterSettings = FAST,
    tokens_per_step: int = 1,
    max_model_len: int = 512,
    security: SecuritySettings | None = None,
    router_id: str | None = None,
    peers: RouterPeers | None = None,
    wanted: WantedWorkers | None = None,
    aliases: Sequence[str] = (),
    params: type[SamplingParams] = SamplingParams,
    tracer: ProcessTracer | None = None,
) -> AsyncIterator[RouterRig]:
    """A started router; at the end nothing may be left."""
    prefill = FakePrefillPool(num_prefill, next_token=next_token, max_model_len=max_model_len)
    decode = FakeDecodePool(num_decode, prefill=prefill, tokens_per_step=tokens_per_step, max_model_len=max_model_len)
    service = RouterService(
        model_dir,
        "tiny",
        {"prefill": prefill, "decode": decode},
        settings,
        router_id=router_id,
        peers=peers,
        aliases=aliases,
        params=params,
        tracer=tracer,
    )
    service.view.wanted = wanted
    await service.start()
    app = build_app(service, security=security)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield RouterRig(prefill=prefill, decode=decode, service=service, app=app, client=client)
    finally:
        await service.close()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream; the stream must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def completion_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a streamed text completion."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def chat_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a streamed chat completion."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)
