"""The spans of a worker: one for each traced request that it serves, with child spans for where its time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.contract.tracing.request_timings import RequestTimings
from router.telemetry.span_names import DECODE, KV_TRANSFER, QUEUE, STEP, call_name
from router.telemetry.tracer import Attributes, OpenSpan, ProcessTracer


@dataclass(slots=True)
class _Served:
    """A request at this worker. ``began_ns`` is when its first token was ready; 0: not yet."""

    span: OpenSpan
    generates: bool
    came_ns: int
    began_ns: int = 0


class WorkerSpans:
    """``engine.frontend.request_observer.RequestObserver``: makes child spans of the spans that requests came with."""

    def __init__(self, tracer: ProcessTracer, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._now_ns = now_ns
        self._served: dict[str, _Served] = {}

    def came(self, request: GenerateRequest) -> None:
        """Open the request's span, if its sender has one."""
        if request.trace is None or not request.trace.traceparent:
            return
        name = call_name(
            hands_over=request.hand_over, goes_on=request.kv_transfer is not None or bool(request.output_token_ids)
        )
        attributes: Attributes = {
            "gen_ai.request.id": request.request_id,
            "baton.prompt_tokens": len(request.prompt_token_ids),
            "baton.output_tokens_before": len(request.output_token_ids),
        }
        came_ns = self._now_ns()
        span = self._tracer.serve(name, request.trace, start_ns=came_ns, attributes=attributes)
        if span is not None:
            self._served[request.request_id] = _Served(span, generates=not request.hand_over, came_ns=came_ns)

    def refused(self, request_id: str) -> None:
        """The engine refused the request."""
        if (served := self._served.pop(request_id, None)) is not None:
            served.span.end(self._now_ns(), error="refused")

    def saw(self, timings: Sequence[RequestTimings], deltas: Iterable[Sequence[TokenDelta]]) -> None:
        """Record first tokens and ends of requests."""
        if not self._served:
            return
        for told in timings:
            self._began(told)
        for of_client in deltas:
            for delta in of_client:
                if delta.finish_reason is not None:
                    self._ended(delta)

    def _began(self, timings: RequestTimings) -> None:
        """Add the spans of the time until the first token."""
        served = self._served.get(timings.request_id)
        if served is None:
            return
        served.began_ns = self._now_ns()
        arrived_ns = served.began_ns - _ns(timings.first_token_s)

        def add(name: str, start_s: float, duration_s: float, attributes: Attributes | None = None) -> None:
            start_ns = max(arrived_ns + _ns(start_s), served.came_ns)
            served.span.add(name, start_ns=start_ns, end_ns=start_ns + _ns(duration_s), attributes=attributes)

        add(QUEUE, 0.0, timings.queue_s)
        for load in timings.loads:
            told: dict[str, str | int] = {
                "baton.kv.bytes": load.num_bytes,
                "baton.kv.blocks": load.num_blocks,
                "baton.kv.failed_blocks": load.num_failed_blocks,
            }
            if load.source:
                told["baton.kv.source"] = load.source
            add(KV_TRANSFER, load.start_s, load.duration_s, told)
        for step in timings.steps:
            add(STEP, step.start_s, step.duration_s, {"baton.tokens": step.num_tokens, "baton.steps": step.num_steps})

    def _ended(self, delta: TokenDelta) -> None:
        """Close the request's span."""
        served = self._served.pop(delta.request_id, None)
        if served is None:
            return
        now_ns = self._now_ns()
        if served.generates and served.began_ns:
            served.span.add(DECODE, start_ns=served.began_ns, end_ns=now_ns)
        reason = delta.finish_reason or FinishReason.STOP
        served.span.note({"baton.finish_reason": reason.value})
        served.span.end(now_ns, error=delta.error.message if delta.error is not None else "")


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
