"""Resetting the prefix caches of all workers, and telling what runs, over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.contract.messages import CacheChanges
from router.api.app import build_app
from router.settings import RolesMode
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

PATH = "/reset_prefix_cache"


async def busy(rig: RouterRig) -> asyncio.Task[httpx.Response]:
    """A request that a decode worker holds."""
    rig.decode[0].step_gate.clear()
    task = asyncio.create_task(rig.complete([5] * 20, max_tokens=4))
    await until(lambda: bool(rig.decode[0].running))
    return task


async def test_every_worker_drops_its_cache_and_says_how_much(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig:
        rig.prefill[1].num_cached_tokens = 64
        answer = await rig.client.post(PATH)

        assert answer.status_code == 200
        rows = answer.json()["workers"]
        assert answer.json()["success"] is True
        assert [(row["replica_id"], row["role"], row["dropped_blocks"]) for row in rows] == [
            ("prefill-0", "prefill", 0),
            ("prefill-1", "prefill", 4),
            ("decode-0", "decode", 0),
        ]


async def test_worker_that_is_busy_is_named_and_the_others_have_dropped(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].num_cached_tokens = 16
        request = await busy(rig)
        answer = await rig.client.post(PATH, json={})

        error, rows = answer.json()["error"], answer.json()["workers"]
        assert (answer.status_code, error["code"], error["param"]) == (409, "prefix_cache_in_use", "preempt_running")
        assert "1 of 2 workers did not drop their prefix cache: decode worker decode-0: " in error["message"]
        assert (rows[0]["dropped_blocks"], "dropped_blocks" in rows[1], rows[1]["error"] != "") == (1, False, True)
        rig.decode[0].step_gate.set()
        assert (await request).status_code == 200


async def test_router_that_gave_the_order_forgets_at_once_what_was_cached(model_dir: Path) -> None:
    async with router_rig(model_dir, num_prefill=2) as rig:
        pool = rig.service.prefill_pool
        await until(lambda: all(rig.prefill.has_stream(name) for name in ("prefill-0", "prefill-1")))
        news = CacheChanges(first_sequence=0, next_sequence=1, stored=bytes(range(64)), is_snapshot=True)
        for replica_id in ("prefill-0", "prefill-1"):
            pool.note_cache(replica_id, [news])
        assert pool.mirror is not None
        num_known = pool.mirror.num_blocks

        await rig.client.post(PATH)

        assert num_known > 0
        assert pool.mirror.num_blocks == 0


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("?preempt_running=true", None),
        ("?reset_running_requests=1&reset_external=true", None),
        ("", {"preempt_running": True}),
        ("", {"reset_running_requests": True}),
        ("?preempt_running=false", {"preempt_running": True}),
    ],
)
async def test_requests_are_preempted_where_that_is_asked_for(
    model_dir: Path, query: str, body: dict[str, Any] | None
) -> None:
    async with router_rig(model_dir) as rig:
        request = await busy(rig)
        answer = await rig.client.post(PATH + query, json=body)

        assert answer.status_code == 200, answer.text
        assert [row["preempted_requests"] for row in answer.json()["workers"]] == [0, 1]
        rig.decode[0].step_gate.set()
        assert (await request).status_code == 200


async def test_worker_that_does_not_answer_is_named(model_dir: Path) -> None:
    async with router_rig(model_dir, num_decode=2) as rig:
        rig.decode[1].is_dead = True
        answer = await rig.client.post(PATH)

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
        assert "decode worker decode-1: " in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "1"


async def test_worker_that_hangs_holds_up_nobody_for_ever(model_dir: Path) -> None:
    settings = dataclasses.replace(FAST, abort_timeout_s=0.05)
    async with router_rig(model_dir, settings=settings) as rig:
        rig.prefill[0].answer_gate.clear()
        answer = await rig.client.post(PATH)
        rig.prefill[0].answer_gate.set()

        assert answer.status_code == 503
        assert "prefill-0 did not answer within 0.05 s" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("?preempt=true", "unknown_parameter", "preempt"),
        ("?preempt_running=maybe", "invalid_parameter", "preempt_running"),
        ("?reset_external=false", "unsupported_parameter", "reset_external"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_nothing_is_dropped(
    model_dir: Path, query: str, code: str, param: str
) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].num_cached_tokens = 64
        answer = await rig.client.post(PATH + query)

        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, code, param)
        assert rig.prefill[0].num_cached_tokens == 64


async def test_web_page_of_another_origin_can_send_nothing_that_counts(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        rig.prefill[0].num_cached_tokens = 64
        headers = {"Origin": "https://evil.example"}
        empty = await rig.client.post(PATH, headers=headers)
        text = await rig.client.post(PATH, headers={**headers, "Content-Type": "text/plain"}, content=b"{}")

        assert [empty.status_code, text.status_code] == [415, 415]
        assert rig.prefill[0].num_cached_tokens == 64


@pytest.mark.parametrize("roles", ["fixed", "elastic"])
async def test_server_info_tells_what_runs(model_dir: Path, roles: RolesMode) -> None:
    async def facts() -> Mapping[str, object]:
        return {"versions": {"ray": "2"}, "config": {"port": 8000}}

    async with router_rig(model_dir, num_decode=2, settings=dataclasses.replace(FAST, roles=roles)) as rig:
        app = build_app(rig.service, facts=facts)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            told = (await client.get("/server_info")).json()

        assert (told["models"], told["versions"], told["config"]) == (["tiny"], {"ray": "2"}, {"port": 8000})
        assert [row["replica_id"] for row in told["workers"]] == ["prefill-0", "decode-0", "decode-1"]
        assert {(row["device"], row["num_blocks"], row["max_model_len"]) for row in told["workers"]} == {
            ("cpu", 1000, 512)
        }


@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", "/server_info"), ("HEAD", "/server_info")])
async def test_both_are_closed_where_orders_are(model_dir: Path, method: str, path: str) -> None:
    async with router_rig(model_dir, settings=dataclasses.replace(FAST, admin_api=False)) as rig:
        rig.prefill[0].num_cached_tokens = 64
        answer = await rig.client.request(method, path)

        assert answer.status_code == 403
        assert rig.prefill[0].num_cached_tokens == 64


@pytest.mark.parametrize("model", [None, "tiny", "other-name"])
async def test_model_answers_to_all_of_its_names_with_the_first(model_dir: Path, model: str | None) -> None:
    async with router_rig(model_dir, aliases=("other-name",)) as rig:
        answer = (await rig.complete("hi", max_tokens=2, **({"model": model} if model else {}))).json()
        chat = (await rig.chat("hi", max_tokens=2, **({"model": model} if model else {}))).json()
        listed = (await rig.client.get("/v1/models")).json()["data"]
        refused = await rig.complete("hi", max_tokens=2, model="third")

        assert (answer["model"], chat["model"]) == ("tiny", "tiny")
        assert [(card["id"], card["root"]) for card in listed] == [("tiny", "tiny"), ("other-name", "tiny")]
        assert (await rig.client.get("/v1/models/other-name")).json()["id"] == "other-name"
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            404,
            "the model 'third' does not exist; served here: 'tiny', 'other-name'",
        )
