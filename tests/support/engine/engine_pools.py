"""The router's pools over real engines in this process: only Ray, NIXL and the model are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from engine.contract.config import SchedulerConfig
from engine.contract.errors import EngineDeadError, RequestRefusedError
from engine.contract.executor import StepRunner
from engine.contract.messages import CacheReset, GenerateRequest, StepMessage, WorkerInfo
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from engine.frontend.request_observer import RequestObserver
from kv_transfer.connector import ConnectorBuilder
from kv_transfer.fault_options import FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.options import ConnectorOptions
from router.pool.workers import ReplicaStatus, WorkerRefusedError, WorkerUnavailableError
from router.roles import ROLES
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import VOCAB_SIZE
from tests.support.engine.disaggregated import inproc_builder

T = TypeVar("T")
INPROC = ConnectorOptions(connector="inproc", streamed=True)
BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
REPORT_PERIOD_S = 0.02
DRAIN_TIMEOUT_S = 120.0


EngineBuilder = Callable[[str, int], tuple[EngineCore, WorkerInfo, RequestObserver | None]]
"""Builds an engine that is not started, with a name and a number of blocks."""


class EnginePool:
    """The engines of one role, by name. With ``moves_out`` running requests leave an engine that drains.

    ``submitted`` are all requests that a router sent, in order, ``ordered`` those that were told to go on elsewhere,
    ``resets`` the engines that were told to drop their caches. Answers to submissions come once ``answer_gate`` is set,
    and aborts arrive once ``abort_gate`` is.
    """

    def __init__(self, role: str, build: EngineBuilder, *, moves_out: bool) -> None:
        self.engines: dict[str, AsyncEngine] = {}
        self.submitted: list[GenerateRequest] = []
        self.ordered: list[str] = []
        self.resets: list[str] = []
        self.answer_gate, self.abort_gate = asyncio.Event(), asyncio.Event()
        self.answer_gate.set()
        self.abort_gate.set()
        self._infos: dict[str, WorkerInfo] = {}
        self._role = role
        self._build = build
        self._num_added = 0
        self._moves_out = moves_out

    def add(self, num_blocks: int) -> AsyncEngine:
        """Build an engine with this many blocks; it is not started."""
        name = f"{self._role}-{self._num_added}"
        self._num_added += 1
        core, info, observer = self._build(name, num_blocks)
        self.engines[name] = AsyncEngine(
            lambda: core, name=info.role, report_period_s=REPORT_PERIOD_S, observer=observer
        )
        self._infos[name] = info
        return self.engines[name]

    async def replace(self, name: str) -> None:
        """Stop an engine if it lives, and start one of the same size under a new name."""
        await self.engines.pop(name).close()
        await self.add(self._infos.pop(name).num_blocks).start()

    def replica_ids(self) -> Sequence[str]:
        """All of them."""
        return tuple(self.engines)

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Send the whole state of the prefix cache again."""
        self.engines[replica_id].resync_cache(client_id)

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Constants and load; a dead engine does not answer."""
        engine = self.engines[replica_id]
        try:
            engine.check_health()
        except EngineDeadError as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error
        info = self._infos[replica_id]
        return ReplicaStatus(
            replica_id=replica_id, node_ip=info.node_ip, pid=info.pid, state="running", info=info, load=engine.load
        )

    def has_link(self, replica_id: str) -> bool:
        """True: calls within a process cost nothing."""
        return True

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests."""
        await self.abort_gate.wait()
        await _called(replica_id, self.engines[replica_id].abort(request_ids))

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests."""
        self.submitted.extend(requests)
        answers = await _called(replica_id, self.engines[replica_id].submit(requests))
        await self.answer_gate.wait()
        return [None if answer is None else WorkerRefusedError(str(answer), code=answer.code) for answer in answers]

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """The stream of one router."""
        messages = self.engines[replica_id].outputs(client_id, mirrors_cache=mirrors_cache)
        try:
            async for message in messages:
                yield message
        except EngineDeadError as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error
        finally:
            await messages.aclose()  # type: ignore[attr-defined]  # the engine's iterator is a generator

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Drop what is cached."""
        self.resets.append(replica_id)
        return await self.engines[replica_id].reset_prefix_cache(preempt_running=preempt_running)

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Order requests to continue elsewhere."""
        self.ordered.extend(request_ids)
        await _called(replica_id, self.engines[replica_id].move_out(request_ids, only_waiting=only_waiting))

    async def drain(self, replica_id: str) -> None:
        """Drain an engine."""
        await self.engines[replica_id].drain(moves_out=self._moves_out, timeout_s=DRAIN_TIMEOUT_S)

    async def lean(self, replica_id: str, role: str) -> str:
        """Make an engine prefer a role."""
        return self.engines[replica_id].lean(ROLES[role]) or self._infos[replica_id].role

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Refuse: these connectors do not inject faults."""
        raise WorkerRefusedError(f"{replica_id} does not allow {options}", code="faults_not_allowed")


async def _called(replica_id: str, call: Awaitable[T]) -> T:
    try:
        return await call
    except RequestRefusedError as error:
        raise WorkerRefusedError(str(error), code=error.code) from error
    except EngineDeadError as error:
        raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error


def _info(role: str, name: str, num_blocks: int) -> WorkerInfo:
    return WorkerInfo(
        role=role,
        engine_id=name,
        incarnation="1",
        node_ip="127.0.0.1",
        pid=1,
        model_name="tiny",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=BLOCK_SIZE * 8,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        device="cpu",
        dtype="float32",
    )


EngineMaker = Callable[[str, str, int, ConnectorBuilder], tuple[EngineCore, WorkerInfo]]
"""Makes an engine of a role with a name, a number of blocks and a connector."""


def chain_engines(max_num_seqs: int, chunk_tokens: int) -> EngineMaker:
    """Engines without a model; prefill engines compute ``chunk_tokens`` per step, 0: any number."""
    scheduler = SchedulerConfig(
        max_num_batched_tokens=max(64, max_num_seqs), max_num_seqs=max_num_seqs, enable_cache_events=True
    )

    def make(role: str, name: str, num_blocks: int, build_connector: ConnectorBuilder) -> tuple[EngineCore, WorkerInfo]:
        is_chunked = role == "prefill" and chunk_tokens > 0
        core = chain_engine(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            scheduler=replace(scheduler, max_num_batched_tokens=chunk_tokens) if is_chunked else scheduler,
            build_connector=build_connector,
        )
        return core, replace(_info(role, name, num_blocks), stream_chunk_tokens=chunk_tokens)

    return make


@asynccontextmanager
async def engine_pools(
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    num_blocks: int = 256,
    decode_blocks: Sequence[int] = (),
    max_num_seqs: int = 16,
    chunk_tokens: int = 0,
    wrap_prefill_runner: Callable[[StepRunner], StepRunner] = lambda runner: runner,
    wrap_decode_runner: Callable[[StepRunner], StepRunner] = lambda runner: runner,
    options: ConnectorOptions = INPROC,
    make: EngineMaker | None = None,
    are_elastic: bool = False,
    observe: Callable[[str, str], RequestObserver | None] = lambda role, name: None,
) -> AsyncIterator[tuple[EnginePool, EnginePool]]:
    """A pool for prompts and one for streams, as ``pools_by_role``.

    ``decode_blocks`` gives each decode engine a size of its own. With ``chunk_tokens`` prefill computes so many tokens
    a step, and hands longer prompts over while it computes them.
    """
    async with pools_by_role(
        {"prefill": [num_blocks] * num_prefill, "decode": decode_blocks or [num_blocks] * num_decode},
        wrap={"prefill": wrap_prefill_runner, "decode": wrap_decode_runner},
        options=options,
        make=make or chain_engines(max_num_seqs, chunk_tokens),
        are_elastic=are_elastic,
        observe=observe,
    ) as pools:
        yield pools["prefill"], pools["decode"]


@asynccontextmanager
async def pools_by_role(
    num_blocks: Mapping[str, Sequence[int]],
    *,
    wrap: Mapping[str, Callable[[StepRunner], StepRunner]],
    options: ConnectorOptions,
    make: EngineMaker,
    are_elastic: bool = False,
    observe: Callable[[str, str], RequestObserver | None] = lambda role, name: None,
) -> AsyncIterator[dict[str, EnginePool]]:
    """Started engines around one in-process fabric, in a pool for each role; all are closed at the end.

    ``num_blocks`` are the sizes of each role's engines, ``wrap`` what their runners are wrapped in. With
    ``are_elastic`` live requests leave all engines that drain. ``observe`` makes the observer of an engine by its role
    and its name.
    """
    fabric = InProcessFabric()

    def build(role: str, name: str, num_blocks: int) -> tuple[EngineCore, WorkerInfo, RequestObserver | None]:
        core, info = make(role, name, num_blocks, inproc_builder(fabric, name, options))
        core.runner = wrap[role](core.runner)
        return core, info, observe(role, name)

    pools = {
        role: EnginePool(role, partial(build, role), moves_out=are_elastic or ROLES[role].moves_out)
        for role in num_blocks
    }
    for role, sizes in num_blocks.items():
        for size in sizes:
            pools[role].add(size)
    for engine in [engine for pool in pools.values() for engine in pool.engines.values()]:
        await engine.start()
    try:
        yield pools
    finally:
        for engine in [engine for pool in pools.values() for engine in pool.engines.values()]:
            await engine.close()
