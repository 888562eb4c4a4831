"""A collector gets one trace of a request from all processes that served it, and the waterfall adds up to its time."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.otlp_collector import Collected, Collector

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4737"
SPAN_ID = "00f067aa0ba902b7"
NUM_PROMPT_TOKENS = 150
TOLERANCE = 0.02
TOLERANCE_MS = 2.0

ALL = {
    ("router", "llm_request", "server"),
    ("router", "tokenize", "internal"),
    ("router", "queue", "internal"),
    ("router", "prefill", "client"),
    ("router", "decode", "client"),
    ("prefill", "prefill", "server"),
    ("prefill", "queue", "internal"),
    ("prefill", "step", "internal"),
    ("decode", "decode", "server"),
    ("decode", "queue", "internal"),
    ("decode", "kv_transfer", "internal"),
    ("decode", "step", "internal"),
    ("decode", "decode", "internal"),
}


def ask(client: httpx.Client, trace_id: str, *, is_sampled: bool, factor: int) -> dict[str, Any]:
    """The waterfall of a request that came with a span of its caller; its prompt is that of no other ``factor``."""
    prompt = [3 + (factor * offset + offset // 7) % 250 for offset in range(1, NUM_PROMPT_TOKENS + 1)]
    headers = {"traceparent": f"00-{trace_id}-{SPAN_ID}-0{int(is_sampled)}"}
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")
    assert found.status_code == 200, found.text
    waterfall: dict[str, Any] = found.json()
    return waterfall


def has_ended(spans: list[Collected]) -> bool:
    """True if router and workers have sent all their spans: the span of a process's whole work comes last."""
    return {(span.role, span.name, span.kind) for span in spans} >= ALL


def test_one_trace_comes_from_all_processes(wide_cluster: ClusterProcess, collector: Collector) -> None:
    with httpx.Client(base_url=wide_cluster.url, timeout=60.0, trust_env=False) as client:
        unsampled = ask(client, OTHER_TRACE_ID, is_sampled=False, factor=11)
        waterfall = ask(client, TRACE_ID, is_sampled=True, factor=13)
    spans = collector.wait_for(TRACE_ID, has_ended)

    assert (unsampled["trace_id"], waterfall["trace_id"]) == (None, TRACE_ID)
    assert collector.of_trace(OTHER_TRACE_ID) == []
    assert len({span.resource["service.instance.id"] for span in spans}) == 3
    by_id = {span.span_id: span for span in spans}
    [whole] = [span for span in spans if span.parent_id == SPAN_ID]
    assert (whole.role, whole.name) == ("router", "llm_request")
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span is whole
        elif span.kind == "server":
            assert (parent.role, parent.kind, parent.name) == ("router", "client", span.name)
            assert parent.attributes["baton.worker"] == span.resource["service.instance.id"]
        elif span.role != "router":
            assert (parent.role, parent.kind) == (span.role, "server")
        else:
            assert parent is whole
    inside_ms = sum(span.end_ns - span.start_ns for span in spans if span.parent_id == whole.span_id) / 1e6
    whole_ms = (whole.end_ns - whole.start_ns) / 1e6
    assert abs(inside_ms - whole_ms) <= max(TOLERANCE_MS, TOLERANCE * whole_ms)


def test_parts_of_the_waterfall_add_up_and_tell_of_steps_and_bytes(wide_cluster: ClusterProcess) -> None:
    with httpx.Client(base_url=wide_cluster.url, timeout=60.0, trust_env=False) as client:
        waterfall = ask(client, OTHER_TRACE_ID, is_sampled=False, factor=17)

    parts = [span for span in waterfall["spans"] if span["parent"] is None]
    assert [part["name"] for part in parts] == ["tokenize", "queue", "prefill_queue", "prefill", "transfer", "decode"]
    added_ms, total_ms = sum(part["duration_ms"] for part in parts), waterfall["total_ms"]
    assert abs(added_ms - total_ms) <= max(TOLERANCE_MS, TOLERANCE * total_ms)
    told: dict[str, list[dict[str, Any]]] = {}
    for span in waterfall["spans"]:
        if span["parent"] is not None:
            told.setdefault(f"{waterfall['spans'][span['parent']]['name']} {span['name']}", []).append(span)
    computed = sum(step["attributes"]["tokens"] for step in told["prefill step"])
    assert computed + waterfall["cached_tokens"] >= NUM_PROMPT_TOKENS
    [moved] = told["transfer kv_transfer"]
    assert moved["attributes"]["bytes"] > 0
    assert moved["attributes"]["source"] == parts[3]["where"]
    assert moved["where"] == parts[4]["where"]
