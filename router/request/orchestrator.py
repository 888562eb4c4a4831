"""Runs a request: reserves room on a decode replica, has a prefill replica compute the prompt, then decodes.

Every end of a request (its last token, a stop string, an error, a client that disconnected, its deadline) takes the
same code path, which leaves nothing of the request on any worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from router.balance.streams import LiveStreams
from router.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RouterError,
    WorkerFailedError,
    is_refusal,
)
from router.key_shares import KeyShares
from router.pool.admission import Admission, RoomWish, Ticket
from router.pool.demand import Demand
from router.pool.elastic_placement import ElasticPlacement
from router.pool.replica import Reservation
from router.report.arrivals import RecentArrivals
from router.report.counters import RouterCounters
from router.request.decode_phase import DecodePhase
from router.request.generation import Generation
from router.request.journey import Journey
from router.request.kv_loss import KVLostError
from router.request.local_prompts import LocalPrompts
from router.request.prefill_phase import PrefillLostError, PrefillPhase
from router.settings import RouterSettings
from router.trace.choice import placed_choice
from router.trace.origin import Origin
from router.trace.recorder import TraceRecorder
from router.trace.request_trace import MAX_CHOICES
from router.wire.mailbox import Mailbox, Pacer
from router.wire.worker_errors import KV_LOST
from router.wire.worker_link import WorkerLink

logger = logging.getLogger(f"baton.{__name__}")

MAX_PREFILLS_AGAIN = 2
"""How often the prefill pool recomputes a prompt whose KV was lost; after that the decode replica does."""


class Orchestrator:
    """Runs requests on the two pools. Everything happens in one event loop."""

    def __init__(
        self,
        prefill: WorkerLink,
        decode: WorkerLink,
        *,
        streams: LiveStreams,
        settings: RouterSettings,
        counters: RouterCounters,
        recorder: TraceRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``recorder`` None traces nothing."""
        rules = settings.scaling
        self.arrivals = None if rules is None else RecentArrivals(window_s=rules.window_s, clock=clock)
        self._recorder = recorder
        self._prefill_link = prefill
        self._decode_link = decode
        self._prefill_pool = prefill.pool
        self._decode_pool = decode.pool
        self._settings = settings
        self._counters = counters
        self._local_prompts = LocalPrompts(
            settings, prefill_pool=prefill.pool, decode_pool=decode.pool, counters=counters
        )
        self._placement = (
            ElasticPlacement(decode.pool, settings=settings, num_new_tokens=counters.mean_output_tokens)
            if settings.is_elastic and decode.pool.is_united
            else None
        )
        self._admission = Admission(decode.pool, settings=settings, placement=self._placement)
        self._prefill_phase = PrefillPhase(
            prefill, notices=decode.notices, streams=streams, settings=settings, counters=counters
        )
        self._decode_phase = DecodePhase(
            decode, prefill_pool=prefill.pool, streams=streams, settings=settings, counters=counters
        )
        self._pacer = Pacer(max_delay_s=settings.max_write_delay_s)
        self._alive: KeyShares[asyncio.Task[None]] = KeyShares(settings.max_num_requests)

    @property
    def num_alive(self) -> int:
        """Requests in progress, including those that wait."""
        return len(self._alive)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room on a decode replica."""
        return self._admission.num_waiting

    def start(
        self, request: GenerateRequest, *, timeout_s: float, session_id: str | None = None, caller_id: str = ""
    ) -> Generation:
        """Accept one request; see ``start_choices``."""
        return self.start_choices([[request]], timeout_s=timeout_s, session_id=session_id, caller_id=caller_id)[0]

    def start_choices(
        self,
        prompts: Sequence[Sequence[GenerateRequest]],
        *,
        timeout_s: float,
        session_id: str | None = None,
        caller_id: str = "",
        origin: Origin | None = None,
    ) -> list[Generation]:
        """Accept all choices of some prompts, or none. Each accepted one ends exactly once, within ``timeout_s``.

        An accepted request is not refused later for lack of room; it waits. Requests of one ``session_id`` go to the
        same replicas if possible. The first choice of a prompt leads: the others wait for its first token and follow
        it to its replicas, so the prompt is computed and moved once, and all choices share its blocks. ``origin`` is
        what their trace is kept under.

        Raises:
            NoReplicaError: No replica could run them now.
            QueueFullError: They would exceed the limit of requests in progress or waiting.
        """
        num_choices = sum(map(len, prompts))
        owner = origin.owner if origin is not None else ""
        self.check_room(num_choices, owner=owner)
        demands = [Demand(choices[0], session_id=session_id, owner=owner) for choices in prompts]
        recorder = self._recorder if self._recorder is not None and self._recorder.wants(origin) else None
        for demand in demands[:MAX_CHOICES]:
            demand.is_traced = recorder is not None
        try:
            tickets = self._enter(prompts, demands)
        except QueueFullError:
            self._counters.num_refused += num_choices
            raise
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        started: list[Generation] = []
        for choices, demand, held in zip(prompts, demands, tickets, strict=True):
            leader: Generation | None = None
            for request, ticket in zip(choices, held, strict=True):
                generation = Generation(
                    request=request,
                    demand=demand,
                    timeout_s=timeout_s,
                    deadline_s=deadline_s,
                    caller_id=caller_id,
                    mailbox=Mailbox(self._pacer),
                    leader=leader,
                    ticket=ticket,
                )
                generation.others = self._others(generation)
                if recorder is not None and origin is not None:
                    num_tokens = demand.num_tokens if leader is None else 0
                    if not started:
                        sampling = request.sampling
                        generation.trace = recorder.begin(origin, num_prompt_tokens=num_tokens, sampling=sampling)
                    elif (first := started[0].trace) is not None:
                        generation.trace = first.beside(num_prompt_tokens=num_tokens)
                self._begin(generation)
                leader = leader or generation
                started.append(generation)
        return started

    def _others(self, generation: Generation) -> list[Generation]:
        """Generations that receive the outputs of a beam search other than the best one."""
        beams = generation.request.sampling.beams
        others = range(1, beams.num_results if beams is not None else 1)
        return [replace(generation, mailbox=Mailbox(self._pacer), leader=None, ticket=None) for _ in others]

    def _begin(self, generation: Generation) -> None:
        self._counters.num_requests += 1
        self._counters.num_prompt_tokens += len(generation.request.prompt_token_ids)
        if self.arrivals is not None:
            request = generation.request
            generation.arrival = self.arrivals.note(len(request.prompt_token_ids), request.promise)
        task = generation.start(self._drive(generation))
        self._alive.add(task, owner=generation.demand.owner)
        task.add_done_callback(lambda ended: self._forget(ended, generation))

    def _enter(
        self, prompts: Sequence[Sequence[GenerateRequest]], demands: Sequence[Demand]
    ) -> list[Sequence[Ticket | None]]:
        """One ticket a request for room on a decode replica; None for requests that need no decode replica."""
        wishes = [self._wish(choices, demand) for choices, demand in zip(prompts, demands, strict=True)]
        entered = iter(self._admission.enter([wish for wish in wishes if wish is not None]))
        return [
            next(entered) if wish is not None else [None] * len(choices)
            for choices, wish in zip(prompts, wishes, strict=True)
        ]

    def _wish(self, choices: Sequence[GenerateRequest], demand: Demand) -> RoomWish | None:
        """The room that the choices of one prompt need; the choices do not differ in what decides it."""
        request, pool = choices[0], self._decode_pool
        max_tokens, num_tokens = request.sampling.max_tokens, len(request.prompt_token_ids)
        if max_tokens <= 1 and num_tokens > self._settings.local_prefill_tokens:
            return None
        num_blocks = pool.blocks_for(num_tokens + min(max_tokens, self._settings.growth_headroom_tokens))
        num_own = num_blocks - (pool.blocks_for(num_tokens + 1) - 1)
        if request.sampling.beams is not None:
            num_blocks += (request.sampling.beams.width - 1) * num_own
        return RoomWish(
            demand=demand,
            num_blocks=num_blocks,
            num_own_blocks=num_own,
            priority=request.priority,
            num_choices=len(choices),
        )

    def check_room(self, num_requests: int = 1, *, owner: str | None = None) -> None:
        """Refuse now what ``start`` would refuse. The limit that protects others applies only if ``owner`` is given.

        Raises:
            QueueFullError: ``num_requests`` more would exceed the limit of requests in progress.
        """
        if num_requests > self._alive.num_left(owner):
            self._counters.num_refused += num_requests
            raise QueueFullError(
                f"too many requests in progress: {self._alive.limit_for(num_requests)}; try again later",
                retry_after_s=self._settings.retry_after_s,
            )

    async def close(self) -> None:
        """End all requests, and wait until the workers have been told."""
        for task in tuple(self._alive):
            task.cancel()
        await asyncio.gather(*tuple(self._alive), return_exceptions=True)
        await self._admission.close()
        await asyncio.gather(self._prefill_link.close(), self._decode_link.close())

    def _forget(self, task: asyncio.Task[None], generation: Generation) -> None:
        self._alive.discard(task)
        if generation.ticket is not None:
            self._admission.leave(generation.ticket)
        if not generation.mailbox.is_ended:
            # A task cancelled before its first step never ran _drive.
            self._counters.num_cancelled += 1
            generation.end(RequestCancelledError())
            self._end_trace(generation, RequestCancelledError())

    async def _drive(self, generation: Generation) -> None:
        counters = self._counters
        error: RouterError | None = None
        try:
            async with asyncio.timeout_at(generation.deadline_s):
                await self._live(generation)
            counters.num_finished += 1
        except asyncio.CancelledError:
            if generation.is_satisfied:
                counters.num_finished += 1
            else:
                counters.num_cancelled += 1
            error = RequestCancelledError()
            raise
        except RouterError as caught:
            if is_refusal(caught, num_output_tokens=len(generation.output_token_ids)):
                counters.num_refused += 1
            elif isinstance(caught, InvalidRequestError):
                counters.num_invalid += 1
            else:
                counters.num_failed += 1
            error = caught
        except TimeoutError:
            counters.num_failed += 1
            error = DeadlineExceededError(timeout_s=generation.timeout_s, stage=generation.stage)
        except Exception:
            counters.num_failed += 1
            logger.exception("request failed: request_id=%s", generation.name_in_logs)
            error = InternalError()
        finally:
            counters.num_generated_tokens += len(generation.output_token_ids)
            if generation.arrival is not None:
                generation.arrival.num_output_tokens = len(generation.output_token_ids)
            generation.end(error)
            self._end_trace(generation, error)

    def _end_trace(self, generation: Generation, error: RouterError | None) -> None:
        if generation.trace is None or self._recorder is None:
            return
        if error is None or generation.is_satisfied:
            reason = "stop" if generation.is_satisfied else ""
            self._recorder.end(generation.trace, "finished", finish_reason=reason)
        elif isinstance(error, RequestCancelledError):
            self._recorder.end(generation.trace, "aborted", finish_reason="abort")
        else:
            generation.trace.note(error=error.message)
            self._recorder.end(generation.trace, "failed", finish_reason="error")

    async def _live(self, generation: Generation) -> None:
        await _wait_for_leader(generation)
        reservation = await self._reserve(generation)
        try:
            if reservation is not None and self._local_prompts.takes(generation, reservation):
                if generation.prompt_room is not None:  # no prefill replica computes the prompt
                    generation.prompt_room.release()
                await self._decode_phase.run(generation, Journey(), reservation)
                return
            try:
                replica_id, delta = await self._prefill_phase.run(generation, reservation)
            except PrefillLostError as error:
                logger.warning("decode computes the prompt: request_id=%s: %s", generation.name_in_logs, error)
                self._counters.num_local_prefills += 1
                await self._decode_phase.run(generation, Journey(), reservation)
                return
            is_handed_over = delta.finish_reason is FinishReason.HANDED_OVER
            if generation.num_head_tokens:
                generation.is_local = True  # the decode replica computes the rest of the prompt
                generation.num_cached_tokens = delta.num_cached_tokens
                if generation.trace is not None:
                    generation.trace.finish_head(delta, num_tokens=generation.num_head_tokens)
            else:
                self._deliver(generation, delta, is_handed_over=is_handed_over)
            if is_handed_over:
                await self._decode(generation, delta, reservation, prefill_replica_id=replica_id)
        finally:
            self._decode_link.notices.withdraw(generation.request_id)
            if reservation is not None:
                reservation.release()
            if generation.prompt_room is not None:
                generation.prompt_room.release()

    def _deliver(self, generation: Generation, delta: TokenDelta, *, is_handed_over: bool) -> None:
        if is_handed_over:
            generation.deliver_first(delta, may_hold=self._settings.hold_first_tokens)
        else:
            generation.deliver(delta, delta.finish_reason)

    async def _reserve(self, generation: Generation) -> Reservation | None:
        """Reserve room for the KV on a decode replica; None for a request that needs no decode replica."""
        if generation.ticket is None:
            self._place_prompt(generation)
            return None
        beside = generation.leader.decode_replica if generation.leader is not None else None
        reservation = await self._admission.room(generation.ticket, beside=beside)
        generation.decode_replica = reservation.replica
        placed, generation.prompt_room = generation.ticket.placed, generation.ticket.prompt_room
        generation.placed, reason = placed, placed.reason if placed is not None else None
        if self._placement is not None or reason is not None:
            self._counters.note_placed(reason)
        if generation.trace is not None and placed is not None:
            generation.trace.choose(placed_choice(self._decode_pool, placed))
        return reservation

    def _place_prompt(self, generation: Generation) -> None:
        """Reserve a turn for a request without decode, if any worker may compute prompts."""
        placed = self._placement.place_prompt(generation.demand) if self._placement is not None else None
        if placed is None or placed.prompt is None:
            return
        self._counters.note_placed(placed.reason)
        if generation.trace is not None:
            generation.trace.choose(placed_choice(self._decode_pool, placed))
        generation.prompt_room = self._prefill_pool.reserve(placed.prompt, num_tokens=placed.num_prompt_tokens)

    async def _decode(
        self, generation: Generation, delta: TokenDelta, reservation: Reservation | None, *, prefill_replica_id: str
    ) -> None:
        journey = Journey(kv_transfer=delta.kv_transfer, num_output_tokens=len(generation.output_token_ids))
        num_again = 0
        while True:
            is_tried_again = num_again < MAX_PREFILLS_AGAIN and not generation.num_head_tokens
            journey.kv_lost_policy = self._settings.kv_lost_policy if is_tried_again else "recompute"
            is_lease_certain_to_end = False
            try:
                is_lease_certain_to_end = await self._decode_phase.run(generation, journey, reservation)
                return
            except KVLostError as error:
                logger.warning("KV lost: request_id=%s: %s", generation.name_in_logs, error)
                if generation.trace is not None:
                    generation.trace.enter("recompute", reason=str(error))
                if journey.kv_lost_policy == "fail":
                    raise WorkerFailedError(str(error), code=KV_LOST, retry_after_s=1.0) from error
            finally:
                if not is_lease_certain_to_end:
                    self._prefill_link.aborts.abort(prefill_replica_id, delta.request_id)
            num_again += 1
            reservation = None  # was released when the request left its replica
            self._counters.num_prefill_retries += 1
            try:
                # The first token is computed again, and is the same; it was delivered already.
                prefill_replica_id, delta = await self._prefill_phase.run(generation, None)
                journey.kv_transfer = delta.kv_transfer
            except PrefillLostError:
                journey.kv_transfer = None


async def _wait_for_leader(generation: Generation) -> None:
    """If this is a later choice of a prompt, wait until the first choice has begun."""
    if generation.leader is not None:
        await generation.leader.begun.wait()
        if generation.trace is not None:
            generation.trace.enter("queue")
