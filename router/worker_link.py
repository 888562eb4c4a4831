"""One role's workers as requests meet them: a request is submitted, its tokens come back, or it is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from engine.messages import GenerateRequest, TokenDelta
from router.aborts import AbortSender
from router.early_notices import EarlyNotices
from router.output_streams import OutputStreams
from router.pool import ReplicaPool
from router.replica import Reservation
from router.settings import RouterSettings
from router.submissions import Submissions
from router.workers import WorkerPool, WorkerRefusedError, WorkerUnavailableError


class Run:
    """One request on one replica: the sink of its deltas. ``ended`` holds the last one, or why none came."""

    __slots__ = ("_on_delta", "ended")

    def __init__(self, on_delta: Callable[[TokenDelta], None]) -> None:
        self._on_delta = on_delta
        self.ended: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: TokenDelta) -> None:
        """New tokens, or the end."""
        if self.ended.done():
            return
        self._on_delta(delta)
        if delta.finish_reason is not None:
            self.ended.set_result(delta)

    def on_lost(self, error: WorkerUnavailableError) -> None:
        """The replica died, or its stream did."""
        if not self.ended.done():
            self.ended.set_exception(error)


class WorkerLink:
    """Everything between this router and the workers of one role."""

    def __init__(
        self,
        workers: WorkerPool,
        pool: ReplicaPool,
        *,
        settings: RouterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.aborts = AbortSender(workers, timeout_s=settings.abort_timeout_s)
        self.streams = OutputStreams(workers, pool, settings=settings, clock=clock)
        self._submissions = Submissions(workers, self.aborts, timeout_s=settings.submit_timeout_s)
        self.notices = EarlyNotices(self.streams, self._submissions, self.aborts)
        pool.on_lost = self.streams.give_up

    async def run(
        self, reservation: Reservation, request: GenerateRequest, on_delta: Callable[[TokenDelta], None]
    ) -> TokenDelta:
        """The last delta of a request on the replica that was reserved; ``on_delta`` sees every one.

        Whatever else happens, the request is aborted there.

        Raises:
            WorkerRefusedError: The engine refused it.
            WorkerUnavailableError: The replica is gone, silent, or does not answer.
        """
        replica_id = reservation.replica.replica_id
        stream = await self.streams.connect(replica_id)
        run = Run(on_delta)
        self.notices.supersede(request.request_id, replica_id)
        stream.attach(request.request_id, run)
        try:
            await self._submit(replica_id, replace(request, client_id=stream.client_id), run)
            reservation.accepted()
            return await run.ended
        except WorkerRefusedError:
            raise
        except BaseException:
            self.aborts.abort(replica_id, request.request_id)
            raise
        finally:
            stream.detach(request.request_id)
            if run.ended.done() and not run.ended.cancelled():
                run.ended.exception()

    async def _submit(self, replica_id: str, request: GenerateRequest, run: Run) -> None:
        """Return when the request was accepted, or when its run ended: a replica that hangs accepts nothing, and its
        stream tells long before the call's own timeout.
        """
        submission = asyncio.ensure_future(self._submissions.submit(replica_id, request))
        try:
            await asyncio.wait((submission, run.ended), return_when=asyncio.FIRST_COMPLETED)
            if submission.done():
                submission.result()
        finally:
            submission.cancel()

    def follow(self) -> None:
        """Give up silent streams, and open those of replicas that can be used: no first request need wait for it."""
        self.streams.give_up_silent()
        for replica in self.pool.replicas:
            if self.pool.is_usable(replica) and replica.info is not None:
                self.streams.open(replica.replica_id)

    async def close(self) -> None:
        """Stop sending, tell the workers what was given up, close the streams."""
        await self.notices.close()
        await self._submissions.close()
        await self.aborts.flush()
        await self.streams.close()
