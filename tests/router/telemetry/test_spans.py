"""One request is one trace at a collector, across router and workers, and there are no spans if it is not sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.telemetry.settings import TracingSettings
from router.telemetry.tracer import CLOSING_THREAD
from tests.support.cluster.otlp_collector import Collected, running_collector
from tests.support.router.live_router import Live, live_router
from tests.support.router.router_rig import FAST, until

PROMPT = list(range(3, 40))
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=value"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}


async def ask(live: Live, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
    answer = await live.client.post("/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def tree(spans: list[Collected]) -> dict[str, list[str]]:
    """The names of the spans in each span, by its role and name, in the order of their beginnings."""
    names = {span.span_id: f"{span.role} {span.name}" for span in spans}
    inside: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        inside.setdefault(names.get(span.parent_id, "caller"), []).append(f"{span.role} {span.name}")
    return inside


def only(spans: list[Collected], name: str, kind: str) -> Collected:
    [found] = [span for span in spans if (span.name, span.kind) == (name, kind)]
    return found


async def test_request_is_one_trace_over_all_processes(model_dir: Path) -> None:
    with running_collector() as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, chunk_tokens=16, tracing=tracing) as live:
            answer = await ask(live, SAMPLED)
            path = f"/v1/requests/{answer.headers['x-request-id']}/trace"
            assert (await live.client.get(path)).json()["trace_id"] == TRACE_ID

    spans = collector.of_trace(TRACE_ID)
    assert (len(spans), collector.path) == (len(collector.spans), "/v1/traces")
    assert tree(spans) == {
        "caller": ["router llm_request"],
        "router llm_request": ["router tokenize", "router queue", "router prefill", "router decode"],
        "router prefill": ["prefill prefill"],
        "prefill prefill": ["prefill queue", "prefill step", "prefill step", "prefill step"],
        "router decode": ["decode decode"],
        "decode decode": ["decode queue", "decode kv_transfer", "decode step", "decode decode"],
    }
    whole = only(spans, "llm_request", "server")
    assert whole.parent_id == SPAN_ID
    assert all(whole.start_ns <= span.start_ns <= span.end_ns for span in spans)
    inside_ns = sum(span.end_ns - span.start_ns for span in spans if span.parent_id == whole.span_id)
    assert inside_ns == pytest.approx(whole.end_ns - whole.start_ns, abs=2_000)  # what the wall clock's floats lose
    assert {span.resource["service.name"] for span in spans} == {"baton"}
    assert {span.resource["service.instance.id"] for span in spans} == {"r", "prefill-0", "decode-0"}


async def test_spans_have_the_names_of_the_conventions_and_of_vllm(model_dir: Path) -> None:
    with running_collector() as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url, service_name="mine")
        async with live_router(model_dir, tracing=tracing) as live:
            answer = await ask(live, temperature=0.5, top_p=0.9, seed=1)

    whole = only(collector.spans, "llm_request", "server")
    told = whole.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (8, 0.5)
    assert told["gen_ai.request.top_p"] == 0.9
    assert told["gen_ai.request.id"] == answer.headers["x-request-id"]
    assert told["gen_ai.response.id"] == answer.json()["id"]
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.prompt_tokens"] == len(PROMPT)
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == 8
    whole_s = (whole.end_ns - whole.start_ns) / 1e9
    assert told["gen_ai.latency.e2e"] == pytest.approx(whole_s, abs=1e-5)
    in_engine_s = told["gen_ai.latency.time_in_model_prefill"] + told["gen_ai.latency.time_in_model_decode"]
    assert told["gen_ai.latency.time_in_model_inference"] == pytest.approx(in_engine_s)
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert told["gen_ai.latency.time_in_queue"] >= 0
    assert whole.events == ("choice", "choice", "first_token")
    assert whole.error is None
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}
    moved = only(collector.spans, "kv_transfer", "internal").attributes
    assert (moved["baton.kv.source"], moved["baton.kv.blocks"]) == ("prefill-0", 10)
    assert moved["baton.kv.bytes"] > 0


async def test_who_is_sampled_is_the_callers_choice_first(model_dir: Path) -> None:
    with running_collector() as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url, sample_ratio=0.0)
        async with live_router(model_dir, tracing=tracing) as live:
            for headers in (None, UNSAMPLED, {"traceparent": "nonsense"}):
                answer = await ask(live, headers)
                path = f"/v1/requests/{answer.headers['x-request-id']}/trace"
                assert (await live.client.get(path)).json()["trace_id"] is None
            submitted = [*live.prefill.submitted, *live.decode.submitted]
            assert [request.trace.traceparent for request in submitted if request.trace is not None] == [""] * 6
            await ask(live, SAMPLED)

    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


async def test_all_that_begins_here_is_sampled_unless_told_otherwise(model_dir: Path) -> None:
    with running_collector() as collector:
        settings = dataclasses.replace(FAST, trace_requests=0)
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, settings=settings, tracing=tracing) as live:
            await ask(live)
            await ask(live, UNSAMPLED)

    assert [span.parent_id for span in collector.spans if span.name == "llm_request"] == [""]


async def test_request_whose_worker_dies_tells_of_both_workers(model_dir: Path) -> None:
    with running_collector() as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, num_decode=2, turns_per_step=200, tracing=tracing) as live:
            answers = [asyncio.create_task(ask(live, prompt=[*PROMPT, number], max_tokens=150)) for number in range(4)]
            victim = live.decode.engines["decode-0"]
            await until(lambda: victim.load.counters["num_generated_tokens"] > 8)
            await victim.close()
            await asyncio.gather(*answers)

    lost = [span for span in collector.spans if (span.name, span.kind) == ("decode", "client") and span.error]
    assert lost
    for span in lost:
        assert span.attributes["baton.worker"] == "decode-0"
        of_trace = collector.of_trace(span.trace_id)
        calls = [item for item in of_trace if (item.name, item.kind) == ("decode", "client")]
        assert [item.attributes["baton.worker"] for item in calls if not item.error] == ["decode-1"]
        assert "recovery" in {item.name for item in of_trace}


async def test_collector_that_is_not_there_disturbs_no_request(model_dir: Path) -> None:
    with running_collector(is_away=True) as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, tracing=tracing, send_timeout_s=0.0) as live:
            for _ in range(3):
                await ask(live, SAMPLED)
            await until(live.is_at_rest)

        assert collector.spans == []
        collector.begin()  # else threads would try again and again, beside later tests
        for thread in threading.enumerate():
            if thread.name == CLOSING_THREAD:
                await asyncio.to_thread(thread.join)


async def test_client_that_leaves_ends_all_spans(model_dir: Path) -> None:
    with running_collector() as collector:
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, turns_per_step=200, tracing=tracing) as live:
            body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
            async with live.client.stream("POST", "/v1/completions", json=body, headers=SAMPLED) as answer:
                await anext(answer.aiter_bytes())
            await until(live.is_at_rest)

    spans = collector.of_trace(TRACE_ID)
    whole = only(spans, "llm_request", "server")
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert only(spans, "decode", "server").attributes["baton.finish_reason"] == "abort"


async def test_refused_request_is_one_span_that_says_why(model_dir: Path) -> None:
    with running_collector() as collector:
        async with live_router(model_dir, tracing=TracingSettings(otlp_endpoint=collector.url)) as live:
            answer = await live.complete(PROMPT, temperature=-1.0)
            path = f"/v1/requests/{answer.headers['x-request-id']}/trace"
            waterfall = (await live.client.get(path)).json()

    whole = only(collector.spans, "llm_request", "server")
    assert (answer.status_code, waterfall["state"], waterfall["trace_id"]) == (400, "refused", whole.trace_id)
    assert (whole.attributes["http.response.status_code"], whole.attributes["error.type"]) == (400, "invalid_parameter")
    assert whole.error is None  # it was its sender's
    assert tree(collector.spans) == {"caller": ["router llm_request"], "router llm_request": ["router refused"]}


async def test_spans_of_several_choices_are_those_of_the_first_and_tell_of_all(model_dir: Path) -> None:
    with running_collector() as collector:
        async with live_router(model_dir, tracing=TracingSettings(otlp_endpoint=collector.url)) as live:
            answer = await ask(live, prompt=[PROMPT, [5] * 9], n=2, temperature=1.0, seed=1)
            path = f"/v1/requests/{answer.headers['x-request-id']}/trace"
            waterfall = (await live.client.get(path)).json()

    whole, usage = only(collector.spans, "llm_request", "server"), answer.json()["usage"]
    told = whole.attributes
    assert (told["gen_ai.request.n"], told["gen_ai.response.finish_reasons"]) == (4, ["length"] * 4)
    assert told["gen_ai.usage.input_tokens"] == told["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.latency.e2e"] == pytest.approx(waterfall["total_ms"] / 1e3, abs=1e-5)
    inside_ns = sum(span.end_ns - span.start_ns for span in collector.spans if span.parent_id == whole.span_id)
    assert inside_ns == pytest.approx(whole.end_ns - whole.start_ns, abs=4_000)  # what the wall clock's floats lose
    assert {span.trace_id for span in collector.spans} == {whole.trace_id}
    assert sum(span.kind == "server" for span in collector.spans) == 3


async def test_calls_have_the_names_that_workers_give_them(model_dir: Path) -> None:
    with running_collector() as collector:
        settings = dataclasses.replace(FAST, local_prefill_tokens=20)
        tracing = TracingSettings(otlp_endpoint=collector.url)
        async with live_router(model_dir, settings=settings, tracing=tracing) as live:
            await ask(live, prompt=PROMPT[:9])
            await ask(live, max_tokens=1)
            await ask(live)

    by_id = {span.span_id: span for span in collector.spans}
    served = [span for span in collector.spans if span.kind == "server" and span.name != "llm_request"]
    assert sorted(span.name for span in served) == ["decode", "generate", "prefill", "prefill"]
    assert all(by_id[span.parent_id].name == span.name for span in served)
