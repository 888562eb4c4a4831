"""Tells decode replicas which prompts are being computed for them, so that they load the KV early."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from engine.contract.messages import GenerateRequest
from router.pool.workers import WorkerError
from router.wire.aborts import AbortSender
from router.wire.output_streams import OutputStreams
from router.wire.submissions import Answer, Submissions

logger = logging.getLogger(f"baton.{__name__}")


@dataclass(slots=True, eq=False)
class _Notice:
    """One notice. ``is_sent``: the replica may hold KV for it. ``answer``: the replica's, once it is being sent."""

    replica_id: str
    is_sent: bool = False
    is_void: bool = False
    answer: Answer | None = None

    def drop(self) -> None:
        """Send it no more. If it is on its way, it is aborted when the replica has answered, unless the replica has
        accepted the request again by then.
        """
        self.is_void = True
        if self.answer is not None:
            self.answer.cancel()


class EarlyNotices:
    """Notices of coming requests, by request id.

    Notices are best effort: if anything goes wrong with one, the request is served as if there had been none. A notice
    ends when the request itself goes to the same replica, or by ``withdraw``, which frees what the replica holds.
    """

    def __init__(self, streams: OutputStreams, submissions: Submissions, aborts: AbortSender) -> None:
        self._streams = streams
        self._submissions = submissions
        self._aborts = aborts
        self._notices: dict[str, _Notice] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def give(self, replica_id: str, request: GenerateRequest) -> None:
        """Announce a request in the background; a newer notice of the same request replaces the older one."""
        older = self._notices.get(request.request_id)
        if older is not None:
            older.drop()
        notice = self._notices[request.request_id] = _Notice(replica_id)
        task = asyncio.create_task(self._send(notice, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def supersede(self, request_id: str, replica_id: str) -> None:
        """End the notice, because the request itself goes to that replica now, and would be aborted there.

        A notice that still waits to be sent is not sent any more. It could arrive when the request has left again, and
        nobody would free what the replica holds for it.
        """
        notice = self._notices.get(request_id)
        if notice is not None and notice.replica_id == replica_id:
            notice.drop()
            del self._notices[request_id]

    def withdraw(self, request_id: str) -> None:
        """The request ended: a replica with a notice that it did not go to frees what it holds. Idempotent."""
        notice = self._notices.pop(request_id, None)
        if notice is None:
            return
        notice.drop()
        if notice.is_sent:
            self._aborts.abort(notice.replica_id, request_id)

    async def close(self) -> None:
        """Stop sending."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, notice: _Notice, request: GenerateRequest) -> None:
        replica_id, request_id = notice.replica_id, request.request_id
        try:
            stream = await self._streams.connect(replica_id)
            if notice.is_void:
                return
            notice.answer = self._submissions.submit(replica_id, replace(request, client_id=stream.client_id))
            refusal = await notice.answer
            if refusal is not None:
                logger.debug("not streamed: request_id=%s: %s", request_id, refusal)
                return
        except WorkerError as error:
            logger.debug("notice not given: request_id=%s: %s", request_id, error)
        notice.is_sent = True
