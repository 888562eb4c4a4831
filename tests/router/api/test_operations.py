"""Health, readiness, status and metrics."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.api.app import build_app
from tests.support.router.router_rig import router_rig, until


async def test_router_without_workers_is_live_but_not_ready(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=0) as rig:
        ready = await rig.client.get("/ready")

        assert (await rig.client.get("/health")).status_code == 200
        assert (await rig.client.get("/ping")).status_code == 200
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")


async def test_router_becomes_ready_when_its_workers_join(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=0) as rig:
        rig.decode.add("decode-late")
        await until(rig.service.is_ready)

        assert (await rig.client.get("/ready")).status_code == 200
        assert (await rig.complete("hi", max_tokens=3)).status_code == 200


async def test_models_and_version(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        models = (await rig.client.get("/v1/models")).json()

        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 512)
        assert (await rig.client.get("/v1/models/other")).status_code == 404
        assert (await rig.client.get("/version")).json()["version"]


async def test_status_shows_every_replica_and_adds_up_their_counters(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2) as rig:
        await rig.complete([5] * 20, max_tokens=4)
        status = (await rig.client.get("/status")).json()

        assert status["model"] == "tiny"
        assert [row["replica_id"] for row in status["pools"]["prefill"]] == ["prefill-0", "prefill-1"]
        row = status["pools"]["decode"][0]
        assert {"replica_id", "node_ip", "pid", "state", "kv_usage", "num_running", "num_waiting"} <= row.keys()
        assert (row["num_loading"], row["num_leased_blocks"], row["state"]) == (0, 0, "running")
        totals = status["totals"]
        assert (totals["requests"], totals["finished"], totals["tokens"], totals["prompt_tokens"]) == (1, 1, 4, 20)
        assert (totals["transfers"], totals["transferred_bytes"]) == (4, 4 * 4096)
        assert totals["counters"]["num_generated_tokens"] == 4


async def test_status_says_which_replica_does_not_answer(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig:
        rig.prefill[1].is_dead = True
        rows = (await rig.client.get("/status")).json()["pools"]["prefill"]

        assert [row["state"] for row in rows] == ["running", "unreachable"]


async def test_status_says_which_router_answers(model_dir: Path) -> None:
    async with router_rig(model_dir) as one, router_rig(model_dir) as other:
        answers = [(await rig.client.get("/status")).json()["router"] for rig in (one, one, other)]

        assert answers[0]["router_id"] == answers[1]["router_id"] != answers[2]["router_id"]
        assert answers[0]["pid"] == os.getpid()


async def test_only_what_a_router_measures_has_its_label(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=5)
        families = text_string_to_metric_families((await rig.client.get("/metrics")).text)

        labelled = {item.name: "router" in item.labels for family in families for item in family.samples}
        assert labelled["baton:generation_tokens_total"]
        assert labelled["baton:router_requests_in_progress"]
        assert not labelled["baton:replica_up"]
        assert not labelled["baton:worker_num_generated_tokens_total"]


async def test_metrics_count_what_happened(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 7, max_tokens=5, ignore_eos=True)
        await rig.complete("hi", bad=1)
        families = list(text_string_to_metric_families((await rig.client.get("/metrics")).text))

        routers = {item.labels.pop("router", None) for fam in families for item in fam.samples}
        assert routers == {rig.service.router_id, None}
        samples = {(item.name, *sorted(item.labels.values())): item.value for fam in families for item in fam.samples}
        assert samples["baton:prompt_tokens_total",] == 7
        assert samples["baton:generation_tokens_total",] == 5
        assert samples["baton:request_finishes_total", "length"] == 1
        assert samples["baton:time_to_first_token_seconds_count",] == 1
        assert samples["baton:e2e_request_latency_seconds_count",] == 1
        assert samples["baton:http_requests_total", "/v1/completions", "400", "POST"] == 1
        assert samples["baton:replica_up", "decode", "decode-0"] == 1
        assert samples["baton:worker_num_generated_tokens_total", "decode", "decode-0"] == 4


@pytest.mark.parametrize("given", ["", "two words", "x" * 200])
async def test_unusable_request_id_is_replaced(model_dir: Path, given: str) -> None:
    async with router_rig(model_dir) as rig:
        response = await rig.client.get("/health", headers={"X-Request-Id": given})

        assert response.headers["x-request-id"] not in ("", given)


async def test_server_that_answers_the_request_id_is_left_to_it(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        app = build_app(rig.service, answers_request_id=False)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            response = await client.get("/health", headers={"X-Request-Id": "my-own-id"})

        assert (response.status_code, response.headers.get_list("x-request-id")) == (200, [])


async def test_openapi_document_describes_the_bodies(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        document = (await rig.client.get("/openapi.json")).json()

        body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"prompt", "max_tokens", "stop"} <= body["properties"].keys()
        assert body["additionalProperties"] == {"type": "null"}
