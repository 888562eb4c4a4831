"""How a worker ends when Serve stops it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

from cluster.serve.workers import Worker
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from tests.support.engine.chain_engine import chain_engine

PATIENCE_S = 30.0


async def test_worker_whose_engine_is_still_built_is_not_waited_for() -> None:
    """It has nothing to lose, and loading weights may take minutes during which nobody else can use its GPU."""
    has_begun, may_end = threading.Event(), threading.Event()

    def build() -> EngineCore:
        has_begun.set()
        may_end.wait()
        return chain_engine()

    engine = AsyncEngine(build)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(has_begun.wait)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await Worker.__del__(cast("Worker", SimpleNamespace(_engine=engine)))
    finally:
        may_end.set()
        await starting
        await engine.close()
