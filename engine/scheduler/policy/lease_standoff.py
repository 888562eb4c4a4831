"""Waits in a circle, over leases: seen from one engine, which cannot know that there is one. Free of torch.

Workers that take any work lend blocks and borrow: A keeps a prompt for B, which has no room for it before A has read
what B keeps for A, and A has none before B has read. A request that waits renews the lease that is kept for it, so that
time alone ends nothing (known-failures 7). Whoever computes nothing, loads nothing, and waits only for its own leases
to end may be part of a circle; where it is none, one prompt is computed twice on an engine that had nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowTable

PATIENCE_S: Final = 2.0
"""So long an engine stands still before a request does without what another engine keeps for it, and then the next one.
A hand-over takes milliseconds, and a reader whose engine is full makes room within a step or two of those that run."""


class LeaseStandoff:
    """Says which request is to do without its hand-over, so that its lease elsewhere ends, and the circle with it."""

    def __init__(
        self,
        *,
        live_requests: LiveRequests,
        table: RowTable,
        remote: RemoteKV,
        leases: BlockLeases,
        clock: Callable[[], float],
    ) -> None:
        self._live_requests = live_requests
        self._table = table
        self._remote = remote
        self._leases = leases
        self._clock = clock
        self._since_s: float | None = None

    @property
    def due_s(self) -> float | None:
        """When somebody has to do without if nothing changes until then; None when nobody has to."""
        return None if self._since_s is None else self._since_s + PATIENCE_S

    def find(self) -> Request | None:
        """Who does without from now on: the one that came first; asked at the beginning of each step."""
        waiting = self._waiting()
        if not waiting:
            self._since_s = None
            return None
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < PATIENCE_S:
            return None
        self._since_s = now_s if len(waiting) > 1 else None
        return min(waiting, key=lambda request: request.arrival_index)

    def _waiting(self) -> list[Request]:
        """Those for whom others keep blocks, where nothing but leases is in their way."""
        if not len(self._leases) or len(self._table) or self._remote.has_loads or len(self._live_requests.ready):
            return []
        return [request for request in self._live_requests.waiting if request.kv_transfer is not None]
