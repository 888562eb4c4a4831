"""The second half of a request's life: every token after the first, from one decode replica or from several."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from engine.messages import FinishReason, GenerateRequest, TokenDelta
from kv_transfer.params import KVTransferParams
from router.aborts import AbortSender
from router.counters import RouterCounters
from router.errors import RouterError, WorkerFailedError
from router.generation import Generation
from router.output_streams import OutputStreams
from router.pool import ReplicaPool, Reservation
from router.settings import RouterSettings
from router.submissions import Submissions
from router.worker_errors import is_lost, is_retryable, raise_for_error, refusal_error
from router.workers import WorkerRefusedError, WorkerUnavailableError

logger = logging.getLogger(f"baton.{__name__}")


class DecodeRun:
    """One request on one decode replica: the sink of its deltas."""

    def __init__(self, generation: Generation, reservation: Reservation) -> None:
        self._generation = generation
        self._reservation = reservation
        self.ended: asyncio.Future[TokenDelta] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: TokenDelta) -> None:
        """New tokens: from now on the replica's reports count this request, so its reservation ends."""
        self._reservation.release()
        reason = delta.finish_reason
        if self.ended.done():
            return
        is_good = reason is None or reason is FinishReason.STOP or reason is FinishReason.LENGTH
        self._generation.deliver(delta, reason if is_good else None)
        if reason is not None:
            self.ended.set_result(delta)

    def on_lost(self, error: WorkerUnavailableError) -> None:
        """The replica died, or its stream did."""
        if not self.ended.done():
            self.ended.set_exception(error)


class DecodePhase:
    """Runs requests on decode replicas; moves them on with the tokens they have when one is lost."""

    def __init__(
        self,
        *,
        pool: ReplicaPool,
        streams: OutputStreams,
        submissions: Submissions,
        aborts: AbortSender,
        settings: RouterSettings,
        counters: RouterCounters,
    ) -> None:
        self._pool = pool
        self._streams = streams
        self._submissions = submissions
        self._aborts = aborts
        self._settings = settings
        self._counters = counters

    async def run(
        self, generation: Generation, kv_transfer: KVTransferParams | None, reservation: Reservation | None
    ) -> bool:
        """Bring a request to its end.

        Returns:
            True when the decode side has certainly ended the lease behind ``kv_transfer``.

        Raises:
            RouterError: It could not be ended well anywhere.
        """
        num_tokens_before = len(generation.output_token_ids)
        tried: set[str] = set()
        reason = ""
        failure: RouterError | None = None
        for attempt in range(1 + self._settings.migration_limit):
            self._counters.num_migrations += attempt > 0
            generation.stage = "decode" if attempt == 0 else f"decode, moved {attempt} times"
            if attempt > 0 or reservation is None or not self._pool.is_usable(reservation.replica):
                reservation = await self._reserve(generation, tried, is_retry=attempt > 0)
            replica_id = reservation.replica.replica_id
            tried.add(replica_id)
            has_decoded = len(generation.output_token_ids) > num_tokens_before
            try:
                final = await self._run_on(generation, reservation, None if has_decoded else kv_transfer)
            except WorkerRefusedError as error:
                if not is_retryable(error):
                    raise refusal_error(error) from error
                reason = str(error)
                failure = refusal_error(error)
            except WorkerUnavailableError as error:
                reason = str(error)
                self._pool.note_failure(replica_id, error.reason)
            else:
                if not is_lost(final):
                    raise_for_error(final)
                    return attempt == 0
                reason = f"{replica_id} gave the request up"
                self._pool.note_failure(replica_id, reason)
            finally:
                reservation.release()
            logger.warning(
                "decode lost: request_id=%s num_output_tokens=%d: %s",
                generation.request_id,
                len(generation.output_token_ids),
                reason,
            )
        raise failure or WorkerFailedError(
            f"decode failed on {1 + self._settings.migration_limit} replicas, at last with: {reason}",
            code="decode_failed",
            retry_after_s=self._settings.retry_after_s,
        )

    async def _reserve(self, generation: Generation, tried: set[str], *, is_retry: bool) -> Reservation:
        replica = await self._pool.choose_or_wait(tried, is_retry=is_retry)
        num_tokens = len(generation.request.prompt_token_ids) + len(generation.output_token_ids)
        return self._pool.reserve(replica, num_blocks=self._pool.blocks_for(num_tokens))

    async def _run_on(
        self, generation: Generation, reservation: Reservation, kv_transfer: KVTransferParams | None
    ) -> TokenDelta:
        """The last delta from one replica. Whatever else happens, the request is aborted there."""
        replica_id = reservation.replica.replica_id
        request_id = generation.request_id
        stream = await self._streams.connect(replica_id)
        run = DecodeRun(generation, reservation)
        stream.attach(request_id, run)
        try:
            request = self._request(generation, kv_transfer, stream.client_id)
            await self._submissions.submit(replica_id, request)
            return await run.ended
        except WorkerRefusedError:
            raise
        except BaseException:
            self._aborts.abort(replica_id, request_id)
            raise
        finally:
            stream.detach(request_id)
            if run.ended.done() and not run.ended.cancelled():
                run.ended.exception()

    def _request(self, generation: Generation, kv_transfer: KVTransferParams | None, client_id: str) -> GenerateRequest:
        return replace(
            generation.request,
            output_token_ids=tuple(generation.output_token_ids),
            hand_over=False,
            kv_transfer=kv_transfer,
            client_id=client_id,
        )
