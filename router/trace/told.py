"""A request's trace as JSON (docs/tracing.md)."""

from __future__ import annotations

from typing import Any

from router.trace.request_trace import Part, RequestTrace

OTHER_CHOICES = "other_choices"
"""The part between the end of the first choice and the end of the last one."""

_WORST_FIRST = ("running", "refused", "failed", "aborted", "finished")


def told(trace: RequestTrace) -> dict[str, Any]:
    """A whole trace. The ``spans`` without a parent follow each other and add up to ``total_ms``.

    With several choices, the spans are those of the first choice and the wait for the others. Each of the other choices
    is listed separately.
    """
    own, whole_s = _of_choice(trace), _whole_s(trace)
    spans: list[dict[str, Any]] = own["spans"]
    if (rest_s := whole_s - trace.total_s) > 0 and trace.ended_s is not None:
        start_s = trace.origin.received_s + trace.total_s
        part = Part(name=OTHER_CHOICES, start_s=start_s, end_s=start_s + rest_s, where=trace.parts[0].where)
        spans.append(_span(part, trace.origin.received_s, start_s + rest_s))
    return {
        "id": trace.origin.request_id,
        "answer_id": trace.origin.answer_id,
        "model": trace.model,
        "endpoint": trace.origin.endpoint,
        "num_choices": trace.origin.num_choices,
        "started_unix_s": round(trace.started_unix_s, 6),
        "trace_id": None if trace.spans is None else trace.spans.trace_id,
        **own,
        **_of_all(trace),
        OTHER_CHOICES: [{"index": index, **_of_choice(other)} for index, other in enumerate(trace.others, start=1)],
    }


def summary(trace: RequestTrace) -> dict[str, Any]:
    """One line of the list of requests. ``prefill`` and ``decode`` are the last workers of its first choice; ``gaps``
    is the histogram of its inter-token gaps, in milliseconds. ``choices`` has two numbers for each choice: prompt
    tokens (0 if it has the prompt of the choice before) and output tokens.
    """
    prefill = [part.where for part in trace.parts if part.name == "prefill"]
    decode = [part.where for part in trace.parts if part.name == "decode"]
    reason = trace.choices[-1].reason if trace.choices else None
    return {
        "id": trace.origin.request_id,
        "started_unix_s": round(trace.started_unix_s, 6),
        "ttft_ms": _ttft_ms(trace),
        "gaps": trace.gaps.counts(),
        "endpoint": trace.origin.endpoint,
        "choices": [[choice.num_prompt_tokens, choice.num_output_tokens] for choice in trace.all_choices],
        "cached_tokens": trace.num_cached_tokens or 0,
        "prefill": prefill[-1] if prefill else None,
        "decode": decode[-1] if decode else None,
        "reason": trace.parts[0].attributes["code"] if trace.state == "refused" else reason,
        **_of_all(trace),
    }


def _of_all(trace: RequestTrace) -> dict[str, Any]:
    """The numbers over all choices together; a shared prompt counts once."""
    return {
        "state": worst_state(trace),
        "total_ms": _ms(_whole_s(trace)),
        "prompt_tokens": sum(choice.num_prompt_tokens for choice in trace.all_choices),
        "completion_tokens": sum(choice.num_output_tokens for choice in trace.all_choices),
    }


def worst_state(trace: RequestTrace) -> str:
    """The state of all choices together."""
    return min((choice.state for choice in trace.all_choices), key=_WORST_FIRST.index)


def _of_choice(trace: RequestTrace) -> dict[str, Any]:
    started_s, total_s = trace.origin.received_s, trace.total_s
    return {
        "state": trace.state,
        "total_ms": _ms(total_s),
        "ttft_ms": _ttft_ms(trace),
        "prompt_tokens": trace.num_prompt_tokens,
        "completion_tokens": trace.num_output_tokens,
        "cached_tokens": trace.num_cached_tokens or 0,
        "finish_reason": trace.finish_reason or None,
        "spans": [_span(part, started_s, started_s + total_s) for part in trace.parts],
        "choices": [choice.told(started_s) for choice in trace.choices],
        "gaps": trace.gaps.told(started_s),
    }


def _whole_s(trace: RequestTrace) -> float:
    """Time until the last choice ended, or until now."""
    return max(choice.total_s for choice in trace.all_choices)


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
