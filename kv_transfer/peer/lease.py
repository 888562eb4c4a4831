"""The leases that an engine grants on its own blocks: they say which reader may read them, and until when."""

from __future__ import annotations

import math
import threading
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.connector import LeaseEnd, LeaseEnded

_NUM_REMEMBERED_ENDS = 4096


class Completion(StrEnum):
    """The result of a reader's "done"."""

    OK = "ok"
    EXPIRED = "expired"


@dataclass(slots=True, kw_only=True)
class Lease:
    """Blocks pinned for one reader until ``deadline_s`` on the table's clock."""

    lease_id: str
    request_id: str
    block_ids: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCounts:
    """Counters since the start of the table; granted = done + expired + aborted + live."""

    num_granted: int = 0
    num_done: int = 0
    num_expired: int = 0
    num_aborted: int = 0
    num_unknown: int = 0


class LeaseTable:
    """Grants leases and ends each exactly once: by the reader's "done", by its deadline, or by abort.

    Safe to call from any thread: the engine grants and aborts, the connector's thread completes, renews and expires.
    Ended leases go into a queue that ``take_ended`` empties. ``on_change`` is called, outside the lock, after a lease
    was granted or ended, to wake the connector's thread.
    """

    def __init__(
        self, *, ttl_s: float, clock: Callable[[], float], on_change: Callable[[], None] | None = None
    ) -> None:
        self.on_change = on_change
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._live: dict[str, Lease] = {}
        self._by_request: defaultdict[str, set[str]] = defaultdict(set)
        self._completed_by: OrderedDict[str, str] = OrderedDict()
        self._ended: deque[LeaseEnded] = deque()
        self._num_granted = 0
        self._num_by_end = dict.fromkeys(LeaseEnd, 0)
        self._num_unknown = 0
        self._earliest_deadline_s = math.inf

    @property
    def num_live(self) -> int:
        """Leases that have not ended."""
        return len(self._live)

    @property
    def num_ended(self) -> int:
        """Leases that ended since the start."""
        return sum(self._num_by_end.values())

    def grant(self, *, request_id: str, block_ids: tuple[int, ...]) -> Lease:
        """Pin blocks for one reader. A request id may hold several leases: a retry grants anew."""
        with self._lock:
            lease = Lease(
                lease_id=uuid.uuid4().hex,
                request_id=request_id,
                block_ids=block_ids,
                deadline_s=self._clock() + self._ttl_s,
            )
            self._live[lease.lease_id] = lease
            self._earliest_deadline_s = min(self._earliest_deadline_s, lease.deadline_s)
            self._by_request[request_id].add(lease.lease_id)
            self._num_granted += 1
        self._changed()
        return lease

    def renew(self, lease_id: str) -> bool:
        """Move a live lease's deadline to a full time-to-live from now; False when the lease is not live."""
        with self._lock:
            lease = self._live_lease(lease_id)
            if lease is None:
                self._num_unknown += 1
            else:
                lease.deadline_s = self._clock() + self._ttl_s
        if lease is None:
            self._changed()
        return lease is not None

    def complete(self, lease_id: str, *, reader: str) -> Completion:
        """End a lease because its reader has read everything, and say whether the lease was alive until now.

        ``reader`` names one read. If it completes the same lease again, because the answer was lost, it gets the same
        answer. Any other reader that completes an ended lease gets EXPIRED: its blocks may have been reused during its
        read.
        """
        with self._lock:
            if self._completed_by.get(lease_id) == reader:
                self._num_unknown += 1
                return Completion.OK
            lease = self._live_lease(lease_id)
            if lease is None:
                self._num_unknown += 1
            else:
                self._end(lease, LeaseEnd.DONE)
                self._completed_by[lease_id] = reader
                while len(self._completed_by) > _NUM_REMEMBERED_ENDS:
                    self._completed_by.popitem(last=False)
        self._changed()
        return Completion.EXPIRED if lease is None else Completion.OK

    def abort(self, lease_id: str) -> bool:
        """End one lease because its reader released it; False (and counted) when it is not live."""
        with self._lock:
            lease = self._live_lease(lease_id)
            if lease is None:
                self._num_unknown += 1
            else:
                self._end(lease, LeaseEnd.ABORTED)
        self._changed()
        return lease is not None

    def expire_lease(self, lease_id: str) -> bool:
        """End one lease as if its deadline had come; False when it is not live."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is not None:
                self._end(lease, LeaseEnd.EXPIRED)
        self._changed()
        return lease is not None

    def abort_request(self, request_id: str) -> int:
        """End all leases of a request; returns how many there were."""
        with self._lock:
            lease_ids = tuple(self._by_request.get(request_id, ()))
            for lease_id in lease_ids:
                self._end(self._live[lease_id], LeaseEnd.ABORTED)
        if lease_ids:
            self._changed()
        return len(lease_ids)

    def abort_all(self) -> None:
        """End every lease: this engine stops serving readers."""
        with self._lock:
            for lease in tuple(self._live.values()):
                self._end(lease, LeaseEnd.ABORTED)
        self._changed()

    def expire(self) -> int:
        """End every lease whose deadline has passed; returns how many.

        Renewals make the order of deadlines arbitrary, so all leases must be checked. The check is skipped until the
        earliest deadline found by the last check, because renewals only postpone deadlines.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._earliest_deadline_s:
                return 0
            overdue = [lease for lease in self._live.values() if lease.deadline_s <= now_s]
            for lease in overdue:
                self._end(lease, LeaseEnd.EXPIRED)
            self._earliest_deadline_s = min((lease.deadline_s for lease in self._live.values()), default=math.inf)
        if overdue:
            self._changed()
        return len(overdue)

    def take_ended(self) -> tuple[LeaseEnded, ...]:
        """The leases that ended since the last call, each once."""
        with self._lock:
            ended = tuple(self._ended)
            self._ended.clear()
        return ended

    def counts(self) -> LeaseCounts:
        """Counters since the start."""
        with self._lock:
            return LeaseCounts(
                num_granted=self._num_granted,
                num_done=self._num_by_end[LeaseEnd.DONE],
                num_expired=self._num_by_end[LeaseEnd.EXPIRED],
                num_aborted=self._num_by_end[LeaseEnd.ABORTED],
                num_unknown=self._num_unknown,
            )

    def _live_lease(self, lease_id: str) -> Lease | None:
        """The lease if it is live right now. A lease past its deadline is ended here."""
        lease = self._live.get(lease_id)
        if lease is not None and lease.deadline_s <= self._clock():
            self._end(lease, LeaseEnd.EXPIRED)
            return None
        return lease

    def _end(self, lease: Lease, reason: LeaseEnd) -> None:
        del self._live[lease.lease_id]
        lease_ids = self._by_request[lease.request_id]
        lease_ids.discard(lease.lease_id)
        if not lease_ids:
            del self._by_request[lease.request_id]
        self._num_by_end[reason] += 1
        self._ended.append(LeaseEnded(request_id=lease.request_id, lease_id=lease.lease_id, reason=reason))

    def _changed(self) -> None:
        on_change = self.on_change  # read once: the connector's thread resets it when it ends
        if on_change is not None:
            on_change()
