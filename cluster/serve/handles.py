"""Implements the router's Protocols for pools with Serve handles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from cluster.config.names import APP_NAME
from cluster.serve.refusal import Refusal
from cluster.serve.replica_caller import Caller
from engine.contract.messages import CacheReset, GenerateRequest, LoadReport, StepMessage, WorkerInfo
from engine.contract.step_frame import FrameError, unpack_step
from kv_transfer.fault_options import FaultOptions
from router.pool.workers import ReplicaStatus, WorkerRefusedError, WorkerUnavailableError
from router.report.router_report import RouterReport
from router.settings import RouterSettings
from router.stored_responses.store import Order, StoredResponse
from router.trace.origin import Viewer
from router.wire.frame_link import open_link
from router.wire.frame_server import FrameOffer
from router.wire.linked_calls import LinkedCalls

RESYNC_TIMEOUT_S = 10.0

TELL_AGAIN_S = 10.0
"""How often the wanted number of replicas is sent to the replicas again."""


class RayWorkerPool:
    """One role's workers. Implements ``router.pool.workers.WorkerPool``, with the timeouts of the router's settings.

    Requests, aborts and orders to move go over the connection on which the tokens arrive. They go over Ray to replicas
    without such a connection.
    """

    def __init__(self, caller: Caller, settings: RouterSettings) -> None:
        self._caller = caller
        self._links: dict[str, LinkedCalls] = {}
        self._submit_timeout_s = settings.submit_timeout_s
        self._order_timeout_s = settings.abort_timeout_s

    def replica_ids(self) -> Sequence[str]:
        """The replicas that can be addressed now, without a network call."""
        return self._caller.replica_ids()

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:
        """Ask one replica for its constants and its load; raises WorkerUnavailableError."""
        answer: tuple[WorkerInfo, LoadReport] = await self._caller.call(replica_id, "status", timeout_s=timeout_s)
        info, load = answer
        return ReplicaStatus(
            replica_id=replica_id, node_ip=info.node_ip, pid=info.pid, state="running", info=info, load=load
        )

    def has_link(self, replica_id: str) -> bool:
        """True when calls to this replica go as frames over an open connection."""
        return replica_id in self._links

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """Abort requests in any state; raises WorkerUnavailableError."""
        if (link := self._links.get(replica_id)) is not None:
            await link.abort(request_ids, timeout_s=self._order_timeout_s)
        else:
            await self._caller.call(replica_id, "abort", tuple(request_ids), timeout_s=self._order_timeout_s)

    async def move_out(self, replica_id: str, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Let requests move from a replica to another one; raises WorkerUnavailableError."""
        if (link := self._links.get(replica_id)) is not None:
            await link.move_out(request_ids, timeout_s=self._order_timeout_s, only_waiting=only_waiting)
        else:
            args = (tuple(request_ids), True) if only_waiting else (tuple(request_ids),)
            await self._caller.call(replica_id, "move_out", *args, timeout_s=self._order_timeout_s)

    async def drain(self, replica_id: str) -> None:
        """Let a replica drain its requests, and exit; raises WorkerUnavailableError."""
        await self._caller.call(replica_id, "drain", timeout_s=self._order_timeout_s)

    async def lean(self, replica_id: str, role: str) -> str:
        """Let a replica prefer the work of a role; raises WorkerUnavailableError."""
        before: str = await self._caller.call(replica_id, "lean", role, timeout_s=self._order_timeout_s)
        return before

    async def set_faults(self, replica_id: str, options: FaultOptions) -> None:
        """Inject these faults into a replica's connector; raises WorkerRefusedError and WorkerUnavailableError."""
        refusal: Refusal | None = await self._caller.call(
            replica_id, "set_faults", options, timeout_s=self._order_timeout_s
        )
        if refusal is not None:
            raise refusal.to_error()

    async def reset_prefix_cache(self, replica_id: str, *, preempt_running: bool) -> CacheReset | None:
        """Let a replica drop its prefix cache; raises WorkerUnavailableError."""
        reset: CacheReset | None = await self._caller.call(
            replica_id, "reset_prefix_cache", preempt_running, timeout_s=self._order_timeout_s
        )
        return reset

    async def submit(self, replica_id: str, requests: Sequence[GenerateRequest]) -> Sequence[WorkerRefusedError | None]:
        """Add requests to an engine; raises WorkerUnavailableError."""
        link = self._links.get(replica_id)
        if link is not None and (call := link.packed(requests)) is not None:
            return await link.submit(call, timeout_s=self._submit_timeout_s)
        answers: list[Refusal | None] = await self._caller.call(
            replica_id, "submit", tuple(requests), timeout_s=self._submit_timeout_s
        )
        return [answer.to_error() if answer is not None else None for answer in answers]

    async def outputs(
        self, replica_id: str, client_id: str, *, mirrors_cache: bool = False
    ) -> AsyncIterator[StepMessage]:
        """Open the stream of all messages for ``client_id``: over a socket if the worker is on this host, otherwise
        over Ray.

        Raises:
            WorkerUnavailableError: The replica is gone, or sends something that this router cannot read.
        """
        offer: FrameOffer | None = await self._caller.call(
            replica_id, "offer_outputs", client_id, mirrors_cache, timeout_s=self._submit_timeout_s
        )
        link = await open_link(offer) if offer is not None else None
        async with contextlib.AsyncExitStack() as stack:
            if link is not None:
                stack.push_async_callback(link.aclose)
                stack.enter_context(self._noted(replica_id, LinkedCalls(replica_id, client_id, link)))
            frames = link or self._caller.stream(replica_id, "outputs", client_id, mirrors_cache)
            if link is None and hasattr(frames, "aclose"):
                stack.push_async_callback(frames.aclose)
            async for frame in frames:
                try:
                    yield unpack_step(frame)
                except FrameError as error:
                    raise WorkerUnavailableError(replica_id=replica_id, reason=str(error)) from error

    @contextlib.contextmanager
    def _noted(self, replica_id: str, link: LinkedCalls) -> Iterator[None]:
        """Send calls over this connection while its stream is read. If it breaks, calls fail like the stream."""
        self._links[replica_id] = link
        try:
            yield
        finally:
            if self._links.get(replica_id) is link:
                del self._links[replica_id]

    async def resync_cache(self, replica_id: str, client_id: str) -> None:
        """Ask a replica to send the state of its whole prefix cache again; raises WorkerUnavailableError."""
        await self._caller.call(replica_id, "resync_cache", client_id, timeout_s=RESYNC_TIMEOUT_S)


class RayRouterPeers:
    """Implements ``router.report.router_report.RouterPeers``: the other replicas of the router's own deployment."""

    def __init__(self, caller: Caller, *, own_id: str) -> None:
        self._caller = caller
        self._own_id = own_id

    def peer_ids(self) -> Sequence[str]:
        """The routers that can be asked now, without a network call."""
        return [router_id for router_id in self._caller.replica_ids() if router_id != self._own_id]

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        """Ask one router; raises WorkerUnavailableError."""
        report: RouterReport | None = await self._caller.call(router_id, "report", timeout_s=timeout_s)
        if report is None:
            raise WorkerUnavailableError(replica_id=router_id, reason="it is starting")
        if report.router_id != router_id:
            # If the addressed replica has just ended, Serve may choose another one.
            raise WorkerUnavailableError(replica_id=router_id, reason=f"{report.router_id} answered instead")
        return report

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        """Send this router's final counters to another router; raises WorkerUnavailableError."""
        await self._caller.call(router_id, "note_farewell", report, timeout_s=timeout_s)

    async def take_order(
        self, router_id: str, order: Order, response_id: str, *, owner: str, timeout_s: float
    ) -> StoredResponse | None:
        """Send an order about a stored response to the router that keeps it; raises WorkerUnavailableError.

        If another router answers in its place, it has no response with this id.
        """
        found: StoredResponse | None = await self._caller.call(
            router_id, "take_response_order", order, response_id, owner, timeout_s=timeout_s
        )
        return found

    async def find_trace(self, router_id: str, request_id: str, *, viewer: Viewer, timeout_s: float) -> bytes | None:
        """Ask a router for a request's trace; raises WorkerUnavailableError."""
        found: bytes | None = await self._caller.call(router_id, "find_trace", request_id, viewer, timeout_s=timeout_s)
        return found

    async def last_traces(self, router_id: str, limit: int, *, viewer: Viewer, timeout_s: float) -> bytes:
        """Ask a router for the summaries of its last requests; raises WorkerUnavailableError."""
        found: bytes = await self._caller.call(router_id, "last_traces", limit, viewer, timeout_s=timeout_s)
        return found


class ServeSizes:
    """Implements ``router.scaling.control.ScalingOrders``: tells the replicas of a pool how many there should be.
    Serve's autoscaler then asks the replicas for that number (``cluster/serve/autoscale.py``).
    """

    def __init__(
        self,
        callers: Mapping[str, Caller],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._callers = callers
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._orders: dict[str, tuple[int, float]] = {}
        self._told_s: dict[str, dict[str, float]] = {role: {} for role in callers}

    async def want(self, role: str, number: int) -> None:
        """Tell the number to replicas that do not know it yet, and to all of them from time to time, because another
        router may have told them another number. Raises WorkerUnavailableError if a replica cannot be told.
        """
        caller, order, now_s = self._callers[role], self._orders.get(role), self._clock()
        if order is None or order[0] != number:
            order = self._orders[role] = (number, self._wall_clock())
            self._told_s[role] = {}
        replica_ids = caller.replica_ids()
        told_s = self._told_s[role] = {name: at_s for name, at_s in self._told_s[role].items() if name in replica_ids}
        due = [name for name in replica_ids if name not in told_s or now_s - told_s[name] >= TELL_AGAIN_S]
        calls = [caller.call(name, "want", *order, timeout_s=self._timeout_s) for name in due]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(due, answers, strict=True):
            if not isinstance(answer, BaseException):
                told_s[name] = now_s
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer


class ServeTargets:
    """Implements ``router.report.cluster_view.WantedWorkers`` with Serve's target numbers: as deployed, or as chosen
    by its autoscaler.

    The controller's method is private to Serve. Ray is pinned to one version, and tests/e2e would show a change.
    """

    def __init__(self, controller: Any, pools: Collection[str]) -> None:
        """``pools`` are the cluster's, by the names of their roles."""
        self._controller = controller
        self._pools = pools

    @classmethod
    def of_this_cluster(cls, pools: Collection[str]) -> ServeTargets:
        """The targets of the Serve that runs this process. Call it at the start: looking the controller up blocks while
        Ray's head node is away."""
        return cls(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE), pools)

    async def numbers(self, *, timeout_s: float) -> Mapping[str, int]:
        """Serve's target number of workers, by role; roles are missing while Serve's controller does not answer."""
        known: dict[str, int] = {}
        with contextlib.suppress(RayError, KeyError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                for role in self._pools:
                    details = await self._controller.get_deployment_details.remote(APP_NAME, role)
                    known[role] = details.target_num_replicas
        return known
