"""The router's spans of one request, for a collector: the request, its calls to workers, and its other waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from engine.contract.messages import SamplingParams
from engine.contract.tracing.request_timings import TraceContext
from router.telemetry.span_names import SERVER
from router.telemetry.tracer import AttributeValue, OpenSpan, ProcessTracer
from router.trace.origin import Origin
from router.trace.request_trace import Part, RequestTrace
from router.trace.told import OTHER_CHOICES, worst_state

PROVIDER: Final = "baton"
COMPLETIONS: Final = "/v1/completions"
FIRST_SERVER_ERROR: Final = 500

_QUEUES = frozenset({"queue", "prefill_queue"})


class RequestSpans:
    """Written along with the request's trace. ``unix_ns`` converts the trace's times to wall-clock nanoseconds.

    A worker's own spans are children of the span of the call that sent it the request.
    """

    def __init__(self, server: OpenSpan, unix_ns: Callable[[float], int]) -> None:
        self._server = server
        self._unix_ns = unix_ns
        self._call: OpenSpan | None = None

    @property
    def trace_id(self) -> str:
        """The trace id that a collector knows."""
        return self._server.trace_id

    @property
    def context(self) -> TraceContext:
        """The span context to send with the request to a worker now."""
        return (self._call or self._server).context

    def call(self, name: str, where: str, *, part: str, now_s: float) -> None:
        """Open the span of a call: the request is sent to a worker."""
        self.end_call(now_s)
        attributes: dict[str, AttributeValue] = {"baton.worker": where, "baton.part": part}
        self._call = self._server.open(name, start_ns=self._unix_ns(now_s), kind="client", attributes=attributes)

    def end_call(self, now_s: float, *, error: str = "") -> None:
        """Close the call's span: the worker finished the request, or was lost."""
        if self._call is not None:
            self._call.end(self._unix_ns(now_s), error=error)
            self._call = None

    def end(self, trace: RequestTrace) -> None:
        """The request ended: make spans of the rest of its trace."""
        assert trace.ended_s is not None
        self.end_call(trace.ended_s, error=_error(trace))
        ended_s = _ended_s(trace)
        for part in trace.parts_in_order():
            if trace.is_at_router(part) and part.end_s is not None:
                self._server.add(
                    part.name,
                    start_ns=self._unix_ns(part.start_s),
                    end_ns=self._unix_ns(part.end_s),
                    attributes=_named("baton", part.attributes),
                )
        if ended_s > trace.ended_s:
            start_ns, end_ns = self._unix_ns(trace.ended_s), self._unix_ns(ended_s)
            self._server.add(OTHER_CHOICES, start_ns=start_ns, end_ns=end_ns)
        for choice in trace.choices:
            told = {"prefill": choice.chosen.prefill, "decode": choice.chosen.decode, "reason": choice.reason}
            self._server.event("choice", at_ns=self._unix_ns(choice.at_s), attributes=_named("baton", told))
        if trace.first_token_s is not None:
            self._server.event("first_token", at_ns=self._unix_ns(trace.first_token_s))
        self._server.note(_outcome(trace))
        error = next((error for choice in trace.all_choices if (error := _error(choice))), "")
        self._server.end(self._unix_ns(ended_s), error=error)


def begin_spans(
    tracer: ProcessTracer,
    origin: Origin,
    sampling: SamplingParams | None,
    *,
    model: str,
    unix_ns: Callable[[float], int],
) -> RequestSpans | None:
    """Begin the spans of an accepted request; None if its trace is not sampled."""
    server = tracer.serve(
        SERVER, origin.context, start_ns=unix_ns(origin.received_s), attributes=_request(origin, sampling, model)
    )
    return RequestSpans(server, unix_ns) if server is not None else None


def _request(origin: Origin, sampling: SamplingParams | None, model: str) -> dict[str, AttributeValue]:
    """Attributes of what was asked for, named as in OpenTelemetry's conventions for generative AI and in vLLM."""
    told: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion" if origin.endpoint == COMPLETIONS else "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.id": origin.request_id,
        "gen_ai.request.n": origin.num_choices,
        "gen_ai.request.choice.count": origin.num_choices,
        "url.path": origin.endpoint,
    }
    if sampling is not None:
        told["gen_ai.request.max_tokens"] = sampling.max_tokens
        told["gen_ai.request.temperature"] = sampling.temperature
        told["gen_ai.request.top_p"] = sampling.top_p
        if sampling.top_k:
            told["gen_ai.request.top_k"] = sampling.top_k
        told["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
        told["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    return told


def _outcome(trace: RequestTrace) -> dict[str, AttributeValue]:
    """Attributes of the result of all choices together, with the same names. Latencies are in seconds; those within
    the model are of the first choice."""
    assert trace.ended_s is not None
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in trace.all_choices)
    num_output_tokens = sum(choice.num_output_tokens for choice in trace.all_choices)
    state, reasons = worst_state(trace), [choice.finish_reason for choice in trace.all_choices]
    told: dict[str, AttributeValue] = {
        "gen_ai.response.id": trace.origin.answer_id,
        "gen_ai.response.model": trace.model,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.num_cached_tokens or 0,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_output_tokens,
        "gen_ai.usage.num_sequences": trace.origin.num_choices,
        "gen_ai.latency.e2e": _ended_s(trace) - trace.origin.received_s,
        "baton.state": state,
    }
    if any(reasons):
        told["gen_ai.response.finish_reasons"] = reasons
    if state == "failed":
        told["error.type"] = "error"
    if state == "refused":
        refusal = trace.parts[0].attributes
        told["error.type"], told["http.response.status_code"] = refusal["code"] or "error", refusal["status"]
    if trace.first_token_s is not None:
        parts = trace.parts_in_order()
        prefill_s = _seconds(part for part in parts if part.name == "prefill")
        decode_s = trace.ended_s - trace.first_token_s
        told["gen_ai.latency.time_to_first_token"] = trace.first_token_s - trace.origin.received_s
        told["gen_ai.latency.time_in_queue"] = _seconds(part for part in parts if part.name in _QUEUES)
        told["gen_ai.latency.time_in_model_prefill"] = prefill_s
        told["gen_ai.latency.time_in_model_decode"] = decode_s
        told["gen_ai.latency.time_in_model_inference"] = prefill_s + decode_s
    return told


def _error(trace: RequestTrace) -> str:
    """Why the request failed; empty if it did not fail, or if its sender made the mistake."""
    last = trace.parts_in_order()[-1].attributes
    if trace.state == "refused":
        return str(last["reason"]) if last["status"] >= FIRST_SERVER_ERROR else ""
    return str(last.get("error", trace.state)) if trace.state == "failed" else ""


def _ended_s(trace: RequestTrace) -> float:
    """When the last choice ended."""
    return max(choice.ended_s for choice in trace.all_choices if choice.ended_s is not None)


def _seconds(parts: Iterable[Part]) -> float:
    return sum(part.end_s - part.start_s for part in parts if part.end_s is not None)


def _named(prefix: str, attributes: dict[str, Any]) -> dict[str, AttributeValue]:
    return {f"{prefix}.{name}": value for name, value in attributes.items() if value is not None}
