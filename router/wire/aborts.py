"""Sends aborts to workers: in the background, batched per replica, and never lost when a caller is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import logging

from router.pool.workers import WorkerError, WorkerPool

logger = logging.getLogger(f"baton.{__name__}")


class AbortSender:
    """Sends aborts to the replicas of one pool. Requests that are cancelled at about the same time share one call.

    Over Ray, or behind a call that hangs, an abort may come late. It names one run of a request: when the request comes
    back to a replica, it gets another id there (``Generation.next_run``).
    """

    def __init__(self, workers: WorkerPool, *, timeout_s: float) -> None:
        self._workers = workers
        self._timeout_s = timeout_s
        self._waiting: dict[str, set[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def abort(self, replica_id: str, request_id: str) -> None:
        """Have a run, or the lease that it left, ended on a replica, soon. The replica ignores unknown ids."""
        self._waiting.setdefault(replica_id, set()).add(request_id)
        if replica_id not in self._tasks:
            # In a context of its own: the task sends for many requests, not just for the one that starts it.
            self._tasks[replica_id] = asyncio.create_task(self._send(replica_id), context=contextvars.Context())

    async def flush(self) -> None:
        """Wait until all aborts so far are sent, or have failed."""
        while self._tasks:
            await asyncio.gather(*tuple(self._tasks.values()), return_exceptions=True)

    async def _send(self, replica_id: str) -> None:
        try:
            while request_ids := self._waiting.pop(replica_id, None):
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await self._workers.abort(replica_id, tuple(request_ids))
                except (WorkerError, TimeoutError) as error:
                    # A replica that is gone holds nothing; one that hangs ends our requests when the stream closes.
                    logger.warning(
                        "abort failed: replica_id=%s num_requests=%d: %s", replica_id, len(request_ids), error
                    )
        finally:
            self._waiting.pop(replica_id, None)
            self._tasks.pop(replica_id, None)
