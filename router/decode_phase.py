"""The second half of a request's life: every token after the first, from one decode replica or from several."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.messages import FinishReason, TokenDelta
from kv_transfer.params import KVTransferParams
from router.counters import RouterCounters
from router.errors import RouterError, WorkerFailedError
from router.generation import Generation
from router.pool import Reservation
from router.settings import RouterSettings
from router.worker_errors import is_lost, is_retryable, raise_for_error, refusal_error
from router.worker_link import WorkerLink
from router.workers import WorkerRefusedError, WorkerUnavailableError

logger = logging.getLogger(f"baton.{__name__}")


class DecodePhase:
    """Runs requests on decode replicas; moves them on with the tokens they have when one is lost."""

    def __init__(
        self,
        link: WorkerLink,
        *,
        settings: RouterSettings,
        counters: RouterCounters,
    ) -> None:
        self._link = link
        self._pool = link.pool
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
        """The last delta from one replica."""

        def on_delta(delta: TokenDelta) -> None:
            # From its first tokens on the replica's reports count this request, so its reservation ends.
            reservation.release()
            reason = delta.finish_reason
            is_good = reason is None or reason is FinishReason.STOP or reason is FinishReason.LENGTH
            generation.deliver(delta, reason if is_good else None)

        request = replace(
            generation.request,
            output_token_ids=tuple(generation.output_token_ids),
            hand_over=False,
            kv_transfer=kv_transfer,
        )
        return await self._link.run(reservation.replica.replica_id, request, on_delta)
