"""HAProxy in front of two routers: the same answers, and routers that know of each other."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.cluster import POLL_PERIOD_S, running_cluster

NUM_TOKENS = 5
WAIT_S = 60.0


def test_routers_behind_haproxy_answer_stream_and_tell_of_each_other(served_model: Path) -> None:
    with (
        running_cluster(
            model=str(served_model),
            dtype="float32",
            http_proxy="haproxy",
            router_replicas=2,
            router={"peer_period_s": 0.2},
            max_model_len=128,
        ) as cluster,
        httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False) as client,
    ):
        status = wait_for_two_routers(client)
        body = {"prompt": [5] * 9, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        whole = asked(client, body)
        streamed = asked(client, {**body, "stream": True})

    assert [row["state"] for row in status["routers"]] == ["running", "running"]
    assert whole.json()["usage"]["completion_tokens"] == NUM_TOKENS
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.text.rstrip().endswith("data: [DONE]")


def wait_for_two_routers(client: httpx.Client) -> dict[str, Any]:
    """The first status in which one router tells of both."""
    deadline_s = time.monotonic() + WAIT_S
    status: dict[str, Any] = {}
    while [row["state"] for row in status.get("routers", ())] != ["running", "running"]:
        assert time.monotonic() < deadline_s, f"no status of two routers: {status}"
        time.sleep(POLL_PERIOD_S)
        try:
            status = client.get("/status").json()
        except (httpx.TransportError, ValueError):  # HAProxy is started again when it learns of a router
            continue
    return status


def asked(client: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """The answer to a completion; a connection that HAProxy closed while it was started again is made anew."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            answer = client.post("/v1/completions", json=body)
        except httpx.TransportError:
            assert time.monotonic() < deadline_s, "no answer"
            time.sleep(POLL_PERIOD_S)
            continue
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer
