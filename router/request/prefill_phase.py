"""The first half of a request's life: a prefill replica computes its prompt and samples its first token."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from engine.contract.messages import GenerateRequest, TokenDelta
from engine.contract.role import Work
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, PeerIdentity
from router.balance.streams import LiveStreams, was_given_back
from router.errors import RouterError, WorkerFailedError
from router.pool.replica import Replica, Reservation
from router.pool.workers import WorkerError, WorkerRefusedError, WorkerUnavailableError
from router.report.counters import RouterCounters
from router.request.decode_phase import MAX_MOVES
from router.request.generation import Generation
from router.settings import RouterSettings
from router.telemetry.span_names import PREFILL
from router.trace.choice import policy_choice
from router.wire.early_notices import EarlyNotices
from router.wire.worker_errors import (
    DRAINING,
    ENGINE_DEAD,
    QUEUE_FULL,
    is_lost,
    is_retryable,
    raise_for_error,
    refusal_error,
)
from router.wire.worker_link import WorkerLink

logger = logging.getLogger(f"baton.{__name__}")


@dataclass(slots=True)
class Loss:
    """Why the last attempt failed; ``failure`` is the error for the caller, if it says more than that one was lost.

    Refusals by draining replicas, or by replicas with full queues, do not count as losses. Nor does an order that moved
    the prompt from a queue to the replica ``target``.
    """

    tried: set[str] = field(default_factory=set)
    num_attempts: int = 0
    num_losses: int = 0
    num_drained: int = 0
    num_full: int = 0
    num_moves: int = 0
    target: str | None = None
    reason: str = ""
    failure: RouterError | None = None


class PrefillLostError(Exception):
    """No prefill replica computes the prompt, so the decode replica should."""


class PrefillPhase:
    """Runs prompts on prefill replicas; tries another one when one is lost."""

    def __init__(
        self,
        link: WorkerLink,
        *,
        notices: EarlyNotices,
        streams: LiveStreams,
        settings: RouterSettings,
        counters: RouterCounters,
    ) -> None:
        """``notices`` tell decode replicas to begin early loads."""
        self._streams = streams
        self._link = link
        self._pool = link.pool
        self._notices = notices
        self._settings = settings
        self._counters = counters

    async def run(self, generation: Generation, decode: Reservation | None) -> tuple[str, TokenDelta]:
        """Compute the prompt, and return the prefill replica and the first token; ``decode`` is the decode replica.

        Raises:
            RouterError: No prefill replica succeeded.
            PrefillLostError: A decode replica should compute the prompt.
        """
        generation.stage = "prefill"
        policy = self._settings.prefill_lost_policy
        num_attempts = self._settings.max_prefill_attempts if policy == "retry" else 1
        stream_id = decode.replica.replica_id if decode is not None else None
        loss = Loss()
        while loss.num_losses < num_attempts and loss.num_drained <= MAX_MOVES:
            if policy != "fail" and not self._pool.has_any(work=Work.PROMPT):
                raise PrefillLostError(loss.reason or "no prefill replica accepts requests")
            if generation.num_head_tokens and (loss.num_attempts or self._first_choice(generation) is None):
                raise PrefillLostError(loss.reason or "the worker that computed its beginning accepts no requests")
            replica = await self._choose(generation, loss, stream_id=stream_id)
            if replica.replica_id == stream_id:
                raise PrefillLostError(loss.reason or "no other replica accepts requests")
            if decode is not None and generation.leader is None and not generation.num_head_tokens:
                self._give_notice(generation, source=replica, decode_replica_id=decode.replica.replica_id)
            if (trace := generation.trace) is not None:
                part = "recompute" if generation.output_token_ids else "prefill"
                trace.enter_worker(part, where=replica.replica_id, call=PREFILL, hands_over=stream_id is not None)
            delta = await self._stay(generation, replica, loss, stream_id=stream_id)
            if delta is not None:
                return replica.replica_id, delta
            if loss.target is None:
                _tell(generation, loss)
        if policy == "recompute":
            raise PrefillLostError(loss.reason)
        raise loss.failure or WorkerFailedError(
            f"prefill failed {times(loss.num_losses)}, at last with: {loss.reason}",
            code="prefill_failed",
            retry_after_s=self._settings.retry_after_s,
        )

    async def _choose(self, generation: Generation, loss: Loss, *, stream_id: str | None) -> Replica:
        """The replica for the next attempt: its leader's, the one where it was placed, or the policy's choice.

        The request's decode replica is chosen only if there is no other one.

        Raises:
            NoReplicaError: No replica was healthy for ``recovery_wait_s``.
        """
        self._counters.num_prefill_retries += loss.num_attempts > 0 and loss.target is None
        replica = self._target(loss) if loss.num_attempts else self._first_choice(generation)
        if loss.num_full and not self._pool.has_any(loss.tried, Work.PROMPT):
            generation.stage = "prefill, whose workers' queues are full"
            await asyncio.sleep(self._settings.full_wait_s(loss.num_full))
            loss.tried.clear()
        if replica is None:
            avoided = loss.tried if stream_id is None else loss.tried | {stream_id}
            replica = await self._pool.choose_or_wait(generation.demand, avoided, Work.PROMPT)
            if generation.trace is not None:
                name = replica.replica_id
                generation.trace.choose(policy_choice(self._pool, work=Work.PROMPT, chosen=name, other=stream_id))
        loss.num_attempts += 1
        loss.tried.add(replica.replica_id)
        generation.prefill_replica = replica
        return replica

    def _target(self, loss: Loss) -> Replica | None:
        """The replica that an order named, used once; None if it is gone."""
        name, loss.target = loss.target, None
        replica = self._pool.get(name) if name is not None else None
        return replica if replica is not None and self._pool.is_usable(replica) else None

    def _first_choice(self, generation: Generation) -> Replica | None:
        """The replica that already has this prompt's KV, or that has a turn for it, if it can be used."""
        if generation.leader is not None and generation.leader.prefill_replica is not None:
            replica: Replica | None = generation.leader.prefill_replica
        else:
            replica = generation.prompt_room.replica if generation.prompt_room is not None else None
        return replica if replica is not None and self._pool.is_usable(replica) else None

    async def _stay(
        self, generation: Generation, replica: Replica, loss: Loss, *, stream_id: str | None
    ) -> TokenDelta | None:
        """The first token from one replica. None: try another one; ``loss`` then says why, or which one.

        While the prompt waits there, an order may move it.
        """
        request = generation.next_run(replica.replica_id)
        stream = self._streams.enter(
            request,
            generation.output_token_ids,
            replica_id=replica.replica_id,
            num_moves=loss.num_moves,
            prompt=None if generation.num_head_tokens or generation.output_token_ids else generation.demand,
            first_due_s=generation.first_due_s,
            is_handed_over=True,
            goes_on_at=stream_id,
        )
        try:
            delta = await self._try(generation, request, replica, loss)
        finally:
            self._streams.leave(stream)
        if delta is None or not was_given_back(delta):
            return delta
        order = stream.order_of(delta)
        if order is None:
            loss.num_drained += 1
            loss.reason = f"{replica.replica_id} is draining"
            return None
        self._counters.count_move(order.reason)
        if generation.trace is not None:
            generation.trace.note(reason=order.reason.value)
        loss.num_moves += 1
        loss.tried, loss.target = {replica.replica_id}, order.target
        return None

    async def _try(
        self, generation: Generation, request: GenerateRequest, replica: Replica, loss: Loss
    ) -> TokenDelta | None:
        """The first token from one replica. None: try another one; ``loss`` then says why."""
        try:
            delta = await self._run_on(generation, request, replica)
        except WorkerRefusedError as error:
            if not is_retryable(error):
                raise refusal_error(error) from error
            loss.reason = str(error)
            if error.code == QUEUE_FULL and self._settings.prefill_lost_policy != "recompute":
                loss.num_full += 1
                return None
            if error.code == DRAINING:
                loss.num_drained += 1
                self._pool.note_draining(replica.replica_id)
            else:
                loss.num_losses += 1
                loss.failure = refusal_error(error)
            if error.code == ENGINE_DEAD:
                self._pool.note_failure(replica.replica_id, loss.reason)
            return None
        except WorkerError as error:
            loss.reason, loss.failure = str(error), None
            if isinstance(error, WorkerUnavailableError) and not error.was_called:
                loss.num_drained += 1
                self._pool.note_gone(replica.replica_id)
                return None
        else:
            if not is_lost(delta):
                raise_for_error(delta)
                return delta
            loss.reason, loss.failure = f"{replica.replica_id} gave the request up", None
        loss.num_losses += 1
        self._pool.note_failure(replica.replica_id, loss.reason)
        return None

    def _give_notice(self, generation: Generation, *, source: Replica, decode_replica_id: str) -> None:
        """Let the decode replica load the prompt's KV while it is computed, if that takes several steps."""
        info, request = source.info, generation.request
        if info is None or not 0 < info.stream_chunk_tokens < len(request.prompt_token_ids):
            return
        remaining_s = generation.deadline_s - asyncio.get_running_loop().time()
        stream = KVStreamParams(
            protocol_version=PROTOCOL_VERSION,
            source=PeerIdentity(engine_id=info.engine_id, incarnation=info.incarnation),
            timeout_s=min(self._settings.prefill_timeout_s, remaining_s),
        )
        self._notices.give(decode_replica_id, replace(request, kv_stream=stream, prediction_token_ids=None))

    def _turn(self, generation: Generation, replica: Replica) -> Reservation:
        """The request's place in a replica's queue: the one reserved when it was placed there, or a new one."""
        kept, generation.prompt_room = generation.prompt_room, None
        if kept is not None and kept.replica is replica:
            return kept
        if kept is not None:
            kept.release()
        num_cached = self._pool.num_cached_tokens(replica, generation.demand)
        return self._pool.reserve(replica, num_tokens=generation.demand.num_tokens - num_cached)

    async def _run_on(self, generation: Generation, request: GenerateRequest, replica: Replica) -> TokenDelta:
        def make_request(client_id: str) -> GenerateRequest:
            return replace(
                _head(request, generation.num_head_tokens) if generation.num_head_tokens else request,
                hand_over=True,
                client_id=client_id,
                prediction_token_ids=None,
                trace=generation.trace_context,
            )

        timeout_s = self._settings.prefill_timeout_s
        reservation = self._turn(generation, replica)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link.run(reservation, make_request, lambda _: None, generation.note)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            raise WorkerUnavailableError(replica_id=replica.replica_id, reason=reason) from None
        finally:
            reservation.release()


def _head(request: GenerateRequest, num_tokens: int) -> GenerateRequest:
    """The request for the first part of a split prompt. The token that it samples is not used."""
    return replace(
        request,
        prompt_token_ids=request.prompt_token_ids[:num_tokens],
        sampling=type(request.sampling)(max_tokens=2, ignore_eos=True),
    )


def _tell(generation: Generation, loss: Loss) -> None:
    """Log and trace that a prompt goes elsewhere because of a loss."""
    if generation.trace is not None:
        generation.trace.enter("recovery", reason=loss.reason)
    logger.warning("prefill failed: request_id=%s: %s", generation.name_in_logs, loss.reason)


def times(number: int) -> str:
    """The number in words for a message: once, or N times."""
    return "once" if number == 1 else f"{number} times"
