"""A router over real engines in this process, behind a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.contract.messages import LoadReport
from router.api.app import build_app
from router.service import RouterService
from router.settings import RouterSettings
from router.telemetry.settings import NO_TRACING, TracingSettings
from router.telemetry.tracer import ProcessTracer, make_tracer
from router.telemetry.worker_spans import WorkerSpans
from tests.support.engine.engine_pools import EnginePool, engine_pools
from tests.support.engine.loop_paced_runner import LoopPacedRunner
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST

NUM_TOKENS = 30


@dataclass
class Live:
    """A router over real engines, behind a socket."""

    prefill: EnginePool
    decode: EnginePool
    service: RouterService
    client: httpx.AsyncClient

    async def complete(self, prompt: list[int], **body: Any) -> httpx.Response:
        ask = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
        return await self.client.post("/v1/completions", json={"prompt": prompt, **ask})

    def loads(self) -> list[LoadReport]:
        prefill = [engine.load for engine in self.prefill.engines.values()]
        return prefill + [engine.load for engine in self.decode.engines.values()]

    def is_at_rest(self) -> bool:
        return self.service.num_alive == 0 and not any(
            load.num_running or load.num_waiting or load.num_loading or load.num_leased_blocks or load.num_held_blocks
            for load in self.loads()
        )


@asynccontextmanager
async def live_router(
    model_dir: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_blocks: int = 256,
    settings: RouterSettings = FAST,
    turns_per_step: int = 0,
    chunk_tokens: int = 0,
    tracing: TracingSettings = NO_TRACING,
    send_timeout_s: float = 60.0,
) -> AsyncIterator[Live]:
    """With ``turns_per_step`` decode engines leave the event loop so many turns between two steps; prefill computes
    ``chunk_tokens`` a step, unless that is 0. Spans have been sent when it is closed, if they can
    be within ``send_timeout_s``."""
    tracers: list[ProcessTracer] = []

    def tracer(role: str, name: str) -> ProcessTracer | None:
        if (made := make_tracer(tracing, role=role, instance_id=name)) is not None:
            tracers.append(made)
        return made

    def observe(role: str, name: str) -> WorkerSpans | None:
        of_worker = tracer(role, name)
        return None if of_worker is None else WorkerSpans(of_worker)

    async with engine_pools(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=num_blocks,
        chunk_tokens=chunk_tokens,
        observe=observe,
        wrap_decode_runner=lambda runner: LoopPacedRunner(runner, num_turns=turns_per_step),
    ) as (prefill, decode):
        pools = {"prefill": prefill, "decode": decode}
        service = RouterService(model_dir, "tiny", pools, settings, tracer=tracer("router", "r"))
        await service.start()
        limits = httpx.Limits(max_connections=None)
        try:
            async with (
                live_app(build_app(service)) as url,
                httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client,
            ):
                yield Live(prefill, decode, service, client)
        finally:
            await service.close()
            for of_process in tracers:
                of_process.close(timeout_s=send_timeout_s)


def token_ids(response: httpx.Response) -> list[int]:
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids
