"""Who may start: a bounded, ordered queue in front of the decode replicas' memory."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from dataclasses import dataclass, field

from router.demand import Demand
from router.errors import NoReplicaError, QueueFullError
from router.pool import ReplicaPool
from router.replica import Reservation
from router.settings import RouterSettings


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    order: int
    demand: Demand = field(compare=False)
    num_blocks: int = field(compare=False)
    granted: asyncio.Future[Reservation] = field(compare=False)


class Admission:
    """Grants each request room on a decode replica before anything is computed for it.

    While no replica has room, requests wait in order of (priority, arrival); the first one is not overtaken by
    smaller ones behind it, or it might wait for ever.
    """

    def __init__(self, pool: ReplicaPool, *, settings: RouterSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._queue: list[_Waiting] = []
        self._order = itertools.count()
        self._granting: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Requests for which no decode replica has room now."""
        return sum(not item.granted.done() for item in self._queue)

    async def reserve(self, demand: Demand, *, num_blocks: int, priority: int) -> Reservation:
        """Room for ``num_blocks`` on some decode replica. The caller bounds the wait.

        Raises:
            NoReplicaError: No decode replica is healthy, or none was for ``recovery_wait_s`` while this one waited.
            QueueFullError: As many as allowed are waiting.
        """
        if not self._queue and (reservation := self._try(demand, num_blocks)) is not None:
            return reservation
        if not self._pool.expects_any():
            raise NoReplicaError(role=self._pool.role, retry_after_s=self._settings.retry_after_s)
        limit = self._settings.max_num_queued
        if self.num_waiting >= limit:
            raise QueueFullError(
                f"too many requests waiting for KV memory: the limit is {limit}; try again later",
                retry_after_s=self._settings.retry_after_s,
            )
        granted: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, _Waiting(priority, next(self._order), demand, num_blocks, granted))
        if self._granting is None:
            self._granting = asyncio.create_task(self._grant())
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                granted.result().release()
            self._pool.notify()
            raise

    async def close(self) -> None:
        """Stop granting."""
        if self._granting is not None:
            self._granting.cancel()
            await asyncio.gather(self._granting, return_exceptions=True)

    def _try(self, demand: Demand, num_blocks: int) -> Reservation | None:
        replica = self._pool.choose(demand, num_blocks=num_blocks, must_fit=True)
        return None if replica is None else self._pool.reserve(replica, num_blocks=num_blocks)

    async def _grant(self) -> None:
        try:
            while self._queue:
                first = self._queue[0]
                if first.granted.done():
                    heapq.heappop(self._queue)
                elif (reservation := self._try(first.demand, first.num_blocks)) is not None:
                    heapq.heappop(self._queue)
                    first.granted.set_result(reservation)
                elif self._pool.has_any():
                    await self._pool.wait_for_change()
                else:
                    await self._recover()
        finally:
            self._granting = None

    async def _recover(self) -> None:
        """Wait for any replica at all; when none comes back, nobody waits any longer."""
        wait_s = self._settings.recovery_wait_s
        try:
            async with asyncio.timeout(wait_s):
                while not self._pool.has_any():
                    await self._pool.wait_for_change()
        except TimeoutError:
            for item in self._queue:
                if not item.granted.done():
                    item.granted.set_exception(
                        NoReplicaError(
                            role=self._pool.role,
                            retry_after_s=self._settings.retry_after_s,
                            reason=f"none came back within {wait_s:g} s",
                        )
                    )
