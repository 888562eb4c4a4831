"""The measurements of each request, and the names of their metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.contract.messages import SamplingParams
from engine.contract.stats import GAUGES
from engine.contract.token_ids import TokenIds
from router.report.metric_rows import Distribution
from router.request.text_request import TextRequest
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

LISTED = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time")
OF_SEVERAL_TOKENS = ("request_handover_time", "request_decode_time", "request_time_per_output_token")

VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:cache_config_info",
}
"""Samples that dashboards for vLLM's server ask for."""


async def scrape(rig: RouterRig) -> list[Sample]:
    text = (await rig.client.get("/metrics")).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(samples: list[Sample], name: str, **labels: str) -> float:
    found = [item.value for item in samples if item.name == name and labels.items() <= item.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]


async def test_sequence_that_is_given_up_before_it_begins_is_in_the_totals(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        text = TextRequest(request_id="a", prompt_token_ids=TokenIds.of((5, 6)), sampling=SamplingParams(max_tokens=9))
        rig.service.generate(text).cancel()
        await until(rig.is_at_rest)

        counters = rig.service.counters
        assert (counters.num_requests, counters.num_cancelled, counters.num_finished) == (1, 1, 0)
        assert value(await scrape(rig), "baton:request_finishes_total", reason="abort") == 1


@given(values=st.lists(st.floats(0, 100), max_size=30), bounds=st.lists(st.floats(0.1, 50), min_size=1, unique=True))
def test_distribution_counts_what_is_at_most_each_bound(values: list[float], bounds: list[float]) -> None:
    bounds.sort()
    distribution = Distribution(bounds)
    for item in values:
        distribution.observe(item)

    expected = [sum(item <= bound for item in values) for bound in bounds] + [len(values)]
    assert [number for _, number in distribution.cumulative()] == expected
    assert distribution.total == pytest.approx(sum(values))


def test_distribution_takes_a_value_several_times() -> None:
    distribution = Distribution((1.0,))
    distribution.observe(0.5, 3)

    assert (distribution.num_values, distribution.total) == (3, 1.5)


async def test_each_part_of_a_request_is_measured_once(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        samples = await scrape(rig)

    for name in (*LISTED, *OF_SEVERAL_TOKENS):
        assert value(samples, f"baton:{name}_seconds_count") == 1, name
    assert value(samples, "baton:inter_token_latency_seconds_count") == 4
    assert value(samples, "baton:request_prompt_tokens_sum") == 7
    assert value(samples, "baton:request_generation_tokens_sum") == 5
    whole = value(samples, "baton:e2e_request_latency_seconds_sum")
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert sum(value(samples, f"baton:{name}_seconds_sum") for name in parts) == pytest.approx(whole, rel=0.01)


async def test_request_of_one_token_has_no_hand_over(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=1)
        samples = await scrape(rig)

    assert [value(samples, f"baton:{name}_seconds_count") for name in LISTED] == [1] * len(LISTED)
    assert [value(samples, f"baton:{name}_seconds_count") for name in OF_SEVERAL_TOKENS] == [0] * 3


async def test_prompt_computed_on_decode_has_no_hand_over(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=replace(FAST, local_prefill_tokens=64)) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        samples = await scrape(rig)

    assert value(samples, "baton:request_handover_time_seconds_count") == 0
    assert value(samples, "baton:request_decode_time_seconds_count") == 1


async def test_finishes_are_counted_by_reason(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        rig.prefill[0].is_dead = rig.decode[0].is_dead = True
        await rig.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Timeout": "0.2"})
        samples = await scrape(rig)

    finishes = {item.labels["reason"]: item.value for item in samples if item.name == "baton:request_finishes_total"}
    assert finishes == {"stop": 0, "length": 1, "error": 1, "abort": 0}


async def test_other_systems_names_come_only_when_asked_for(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)

        assert not [item.name for item in await scrape(rig) if item.name.startswith("vllm:")]


async def test_vllm_names_have_its_labels_and_our_values(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=replace(FAST, metrics_compat="vllm")) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        samples = await scrape(rig)

    theirs = [item for item in samples if item.name.startswith("vllm:")]
    counters = {"vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"}
    assert {item.name for item in theirs} >= VLLM_NAMES - counters  # the fake workers do not count those
    assert {item.labels["model_name"] for item in theirs} == {"tiny"}
    assert all(item.labels["engine"] for item in theirs)
    assert value(samples, "vllm:prompt_tokens_total") == 7
    assert value(samples, "vllm:generation_tokens_total") == 5
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 1
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 1


async def test_every_gauge_that_is_declared_is_reported_told_in_the_status_and_measured(model_dir: Path) -> None:
    numbers: dict[str, int] = {name: 100 + index for index, name in enumerate(GAUGES)}
    values = {name: (3, number) if name.endswith("by_group") else number for name, number in numbers.items()}
    async with router_rig(model_dir) as rig:
        rig.decode[0].gauges = values
        await until(lambda: rig.service.decode_pool.replicas[0].load.num_running == numbers["num_running"])

        (row,) = (await rig.client.get("/status")).json()["pools"]["decode"]
        samples = await scrape(rig)

    assert {name: row[name] for name in GAUGES} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    metrics = {name: told.metric for name, told in GAUGES.items() if told.metric}
    assert len(metrics) == 9
    for name, metric in metrics.items():
        assert value(samples, f"baton:{metric}", role="decode", replica="decode-0") == numbers[name]
