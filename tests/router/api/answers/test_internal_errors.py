"""What nobody thought of goes wrong while an answer is written: the client is told, and the log says for whom."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from engine.contract.messages import GenerateRequest
from tests.support.router.router_rig import RouterRig, router_rig

HEADERS = {"X-Request-Id": "my-own-id"}


def broken_from(first: int, position: int) -> int:
    """A token, or from some position on what is none, which no detokenizer can take."""
    return 40 if position < first else cast("int", [40])


def num_finishes(rig: RouterRig, reason: str) -> float:
    rows = next(item.rows for item in rig.service.metrics.families() if item.name == "baton:request_finishes")
    return next(row.value for row in rows if row.labels == (("reason", reason),))


@pytest.mark.parametrize("n", [1, 2])
async def test_stream_ends_with_an_error_that_is_logged(
    model_dir: Path, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    def next_token(_: GenerateRequest, position: int) -> int:
        return broken_from(3, position)

    async with router_rig(model_dir, next_token=next_token) as rig:
        body = {"prompt": "hi", "max_tokens": 9, "stream": True, "n": n}
        response = await rig.client.post("/v1/completions", json=body, headers=HEADERS)

        *_, last, done, empty = response.text.split("\n\n")
        assert (done, empty) == ("data: [DONE]", "")
        assert '"code": "internal_error"' in last
        assert "answer failed: request_id=cmpl-" in caplog.text
        assert " x_request_id=my-own-id" in caplog.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_answer_that_fails_before_it_begins_is_a_500(
    model_dir: Path, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def next_token(_: GenerateRequest, position: int) -> int:
        return broken_from(0, position)

    async with router_rig(model_dir, next_token=next_token) as rig:
        body = {"prompt": "hi", "max_tokens": 9, "stream": is_stream}
        response = await rig.client.post("/v1/completions", json=body, headers=HEADERS)

        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert num_finishes(rig, "error") == 1
        assert "answer failed: request_id=cmpl-" in caplog.text
        assert " x_request_id=my-own-id" in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_request_that_fails_before_anything_runs_is_a_500_with_its_id(
    model_dir: Path, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For an endpoint with a direct route, and for one that the framework finds."""

    def fail(*_: object, **__: object) -> None:
        raise TypeError("nobody thought of this")

    async with router_rig(model_dir) as rig:
        monkeypatch.setattr(rig.service.tokenizer, "encode_all", fail)
        response = await rig.client.post(path, json={"prompt": "hi"}, headers=HEADERS)
        answered = next(item.rows for item in rig.service.metrics.families() if item.name == "baton:http_requests")
        traced = (await rig.client.get("/v1/requests")).json()["data"]

    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["x-request-id"] == "my-own-id"
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "x_request_id=my-own-id" in record.getMessage()
    assert path in record.getMessage()
    assert "nobody thought of this" in caplog.text
    assert [row.value for row in answered if ("code", "500") in row.labels and ("path", path) in row.labels] == [1]
    assert [row["id"] for row in traced if row["reason"] == "internal_error"] == ["my-own-id"] * (path != "/tokenize")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_is_said_of_a_request_has_its_callers_id(
    model_dir: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with router_rig(model_dir, num_prefill=2, num_decode=2) as rig:
        (rig.prefill if role == "prefill" else rig.decode)[0].error_code = "engine_dead"
        await rig.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 9}, headers=HEADERS)

        said = [record.getMessage() for record in caplog.records if "request_id=" in record.getMessage()]
        assert any(line.startswith(f"{role} ") for line in said)
        assert all("x_request_id=my-own-id" in line for line in said)
