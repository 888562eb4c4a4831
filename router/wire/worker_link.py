"""The link to one role's workers: submits requests, returns their tokens, and aborts requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.contract.messages import GenerateRequest, TokenDelta, Told
from router.pool.pool import ReplicaPool
from router.pool.replica import Reservation
from router.pool.workers import WorkerPool, WorkerRefusedError, WorkerUnavailableError
from router.settings import RouterSettings
from router.wire.aborts import AbortSender
from router.wire.early_notices import EarlyNotices
from router.wire.output_streams import OutputStreams
from router.wire.submissions import Submissions

FIRST_STREAMS_S = 2.0
"""How long a starting router waits for streams to begin."""


class Run:
    """One request on one replica: the sink of its deltas. ``ended`` gets the last delta, or the error."""

    __slots__ = ("_on_delta", "_reservation", "ended", "on_told")

    def __init__(
        self,
        reservation: Reservation,
        on_delta: Callable[[TokenDelta], None],
        on_told: Callable[[Told], None],
    ) -> None:
        self._reservation = reservation
        self._on_delta = on_delta
        self.on_told = on_told
        self.ended: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: TokenDelta) -> None:
        """New tokens, or the end."""
        if self.ended.done():
            return
        self._on_delta(delta)
        if delta.finish_reason is not None:
            self.ended.set_result(delta)

    def on_answer(self, answer: asyncio.Future[WorkerRefusedError | None]) -> None:
        """Take the outcome of the submission: accepted, refused, or no answer."""
        if answer.cancelled():
            return
        failure = answer.exception() or answer.result()
        if failure is None:
            self._reservation.accepted()
        elif not self.ended.done():
            self.ended.set_exception(failure)

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
        self,
        reservation: Reservation,
        make_request: Callable[[str], GenerateRequest],
        on_delta: Callable[[TokenDelta], None],
        on_told: Callable[[Told], None] = lambda _: None,
    ) -> TokenDelta:
        """Run a request on the reserved replica, and return its last delta. ``on_delta`` gets every delta, ``on_told``
        what the worker reports besides.

        ``make_request`` gets the client id under which the tokens come back. Unless the replica itself ended or
        refused the request, it is aborted there. If a replica hangs, its silent stream shows that long before the
        submission's own timeout.

        Raises:
            WorkerRefusedError: The engine refused the request.
            WorkerUnavailableError: The replica is gone, silent, or does not answer.
        """
        replica_id = reservation.replica.replica_id
        stream = await self.streams.connect(replica_id)
        run = Run(reservation, on_delta, on_told)
        request = make_request(stream.client_id)
        self.notices.supersede(request.request_id, replica_id)
        stream.attach(request.request_id, run)
        answer = self._submissions.submit(replica_id, request)
        answer.add_done_callback(run.on_answer)
        try:
            return await run.ended
        except WorkerRefusedError:
            raise
        except BaseException:
            answer.cancel()
            self.aborts.abort(replica_id, request.request_id)
            raise
        finally:
            stream.detach(request.request_id)
            if run.ended.done() and not run.ended.cancelled():
                run.ended.exception()

    def follow(self) -> None:
        """Give up silent streams, and open those of usable replicas, so that no first request has to wait for it."""
        self.streams.give_up_silent()
        for replica in self.pool.replicas:
            if self.pool.is_usable(replica) and replica.info is not None:
                self.streams.open(replica.replica_id)

    async def hear_all(self) -> None:
        """Wait up to ``FIRST_STREAMS_S`` for the streams of usable replicas. Otherwise a new router would send all
        requests to the replica whose stream begins first."""
        usable = [item for item in self.pool.replicas if self.pool.is_usable(item) and item.info is not None]
        if usable:
            await asyncio.wait(
                [self.streams.open(item.replica_id).connected for item in usable], timeout=FIRST_STREAMS_S
            )

    async def close(self) -> None:
        """Stop sending, tell the workers what was given up, close the streams."""
        await self.notices.close()
        await self._submissions.close()
        await self.aborts.flush()
        await self.streams.close()
