"""A worker as a Serve deployment: gives an engine its identity and its peers, and answers other processes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import ray
from ray import serve
from ray.util import get_node_ip_address

from cluster.config.names import APP_NAME
from cluster.config.scaling import ScalingSection
from cluster.serve.autoscale import LOAD, ORDERED, ORDERED_AT
from cluster.serve.hung_reads import HungReads
from cluster.serve.introductions import Introductions, ServeRendezvous
from cluster.serve.process_start import configure_worker_logging, loading
from cluster.serve.refusal import HandshakeRefusal, Refusal
from cluster.serve.replica_caller import ReplicaCaller
from cluster.serve.start_report import StartReport, publish_start_report, weights_progress
from engine.contract.config import CoreSharing, EngineConfig
from engine.contract.errors import CheckpointError, ConfigError
from engine.contract.messages import CacheReset, GenerateRequest, LoadReport, WorkerInfo
from engine.contract.role import Role
from engine.contract.step_frame import pack_step
from engine.device.core_table import CoreTableError, table_path
from engine.device.torch_environment import prepare_torch
from engine.frontend.call_answers import answer_call
from engine.frontend.os_threads import os_thread_name
from kv_transfer.connector import Connector, WakeCallback
from kv_transfer.errors import HandshakeRefusedError, KVTransferError
from kv_transfer.factory import build_connector
from kv_transfer.fault_options import FaultOptions
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.nixl.ucx_access import confine_ucx, describe_local_ucx
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import Hello, PeerIdentity
from router.attentive_clock import AttentiveClock
from router.roles import ROLES, roles_met_by
from router.telemetry.settings import NO_TRACING, TracingSettings
from router.telemetry.tracer import make_tracer
from router.telemetry.worker_spans import WorkerSpans
from router.wire.frame_server import FrameOffer, FrameServer

if TYPE_CHECKING:
    from engine.build import BuiltEngine
    from engine.frontend.async_engine import AsyncEngine
    from engine.frontend.engine_core import EngineCore

logger = logging.getLogger(f"baton.{__name__}")

MEET_TIMEOUT_S = 5.0
TICK_PERIOD_S = 0.25
END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a replica needs to start. ``pools``: all pools of the cluster, by the names of their roles."""

    role: Role
    pools: tuple[str, ...]
    engine: EngineConfig
    transfer: ConnectorOptions
    model_name: str
    report_period_s: float
    step_timeout_s: float
    drain_timeout_s: float
    scaling: ScalingSection | None
    core_sharing: CoreSharing | None
    tracing: TracingSettings = NO_TRACING


def parts_of_gpu(share: float) -> int:
    """How many workers share a GPU if each gets ``share`` of it from Ray; 1: a worker has the GPU for itself."""
    return max(1, int(1.0 / share + 1e-6)) if 0.0 < share < 1.0 else 1


class Worker:
    """One replica of a pool. It counts as started once its engine is built, which the engine's own thread does."""

    async def __init__(self, settings: WorkerSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        configure_worker_logging()
        self._settings = settings
        self._ordered: dict[str, float] = {}
        self._met = asyncio.Event()
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        # Time during which the whole process was stopped must not count as a step that hangs.
        self._clock = AttentiveClock(max_gap_s=4 * TICK_PERIOD_S)
        self._callers = {name: ReplicaCaller(serve.get_deployment_handle(name, APP_NAME)) for name in settings.pools}
        self._rendezvous = ServeRendezvous(tuple(self._callers.values()), loop=asyncio.get_running_loop())
        self._rendezvous.connect()
        self._report("starting the engine")
        try:
            self._tracer = make_tracer(settings.tracing, role=settings.role.name, instance_id=self._replica_id)
        except ConfigError as error:
            self._report("failed", refusal=str(error))
            raise
        self._engine = self._new_engine()
        try:
            await self._engine.start()
        except (CheckpointError, ConfigError, KVTransferError) as error:
            self._report("failed", refusal=str(error))
            raise
        self._engine.lean(settings.role)
        self._leaving: asyncio.Task[None] | None = None
        self._introductions = self._introduce(self._connector)
        self._frames = FrameServer()
        await self._frames.start()
        self._looking = asyncio.create_task(self._begin_looking())
        self._ticking = asyncio.create_task(self._keep_ticking())
        self._hung_reads = HungReads(
            has_hung_read=lambda: self._engine.has_hung_read,
            may_leave=self._introductions.may_leave,
            leave=lambda: self._leave(exits=True),
            patience_s=settings.drain_timeout_s,
            clock=self._clock,
        )
        self._watching = asyncio.create_task(self._hung_reads.keep_looking())
        self._report("ready")
        logger.info("worker started: role=%s engine_id=%s", self._info.role, self._info.engine_id)

    def _new_engine(self) -> AsyncEngine:
        """An engine that is not built yet."""
        # Imported here: the command that deploys this class does not need numba, and would wait for its import.
        with loading():
            from engine.frontend.async_engine import AsyncEngine

        return AsyncEngine(
            self._build,
            name=self._settings.role.name,
            report_period_s=self._settings.report_period_s,
            step_timeout_s=self._settings.step_timeout_s,
            clock=self._clock,
            observer=None if self._tracer is None else WorkerSpans(self._tracer),
        )

    def _build(self) -> EngineCore:
        """Build the engine; runs in the engine's own thread."""
        prepare_torch(self._settings.engine.model.num_threads)
        # Imported here for the same reason: torch.
        with loading():
            from engine.build import build_engine, worker_info
            from engine.runner.cpu_threads import settle_threads

        settings = self._settings
        identity = PeerIdentity(engine_id=self._replica_id, incarnation=uuid.uuid4().hex)

        def connect(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
            with os_thread_name(f"kv {settings.role.name}"):
                return build_connector(
                    settings.transfer,
                    identity=identity,
                    rendezvous=self._rendezvous,
                    layout=layout,
                    region=region,
                    wake=wake,
                )

        node_ip: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        is_local = settings.transfer.transport == "local"
        networks = "" if is_local else confine_ucx(node_ip)
        built = build_engine(
            settings.engine, build_connector=connect, progress=weights_progress(settings.role.name, self._replica_id)
        )
        transport = describe_local_ucx(built.facts.memory) if is_local else networks
        logger.info("KV transfer uses: %s", transport)
        assert built.connector is not None
        self._connector = built.connector
        self._info = worker_info(
            built.facts,
            role=settings.role.name,
            identity=identity,
            node_ip=node_ip,
            model_name=settings.model_name,
            stream_chunk_tokens=settings.engine.scheduler.prefill_chunk_tokens if settings.transfer.streamed else 0,
            transport=transport,
            max_num_seqs=settings.engine.scheduler.max_num_seqs,
        )
        # Last, because threads that this one starts afterwards inherit its low priority.
        if built.facts.device == "cpu" and (cores := settle_threads()):
            logger.info("each of the %d compute threads is pinned to its own core", len(cores))
        self._share_cores(built)
        return built.core

    def _share_cores(self, built: BuiltEngine) -> None:
        """Join the host's other workers in shared memory. Called by the computing thread, whose team exists by now."""
        from engine.runner.step_threads import share_cores

        sharing = self._settings.core_sharing
        if built.facts.device != "cpu" and not (sharing is not None and sharing.is_required):
            self._share_gpu(built)
            return
        if sharing is None:
            return
        name: str = ray.get_runtime_context().get_session_name()
        try:
            if built.facts.device != "cpu":
                raise CoreTableError("this model runs on a GPU")
            threads = share_cores(table_path(name), borrows=sharing.borrows)
        except CoreTableError as error:
            if sharing.is_required:
                raise ConfigError(f"borrow_idle_cores is true, but {error}", remedy="leave it out") from error
            logger.warning("this worker uses only its own cores: %s", error)
            return
        built.core.share_cores(threads)
        self._info = dataclasses.replace(self._info, borrows_cores=sharing.borrows, num_host_cores=threads.num_usable)
        logger.info("cores: own=%s borrows=%s", sorted(threads.own), sharing.borrows)

    def _share_gpu(self, built: BuiltEngine) -> None:
        """Join the other workers on this GPU, if Ray gave this worker only a part of it."""
        from engine.runner.shared_gpu import gpu_id, share_gpu

        context = ray.get_runtime_context()
        num_parts = parts_of_gpu(context.get_assigned_resources().get("GPU", 1.0))  # type: ignore[no-untyped-call]
        if num_parts == 1:
            return
        gpu, session = gpu_id(), context.get_session_name()
        try:
            shared = share_gpu(table_path(f"{session}-{gpu}"), num_parts=num_parts)
        except CoreTableError as error:
            logger.warning("routers cannot take into account that this worker shares its GPU: %s", error)
            return
        built.core.share_cores(shared)
        self._info = dataclasses.replace(self._info, borrows_cores=True, num_host_cores=num_parts, shared_gpu=gpu)
        logger.info("this worker has 1 of %d parts of GPU %s, and all while others are idle", num_parts, gpu)

    def _introduce(self, connector: Connector) -> Introductions:
        role, others = self._settings.role, roles_met_by(self._settings.role, self._settings.pools)
        assert connector.peers is not None, "workers of a cluster read from each other"
        return Introductions(
            own_id=self._replica_id,
            own=self._callers[role.name],
            others=[self._callers[other.name] for other in others],
            meets_own_role=role.moves_out,
            taking_over=[self._callers[other.name] for other in others if role.is_followed_by(other)],
            peers=connector.peers,
            on_met=self._note_peers,
            on_absent=lambda: self._leave(exits=False),
        )

    def _note_peers(self, num_peers: int) -> None:
        self._engine.num_peers = num_peers

    async def _begin_looking(self) -> None:
        """Meet the running workers before this worker counts as healthy, and new ones later."""
        await self._introductions.meet_all(timeout_s=MEET_TIMEOUT_S)
        self._met.set()
        await self._introductions.keep_looking()

    async def _keep_ticking(self) -> None:
        while True:
            self._clock.tick()
            await asyncio.sleep(TICK_PERIOD_S)

    def _leave(self, *, exits: bool) -> asyncio.Task[None]:
        """Begin to drain; idempotent. ``exits``: this worker must end its own process afterwards."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._drain(exits=exits))
        return self._leaving

    async def _drain(self, *, exits: bool) -> None:
        # This comes first, so that workers that drain at the same time do not hand requests to each other.
        self._engine.stop_admissions()
        takers = await self._introductions.takers() if self._settings.role.moves_out else set()
        moves_out = bool(takers)
        logger.info("draining: moves_out=%s num_takers=%d", moves_out, len(takers))
        is_empty = await self._engine.drain(moves_out=moves_out, timeout_s=self._settings.drain_timeout_s)
        logger.info("drained: is_empty=%s", is_empty)
        if exits:
            if not self._engine.has_hung_read:  # a transport with a hung read must not be closed
                await self._engine.close()
            await self._frames.close()
            await self._send_spans()
            await _end_process()

    async def _send_spans(self) -> None:
        """Send the spans that were not sent yet."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _report(self, stage: str, *, refusal: str | None = None) -> None:
        publish_start_report(
            StartReport(role=self._settings.role.name, replica_id=self._replica_id, stage=stage, refusal=refusal)
        )

    async def status(self) -> tuple[WorkerInfo, LoadReport]:
        """The worker's constants, and its current load."""
        return self._info, self._engine.load

    async def handshake(self, hello: Hello) -> Hello | HandshakeRefusal:
        """Meet another worker."""
        try:
            return await self._engine.handshake(hello)
        except HandshakeRefusedError as error:
            return HandshakeRefusal.of(error)

    async def submit(self, requests: Sequence[GenerateRequest]) -> list[Refusal | None]:
        """Add requests to the engine; one answer each, in order."""
        answers = await self._engine.submit(requests)
        return [Refusal.of(answer) if answer is not None else None for answer in answers]

    async def offer_outputs(self, client_id: str, mirrors_cache: bool) -> FrameOffer | None:
        """The socket where a router on this host gets what ``outputs`` yields and sends its calls, without Ray; None if
        there is none."""
        write = partial(self._engine.write_outputs, client_id, mirrors_cache=mirrors_cache)
        return self._frames.offer(write, partial(answer_call, self._engine))

    async def outputs(self, client_id: str, mirrors_cache: bool = False) -> AsyncGenerator[bytes]:
        """Yield everything that concerns one router, one frame per step."""
        async for message in self._engine.outputs(client_id, mirrors_cache=mirrors_cache):
            yield pack_step(message)

    async def resync_cache(self, client_id: str) -> None:
        """Send one router the whole state of the prefix cache again."""
        self._engine.resync_cache(client_id)

    async def reset_prefix_cache(self, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache; None if requests hold blocks and may not be preempted for it."""
        return await self._engine.reset_prefix_cache(preempt_running=preempt_running)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests in any state; unknown ids are ignored."""
        await self._engine.abort(request_ids)

    async def move_out(self, request_ids: Sequence[str], only_waiting: bool = False) -> None:
        """Move requests, or only waiting ones, to another worker as soon as possible; unknown ids are ignored."""
        await self._engine.move_out(request_ids, only_waiting=only_waiting)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve if the pool follows its load."""
        scaling = self._settings.scaling
        if scaling is None:
            return {}
        if scaling.by == "promise":
            return self._ordered
        return {LOAD: scaling.load_of(self._settings.role, self._engine.load)}

    async def want(self, number: int, ordered_at_s: float) -> None:
        """Remember how many replicas the pool should have, for Serve's next question."""
        self._ordered = {ORDERED: float(number), ORDERED_AT: ordered_at_s}

    async def drain(self) -> None:
        """Take no more requests, let the present ones finish or move, then exit. Returns at once."""
        self._leave(exits=True)

    async def lean(self, role: str) -> str:
        """Prefer the work of a role from now on; running requests go on. Returns the role that it leaned to before."""
        before = self._engine.lean(ROLES[role])
        if before != role:
            logger.info("leaning: role=%s before=%s", role, before)
        return before

    async def set_faults(self, options: FaultOptions) -> Refusal | None:
        """Inject these faults from now on, if the cluster allows it."""
        if self._connector.faults is None:
            return Refusal(
                code="faults_not_allowed", message="this cluster does not allow faults: set kv_transfer.allow_faults"
            )
        self._connector.faults.change(options)
        logger.warning("faults changed: %s", options)
        return None

    async def check_health(self) -> None:
        """Called by Serve; an exception makes it replace this replica. The first call decides when it is ready."""
        await self._met.wait()
        self._hung_reads.check_health()
        self._engine.check_health()

    async def __del__(self) -> None:
        """Called and awaited by Serve when this replica is to end: it drains first, so no running request is lost.

        A replica that still starts has no requests, so this returns at once, and Serve kills the replica.
        """
        if not hasattr(self, "_leaving"):
            return
        await asyncio.wait((self._leave(exits=False),))
        for task in (getattr(self, name, None) for name in ("_looking", "_ticking", "_watching")):
            if task is not None:
                task.cancel()
        await self._engine.close()
        if hasattr(self, "_frames"):
            await self._frames.close()
            await self._send_spans()


async def _end_process() -> None:
    """End this replica through Ray: Serve finds the actor gone, and starts another one. If the process just exited, the
    cluster's terminal would show a message about a worker that ran out of memory.
    """
    ray.kill(ray.get_runtime_context().current_actor)
    await asyncio.sleep(END_TIMEOUT_S)
    os._exit(0)
