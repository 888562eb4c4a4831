"""A router over real prefill and decode engines with a real model in this process, behind a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from engine.build import build_engine, worker_info
from engine.contract.messages import LoadReport, WorkerInfo
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import ConnectorBuilder
from kv_transfer.params import PeerIdentity
from router.api.app import build_app
from router.service import RouterService
from router.settings import RouterSettings
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.engine_pools import EngineMaker, EnginePool, engine_pools
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST

VOCAB_SIZE = 259
"""The size of the byte tokenizer's vocabulary, so that every token has a text."""


@dataclass(frozen=True, slots=True)
class ModelRouter:
    """All parts."""

    prefill: EnginePool
    decode: EnginePool
    service: RouterService
    client: openai.AsyncOpenAI

    def prefill_load(self) -> LoadReport:
        """The load of the one prefill engine."""
        return self.prefill.engines["prefill-0"].load

    def decode_load(self, name: str = "decode-0") -> LoadReport:
        """The load of a decode engine."""
        return self.decode.engines[name].load

    def is_at_rest(self) -> bool:
        """True when nothing runs and no engine holds anything."""
        engines = [*self.prefill.engines.values(), *self.decode.engines.values()]
        return self.service.num_alive == 0 and not any(
            load.num_running or load.num_waiting or load.num_loading or load.num_leased_blocks or load.num_held_blocks
            for load in (engine.load for engine in engines)
        )


def model_engines(path: Path, *, drafting: Drafting | None = None) -> EngineMaker:
    """Engines that run a checkpoint."""

    def make(role: str, name: str, num_blocks: int, build_connector: ConnectorBuilder) -> tuple[EngineCore, WorkerInfo]:
        config = small_engine_config(path, num_blocks=num_blocks)
        built = build_engine(config, build_connector=build_connector, drafting=drafting)
        identity = PeerIdentity(engine_id=name, incarnation="1")
        return built.core, worker_info(
            built.facts, role=role, identity=identity, node_ip="127.0.0.1", model_name="tiny"
        )

    return make


@asynccontextmanager
async def model_router(
    path: Path, *, num_decode: int = 1, drafting: Drafting | None = None, settings: RouterSettings = FAST
) -> AsyncIterator[ModelRouter]:
    """Serve a checkpoint that has a tokenizer; at the end nothing may be left."""
    async with engine_pools(num_decode=num_decode, make=model_engines(path, drafting=drafting)) as (prefill, decode):
        service = RouterService(path, "tiny", {"prefill": prefill, "decode": decode}, settings)
        await service.start()
        try:
            async with (
                live_app(build_app(service)) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            ):
                yield ModelRouter(prefill, decode, service, client)
        finally:
            await service.close()
