"""One request's life: room on a decode replica, the prompt on a prefill replica, then token after token.

Whatever ends a request (its last token, a stop string, an error, a client that left, its deadline) leaves through one
place, and nothing of it stays on any worker.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from engine.messages import FinishReason, GenerateRequest, TokenDelta
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, PeerIdentity
from router.admission import Admission
from router.counters import RouterCounters
from router.decode_phase import MAX_MOVES, DecodePhase
from router.demand import Demand
from router.errors import (
    DeadlineExceededError,
    InternalError,
    QueueFullError,
    RequestCancelledError,
    RouterError,
    WorkerFailedError,
    is_refusal,
)
from router.generation import Generation
from router.journey import Journey
from router.kv_loss import KVLostError
from router.local_prompts import LocalPrompts
from router.mailbox import Mailbox
from router.pacer import Pacer
from router.replica import Replica, Reservation
from router.settings import RouterSettings
from router.worker_errors import DRAINING, ENGINE_DEAD, KV_LOST, is_lost, is_retryable, raise_for_error, refusal_error
from router.worker_link import WorkerLink
from router.workers import WorkerError, WorkerRefusedError, WorkerUnavailableError

logger = logging.getLogger(f"baton.{__name__}")

MAX_PREFILLS_AGAIN = 2
"""How often a prompt whose KV was lost is computed on the prefill pool again; after that the decode replica does it."""


@dataclass(slots=True)
class Loss:
    """Why the last attempt failed; ``failure`` is what the caller should see, where that is more than a loss.

    Refusals by replicas that are drained are no losses.
    """

    num_losses: int = 0
    num_drained: int = 0
    reason: str = ""
    failure: RouterError | None = None


class PrefillLostError(Exception):
    """No prefill replica computes the prompt: the decode replica shall."""


class Orchestrator:
    """Runs requests on the two pools. Everything happens in one event loop."""

    def __init__(
        self,
        prefill: WorkerLink,
        decode: WorkerLink,
        *,
        settings: RouterSettings,
        counters: RouterCounters,
    ) -> None:
        self._prefill_link = prefill
        self._decode_link = decode
        self._prefill_pool = prefill.pool
        self._decode_pool = decode.pool
        self._settings = settings
        self._counters = counters
        self._local_prompts = LocalPrompts(
            settings, prefill_pool=prefill.pool, decode_pool=decode.pool, counters=counters
        )
        self._admission = Admission(decode.pool, settings=settings)
        self._decode_phase = DecodePhase(decode, prefill_pool=prefill.pool, settings=settings, counters=counters)
        self._pacer = Pacer(max_delay_s=settings.max_write_delay_s)
        self._alive: set[asyncio.Task[None]] = set()

    @property
    def num_alive(self) -> int:
        """Requests in progress, those that wait included."""
        return len(self._alive)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room on a decode replica."""
        return self._admission.num_waiting

    def start(
        self,
        request: GenerateRequest,
        *,
        timeout_s: float,
        session_id: str | None = None,
        caller_id: str = "",
        leader: Generation | None = None,
    ) -> Generation:
        """Accept a request: from here on it ends exactly once, within ``timeout_s``.

        Requests of one ``session_id`` go to the same replicas where that is possible. With a ``leader``, whose prompt
        is the same, it waits until that one has its first token, and goes where that one went: the prompt is computed
        and moved once, and both share its blocks (O5).

        Raises:
            QueueFullError: As many as allowed are in progress.
        """
        self.check_room()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        generation = Generation(
            request=request,
            demand=Demand(request, session_id=session_id),
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            caller_id=caller_id,
            mailbox=Mailbox(self._pacer),
            leader=leader,
        )
        self._counters.num_requests += 1
        self._counters.num_prompt_tokens += len(request.prompt_token_ids)
        task = generation.start(self._drive(generation))
        self._alive.add(task)
        task.add_done_callback(lambda ended: self._forget(ended, generation))
        return generation

    def check_room(self, num_requests: int = 1) -> None:
        """Refuse now what ``start`` would refuse.

        Raises:
            QueueFullError: With so many requests more, there would be more in progress than allowed.
        """
        limit = self._settings.max_num_requests
        if len(self._alive) + num_requests > limit:
            self._counters.num_refused += num_requests
            raise QueueFullError(
                f"too many requests in progress: the limit is {limit}; try again later",
                retry_after_s=self._settings.retry_after_s,
            )

    async def close(self) -> None:
        """End all requests, and wait until the workers were told."""
        for task in tuple(self._alive):
            task.cancel()
        await asyncio.gather(*tuple(self._alive), return_exceptions=True)
        await self._admission.close()
        await asyncio.gather(self._prefill_link.close(), self._decode_link.close())

    def _forget(self, task: asyncio.Task[None], generation: Generation) -> None:
        self._alive.discard(task)
        if not generation.mailbox.is_ended:
            # A task cancelled before its first step never ran _drive.
            self._counters.num_cancelled += 1
            generation.end(RequestCancelledError())

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
            generation.end(error)

    async def _live(self, generation: Generation) -> None:
        if generation.leader is not None:
            await generation.leader.begun.wait()
        reservation = await self._reserve(generation)
        try:
            if reservation is not None and self._local_prompts.takes(generation, reservation):
                await self._decode_phase.run(generation, Journey(), reservation)
                return
            try:
                replica_id, delta = await self._prefill(generation, reservation)
            except PrefillLostError as error:
                logger.warning("decode computes the prompt: request_id=%s: %s", generation.name_in_logs, error)
                self._counters.num_local_prefills += 1
                await self._decode_phase.run(generation, Journey(), reservation)
                return
            is_handed_over = delta.finish_reason is FinishReason.HANDED_OVER
            generation.deliver(delta, None if is_handed_over else delta.finish_reason)
            if is_handed_over:
                await self._decode(generation, delta, reservation, prefill_replica_id=replica_id)
        finally:
            self._decode_link.notices.withdraw(generation.request_id)
            if reservation is not None:
                reservation.release()

    async def _reserve(self, generation: Generation) -> Reservation | None:
        """Room for the KV on a decode replica; None for a request that no decode replica will see."""
        request = generation.request
        if request.sampling.max_tokens <= 1 and len(request.prompt_token_ids) > self._settings.local_prefill_tokens:
            return None
        num_growth = min(request.sampling.max_tokens, self._settings.growth_headroom_tokens)
        num_blocks = self._decode_pool.blocks_for(len(request.prompt_token_ids) + num_growth)
        reservation = self._reserve_beside_leader(generation, num_blocks)
        if reservation is None:
            reservation = await self._admission.reserve(
                generation.demand, num_blocks=num_blocks, priority=request.priority
            )
        generation.decode_replica = reservation.replica
        return reservation

    def _reserve_beside_leader(self, generation: Generation, num_blocks: int) -> Reservation | None:
        """Room where the blocks of the same prompt are already, for all but those; None where there is none."""
        replica = generation.leader.decode_replica if generation.leader is not None else None
        if replica is None or not self._decode_pool.is_usable(replica):
            return None
        # Full blocks are shared; the last one, which the output goes on in, each has for itself.
        num_full = self._decode_pool.blocks_for(len(generation.request.prompt_token_ids) + 1) - 1
        num_own = num_blocks - num_full
        if replica.num_available_blocks < num_own and not replica.is_idle:
            return None
        return self._decode_pool.reserve(replica, num_blocks=num_own)

    async def _prefill(self, generation: Generation, decode: Reservation | None) -> tuple[str, TokenDelta]:
        """The first token, from whichever prefill replica manages it; ``decode`` is where its successors will be.

        Raises:
            RouterError: None of them did.
            PrefillLostError: A decode replica should compute the prompt.
        """
        generation.stage = "prefill"
        policy = self._settings.prefill_lost_policy
        num_attempts = self._settings.max_prefill_attempts if policy == "retry" else 1
        tried: set[str] = set()
        loss = Loss()
        while loss.num_losses < num_attempts and loss.num_drained <= MAX_MOVES:
            if policy != "fail" and not self._prefill_pool.has_any():
                raise PrefillLostError(loss.reason or "no prefill replica takes requests")
            self._counters.num_prefill_retries += bool(tried)
            replica = None if tried else self._leaders_prefill(generation)
            if replica is None:
                replica = await self._prefill_pool.choose_or_wait(generation.demand, tried, is_retry=bool(tried))
            tried.add(replica.replica_id)
            generation.prefill_replica = replica
            if decode is not None and generation.leader is None:
                self._give_notice(generation, source=replica, decode_replica_id=decode.replica.replica_id)
            delta = await self._try_prefill(generation, replica, loss)
            if delta is not None:
                return replica.replica_id, delta
            logger.warning("prefill failed: request_id=%s: %s", generation.name_in_logs, loss.reason)
        if policy == "recompute":
            raise PrefillLostError(loss.reason)
        raise loss.failure or WorkerFailedError(
            f"prefill failed {times(loss.num_losses)}, at last with: {loss.reason}",
            code="prefill_failed",
            retry_after_s=self._settings.retry_after_s,
        )

    def _leaders_prefill(self, generation: Generation) -> Replica | None:
        """The replica that has the KV of the same prompt already, if it can be used."""
        replica = generation.leader.prefill_replica if generation.leader is not None else None
        return replica if replica is not None and self._prefill_pool.is_usable(replica) else None

    async def _try_prefill(self, generation: Generation, replica: Replica, loss: Loss) -> TokenDelta | None:
        """The first token from one replica; None when another one should be tried, and then ``loss`` says why."""
        try:
            delta = await self._prefill_on(generation, replica)
        except WorkerRefusedError as error:
            if not is_retryable(error):
                raise refusal_error(error) from error
            loss.reason = str(error)
            if error.code == DRAINING:
                loss.num_drained += 1
                self._prefill_pool.note_draining(replica.replica_id)
            else:
                loss.num_losses += 1
                loss.failure = refusal_error(error)
            if error.code == ENGINE_DEAD:
                self._prefill_pool.note_failure(replica.replica_id, loss.reason)
            return None
        except WorkerError as error:
            loss.reason, loss.failure = str(error), None
            if isinstance(error, WorkerUnavailableError) and not error.was_called:
                loss.num_drained += 1
                self._prefill_pool.note_gone(replica.replica_id)
                return None
        else:
            if not is_lost(delta):
                raise_for_error(delta)
                return delta
            loss.reason, loss.failure = f"{replica.replica_id} gave the request up", None
        loss.num_losses += 1
        self._prefill_pool.note_failure(replica.replica_id, loss.reason)
        return None

    def _give_notice(self, generation: Generation, *, source: Replica, decode_replica_id: str) -> None:
        """Let decode read the prompt while it is computed, if that takes more than one step."""
        info, request = source.info, generation.request
        if info is None or not 0 < info.stream_chunk_tokens < len(request.prompt_token_ids):
            return
        remaining_s = generation.deadline_s - asyncio.get_running_loop().time()
        stream = KVStreamParams(
            protocol_version=PROTOCOL_VERSION,
            source=PeerIdentity(engine_id=info.engine_id, incarnation=info.incarnation),
            timeout_s=min(self._settings.prefill_timeout_s, remaining_s),
        )
        self._decode_link.notices.give(decode_replica_id, replace(request, kv_stream=stream))

    async def _prefill_on(self, generation: Generation, replica: Replica) -> TokenDelta:
        def make_request(client_id: str) -> GenerateRequest:
            return replace(generation.request, hand_over=True, client_id=client_id)

        timeout_s = self._settings.prefill_timeout_s
        num_cached = self._prefill_pool.num_cached_tokens(replica, generation.demand)
        reservation = self._prefill_pool.reserve(replica, num_tokens=generation.demand.num_tokens - num_cached)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._prefill_link.run(reservation, make_request, lambda _: None)
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            raise WorkerUnavailableError(replica_id=replica.replica_id, reason=reason) from None
        finally:
            reservation.release()

    async def _decode(
        self, generation: Generation, delta: TokenDelta, reservation: Reservation | None, *, prefill_replica_id: str
    ) -> None:
        journey = Journey(kv_transfer=delta.kv_transfer, num_output_tokens=len(generation.output_token_ids))
        num_again = 0
        while True:
            journey.kv_lost_policy = self._settings.kv_lost_policy if num_again < MAX_PREFILLS_AGAIN else "recompute"
            is_lease_certain_to_end = False
            try:
                is_lease_certain_to_end = await self._decode_phase.run(generation, journey, reservation)
                return
            except KVLostError as error:
                # The reader released the lease, or it expires: an abort could overtake the prompt that is sent next.
                is_lease_certain_to_end = True
                logger.warning("KV lost: request_id=%s: %s", generation.name_in_logs, error)
                if journey.kv_lost_policy == "fail":
                    raise WorkerFailedError(str(error), code=KV_LOST, retry_after_s=1.0) from error
            finally:
                if not is_lease_certain_to_end:
                    self._prefill_link.aborts.abort(prefill_replica_id, generation.request_id)
            num_again += 1
            reservation = None  # it was released when the request left its replica
            self._counters.num_prefill_retries += 1
            try:
                # The same first token comes again; it was delivered already.
                prefill_replica_id, delta = await self._prefill(generation, None)
                journey.kv_transfer = delta.kv_transfer
            except PrefillLostError:
                journey.kv_transfer = None


def times(number: int) -> str:
    """Once, or so many times."""
    return "once" if number == 1 else f"{number} times"
