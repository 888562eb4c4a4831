"""Which traces are kept, who sees them, and where in the cluster they are found."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from router.errors import TraceNotFoundError
from router.security import SecuritySettings, hash_key, new_key
from router.trace.directory import TraceDirectory
from router.trace.gaps import NUM_LARGEST, Gaps
from router.trace.origin import Origin, Viewer
from router.trace.recorder import MAX_REASON_CHARACTERS, TraceRecorder
from tests.support.router.router_peers import PeerNet
from tests.support.router.router_rig import FAST, router_rig, until

ANYBODY = Viewer(owner="")


def recorder(name: str = "r", *, max_count: int = 10) -> TraceRecorder:
    return TraceRecorder(model="tiny", router_id=name, max_count=max_count, sample_rate=1.0)


def ran(traces: TraceRecorder, request_id: str) -> None:
    origin = Origin(request_id=request_id, answer_id=f"cmpl-{request_id}", owner="", endpoint="/x", received_s=0.0)
    trace = traces.begin(origin, num_prompt_tokens=1)
    assert trace is not None
    traces.end(trace, "finished")


async def test_only_the_last_ones_are_kept(model_dir: Path) -> None:
    traces = recorder(max_count=2)
    for name in "abc":
        ran(traces, name)

    assert [traces.find(name, viewer=ANYBODY) is not None for name in "abc"] == [False, True, True]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_one_owner_pushes_out_its_own_traces_alone(is_refused: bool) -> None:
    traces = recorder(max_count=4)
    for number, owner in enumerate(["few", *["many"] * 20]):
        origin = Origin(request_id=f"r{number}", answer_id="", owner=owner, endpoint="/x", received_s=0.0)
        if is_refused:
            traces.refuse(origin, status=400, code=None, reason="")
        elif (trace := traces.begin(origin, num_prompt_tokens=1)) is not None:
            traces.end(trace, "finished")

    rows = json.loads(traces.last(99, viewer=Viewer(owner="", is_admin=True)))
    assert [row["id"] for row in rows] == ["r20", "r19", "r18", "r0"]


async def test_share_of_requests_that_is_traced(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=replace(FAST, trace_sample_rate=0.0)) as rig:
        answer = await rig.complete(max_tokens=2)
        found = await rig.client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")

        assert (found.status_code, found.json()["error"]["code"]) == (404, "trace_not_found")
        assert "router.trace_sample_rate" in found.json()["error"]["message"]


async def test_both_ids_of_an_answer_find_its_trace_and_lists_name_it(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        answer = await rig.complete([7] * 9, max_tokens=3, ignore_eos=True)
        request_id = answer.headers["x-request-id"]
        by_body = await rig.client.get(f"/v1/requests/{answer.json()['id']}/trace")
        listed = (await rig.client.get("/v1/requests", params={"limit": 5})).json()["data"]

        assert by_body.json()["id"] == request_id
        [row] = listed
        assert (row["id"], row["state"], row["endpoint"]) == (request_id, "finished", "/v1/completions")
        assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (9, 3, 0)
        assert (row["prefill"], row["decode"]) == ("prefill-0", "decode-0")
        assert (await rig.client.get("/v1/requests", params={"limit": 0})).status_code == 400


REFUSED = {
    "parameter": ({"temperature": -1.0}, 400, "invalid_parameter"),
    "model": ({"model": "another"}, 404, "model_not_found"),
    "room": ({"n": 2}, 429, "queue_full"),
    "workers": ({}, 503, "no_healthy_replica"),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_refused_request_leaves_a_trace_with_the_reason(model_dir: Path, why: str) -> None:
    fields, status, code = REFUSED[why]
    async with router_rig(model_dir, settings=replace(FAST, max_num_requests=2, backoff_min_s=30.0)) as rig:
        if why == "workers":
            rig.decode.kill("decode-0")
            await until(lambda: not rig.service.decode_pool.has_any())
        if why == "room":
            rig.prefill[0].gate.clear()
            other = asyncio.create_task(rig.complete([7] * 9, max_tokens=3))
            await until(lambda: rig.service.num_alive == 1)
        answer = await rig.complete([7] * 9, max_tokens=3, **fields)
        found = await rig.client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")
        [row] = [row for row in (await rig.client.get("/v1/requests")).json()["data"] if row["state"] != "running"]
        if why == "room":
            rig.prefill[0].gate.set()
            assert (await other).status_code == 200

        assert (answer.status_code, found.status_code) == (status, 200)
        trace = found.json()
        assert (trace["state"], trace["endpoint"], trace["completion_tokens"]) == ("refused", "/v1/completions", 0)
        [span] = trace["spans"]
        assert (span["name"], span["duration_ms"]) == ("refused", trace["total_ms"])
        told = {"status": status, "code": code, "reason": answer.json()["error"]["message"]}
        assert span["attributes"] == told
        assert (row["id"], row["state"], row["reason"]) == (trace["id"], "refused", code)


async def test_every_endpoint_that_generates_traces_what_it_refuses(model_dir: Path) -> None:
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
    async with router_rig(model_dir) as rig:
        for path in paths:
            assert (await rig.client.post(path, json={"temperature": "hot"})).status_code == 400
        listed = (await rig.client.get("/v1/requests")).json()["data"]

        assert [(row["endpoint"], row["state"]) for row in listed] == [(path, "refused") for path in reversed(paths)]


async def test_whoever_has_no_key_leaves_no_trace(model_dir: Path) -> None:
    admin = new_key()
    security = SecuritySettings(api_keys=(hash_key(new_key()),), admin_keys=(hash_key(admin),))
    async with router_rig(model_dir, security=security) as rig:
        assert (await rig.complete(max_tokens=2)).status_code == 401
        listed = await rig.client.get("/v1/requests", headers={"Authorization": f"Bearer {admin}"})

        assert listed.json()["data"] == []


async def test_refusals_displace_no_trace_of_what_ran() -> None:
    traces = recorder(max_count=2)
    ran(traces, "ran")
    for number in range(5):
        refused = Origin(request_id=f"r{number}", answer_id="", owner="", endpoint="/x", received_s=0.0)
        traces.refuse(refused, status=429, code="queue_full", reason="too many" * 1000)

    found = json.loads(traces.find("r4", viewer=ANYBODY) or b"")
    assert len(found["spans"][0]["attributes"]["reason"]) == MAX_REASON_CHARACTERS
    assert [row["id"] for row in json.loads(traces.last(10, viewer=ANYBODY))] == ["r4", "r3", "ran"]


async def test_owner_and_admin_see_a_trace_and_nobody_else(model_dir: Path) -> None:
    own, other, admin = new_key(), new_key(), new_key()
    security = SecuritySettings(api_keys=(hash_key(own), hash_key(other)), admin_keys=(hash_key(admin),))
    async with router_rig(model_dir, security=security) as rig:

        def key(text: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {text}"}

        body = {"prompt": "hello", "max_tokens": 2}
        answer = await rig.client.post("/v1/completions", json=body, headers=key(own))
        path = f"/v1/requests/{answer.headers['x-request-id']}/trace"
        found = [(await rig.client.get(path, headers=key(text))).status_code for text in (own, admin, other)]
        lists = [(await rig.client.get("/v1/requests", headers=key(text))).json() for text in (own, admin, other)]

        assert found == [200, 200, 404]
        assert [len(item["data"]) for item in lists] == [1, 1, 0]
        assert (await rig.client.get(path)).status_code == 401


async def test_any_router_finds_the_trace_of_another(model_dir: Path) -> None:
    net = PeerNet()
    async with (
        router_rig(model_dir, router_id="one", peers=net.seen_by("one")) as one,
        router_rig(model_dir, router_id="two", peers=net.seen_by("two")) as two,
    ):
        for name, rig in (("one", one), ("two", two)):
            net.views[name], net.recorders[name] = rig.service.view, rig.service.traces.recorder
        answer = await one.complete(max_tokens=2)
        await two.complete(max_tokens=2)
        found = await two.client.get(f"/v1/requests/{answer.headers['x-request-id']}/trace")
        listed = (await two.client.get("/v1/requests")).json()["data"]

        assert found.json()["spans"][0]["where"] == "router one"
        assert len(listed) == 2
        del net.recorders["one"]  # it is gone, and not yet known to be
        assert len((await two.client.get("/v1/requests")).json()["data"]) == 1


async def test_no_router_has_it() -> None:
    directory = TraceDirectory(recorder(), PeerNet().seen_by("r"), timeout_s=1.0)

    with pytest.raises(TraceNotFoundError, match="'nobody'"):
        await directory.find("nobody", viewer=ANYBODY)


def test_gaps_are_counted_and_the_longest_kept() -> None:
    gaps, now_s = Gaps(), 5.0
    for number in range(1001):
        gaps.tokens(now_s)
        now_s += 0.5 if number % 100 == 50 else 0.010

    told = gaps.told(5.0)
    assert told["count"] == 1000
    assert told["p50_ms"] == pytest.approx(10, rel=0.04)
    assert told["max_ms"] == pytest.approx(500)
    assert len(told["largest"]) == NUM_LARGEST
    assert all(gap_ms == pytest.approx(500) for _, gap_ms in told["largest"])


def test_tokens_that_come_together_have_a_part_of_the_gap_each() -> None:
    """So a simulation counts, which makes tokens one by one, and so `/metrics` does."""
    gaps = Gaps()
    for at_s, num_tokens in ((0.0, 3), (0.01, 1), (0.05, 4)):
        gaps.tokens(at_s, num_tokens)

    told = gaps.told(0.0)
    assert (told["count"], told["max_ms"], told["largest"][0]) == (5, 40.0, [10.0, 40.0])
    assert told["p50_ms"] == told["p99_ms"] == pytest.approx(10, rel=0.04)
