"""Breaks circular waits over leases, as far as one engine, which sees only its own part, can tell. Free of torch.

Workers that take any work both grant leases and wait for them. Suppose A keeps a prompt's KV for B, and B keeps one for
A. B has no room to read before A has read, and A has none before B has. A waiting request renews the lease that is kept
for it, so no timeout ends this (known-failures 7). An engine that computes nothing, loads nothing, and waits only for
its own leases to end may be part of such a circle. If it is not, one prompt is computed twice, on an engine that had
nothing to do.
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
"""How long an engine stands still before one request gives up its hand-over, and then before the next one does. A
hand-over takes milliseconds, and a reader whose engine is full makes room within a step or two of its running requests.
"""


class LeaseStandoff:
    """Chooses the request that gives up its hand-over, so that its lease elsewhere ends, and with it the circle."""

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
        self.due_s: float | None = None
        """When a request must give up its hand-over if nothing changes until then; None when no request must."""

    def find(self) -> Request | None:
        """The request to give up its hand-over now: the one that came first.

        To be asked before each step while there are leases, or ``due_s`` is set.
        """
        if not self._leases.by_id or not (waiting := self._waiting()):
            self.due_s = None
            return None
        now_s = self._clock()
        if self.due_s is None:
            self.due_s = now_s + PATIENCE_S
        if now_s < self.due_s:
            return None
        self.due_s = now_s + PATIENCE_S if len(waiting) > 1 else None
        return min(waiting, key=lambda request: request.arrival_index)

    def _waiting(self) -> list[Request]:
        """Requests with a hand-over, if nothing but this engine's own leases keeps them from starting."""
        if len(self._table) or self._remote.has_loads or len(self._live_requests.ready):
            return []
        return [request for request in self._live_requests.waiting if request.kv_transfer is not None]
