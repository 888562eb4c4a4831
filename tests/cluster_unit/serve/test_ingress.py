"""When a router begins to serve: only once it knows the running workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from cluster.serve.ingress import after_first_lists
from tests.support.router.fake_caller import FakeCaller

NUM_LOOKS = 5


class WatchedCaller(FakeCaller):
    """Tells when it was asked often for its list."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked_often = asyncio.Event()
        self._num_looks = 0

    def replica_ids(self) -> Sequence[str]:
        """Count, and answer."""
        self._num_looks += 1
        if self._num_looks == NUM_LOOKS:
            self.was_asked_often.set()
        return super().replica_ids()


class Lifespan:
    """Notes whether it began."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    @asynccontextmanager
    async def __call__(self, app: Any) -> AsyncIterator[None]:
        self.has_begun.set()
        yield


async def test_a_router_serves_once_workers_of_every_role_are_listed() -> None:
    prefill, decode = FakeCaller(), WatchedCaller()
    inner = Lifespan()
    over = asyncio.Event()

    async def live() -> None:
        async with after_first_lists(inner, [prefill, decode], timeout_s=60.0)(FastAPI()):
            await over.wait()

    living = asyncio.create_task(live())
    prefill.replicas["p"] = {}
    async with asyncio.timeout(60.0):
        await decode.was_asked_often.wait()
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
