"""What requests are promised: by the body, by headers, by the cluster; and whether it was kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.contract.promise import NO_PROMISE, Promise
from tests.support.router.router_rig import FAST, RouterRig, router_rig

USER = {"role": "user", "content": "hi"}
HEADERS = {"X-SLO-TTFT-Ms": "250", "X-SLO-ITL-Ms": "12.5"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [USER], "max_tokens": 3},
}


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir) as made:
        yield made


async def ask(rig: RouterRig, url: str, *, headers: dict[str, str] | None = None, **fields: object) -> Promise:
    """The promise that the engines of both roles receive."""
    answer = await rig.client.post(url, json={**BODIES[url], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    prefill, decode = rig.prefill[0].seen[-1].promise, rig.decode[0].seen[-1].promise
    assert prefill == decode
    return decode


@pytest.mark.parametrize("url", BODIES)
async def test_the_body_says_what_is_promised_and_headers_what_it_leaves_out(rig: RouterRig, url: str) -> None:
    assert await ask(rig, url) == NO_PROMISE
    assert await ask(rig, url, slo={"ttft_ms": 100, "itl_ms": 20.5}) == Promise(ttft_ms=100.0, itl_ms=20.5)
    assert await ask(rig, url, headers=HEADERS) == Promise(ttft_ms=250.0, itl_ms=12.5)
    assert await ask(rig, url, headers=HEADERS, slo={"itl_ms": 40}) == Promise(ttft_ms=250.0, itl_ms=40.0)
    assert await ask(rig, url, slo=None) == NO_PROMISE


async def test_the_cluster_promises_what_nobody_asked_for(model_dir: Path) -> None:
    settings = replace(FAST, promise=Promise(ttft_ms=900.0, itl_ms=90.0))
    async with router_rig(model_dir, settings=settings) as rig:
        assert await ask(rig, "/v1/completions") == settings.promise
        assert await ask(rig, "/v1/completions", slo={"itl_ms": 9}) == Promise(ttft_ms=900.0, itl_ms=9.0)


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize(
    ("slo", "param"),
    [
        ({"itl_ms": 0}, "slo.itl_ms"),
        ({"ttft_ms": -1}, "slo.ttft_ms"),
        ({"ttft_ms": 1e9}, "slo.ttft_ms"),
        ({"itl_ms": "20"}, "slo.itl_ms"),
        ({"tpot_ms": 20}, "slo.tpot_ms"),
        (20, "slo"),
    ],
)
async def test_a_promise_that_makes_no_sense_is_named(rig: RouterRig, url: str, slo: object, param: str) -> None:
    answer = await rig.client.post(url, json={**BODIES[url], "slo": slo})

    assert answer.status_code == 400
    assert param in answer.text
    if isinstance(slo, dict) and "tpot_ms" not in slo:
        assert f"got {json.dumps(next(iter(slo.values())))}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e9"])
async def test_bad_header_is_named(rig: RouterRig, name: str, value: str) -> None:
    answer = await rig.client.post("/v1/completions", json=BODIES["/v1/completions"], headers={name: value})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert value in answer.json()["error"]["message"]
    assert "above 0, up to 3600000" in answer.json()["error"]["message"]


async def attained(rig: RouterRig) -> tuple[int, int, int, int]:
    totals = (await rig.client.get("/status")).json()["totals"]
    return (
        totals["ttft_promises_kept"],
        totals["ttft_promises"],
        totals["itl_promises_kept"],
        totals["itl_promises"],
    )


async def test_promises_that_were_kept_are_counted(rig: RouterRig) -> None:
    await rig.complete("x", max_tokens=4)
    assert await attained(rig) == (0, 0, 0, 0)

    await rig.complete("x", max_tokens=4, slo={"ttft_ms": 3.6e6, "itl_ms": 3.6e6})
    assert await attained(rig) == (1, 1, 1, 1)
    await rig.complete("x", max_tokens=4, slo={"ttft_ms": 1e-6, "itl_ms": 1e-6})

    assert await attained(rig) == (1, 2, 1, 2)
    assert "baton:itl_promises_kept_total" in (await rig.client.get("/metrics")).text


async def test_an_answer_of_one_token_has_no_gap(rig: RouterRig) -> None:
    await rig.complete("x", max_tokens=1, slo={"ttft_ms": 3.6e6, "itl_ms": 3.6e6})

    assert await attained(rig) == (1, 1, 0, 0)


async def test_a_request_that_failed_before_its_first_token_missed_its_promise(rig: RouterRig) -> None:
    rig.prefill[0].error_code = "broken"

    answer = await rig.complete("x", max_tokens=4, slo={"ttft_ms": 3.6e6, "itl_ms": 3.6e6})

    assert answer.status_code >= 500
    assert await attained(rig) == (0, 1, 0, 0)
