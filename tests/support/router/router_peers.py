"""Routers of one process that know each other, in place of a cluster's handles."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.pool.workers import WorkerUnavailableError
from router.report.cluster_view import ClusterView
from router.report.counters import RouterCounters
from router.report.metric_rows import MetricFamily
from router.report.router_report import RouterReport
from router.stored_responses.store import Order, ResponseStore, StoredResponse
from router.trace.origin import Viewer
from router.trace.recorder import TraceRecorder


@dataclass(slots=True, kw_only=True)
class PeerNet:
    """All routers by name. ``silent`` ones exist but never answer; ``num_in_vain`` counts requests to them."""

    views: dict[str, ClusterView] = field(default_factory=dict)
    stores: dict[str, ResponseStore] = field(default_factory=dict)
    recorders: dict[str, TraceRecorder] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    num_in_vain: int = 0

    def seen_by(self, name: str) -> Peers:
        """The net as one router sees it."""
        return Peers(self, name)


class Peers:
    """Implements ``router.report.router_report.RouterPeers``."""

    def __init__(self, net: PeerNet, own_name: str) -> None:
        self._net = net
        self._own_name = own_name

    def peer_ids(self) -> Sequence[str]:
        """All other routers."""
        return [name for name in self._net.views if name != self._own_name]

    async def farewell(self, router_id: str, report: RouterReport, *, timeout_s: float) -> None:
        """Say farewell to a router."""
        if (view := self._net.views.get(router_id)) is not None:
            view.note_farewell(report)

    async def take_order(
        self, router_id: str, order: Order, response_id: str, *, owner: str, timeout_s: float
    ) -> StoredResponse | None:
        """Ask a router for a response, which is serialized as between processes."""
        if (store := self._net.stores.get(router_id)) is None:
            raise WorkerUnavailableError(replica_id=router_id, reason="it is gone")
        return pickle.loads(pickle.dumps(store.take_order(order, response_id, owner=owner)))  # type: ignore[no-any-return]

    async def find_trace(self, router_id: str, request_id: str, *, viewer: Viewer, timeout_s: float) -> bytes | None:
        """Ask a router for a trace."""
        return self._recorder(router_id).find(request_id, viewer=pickle.loads(pickle.dumps(viewer)))

    async def last_traces(self, router_id: str, limit: int, *, viewer: Viewer, timeout_s: float) -> bytes:
        """Ask a router for its last requests."""
        return self._recorder(router_id).last(limit, viewer=viewer)

    def _recorder(self, router_id: str) -> TraceRecorder:
        if (recorder := self._net.recorders.get(router_id)) is None:
            raise WorkerUnavailableError(replica_id=router_id, reason="it is gone")
        return recorder

    async def report(self, router_id: str, *, timeout_s: float) -> RouterReport:
        """Ask a router for its report; a silent one never answers."""
        if router_id in self._net.silent:
            self._net.num_in_vain += 1
            await asyncio.Event().wait()
        view = self._net.views.get(router_id)
        if view is None:
            raise WorkerUnavailableError(replica_id=router_id, reason="it is gone")
        return view.report()


def report_of(
    router_id: str, *, created_s: int = 0, gone: tuple[RouterReport, ...] = (), num_finished: int = 0
) -> RouterReport:
    """A report that a router sent at some time."""
    families: tuple[MetricFamily, ...] = ()
    return RouterReport(
        router_id=router_id,
        number=1,
        pid=1,
        created_s=created_s,
        num_alive=0,
        num_waiting=0,
        counters=RouterCounters(num_finished=num_finished),
        families=families,
        departed={},
        gone=gone,
    )
