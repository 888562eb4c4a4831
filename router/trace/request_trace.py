"""The waterfall of one request, written as it runs: consecutive parts, and the parts nested in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.contract.messages import FinishReason, TokenDelta
from engine.contract.tracing.request_timings import RequestTimings, TraceContext
from router.telemetry.span_names import GENERATE
from router.trace.choice import Choice
from router.trace.gaps import Gaps
from router.trace.origin import Origin

TRACED = TraceContext()
"""Sent to a worker that should report its timings but make no spans."""

MAX_PARTS = 128
"""Beyond this number, parts are merged into the last one: only a request that is refused repeatedly has so many."""

MAX_CHOICES = 16
"""How many choices of a body are traced at most: the first ones."""

STATES = ("running", "finished", "failed", "aborted", "refused")


@dataclass(slots=True, kw_only=True)
class Part:
    """A span of time by ``time.perf_counter``. ``end_s`` None: it has not ended. ``parent`` is the index of the part
    that contains it; None for top-level parts, which together cover the request's whole time.
    """

    name: str
    start_s: float
    where: str
    end_s: float | None = None
    parent: int | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


class Spans(Protocol):
    """A request's spans for a collector (``router.trace.request_spans``). Times are those of the trace."""

    @property
    def trace_id(self) -> str:
        """The trace id that a collector knows."""

    @property
    def context(self) -> TraceContext:
        """The span context to send with the request to a worker now."""

    def call(self, name: str, where: str, *, part: str, now_s: float) -> None:
        """Open the span of a call: the request is sent to a worker."""

    def end_call(self, now_s: float, *, error: str = "") -> None:
        """Close the call's span: the worker finished the request, or was lost."""

    def end(self, trace: RequestTrace) -> None:
        """The request ended, with all its choices."""


class RequestTrace:
    """The trace of one request. At any time exactly one of its top-level parts is open.

    Engines report durations, because their clocks differ from the router's. Of single tokens only the longest gaps are
    kept. ``first`` is the trace of the body's first choice, which look-ups return. If this is that trace, ``others``
    are the traces of the other choices.
    """

    __slots__ = (
        "_clock",
        "_current",
        "_hands_over",
        "_is_awaited",
        "_is_told",
        "_is_unread",
        "_router",
        "_timings",
        "choices",
        "ended_s",
        "finish_reason",
        "first",
        "first_token_s",
        "gaps",
        "model",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "origin",
        "others",
        "parts",
        "spans",
        "started_unix_s",
        "state",
    )

    def __init__(
        self,
        origin: Origin,
        *,
        model: str,
        router_id: str,
        num_prompt_tokens: int,
        first: RequestTrace | None = None,
        waits_in: str = "queue",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The request was received and prepared; from now on it waits, in the part ``waits_in``."""
        self.origin, self.model, self.num_prompt_tokens = origin, model, num_prompt_tokens
        self._clock, self._router = clock, f"router {router_id}"
        self.first: RequestTrace = first or self
        self.others: list[RequestTrace] = []
        now_s = clock()
        self.started_unix_s = time.time() - (now_s - origin.received_s)
        ready = Part(name="tokenize", start_s=origin.received_s, end_s=now_s, where=self._router)
        self.parts = [ready, Part(name=waits_in, start_s=now_s, where=self._router)]
        self._current = 1
        self._is_awaited = self._hands_over = self._is_unread = self._is_told = False
        self._timings: RequestTimings | None = None
        self.spans: Spans | None = None
        self.choices: list[Choice] = []
        self.gaps = Gaps()
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens: int | None = None
        self.state, self.finish_reason = "running", ""

    def beside(self, *, num_prompt_tokens: int) -> RequestTrace | None:
        """A trace for another choice of the same body; None if enough choices are traced.

        ``num_prompt_tokens`` 0: this choice follows an earlier one with the same prompt.
        """
        if len(self.others) + 1 >= MAX_CHOICES:
            return None
        router_id = self._router.removeprefix("router ")
        other = RequestTrace(
            self.origin,
            model=self.model,
            router_id=router_id,
            num_prompt_tokens=num_prompt_tokens,
            first=self,
            waits_in="queue" if num_prompt_tokens else "first_choice",
            clock=self._clock,
        )
        self.others.append(other)
        return other

    def enter(self, name: str, *, where: str | None = None, **attributes: Any) -> None:
        """End the current part and begin another one, at the router unless ``where`` names a worker."""
        now_s = self._clock()
        if self.spans is not None:
            self.spans.end_call(now_s, error=str(attributes.get("reason", "")))
        self._enter(name, now_s, where=where, **attributes)

    def _enter(self, name: str, now_s: float, *, where: str | None = None, **attributes: Any) -> None:
        self._is_awaited = self._hands_over = False
        current = self.parts[self._current]
        if len(self.parts) >= MAX_PARTS:
            current.attributes["num_more_parts"] = current.attributes.get("num_more_parts", 0) + 1
            return
        current.end_s = now_s
        self._current = len(self.parts)
        self.parts.append(Part(name=name, start_s=now_s, where=where or self._router, attributes=attributes))

    def enter_worker(
        self, name: str, *, where: str, call: str = GENERATE, hands_over: bool = False, **attributes: Any
    ) -> None:
        """The request goes to a worker, whose first token ends the part. What was waited for there goes on.

        ``call`` is what it is asked for (``router.telemetry.span_names``). ``hands_over``: the worker computes the
        prompt only, and another one goes on.
        """
        current = self.parts[self._current]
        if current.name == name and current.where == self._router:
            current.where = where
            current.attributes.update(attributes)
        else:
            self._enter(name, self._clock(), where=where, **attributes)
        self._is_awaited, self._hands_over, self._timings = True, hands_over, None
        if self.spans is not None and len(self.parts) < MAX_PARTS:
            self.spans.call(call, where, part=name, now_s=self.parts[self._current].start_s)

    @property
    def context(self) -> TraceContext:
        """The context to send to a worker with the request: that it is traced, and in which span."""
        return TRACED if self.spans is None else self.spans.context

    def note_timings(self, timings: RequestTimings) -> None:
        """Take a worker's timings up to its first tokens, which arrive next."""
        self._timings = timings

    def note(self, **attributes: Any) -> None:
        """Add attributes to the open part."""
        self.parts[self._current].attributes.update(attributes)

    def choose(self, choice: Choice) -> None:
        """Record where the request was placed."""
        if len(self.choices) >= MAX_PARTS or len(self.parts) >= MAX_PARTS:
            return
        self.choices.append(choice)
        attributes = {"prefill": choice.chosen.prefill, "decode": choice.chosen.decode, "reason": choice.reason}
        self._inside("choice", at_s=choice.at_s, attributes=attributes)

    def deliver(self, delta: TokenDelta, *, is_shown: bool = True) -> None:
        """A worker sent tokens, or released the request. If ``is_shown`` is false, ``show_first_token`` follows."""
        if delta.token_ids or delta.beams:
            now_s = self._clock()
            if self._is_awaited:
                self._began(delta, now_s, is_shown=is_shown)
            num_tokens = len(delta.token_ids) or sum(len(beam.token_ids) for beam in delta.beams[:1])
            self.num_output_tokens += num_tokens
            if is_shown:
                self.gaps.tokens(now_s, num_tokens)
        reason = delta.finish_reason
        if reason is FinishReason.HANDED_OVER:
            if self.parts[self._current].name not in ("transfer", "move"):
                self.enter("move")
        elif reason is not None:
            self.finish_reason = reason.value

    def finish_head(self, delta: TokenDelta, *, num_tokens: int) -> None:
        """A worker computed the first ``num_tokens`` of a split prompt; the token that it sampled is not used."""
        current = self.parts[self._current]
        current.attributes.update(head_tokens=num_tokens, num_cached_tokens=delta.num_cached_tokens or 0)
        queue_s = min(delta.queue_s or 0.0, self._clock() - current.start_s)
        self._split(current, queue_s)
        self._note_work(current, sent_s=current.start_s - queue_s)
        self._is_awaited = False

    def show_first_token(self) -> None:
        """The caller now gets the first token, which was held back until the next one."""
        if self.first_token_s is None:
            self.first_token_s = self._clock()
            self._inside("first_token", at_s=self.first_token_s)
            if not self.gaps.has_begun:  # otherwise it is counted with the next one
                self.gaps.tokens(self.first_token_s)

    def _began(self, delta: TokenDelta, now_s: float, *, is_shown: bool) -> None:
        """Record a worker's first tokens, and the waits that it reported with them."""
        current, hands_over = self.parts[self._current], self._hands_over
        if self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.num_cached_tokens is not None:
            current.attributes["num_cached_tokens"] = delta.num_cached_tokens
        if delta.num_remote_tokens is not None:
            current.attributes["num_remote_tokens"] = delta.num_remote_tokens
        queue_s = min(delta.queue_s or 0.0, now_s - current.start_s)
        if current.name == "prefill":
            self._split(current, queue_s)
        elif delta.queue_s is not None:
            self._inside("decode_queue", at_s=current.start_s, duration_s=queue_s, where=current.where)
        self._note_work(current, sent_s=current.start_s - (queue_s if current.name == "prefill" else 0.0))
        if self.first_token_s is None and is_shown:
            self.first_token_s = now_s
            self._inside("first_token", at_s=now_s, where=current.where)
        if hands_over and self.spans is not None:
            self.spans.end_call(now_s)
        self._enter("transfer" if hands_over else "decode", now_s, where=None if hands_over else current.where)

    def _note_work(self, current: Part, *, sent_s: float) -> None:
        """Add loads and steps of a worker that got the request at ``sent_s``. Its clock may differ from the router's;
        then their times are as exact as ``sent_s``."""
        timings, self._timings = self._timings, None
        if timings is None:
            return
        for load in timings.loads:
            told: dict[str, Any] = {"bytes": load.num_bytes, "blocks": load.num_blocks, "source": load.source or None}
            if load.num_failed_blocks:
                told["failed_blocks"] = load.num_failed_blocks
            self._work(current, "kv_transfer", sent_s + load.start_s, load.duration_s, told)
        for step in timings.steps:
            told = {"tokens": step.num_tokens} | ({"steps": step.num_steps} if step.num_steps > 1 else {})
            self._work(current, "step", sent_s + step.start_s, step.duration_s, told)

    def _work(self, current: Part, name: str, at_s: float, duration_s: float, attributes: dict[str, Any]) -> None:
        if len(self.parts) < MAX_PARTS // 2:  # the other half is reserved for top-level parts
            self._inside(name, at_s=at_s, duration_s=duration_s, where=current.where, attributes=attributes)

    def _split(self, part: Part, queue_s: float) -> None:
        """Make the request's wait at the worker a part of its own, before the open one."""
        waited = Part(name="prefill_queue", start_s=part.start_s, end_s=part.start_s + queue_s, where=part.where)
        part.start_s += queue_s
        self.parts.insert(self._current, waited)
        for other in self.parts:
            if other.parent is not None and other.parent >= self._current:
                other.parent += 1
        self._current += 1

    def _inside(
        self,
        name: str,
        *,
        at_s: float,
        duration_s: float = 0.0,
        where: str | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        """Add a part inside the open one."""
        self.parts.append(
            Part(
                name=name,
                start_s=at_s,
                end_s=at_s + duration_s,
                where=where or self._router,
                parent=self._current,
                attributes=attributes or {},
            )
        )

    def end(self, state: str, *, finish_reason: str = "") -> None:
        """End the trace of this choice. Only the first call counts."""
        if self.ended_s is None:
            self.ended_s = self.parts[self._current].end_s = self._clock()
            self.state = state
            self.finish_reason = finish_reason or self.finish_reason
            self.first._end_spans()

    def await_reader(self) -> None:
        """Wait for ``read`` to give the finish reason: only the answer's text shows whether it calls tools."""
        self._is_unread = self.ended_s is None

    def read(self, finish_reason: str = "") -> None:
        """The answer was read to its end, with the finish reason that the caller got; empty: cancelled or failed."""
        self._is_unread = False
        if finish_reason and self.state in ("running", "finished"):
            self.finish_reason = finish_reason
        self.first._end_spans()

    def _end_spans(self) -> None:
        """End the collector's spans, once, when every choice is complete."""
        is_unread = any(trace._is_unread and trace.state == "finished" for trace in self.all_choices)
        if self.spans is not None and self.is_over and not is_unread and not self._is_told:
            self._is_told = True
            self.spans.end(self)

    def unix_ns(self, at_s: float) -> int:
        """Convert a time of the trace to wall-clock nanoseconds."""
        return round((self.started_unix_s + at_s - self.origin.received_s) * 1e9)

    def parts_in_order(self) -> list[Part]:
        """The top-level parts, in the order of time."""
        return [part for part in self.parts if part.parent is None]

    def is_at_router(self, part: Part) -> bool:
        """True if the request was at no worker during this part."""
        return part.where == self._router

    def refuse(self, **attributes: Any) -> None:
        """The request was refused before any of it ran; its whole time is one part."""
        now_s = self._clock()
        received_s = self.origin.received_s
        self.parts = [Part(name="refused", start_s=received_s, end_s=now_s, where=self._router, attributes=attributes)]
        self._current, self.ended_s = 0, now_s
        self.state, self.finish_reason = "refused", "error"

    @property
    def is_over(self) -> bool:
        """True when every choice of the body has ended."""
        return all(trace.ended_s is not None for trace in self.all_choices)

    @property
    def all_choices(self) -> Sequence[RequestTrace]:
        """All traced choices, this one first. Call it on the trace of the body's first choice."""
        return (self, *self.others)

    @property
    def total_s(self) -> float:
        """From the request's first byte to the end of this choice, or until now."""
        return (self._clock() if self.ended_s is None else self.ended_s) - self.origin.received_s
