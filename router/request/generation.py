"""One sequence from its acceptance to its end, as its consumer holds it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from engine.contract.messages import DraftCounts, FinishReason, GenerateRequest, TokenDelta, Told
from engine.contract.tracing.request_timings import TraceContext
from router.errors import RouterError
from router.pool.admission import Ticket
from router.pool.demand import Demand
from router.pool.placing import Placed
from router.pool.replica import Replica, Reservation
from router.report.arrivals import Arrival
from router.report.milestones import Milestones
from router.trace.request_trace import RequestTrace
from router.wire.mailbox import Mailbox

HELD_SHARE = 0.9
LEAST_MARGIN_S = 0.02
"""So much of what was promised for a first token the token may wait for the next one, and no longer than until so many
seconds before: writing it, and whoever reads it, take some time too."""


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """Tokens come out of ``take``; ``cancel`` gives the request up and frees what it holds everywhere.

    ``output_token_ids`` are all tokens so far: another worker can continue from them. ``stage`` says what the request
    is waiting for, for error messages. ``deadline_s`` is in the event loop's time.
    ``caller_id`` is what the caller knows the request by, for logs.
    ``leader`` is the first sequence of the same prompt, if this is not the first; ``ticket`` stands for its room on a
    decode replica, None where it needs none; ``begun`` is set once the first token is there, or never will be; the
    replicas are those where the sequence went first. ``placed`` and ``prompt_room`` are its ticket's: where it goes,
    and its turn on the replica that computes its prompt. ``is_local``: the decode replica computes the prompt.
    ``trace`` is written as it goes; None where it is not traced. ``arrival`` is what is remembered of it to predict the
    load to come, where that is done.
    ``num_draft_tokens`` were verified on its way so far, and ``num_accepted_drafts`` of them became output.
    ``others`` get what a beam search found beside the best output, which is this one's: they have no life of their own.
    """

    request: GenerateRequest
    demand: Demand
    timeout_s: float
    deadline_s: float
    caller_id: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    is_satisfied: bool = False
    mailbox: Mailbox = field(default_factory=Mailbox)
    task: asyncio.Task[None] | None = None
    times: Milestones = field(default_factory=Milestones)
    leader: Generation | None = None
    ticket: Ticket | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    prefill_replica: Replica | None = None
    decode_replica: Replica | None = None
    placed: Placed | None = None
    prompt_room: Reservation | None = None
    is_local: bool = False
    others: list[Generation] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    trace: RequestTrace | None = None
    arrival: Arrival | None = None
    _stage: str = "admission"

    @property
    def stage(self) -> str:
        """What the request waits for."""
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._stage = stage
        self.times.enter(stage)

    @property
    def num_head_tokens(self) -> int:
        """Of a prompt that is split between two workers: how many tokens the first one computes; otherwise 0."""
        return self.placed.num_head_tokens if self.placed is not None else 0

    @property
    def first_due_s(self) -> float:
        """Until when its first token was promised, in the event loop's time; infinite: it was not."""
        ttft_ms = self.request.promise.ttft_ms
        return math.inf if ttft_ms is None else self.deadline_s - self.timeout_s + ttft_ms / 1e3

    @property
    def held_until_s(self) -> float:
        """Until when its first token may wait for the next one, in the event loop's time; in the past where either was
        not promised.
        """
        ttft_ms, itl_ms = self.request.promise.ttft_ms, self.request.promise.itl_ms
        if ttft_ms is None or itl_ms is None:
            return -math.inf
        return self.first_due_s - max((1.0 - HELD_SHARE) * ttft_ms / 1e3, LEAST_MARGIN_S)

    @property
    def request_id(self) -> str:
        """The id that the workers know."""
        return self.request.request_id

    @property
    def name_in_logs(self) -> str:
        """The id that the workers know, and the caller's, by which others find what is said of this request."""
        return f"{self.request_id} x_request_id={self.caller_id}" if self.caller_id else self.request_id

    @property
    def trace_context(self) -> TraceContext | None:
        """What workers get with the request; None where it is not traced."""
        return None if self.trace is None else self.trace.context

    def note(self, told: Told) -> None:
        """A worker tells something about the tokens that come next."""
        if isinstance(told, DraftCounts):
            self.num_draft_tokens += told.num_drafts
            self.num_accepted_drafts += told.num_accepted
        elif self.trace is not None:
            self.trace.note_timings(told)

    async def take(self) -> list[TokenDelta]:
        """All deltas that are waiting; an empty list once the request ended well.

        Raises:
            RouterError: The request ended with an error.
        """
        return await self.mailbox.take()

    def cancel(self) -> None:
        """Stop at once. Idempotent; nothing happens if the request ended."""
        if self.task is not None:
            self.task.cancel()

    def finish_early(self) -> None:
        """The consumer has all it wants (a stop string is complete): stop, and count it as finished."""
        self.is_satisfied = True
        self.cancel()

    def start(self, life: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let the request live, as a task of its own: a slow consumer holds nobody up."""
        self.task = asyncio.create_task(life)
        for other in self.others:
            other.task = self.task
        return self.task

    def end(self, error: RouterError | None) -> None:
        """Nothing comes any more. Only the first call counts."""
        self.begun.set()
        self.mailbox.end(error)
        for other in self.others:
            other.end(error)

    def deliver_first(self, delta: TokenDelta, *, may_hold: bool) -> None:
        """Pass on a token behind which another worker goes on; with ``may_hold`` it comes to the consumer with the next
        one, as long as what was promised allows."""
        is_held = may_hold and asyncio.get_running_loop().time() < self.held_until_s
        self.deliver(delta, None, is_shown=not is_held)
        if is_held:
            self.mailbox.hold(until_s=self.held_until_s, on_shown=self._show_first)

    def _show_first(self) -> None:
        if self.trace is not None:
            self.trace.show_first_token()

    def deliver(self, delta: TokenDelta, finish_reason: FinishReason | None, *, is_shown: bool = True) -> None:
        """Pass new tokens on to the consumer. ``is_shown``: at once, as far as its trace is concerned."""
        self.output_token_ids.extend(delta.token_ids)
        if self.times.wants_tokens:
            self.begun.set()
            delta = self._with_cached_tokens(delta)
            if self.arrival is not None and self.arrival.num_cached_tokens is None:  # later ones count what was moved
                self.arrival.num_cached_tokens = delta.num_cached_tokens
            if delta.token_ids or delta.beams:
                self.times.token(delta.queue_s)
        if self.trace is not None:
            self.trace.deliver(delta, is_shown=is_shown)
        if finish_reason is not delta.finish_reason:
            delta = delta._replace(finish_reason=finish_reason, kv_transfer=None, error=None)
        if delta.beams:
            self._deliver_beams(delta)
        elif delta.token_ids or delta.finish_reason is not None:
            self.mailbox.put(delta)
        elif self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens

    def _with_cached_tokens(self, delta: TokenDelta) -> TokenDelta:
        """Of a prompt that was split, what was in the cache of either worker; what was moved was not."""
        if not self.num_head_tokens or self.num_cached_tokens is None or delta.num_cached_tokens is None:
            return delta
        num_local = delta.num_cached_tokens - (delta.num_remote_tokens or 0)
        return delta._replace(num_cached_tokens=max(self.num_cached_tokens, num_local))

    def _deliver_beams(self, delta: TokenDelta) -> None:
        """Pass on what a search found, one output to each consumer, as if it had generated it."""
        num_cached_tokens = delta.num_cached_tokens if self.num_cached_tokens is None else self.num_cached_tokens
        for generation, beam in zip((self, *self.others), delta.beams, strict=True):
            self.output_token_ids.extend(beam.token_ids)
            found = TokenDelta(
                delta.request_id,
                beam.token_ids,
                FinishReason.LENGTH if beam.stop_token_id is None else FinishReason.STOP,
                stop_token_id=beam.stop_token_id,
                num_cached_tokens=num_cached_tokens,
                beams=(beam,),
            )
            generation.mailbox.put(found)
