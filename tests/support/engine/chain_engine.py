"""Engines around the chain runner: everything is real except the model."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.contract.config import CacheConfig, SchedulerConfig
from engine.drafting.proposer import Drafting
from engine.frontend.engine_core import EngineCore
from engine.scheduler.policy.gates import AdmissionGate
from engine.scheduler.scheduler import Scheduler
from kv_transfer.connector import ConnectorBuilder
from tests.support.engine.chain_runner import ChainRunner

DEFAULT_SCHEDULER = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16)


def chain_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    scheduler: SchedulerConfig = DEFAULT_SCHEDULER,
    build_connector: ConnectorBuilder | None = None,
    gates: Sequence[AdmissionGate] = (),
    drafting: Drafting | None = None,
    device: str = "cpu",
) -> EngineCore:
    """A small engine whose tokens are ``expected_tokens`` as long as its cache has the right content.

    Where steps run ahead, as by default on another ``device``, its runner is late: see ``ChainRunner``.
    """
    runs_ahead = scheduler.runs_ahead(device)
    runner = ChainRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
        is_late=runs_ahead,
    )
    wake = threading.Event()
    connector = build_connector(runner.layout, runner.region, wake.set) if build_connector is not None else None
    policy = Scheduler(
        scheduler,
        CacheConfig(block_size=block_size),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        connector=connector.scheduler if connector is not None else None,
        gates=gates,
        drafting=drafting,
    )
    core = EngineCore(
        scheduler=policy,
        runner=runner,
        connector=connector.worker if connector is not None else None,
        wake=wake,
        runs_ahead=runs_ahead,
    )
    runner.between_layers = core.between_layers
    return core
