"""One sequence from its acceptance to its end: the handle that its consumer holds."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
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
"""How long a first token may be held back for the next one: for this share of the promised TTFT, and never later than
this many seconds before the promise ends, because writing and reading it also take time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One sequence that is being generated. ``take`` returns its tokens; ``cancel`` ends it and frees what it holds on
    all workers.

    Progress: ``output_token_ids`` are all tokens so far, from which another worker can continue. ``stage`` says what
    the request is waiting for, for error messages. ``deadline_s`` is in the event loop's time. ``caller_id`` is the
    caller's id of the request, for logs. ``num_runs`` counts the runs of the request at each replica, see ``next_run``.

    Other sequences of the same prompt: ``leader`` is the first of them, None if this is the first. ``begun`` is set
    once the first token has arrived, or never will.

    Placement: ``ticket`` is its room on a decode replica, None if it needs none. The ticket has ``placed``, the
    decision where the sequence goes, and ``prompt_room``, its turn on the replica that computes its prompt. The
    replicas are the first ones that served the sequence. ``is_local``: the decode replica also computes the prompt.

    Records: ``trace`` is written while the sequence runs; None if it is not traced. ``arrival`` is the record from
    which future load is predicted, if that is done. ``num_draft_tokens`` draft tokens were verified so far, and
    ``num_accepted_drafts`` of them became output.

    Beam search: ``others`` receive the other outputs of the search, and this one gets the best. The others run no
    request themselves.
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
    num_runs: Counter[str] = field(default_factory=Counter)
    _stage: str = "admission"

    @property
    def stage(self) -> str:
        """What the request is waiting for."""
        return self._stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self._stage = stage
        self.times.enter(stage)

    @property
    def num_head_tokens(self) -> int:
        """How many prompt tokens the first worker computes, if the prompt is split between two; otherwise 0."""
        return self.placed.num_head_tokens if self.placed is not None else 0

    @property
    def first_due_s(self) -> float:
        """When its first token is due by promise, in the event loop's time; infinite if nothing was promised."""
        ttft_ms = self.request.promise.ttft_ms
        return math.inf if ttft_ms is None else self.deadline_s - self.timeout_s + ttft_ms / 1e3

    @property
    def held_until_s(self) -> float:
        """Until when its first token may be held back for the next one, in the event loop's time; in the past if either
        of the two was not promised, or if the prompt's log-probabilities come with it: other choices show these too.
        """
        ttft_ms, itl_ms = self.request.promise.ttft_ms, self.request.promise.itl_ms
        if ttft_ms is None or itl_ms is None or self.request.sampling.num_prompt_logprobs is not None:
            return -math.inf
        return self.first_due_s - max((1.0 - HELD_SHARE) * ttft_ms / 1e3, LEAST_MARGIN_S)

    @property
    def request_id(self) -> str:
        """The id that the workers know; see ``next_run``."""
        return self.request.request_id

    def next_run(self, replica_id: str) -> GenerateRequest:
        """The request as it is sent to a replica next. From its second run there on it has an id of its own, such as
        ``cmpl-1~2``: whatever is late of an earlier run, an abort, tokens or its end, then does not concern this one.

        A worker counts the time to the first token from when the request comes to it. So where the request was at
        another worker before, it is promised what is left of that time.
        """
        self.num_runs[replica_id] += 1
        number, promise, request = self.num_runs[replica_id], self.request.promise, self.request
        if number > 1:
            request = replace(request, request_id=f"{self.request_id}~{number}")
        if self.num_runs.total() > 1 and promise.ttft_ms is not None and not self.output_token_ids:
            left_ms = max(1e3 * (self.first_due_s - asyncio.get_running_loop().time()), 1.0)
            request = replace(request, promise=replace(promise, ttft_ms=min(left_ms, promise.ttft_ms)))
        return request

    @property
    def name_in_logs(self) -> str:
        """The workers' id and the caller's id, so that a log line can be found by either."""
        return f"{self.request_id} x_request_id={self.caller_id}" if self.caller_id else self.request_id

    @property
    def trace_context(self) -> TraceContext | None:
        """The trace context to send to workers with the request; None if it is not traced."""
        return None if self.trace is None else self.trace.context

    def note(self, told: Told) -> None:
        """Take what a worker reports about the tokens that come next."""
        if isinstance(told, DraftCounts):
            self.num_draft_tokens += told.num_drafts
            self.num_accepted_drafts += told.num_accepted
        elif self.trace is not None:
            self.trace.note_timings(told)

    async def take(self) -> list[TokenDelta]:
        """Wait for deltas, and return all that are there; an empty list once the request ended well.

        Raises:
            RouterError: The request ended with an error.
        """
        return await self.mailbox.take()

    def cancel(self) -> None:
        """Stop at once. Idempotent; does nothing if the request has ended."""
        if self.task is not None:
            self.task.cancel()

    def finish_early(self) -> None:
        """Stop, and count the request as finished: the consumer has all it wants (a stop string is complete)."""
        self.is_satisfied = True
        self.cancel()

    def start(self, life: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the request's life as a task of its own, so that a slow consumer delays nobody else."""
        self.task = asyncio.create_task(life)
        for other in self.others:
            other.task = self.task
        return self.task

    def end(self, error: RouterError | None) -> None:
        """End the sequence, with an error or without. Only the first call counts."""
        self.begun.set()
        self.mailbox.end(error)
        for other in self.others:
            other.end(error)

    def deliver_first(self, delta: TokenDelta, *, may_hold: bool) -> None:
        """Pass on the token after which another worker continues. With ``may_hold`` the consumer gets it together with
        the next one, as long as the promises allow."""
        is_held = may_hold and asyncio.get_running_loop().time() < self.held_until_s
        self.deliver(delta, None, is_shown=not is_held)
        if is_held:
            self.mailbox.hold(until_s=self.held_until_s, on_shown=self._show_first)

    def _show_first(self) -> None:
        if self.trace is not None:
            self.trace.show_first_token()

    def deliver(self, delta: TokenDelta, finish_reason: FinishReason | None, *, is_shown: bool = True) -> None:
        """Pass new tokens on to the consumer. ``is_shown`` False: the trace does not count them as shown yet."""
        self.output_token_ids.extend(delta.token_ids)
        if self.times.wants_tokens:
            self.begun.set()
            delta = self._with_cached_tokens(delta)
            if self.arrival is not None and self.arrival.num_cached_tokens is None:  # later ones also count moved KV
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
        """Of a split prompt, count the tokens cached on either worker, without those that were moved."""
        if not self.num_head_tokens or self.num_cached_tokens is None or delta.num_cached_tokens is None:
            return delta
        num_local = delta.num_cached_tokens - (delta.num_remote_tokens or 0)
        return delta._replace(num_cached_tokens=max(self.num_cached_tokens, num_local))

    def _deliver_beams(self, delta: TokenDelta) -> None:
        """Pass one output of the beam search to each consumer, as if each had been generated separately."""
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
