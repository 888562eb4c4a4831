"""The second half of a request's life: every token after the first, from one decode replica or from several."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.contract.role import Work
from kv_transfer.params import KVTransferParams
from router.balance.streams import LiveStreams, MoveOrder
from router.errors import WorkerFailedError
from router.pool.pool import ReplicaPool
from router.pool.replica import Replica, Reservation
from router.pool.workers import StreamNotBegunError, WorkerRefusedError, WorkerUnavailableError
from router.report.counters import RouterCounters
from router.request.generation import Generation
from router.request.journey import Journey
from router.request.kv_loss import KVLostError, recompute_limit
from router.settings import RouterSettings
from router.telemetry.span_names import call_name
from router.trace.choice import policy_choice
from router.wire.worker_errors import (
    DRAINING,
    ENGINE_DEAD,
    KV_LOST,
    QUEUE_FULL,
    is_lost,
    is_retryable,
    raise_for_error,
    refusal_error,
)
from router.wire.worker_link import WorkerLink

logger = logging.getLogger(f"baton.{__name__}")


MAX_MOVES = 32
"""How many draining replicas a request may leave: each drain is an operator's order, so only a loop needs more."""


class DecodePhase:
    """Runs requests on decode replicas. When a replica is lost, its requests continue elsewhere from their tokens."""

    def __init__(
        self,
        link: WorkerLink,
        *,
        prefill_pool: ReplicaPool,
        streams: LiveStreams,
        settings: RouterSettings,
        counters: RouterCounters,
    ) -> None:
        self._prefill_pool = prefill_pool
        self._streams = streams
        self._link = link
        self._pool = link.pool
        self._settings = settings
        self._counters = counters
        self._limit = settings.migration_limit if settings.decode_lost_policy == "retry" else 0

    async def run(self, generation: Generation, journey: Journey, reservation: Reservation | None) -> bool:
        """Run a request to its end. A journey can come here again after its KV was lost and recomputed.

        Returns:
            True if the decode side has certainly ended the lease of the journey's KV.

        Raises:
            RouterError: No replica could complete it.
            KVLostError: Its KV could not be read, and by its policy the decode side does not recompute it.
        """
        num_left_before = journey.num_left
        is_well = False
        try:
            while journey.num_losses <= self._limit and journey.num_moves <= MAX_MOVES:
                generation.stage = journey.stage
                if not journey.is_first or reservation is None or not self._pool.is_usable(reservation.replica):
                    if reservation is not None:
                        reservation.release()  # the request goes elsewhere now
                    reservation = await self._reserve(generation, journey)
                if await self._stay(generation, journey, reservation):
                    is_well = journey.num_losses == 0 and not journey.reads_own_kv
                    return journey.num_left == num_left_before and not journey.reads_own_kv
        finally:
            if journey.kv_holder is not None and not is_well:
                self._link.aborts.abort(journey.kv_holder, journey.kv_run_id)
        raise journey.failure or decode_failed(journey, retry_after_s=self._settings.retry_after_s)

    async def _stay(self, generation: Generation, journey: Journey, reservation: Reservation) -> bool:
        """Run a request on one replica; False when it must go on elsewhere.

        Raises:
            RouterError: It cannot be served anywhere.
        """
        replica_id = reservation.replica.replica_id
        journey.tried.add(replica_id)
        kv_transfer = journey.usable_kv(len(generation.output_token_ids))
        if kv_transfer is not None and kv_transfer.source.engine_id == replica_id:
            kv_transfer = None  # the KV is in the replica's own cache, under a lease that ends with the request
            journey.reads_own_kv = True
        request = generation.next_run(replica_id)
        stream = self._streams.enter(
            request,
            generation.output_token_ids,
            replica_id=replica_id,
            num_moves=journey.num_rebalanced,
            prompt=generation.demand if kv_transfer is None and not generation.output_token_ids else None,
            first_due_s=generation.first_due_s,
        )
        _trace_stay(generation, journey, where=replica_id, has_kv=kv_transfer is not None)
        try:
            final = await self._run_on(generation, request, reservation, kv_transfer, journey.kv_policy)
        except WorkerRefusedError as error:
            self._note_refusal(error, replica_id, journey)
            return _leaves(generation, str(error))
        except WorkerUnavailableError as error:
            if not self._note_unavailable(error, journey):
                return _leaves(generation, str(error))
        else:
            if final.finish_reason is FinishReason.HANDED_OVER:
                order, num_output_tokens = stream.order_of(final), len(generation.output_token_ids)
                self._counters.count_move(order.reason if order is not None else None)
                _trace_move(generation, order)
                journey.handed_over(replica_id, final, num_output_tokens=num_output_tokens, order=order)
                return False
            if final.error is not None and final.error.code == KV_LOST:
                raise KVLostError(final.error.message)
            if not is_lost(final):
                raise_for_error(final)
                return True
            journey.lost(f"{replica_id} gave the request up")
            self._pool.note_failure(replica_id, journey.reason)
        finally:
            self._streams.leave(stream)
            reservation.release()
        self._counters.num_migrations += journey.num_losses <= self._limit
        logger.warning(
            "decode lost: request_id=%s num_output_tokens=%d: %s",
            generation.name_in_logs,
            len(generation.output_token_ids),
            journey.reason,
        )
        return _leaves(generation, journey.reason)

    def _note_unavailable(self, error: WorkerUnavailableError, journey: Journey) -> bool:
        """Note that a replica is gone or does not answer. False: the request never reached it, so this is no
        migration."""
        if not error.was_called:
            self._pool.note_gone(error.replica_id)
            journey.num_moves += 1
            return False
        journey.lost(str(error))
        self._pool.note_failure(error.replica_id, error.reason)
        return not isinstance(error, StreamNotBegunError)

    def _note_refusal(self, error: WorkerRefusedError, replica_id: str, journey: Journey) -> None:
        """Note that a replica refused a request. The request never ran there, so it was not moved away.

        Raises:
            RouterError: Any other replica would refuse it too.
        """
        if not is_retryable(error):
            raise refusal_error(error) from error
        if error.code == DRAINING:
            self._pool.note_draining(replica_id)
            journey.num_moves += 1
            return
        if error.code == QUEUE_FULL:
            journey.turned_away(str(error))
            return
        journey.lost(str(error), failure=refusal_error(error))
        logger.info("decode refused: replica_id=%s code=%s: %s", replica_id, error.code, error)
        if error.code == ENGINE_DEAD:
            self._pool.note_failure(replica_id, journey.reason)

    async def _reserve(self, generation: Generation, journey: Journey) -> Reservation:
        is_refused = journey.is_turned_away or journey.failure is not None
        if is_refused and not self._pool.has_any(journey.tried, Work.STREAM):
            # Every remaining replica has refused. A full one, or one that still has the request, needs a moment.
            num_refusals = journey.num_full if journey.is_turned_away else journey.num_losses
            await asyncio.sleep(self._settings.full_wait_s(num_refusals))
            if journey.is_turned_away:
                journey.tried.clear()
        num_tokens = len(generation.request.prompt_token_ids) + len(generation.output_token_ids)
        num_blocks = self._pool.blocks_for(num_tokens)
        replica = self._target(journey, num_blocks)
        is_told = replica is not None
        if replica is None:
            replica = await self._pool.choose_or_wait(generation.demand, journey.tried, Work.STREAM)
        if generation.trace is not None:
            name, reason = replica.replica_id, "where it was told to go" if is_told else None
            choice = policy_choice(self._pool, work=Work.STREAM, chosen=name, reason=reason)
            generation.trace.choose(choice)
        is_prompt = not generation.output_token_ids and journey.usable_kv(0) is None
        num_waiting = num_tokens - self._pool.num_cached_tokens(replica, generation.demand) if is_prompt else 0
        return self._pool.reserve(replica, num_blocks=num_blocks, num_tokens=num_waiting)

    def _target(self, journey: Journey, num_blocks: int) -> Replica | None:
        """The replica that an order named, used once; None if it is gone or full."""
        name, journey.target = journey.target, None
        replica = self._pool.get(name) if name is not None else None
        if replica is None or not replica.takes_requests or replica.num_available_blocks < num_blocks:
            return None
        return replica

    async def _run_on(
        self,
        generation: Generation,
        request: GenerateRequest,
        reservation: Reservation,
        kv_transfer: KVTransferParams | None,
        kv_lost_policy: str,
    ) -> TokenDelta:
        """Run the request on one replica, and return its last delta."""

        def on_delta(delta: TokenDelta) -> None:
            # The first tokens show that the replica's reports count this request, so the reservation ends.
            reservation.release()
            reason = delta.finish_reason
            is_good = reason is None or reason is FinishReason.STOP or reason is FinishReason.LENGTH
            generation.deliver(delta, reason if is_good else None)

        limit = None
        if kv_transfer is not None:
            limit = recompute_limit(
                kv_lost_policy,
                prefill=self._prefill_pool,
                decode=reservation.replica,
                num_prompt_tokens=len(generation.request.prompt_token_ids),
            )

        def make_request(client_id: str) -> GenerateRequest:
            return replace(
                request,
                output_token_ids=tuple(generation.output_token_ids),
                hand_over=False,
                kv_transfer=kv_transfer,
                client_id=client_id,
                max_recomputed_tokens=limit,
                trace=generation.trace_context,
            )

        return await self._link.run(reservation, make_request, on_delta, generation.note)


def _trace_stay(generation: Generation, journey: Journey, *, where: str, has_kv: bool) -> None:
    if generation.trace is not None:
        name = journey.part(is_begun=bool(generation.output_token_ids), has_kv=has_kv)
        call = call_name(hands_over=False, goes_on=has_kv or bool(generation.output_token_ids))
        generation.trace.enter_worker(name, where=where, call=call)


def _trace_move(generation: Generation, order: MoveOrder | None) -> None:
    if generation.trace is not None:
        generation.trace.note(reason="drain" if order is None else order.reason.value)


def _leaves(generation: Generation, reason: str) -> bool:
    """Note that the request must go on elsewhere: its replica failed, is gone, or refused it."""
    if generation.trace is not None:
        generation.trace.enter("recovery", reason=reason)
    return False


def decode_failed(journey: Journey, *, retry_after_s: float) -> WorkerFailedError:
    """The error that the caller gets when a request was lost too often."""
    num_lost = f"{journey.num_losses} replica{'s' if journey.num_losses != 1 else ''}"
    return WorkerFailedError(
        f"decode failed on {num_lost}, at last with: {journey.reason or 'too many replicas were drained'}",
        code="decode_failed",
        retry_after_s=retry_after_s,
    )
