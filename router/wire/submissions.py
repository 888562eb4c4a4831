"""Submits requests to replicas, and batches those that come for the same replica at the same time.

A call over Ray costs far more than each request in it, so requests that come while a call is under way are batched into
the next one. Over a connection no call waits for an earlier call's answer, which the engine gives between two steps.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import weakref
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.contract.messages import GenerateRequest
from router.pool.workers import WorkerError, WorkerPool, WorkerRefusedError, WorkerUnavailableError
from router.wire.aborts import AbortSender

logger = logging.getLogger(f"baton.{__name__}")

Answer: TypeAlias = asyncio.Future[WorkerRefusedError | None]


@dataclass(slots=True)
class _Lane:
    """The requests that wait to be sent to one replica."""

    waiting: list[tuple[GenerateRequest, Answer]] = field(default_factory=list)


class Submissions:
    """Submits requests, in order for each replica. A lane stays until the next request needs a new one.

    A replica gets an id once, apart from an early notice and the request that follows it: these have the same id.
    """

    def __init__(self, workers: WorkerPool, aborts: AbortSender, *, timeout_s: float) -> None:
        self._workers = workers
        self._aborts = aborts
        self._timeout_s = timeout_s
        self._lanes: dict[str, _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # The newest answer of each request at each replica. Weak: an entry goes when the caller drops the future, which
        # it does when the request ends there.
        self._last: weakref.WeakValueDictionary[tuple[str, str], Answer] = weakref.WeakValueDictionary()

    def submit(self, replica_id: str, request: GenerateRequest) -> Answer:
        """Add a request to a replica's engine.

        Returns:
            A future of the engine's refusal, or of None if it accepted. It fails with WorkerUnavailableError if the
            replica is gone or does not answer. If it is cancelled, the request is not sent, or is aborted if it was.
            Keep a reference while the request runs: otherwise a late answer to its early notice would abort it.
        """
        answer: Answer = asyncio.get_running_loop().create_future()
        lane = self._lanes.get(replica_id)
        if lane is None:
            lane = self._lanes[replica_id] = _Lane()
            # In a context of its own: the task sends for many requests, not just for the one that starts it.
            task = asyncio.create_task(self._send(replica_id, lane), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        lane.waiting.append((request, answer))
        self._last[replica_id, request.request_id] = answer
        return answer

    async def close(self) -> None:
        """Stop sending."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, replica_id: str, lane: _Lane) -> None:
        try:
            while lane.waiting:
                batch = [item for item in lane.waiting if not item[1].done()]
                lane.waiting.clear()
                if self._workers.has_link(replica_id):
                    self._end_lane(replica_id, lane)
                if batch:
                    await self._send_batch(replica_id, batch)
        finally:
            self._end_lane(replica_id, lane)
            for _, answer in lane.waiting:
                answer.cancel()

    def _end_lane(self, replica_id: str, lane: _Lane) -> None:
        """Close a lane: requests from now on do not wait for it."""
        if self._lanes.get(replica_id) is lane:
            del self._lanes[replica_id]

    async def _send_batch(self, replica_id: str, batch: list[tuple[GenerateRequest, Answer]]) -> None:
        error: Exception | None = None
        refusals: list[WorkerRefusedError | None] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                refusals = list(await self._workers.submit(replica_id, [request for request, _ in batch]))
        except WorkerError as caught:
            error = caught
        except TimeoutError:
            error = WorkerUnavailableError(replica_id=replica_id, reason=f"no answer within {self._timeout_s:g} s")
        except Exception as caught:
            logger.exception("submission failed: replica_id=%s", replica_id)
            error = WorkerUnavailableError(replica_id=replica_id, reason=f"{type(caught).__name__}: {caught}")
        if error is None and len(refusals) != len(batch):
            error = WorkerUnavailableError(
                replica_id=replica_id, reason=f"{len(refusals)} answers to {len(batch)} requests"
            )
        for index, (request, answer) in enumerate(batch):
            if answer.done():
                self._end(replica_id, request.request_id, answer)
            elif error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(refusals[index])

    def _end(self, replica_id: str, request_id: str, answer: Answer) -> None:
        """Abort what was submitted, whose caller gave up before the answer came.

        If that was an early notice, and the request itself was submitted since, an abort would end the request. So this
        waits for the newer answer. If the replica accepted the request, the notice has become it and nothing is
        aborted. If it refused it, the notice may still be there, and is aborted.
        """
        newer = self._last.get((replica_id, request_id))
        if newer is None or newer is answer:
            self._aborts.abort(replica_id, request_id)
            return

        def on_answer(ended: Answer) -> None:
            if ended.cancelled() or ended.exception() is not None or ended.result() is not None:
                self._end(replica_id, request_id, ended)

        newer.add_done_callback(on_answer)
