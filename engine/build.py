"""Builds an engine from its settings; the one place where scheduler, runner and connector meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.contract.config import EngineConfig
from engine.contract.messages import WorkerInfo
from engine.frontend.engine_core import EngineCore
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from kv_transfer.connector import Connector, ConnectorBuilder
from kv_transfer.params import PeerIdentity

ProgressCallback = Callable[[int, int], None]
"""Called while weights load, with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine that can step, with its parts at hand."""

    core: EngineCore
    runner: ModelRunner
    connector: Connector | None


def build_engine(
    config: EngineConfig,
    *,
    build_connector: ConnectorBuilder | None = None,
    progress: ProgressCallback | None = None,
) -> BuiltEngine:
    """Load the model, size the cache, and join scheduler, runner and connector.

    Raises:
        CheckpointError: The directory cannot be loaded.
        ConfigError: The settings contradict each other or do not fit into this machine's memory.
    """
    runner = ModelRunner(config, progress=progress)
    runner.warm_up()
    wake = threading.Event()
    connector = build_connector(runner.layout, runner.region, wake.set) if build_connector is not None else None
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        windows=[group.window for group in runner.layout.groups],
        connector=connector.scheduler if connector is not None else None,
    )
    core = EngineCore(
        scheduler=scheduler,
        runner=runner,
        connector=connector.worker if connector is not None else None,
        wake=wake,
        runs_ahead=config.scheduler.runs_ahead(runner.device.type),
    )
    return BuiltEngine(core=core, runner=runner, connector=connector)


def worker_info(
    runner: ModelRunner,
    *,
    role: str,
    identity: PeerIdentity,
    node_ip: str,
    model_name: str,
    stream_chunk_tokens: int = 0,
    transport: str = "",
) -> WorkerInfo:
    """The constants of a worker around ``runner`` in this process."""
    return WorkerInfo(
        role=role,
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        node_ip=node_ip,
        pid=os.getpid(),
        model_name=model_name,
        block_size=runner.layout.block_size,
        num_blocks=runner.num_blocks,
        block_bytes=runner.layout.block_bytes,
        max_model_len=runner.max_model_len,
        vocab_size=runner.model_config.vocab_size,
        device=runner.region.memory.value,
        dtype=runner.layout.dtype,
        stream_chunk_tokens=stream_chunk_tokens,
        transport=transport,
    )
