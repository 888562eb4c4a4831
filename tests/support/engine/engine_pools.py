"""The router's pools over real engines in this process: everything but Ray, NIXL and the model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from decode.server import DecodeServer
from engine.contract.config import SchedulerConfig
from engine.contract.errors import EngineDeadError, RequestRefusedError
from engine.contract.messages import CacheReset, GenerateRequest, StepMessage, WorkerInfo
from engine.frontend.engine_core import EngineCore, StepRunner
from kv_transfer.connector import Connector, ConnectorBuilder, WakeCallback
from kv_transfer.fault_options import FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from prefill.server import PrefillServer
from router.pool.workers import ReplicaStatus, WorkerRefusedError, WorkerUnavailableError
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import VOCAB_SIZE
from tests.support.engine.disaggregated import inproc_builder

T = TypeVar("T")
INPROC = ConnectorOptions(connector="inproc", streamed=True)
BLOCK_SIZE = 4
MAX_MODEL_LEN = 256
REPORT_PERIOD_S = 0.02
DRAIN_TIMEOUT_S = 20.0


class EnginePool:
    """What both pools share. ``submitted`` are all requests that a router sent, in order."""

    def __init__(self, servers: dict[str, PrefillServer] | dict[str, DecodeServer]) -> None:
        self._all = servers
        self.submitted: list[GenerateRequest] = []

    def replica_ids(self) -> Sequence[str]:
        """All of them."""
        return tuple(self._all)

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Tell everything anew."""
        self._all[replica_id].resync_cache(client_id)

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Constants and load; a dead engine does not answer."""
        server = self._all[replica_id]
        try:
            server.check_health()
        except EngineDeadError as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error
        info = server.info()
        return ReplicaStatus(
            replica_id=replica_id, node_ip=info.node_ip, pid=info.pid, state="running", info=info, load=server.load()
        )

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """End requests."""
        await _called(replica_id, self._all[replica_id].abort(request_ids))

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests."""
        self.submitted.extend(requests)
        answers = await _called(replica_id, self._all[replica_id].submit(requests))
        return [None if answer is None else WorkerRefusedError(str(answer), code=answer.code) for answer in answers]

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """The stream of one router."""
        messages = self._all[replica_id].outputs(client_id, mirrors_cache)
        try:
            async for message in messages:
                yield message
        except EngineDeadError as error:
            raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error
        finally:
            await messages.aclose()  # type: ignore[attr-defined]  # the server's iterator is a generator

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Drop what is cached."""
        return await self._all[replica_id].reset_prefix_cache(preempt_running=preempt_running)

    async def drain(self, replica_id: str) -> None:
        """Let its requests go."""
        server = self._all[replica_id]
        await server.drain(moves_out=isinstance(server, DecodeServer), timeout_s=DRAIN_TIMEOUT_S)

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """These connectors are not faulty."""
        raise WorkerRefusedError(f"{replica_id} allows no {options}", code="faults_not_allowed")


class EnginePrefillPool(EnginePool):
    """Prefill servers."""

    def __init__(self, servers: dict[str, PrefillServer]) -> None:
        super().__init__(servers)
        self.servers = servers


class EngineDecodePool(EnginePool):
    """Decode servers."""

    def __init__(self, servers: dict[str, DecodeServer]) -> None:
        super().__init__(servers)
        self.servers = servers


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
"""Makes an engine of a role, by a name, with so many blocks, that uses a connector."""


def chain_engines(max_num_seqs: int, chunk_tokens: int) -> EngineMaker:
    """Engines without a model; prefill computes ``chunk_tokens`` a step, unless that is 0."""
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


class _Keeping:
    """Builds connectors and keeps them, for the servers."""

    def __init__(self, build: ConnectorBuilder) -> None:
        self._build = build
        self.connector: Connector | None = None

    def __call__(self, layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        self.connector = self._build(layout, region, wake)
        return self.connector


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
) -> AsyncIterator[tuple[EnginePrefillPool, EngineDecodePool]]:
    """Started engines around one in-process fabric; all are closed at the end.

    ``decode_blocks`` gives each decode engine a size of its own. With ``chunk_tokens`` prefill computes so many tokens
    a step, and hands longer prompts over while it computes them. Engines have no model unless ``make`` gives them one.
    """
    make = make or chain_engines(max_num_seqs, chunk_tokens)
    fabric = InProcessFabric()
    prefill: dict[str, PrefillServer] = {}
    decode: dict[str, DecodeServer] = {}
    sizes = {"prefill": [num_blocks] * num_prefill, "decode": list(decode_blocks) or [num_blocks] * num_decode}
    for role, of_role in sizes.items():
        for index, num_blocks in enumerate(of_role):
            name = f"{role}-{index}"
            keeping = _Keeping(inproc_builder(fabric, name, options))
            core, info = make(role, name, num_blocks, keeping)
            assert keeping.connector is not None
            worker = keeping.connector.worker
            if role == "prefill":
                core.runner = wrap_prefill_runner(core.runner)
                prefill[name] = PrefillServer(core, info=info, connector=worker, report_period_s=REPORT_PERIOD_S)
            else:
                core.runner = wrap_decode_runner(core.runner)
                decode[name] = DecodeServer(core, info=info, connector=worker, report_period_s=REPORT_PERIOD_S)
    servers: list[PrefillServer | DecodeServer] = [*prefill.values(), *decode.values()]
    for server in servers:
        server.start()
    try:
        yield EnginePrefillPool(prefill), EngineDecodePool(decode)
    finally:
        for server in servers:
            await server.close()
