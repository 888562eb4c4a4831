"""Builds an engine from its settings; the only place where scheduler, executor and connector meet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.contract.config import EngineConfig
from engine.contract.executor import EngineFacts, Executor
from engine.contract.messages import WorkerInfo
from engine.drafting.proposer import Drafting
from engine.drafting.registry import make_drafting, with_predictions
from engine.executor.draft_engine import DraftEngine
from engine.executor.draft_loading import load_draft_model
from engine.executor.single_process import SingleProcessExecutor
from engine.frontend.engine_core import EngineCore
from engine.runner.model_runner import grammar_store
from engine.scheduler.scheduler import Scheduler
from kv_transfer.connector import Connector, ConnectorBuilder
from kv_transfer.params import PeerIdentity

ProgressCallback = Callable[[int, int], None]
"""Called while weights load, with the bytes loaded so far and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready to step, and its parts; closing ``core`` closes them all."""

    core: EngineCore
    facts: EngineFacts
    executor: Executor
    connector: Connector | None
    drafting: Drafting | None = None


def build_engine(
    config: EngineConfig,
    *,
    build_connector: ConnectorBuilder | None = None,
    progress: ProgressCallback | None = None,
    drafting: Drafting | None = None,
) -> BuiltEngine:
    """Load the model, size the cache, and connect scheduler, executor and connector.

    ``drafting`` replaces what ``config.speculative`` asks for: steps verify draft tokens, and the same tokens come in
    fewer steps.

    Raises:
        CheckpointError: The directory cannot be loaded.
        ConfigError: The settings contradict each other or do not fit into this machine's memory.
    """
    draft_engine = DraftEngine.of(config) if drafting is None else None
    grammars = grammar_store(config.model)
    # Loaded before the model itself, whose KV cache may take all memory that is left.
    draft_model = load_draft_model(draft_engine, grammars) if draft_engine is not None else None
    drafting = with_predictions(drafting or make_drafting(config.speculative, model=draft_model), config.speculative)
    max_samples = drafting.most_samples(config.scheduler.max_num_seqs)
    executor = SingleProcessExecutor(config, progress=progress, max_samples=max_samples, grammars=grammars)
    executor.warm_up()
    return join_engine(config, executor, build_connector=build_connector, drafting=drafting)


def join_engine(
    config: EngineConfig,
    executor: Executor,
    *,
    build_connector: ConnectorBuilder | None = None,
    drafting: Drafting | None = None,
) -> BuiltEngine:
    """Put a scheduler and a connector around an executor.

    Raises:
        ConfigError: The settings contradict what the executor says of itself.
    """
    facts, wake = executor.describe(), threading.Event()
    connector: Connector | None = None
    if build_connector is not None:
        (region,) = executor.regions
        connector = build_connector(facts.layout, region, wake.set)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
        windows=[group.window for group in facts.layout.groups],
        connector=connector.scheduler if connector is not None else None,
        drafting=drafting,
        grammars=executor.grammars,
    )
    executor.grammars.on_end = wake.set
    core = EngineCore(
        scheduler=scheduler,
        runner=executor,
        connector=connector.worker if connector is not None else None,
        wake=wake,
        runs_ahead=config.scheduler.runs_ahead(facts.device, has_drafts=drafting is not None and drafting.serves_all),
        on_close=partial(_close, executor, drafting),
        vocab_size=facts.vocab_size,
    )
    executor.call_between_layers(core.between_layers)
    return BuiltEngine(core=core, facts=facts, executor=executor, connector=connector, drafting=drafting)


def _close(executor: Executor, drafting: Drafting | None) -> None:
    executor.close()
    if drafting is not None and drafting.model is not None:
        drafting.model.close()


def worker_info(
    facts: EngineFacts,
    *,
    role: str,
    identity: PeerIdentity,
    node_ip: str,
    model_name: str,
    stream_chunk_tokens: int = 0,
    transport: str = "",
    max_num_seqs: int = 0,
) -> WorkerInfo:
    """The constants of the worker whose engine runs in this process."""
    return WorkerInfo(
        role=role,
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        node_ip=node_ip,
        pid=os.getpid(),
        model_name=model_name,
        block_size=facts.layout.block_size,
        num_blocks=facts.num_blocks,
        block_bytes=facts.layout.block_bytes,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        device=facts.device,
        dtype=facts.layout.dtype,
        stream_chunk_tokens=stream_chunk_tokens,
        transport=transport,
        num_threads=facts.num_threads,
        thread_speedup=facts.thread_speedup,
        max_num_seqs=max_num_seqs,
    )
