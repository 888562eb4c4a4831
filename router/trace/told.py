"""A request's trace as JSON (docs/tracing.md)."""

from __future__ import annotations

from typing import Any

from router.trace.request_trace import Part, RequestTrace


def told(trace: RequestTrace) -> dict[str, Any]:
    """All of a trace: ``spans`` without a parent follow each other and add up to ``total_ms``."""
    started_s = trace.origin.received_s
    total_s = trace.total_s
    return {
        "id": trace.origin.request_id,
        "answer_id": trace.origin.answer_id,
        "state": trace.state,
        "model": trace.model,
        "endpoint": trace.origin.endpoint,
        "num_choices": trace.origin.num_choices,
        "started_unix_s": round(trace.started_unix_s, 6),
        "total_ms": _ms(total_s),
        "ttft_ms": _ttft_ms(trace),
        "prompt_tokens": trace.num_prompt_tokens,
        "completion_tokens": trace.num_output_tokens,
        "cached_tokens": trace.num_cached_tokens or 0,
        "finish_reason": trace.finish_reason or None,
        "trace_id": None if trace.spans is None else trace.spans.trace_id,
        "spans": [_span(part, started_s, started_s + total_s) for part in trace.parts],
        "choices": [choice.told(started_s) for choice in trace.choices],
        "gaps": trace.gaps.told(started_s),
    }


def summary(trace: RequestTrace) -> dict[str, Any]:
    """A line of the list of requests. ``prefill`` and ``decode`` are where it was last."""
    prefill = [part.where for part in trace.parts if part.name == "prefill"]
    decode = [part.where for part in trace.parts if part.name == "decode"]
    return {
        "id": trace.origin.request_id,
        "state": trace.state,
        "started_unix_s": round(trace.started_unix_s, 6),
        "total_ms": _ms(trace.total_s),
        "ttft_ms": _ttft_ms(trace),
        "endpoint": trace.origin.endpoint,
        "prompt_tokens": trace.num_prompt_tokens,
        "completion_tokens": trace.num_output_tokens,
        "prefill": prefill[-1] if prefill else None,
        "decode": decode[-1] if decode else None,
        "reason": trace.choices[-1].reason if trace.choices else None,
    }


def _span(part: Part, started_s: float, ended_s: float) -> dict[str, Any]:
    end_s = ended_s if part.end_s is None else part.end_s
    return {
        "name": part.name,
        "start_ms": _ms(part.start_s - started_s),
        "duration_ms": _ms(end_s - part.start_s),
        "parent": part.parent,
        "where": part.where,
        "attributes": part.attributes,
    }


def _ttft_ms(trace: RequestTrace) -> float | None:
    return None if trace.first_token_s is None else _ms(trace.first_token_s - trace.origin.received_s)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
