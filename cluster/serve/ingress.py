"""The router as a Serve deployment: an HTTP front end that reaches the workers through handles."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address

from cluster.config.names import APP_NAME, ROUTER
from cluster.serve.handles import RayRouterPeers, RayWorkerPool, ServeSizes, ServeTargets
from cluster.serve.listener import Lifespan, ListenSettings, RouterListener
from cluster.serve.process_start import configure_worker_logging
from cluster.serve.replica_caller import FIRST_LISTS_S, Caller, ReplicaCaller, wait_for_lists
from cluster.serve.server_info import ServerFacts
from router.api.app import build_app
from router.report.router_report import RouterReport
from router.security import SecuritySettings
from router.service import RouterService
from router.settings import RouterSettings
from router.stored_responses.store import Order, StoredResponse
from router.telemetry.settings import NO_TRACING, TracingSettings
from router.telemetry.tracer import make_tracer
from router.trace.origin import Viewer

GC_THRESHOLDS = (10_000, 20, 20)
"""Threshold of the garbage collector, by default 700 objects. Nearly all objects of requests are freed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """What a router replica needs to start. ``listen`` None: Serve's proxies forward requests to it."""

    model_dir: Path
    model_name: str
    model_aliases: tuple[str, ...]
    router: RouterSettings
    security: SecuritySettings
    listen: ListenSettings | None = None
    tracing: TracingSettings = NO_TRACING


@serve.ingress()
class RouterIngress:
    """One router replica. Serve asks for its application once the handles exist."""

    def __init__(self, settings: IngressSettings, **pools: DeploymentHandle[Any]) -> None:
        """``pools`` are the handles of the workers of each role, by the role's name."""
        configure_worker_logging()
        self._callers = {role: ReplicaCaller(handle) for role, handle in pools.items()}
        self._settings = settings
        self._service: RouterService | None = None
        self._listener: RouterListener | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the application on the replica's event loop."""
        routers = ReplicaCaller(serve.get_deployment_handle(ROUTER, APP_NAME))
        for caller in (*self._callers.values(), routers):
            caller.connect()
        router_id = serve.get_replica_context().replica_id.unique_id
        settings = self._settings
        service = self._service = RouterService(
            model_dir=settings.model_dir,
            model_name=settings.model_name,
            pools={role: RayWorkerPool(caller, settings.router) for role, caller in self._callers.items()},
            settings=settings.router,
            router_id=router_id,
            peers=RayRouterPeers(routers, own_id=router_id),
            node_ip=get_node_ip_address(),  # type: ignore[no-untyped-call]
            aliases=settings.model_aliases,
            tracer=make_tracer(settings.tracing, role=ROUTER, instance_id=router_id),
        )
        service.view.wanted = ServeTargets.of_this_cluster(self._callers)
        service.scaling.orders = ServeSizes(self._callers, timeout_s=settings.router.abort_timeout_s)
        # Loaded modules stay for good: the collector need not scan them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        listener = self._listener = RouterListener(settings.listen) if settings.listen is not None else None
        # Serve's own servers always add the request id themselves.
        app = build_app(
            service, answers_request_id=listener is not None, security=settings.security, facts=ServerFacts()
        )
        app.router.lifespan_context = after_first_lists(app.router.lifespan_context, self._callers.values())
        if listener is not None:
            app.router.lifespan_context = listener.around(app.router.lifespan_context)
        return app

    def check_health(self) -> None:
        """Called by Serve, which replaces a router that raises.

        Raises:
            ListenError: The router no longer accepts connections.
        """
        if self._listener is not None:
            self._listener.check()

    async def report(self) -> RouterReport | None:
        """What this router reports to another router; None before it serves."""
        return self._service.view.report() if self._service is not None else None

    async def note_farewell(self, report: RouterReport) -> None:
        """Keep the final counters of a router that ends."""
        if self._service is not None:
            self._service.view.note_farewell(report)

    async def take_response_order(self, order: Order, response_id: str, owner: str) -> StoredResponse | None:
        """Read, delete or cancel a stored response; None if this router has none with this id and owner."""
        if self._service is None:
            return None
        return self._service.responses.store.take_order(order, response_id, owner=owner)

    async def find_trace(self, request_id: str, viewer: Viewer) -> bytes | None:
        """The trace of a request that this router ran; None if it has none that the viewer may see."""
        return None if self._service is None else self._service.traces.recorder.find(request_id, viewer=viewer)

    async def last_traces(self, limit: int, viewer: Viewer) -> bytes:
        """The summaries of the last requests that this router ran, as a JSON list."""
        return b"[]" if self._service is None else self._service.traces.recorder.last(limit, viewer=viewer)


def after_first_lists(lifespan: Lifespan, callers: Collection[Caller], *, timeout_s: float = FIRST_LISTS_S) -> Lifespan:
    """A lifespan that begins once the running workers are known. A router that replaces a dead one gets requests as
    soon as it listens, and would refuse them all if it knew no worker yet."""

    @asynccontextmanager
    async def knowing_workers(app: FastAPI) -> AsyncIterator[None]:
        await wait_for_lists(callers, timeout_s=timeout_s)
        async with lifespan(app):
            yield

    return knowing_workers
