"""When a router begins to serve: not before it knows the workers that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from cluster.serve.ingress import after_first_lists
from cluster.serve.replica_caller import LIST_POLL_S
from tests.support.router.fake_caller import FakeCaller

NUM_LOOKS = 5


class Lifespan:
    """Notes whether it began."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    @asynccontextmanager
    async def __call__(self, app: Any) -> AsyncIterator[None]:
        self.has_begun.set()
        yield


async def test_a_router_serves_once_workers_of_every_role_are_listed() -> None:
    prefill, decode = FakeCaller(), FakeCaller()
    inner = Lifespan()
    over = asyncio.Event()

    async def live() -> None:
        async with after_first_lists(inner, [prefill, decode], timeout_s=60.0)(FastAPI()):
            await over.wait()

    living = asyncio.create_task(live())
    prefill.replicas["p"] = {}
    for _ in range(NUM_LOOKS):
        await asyncio.sleep(LIST_POLL_S)
        assert not inner.has_begun.is_set()
    decode.replicas["d"] = {}
    async with asyncio.timeout(60.0):
        await inner.has_begun.wait()

    over.set()
    await living


async def test_a_router_of_a_cluster_that_starts_does_not_wait_for_ever() -> None:
    inner = Lifespan()

    async with after_first_lists(inner, [FakeCaller()], timeout_s=0.0)(FastAPI()):
        assert inner.has_begun.is_set()
