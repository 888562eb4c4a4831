"""Finds a request's trace at the router that ran the request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol

from router.errors import TraceNotFoundError
from router.pool.workers import WorkerError
from router.settings import RouterSettings
from router.telemetry.tracer import ProcessTracer
from router.trace.origin import Viewer
from router.trace.recorder import TraceRecorder


class TracePeers(Protocol):
    """How this router reaches the traces that other routers keep."""

    def peer_ids(self) -> Sequence[str]:
        """Ids of the routers that can be asked now. Makes no network call."""

    async def find_trace(self, router_id: str, request_id: str, *, viewer: Viewer, timeout_s: float) -> bytes | None:
        """Ask one peer for a request's trace; raises WorkerUnavailableError."""

    async def last_traces(self, router_id: str, limit: int, *, viewer: Viewer, timeout_s: float) -> bytes:
        """Ask one peer for the summaries of its last requests; raises WorkerUnavailableError."""


class TraceDirectory:
    """Reaches all traces of the cluster. A request's id does not name its router, so every router is asked."""

    def __init__(self, recorder: TraceRecorder, peers: TracePeers, *, timeout_s: float) -> None:
        self.recorder = recorder
        self._peers = peers
        self._timeout_s = timeout_s

    async def find(self, request_id: str, *, viewer: Viewer) -> bytes:
        """A request's trace as JSON.

        Raises:
            TraceNotFoundError: No router that answers has a trace of this id that the viewer may see.
        """
        if (own := self.recorder.find(request_id, viewer=viewer)) is not None:
            return own
        for found in await asyncio.gather(*(self._found_at(name, request_id, viewer) for name in self._names())):
            if found is not None:
                return found
        raise TraceNotFoundError(request_id=request_id)

    async def last(self, limit: int, *, viewer: Viewer) -> list[dict[str, Any]]:
        """The summaries of the cluster's last requests, newest first."""
        lists = [self.recorder.last(limit, viewer=viewer)]
        lists += await asyncio.gather(*(self._last_at(name, limit, viewer) for name in self._names()))
        rows: list[dict[str, Any]] = [row for found in lists for row in json.loads(found)]
        rows.sort(key=lambda row: -row["started_unix_s"])
        return rows[:limit]

    async def close(self) -> None:
        """Send the spans that are still unsent."""
        await asyncio.to_thread(self.recorder.close)

    def _names(self) -> Sequence[str]:
        return self._peers.peer_ids()

    async def _found_at(self, router_id: str, request_id: str, viewer: Viewer) -> bytes | None:
        try:
            return await self._peers.find_trace(router_id, request_id, viewer=viewer, timeout_s=self._timeout_s)
        except WorkerError:
            return None

    async def _last_at(self, router_id: str, limit: int, viewer: Viewer) -> bytes:
        try:
            return await self._peers.last_traces(router_id, limit, viewer=viewer, timeout_s=self._timeout_s)
        except WorkerError:
            return b"[]"


def trace_directory(
    settings: RouterSettings, peers: TracePeers, *, model: str, router_id: str, tracer: ProcessTracer | None = None
) -> TraceDirectory:
    """A directory of this router's traces, by its settings, and of its peers' traces."""
    recorder = TraceRecorder(
        model=model,
        router_id=router_id,
        max_count=settings.trace_requests,
        sample_rate=settings.trace_sample_rate,
        tracer=tracer,
    )
    return TraceDirectory(recorder, peers, timeout_s=settings.status_timeout_s)
