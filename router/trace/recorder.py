"""The traces that one router keeps: of running requests, and of the last ones that ended."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Iterator

from engine.contract.messages import SamplingParams
from router.fair_shelf import FairShelf
from router.telemetry.tracer import ProcessTracer
from router.trace.origin import Origin, Viewer
from router.trace.request_spans import begin_spans
from router.trace.request_trace import RequestTrace
from router.trace.told import summary, told

MAX_REASON_CHARACTERS = 500
"""How many characters of a refusal's reason are kept: it may quote the request's body."""


class TraceRecorder:
    """Samples which requests are traced, and finds their traces."""

    def __init__(
        self,
        *,
        model: str,
        router_id: str,
        max_count: int,
        sample_rate: float,
        draw: Callable[[], float] = random.random,
        tracer: ProcessTracer | None = None,
    ) -> None:
        """Keep up to ``max_count`` traces of ended requests, sampled from that share of all requests; 0 keeps none.
        Beyond that the owner with most traces loses its oldest one, so that no owner evicts all those of others.

        ``tracer`` makes spans of the requests that it samples, whether or not their traces are kept; None makes none.
        """
        self._tracer = tracer
        self._model, self._router_id = model, router_id
        self._sample_rate = sample_rate if max_count else 0.0
        self._draw = draw
        self._running: dict[RequestTrace, None] = {}
        self._ended: FairShelf[RequestTrace, RequestTrace] = FairShelf(max_count=max_count)
        # On a shelf of their own, so that many refusals evict no other traces.
        self._refused: FairShelf[RequestTrace, RequestTrace] = FairShelf(max_count=max_count)

    @property
    def makes_spans(self) -> bool:
        """True if spans go to a collector, so that callers' span contexts matter."""
        return self._tracer is not None

    def wants(self, origin: Origin | None) -> bool:
        """True if a request should be traced."""
        return origin is not None and (self._tracer is not None or self._is_drawn())

    def _is_drawn(self) -> bool:
        return self._sample_rate > 0.0 and self._draw() < self._sample_rate

    def begin(
        self, origin: Origin, *, num_prompt_tokens: int, sampling: SamplingParams | None = None
    ) -> RequestTrace | None:
        """Begin the trace of an accepted request, which ``end`` ends. None if nobody wants it after all."""
        trace = RequestTrace(origin, model=self._model, router_id=self._router_id, num_prompt_tokens=num_prompt_tokens)
        if self._tracer is not None:
            trace.spans = begin_spans(self._tracer, origin, sampling, model=self._model, unix_ns=trace.unix_ns)
            if not self._is_drawn():
                return trace if trace.spans is not None else None
        self._running[trace] = None
        return trace

    def end(self, trace: RequestTrace, state: str, *, finish_reason: str = "") -> None:
        """Note that a choice of a request ended; only the first call for each choice counts."""
        trace.end(state, finish_reason=finish_reason)
        first = trace.first
        if first in self._running and first.is_over:
            del self._running[first]
            self._ended.put(first, first, owner=first.origin.owner)

    def refuse(self, origin: Origin, *, status: int, code: str | None, reason: str) -> None:
        """Note that a request was answered with an error before any of it ran."""
        is_kept = self._is_drawn()
        if not is_kept and self._tracer is None:
            return
        trace = RequestTrace(origin, model=self._model, router_id=self._router_id, num_prompt_tokens=0)
        trace.refuse(status=status, code=code, reason=reason[:MAX_REASON_CHARACTERS])
        if self._tracer is not None:
            trace.spans = begin_spans(self._tracer, origin, None, model=self._model, unix_ns=trace.unix_ns)
            if trace.spans is not None:
                trace.spans.end(trace)
        if is_kept:
            self._refused.put(trace, trace, owner=origin.owner)

    def find(self, request_id: str, *, viewer: Viewer) -> bytes | None:
        """The newest trace with this id, as JSON; None if there is none that the viewer may see."""
        for trace in self._newest_first():
            origin = trace.origin
            if request_id in (origin.request_id, origin.answer_id) and viewer.may_see(origin):
                return json.dumps(told(trace)).encode()
        return None

    def last(self, limit: int, *, viewer: Viewer) -> bytes:
        """The summaries of the newest traces that the viewer may see, newest first, as a JSON list."""
        seen = (summary(trace) for trace in self._newest_first() if viewer.may_see(trace.origin))
        return json.dumps(list(itertools.islice(seen, limit))).encode()

    def close(self) -> None:
        """Send the spans that are still unsent. Blocks."""
        if self._tracer is not None:
            self._tracer.close()

    def _newest_first(self) -> Iterator[RequestTrace]:
        yield from reversed(self._running)
        ended = (self._ended.newest_first(), self._refused.newest_first())
        yield from heapq.merge(*ended, key=lambda trace: -(trace.ended_s or 0.0))
