"""Two routers behind one address, with API keys: each answers for both, and only to permitted callers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.security import hash_key, new_key
from scripts.fuzz import Target, check_at_rest, fuzz
from tests.support.cluster.cluster import POLL_PERIOD_S, ClusterProcess, run_baton, running_cluster

USER, ADMIN = new_key(), new_key()
NUM_REQUESTS, NUM_TOKENS = 12, 5
WAIT_S = 240.0

NUM_EXAMPLES = 40
"""For each operation with a body; `make fuzz` sends 5,000 cases."""


@pytest.fixture(scope="module")
def cluster(served_model: Path) -> Iterator[ClusterProcess]:
    security = {"api_keys": [hash_key(USER)], "admin_keys": [hash_key(ADMIN)]}
    with running_cluster(
        model=str(served_model),
        dtype="float32",
        router_replicas=2,
        roles="elastic",
        security=security,
        metrics={"compat": "vllm"},
        router={"peer_period_s": 0.2, "default_max_tokens": 8},
        speculative={"method": "suffix", "num_tokens": 4},
        max_model_len=128,
    ) as running:
        yield running


@pytest.fixture
def client(cluster: ClusterProcess) -> Iterator[httpx.Client]:
    # A connection that is kept stays with its router.
    headers = {"Authorization": f"Bearer {ADMIN}", "Connection": "close"}
    with httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False, headers=headers) as client:
        yield client


def read_status(client: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/status").json()
    return answer


def generated(client: httpx.Client) -> dict[str, float]:
    """Tokens by router, as a scrape tells it."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        sample.labels["router"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "baton:generation_tokens_total"
    }


def complete(client: httpx.Client) -> None:
    body = {"prompt": [5] * 9, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == httpx.codes.OK


def test_whichever_router_answers_tells_of_both_and_of_one_that_died(client: httpx.Client) -> None:
    for _ in range(NUM_REQUESTS):
        complete(client)

    answers = answers_of_both(client)
    scrapes = [generated(client) for _ in range(8)]

    assert {len(answer["routers"]) for answer in answers} == {2}
    assert {row["node_ip"] for answer in answers for row in answer["routers"]} == {"127.0.0.1"}
    assert {answer["totals"]["requests"] for answer in answers} == {NUM_REQUESTS}
    assert {answer["totals"]["tokens"] for answer in answers} == {NUM_REQUESTS * NUM_TOKENS}
    assert {sum(scrape.values()) for scrape in scrapes} == {NUM_REQUESTS * NUM_TOKENS}
    assert {tuple(sorted(scrape.items())) for scrape in scrapes} == {tuple(sorted(scrapes[0].items()))}

    victim = answers[0]["routers"][1]
    os.kill(victim["pid"], signal.SIGKILL)
    status = wait_for_replacement(client, victim["router_id"])

    assert status["totals"]["tokens"] == NUM_REQUESTS * NUM_TOKENS
    assert generated(client)[victim["router_id"]] == victim["tokens"]


def answers_of_both(client: httpx.Client) -> list[dict[str, Any]]:
    """The status that each router gives once both have counted all tokens. The system chooses which router gets a
    connection, and a client has its answer before it is counted.
    """
    deadline_s = time.monotonic() + WAIT_S
    answers: dict[str, dict[str, Any]] = {}
    while len(answers) < 2 or any(row["totals"]["tokens"] < NUM_REQUESTS * NUM_TOKENS for row in answers.values()):
        assert time.monotonic() < deadline_s, answers
        answer = read_status(client)
        answers[answer["router"]["router_id"]] = answer
    return list(answers.values())


def test_an_answer_that_was_given_before_comes_in_fewer_steps(client: httpx.Client) -> None:
    """Drafts from earlier answers in a real cluster: the same text, with some accepted drafts."""
    body = {"prompt": [7] * 9, "max_tokens": 16, "ignore_eos": True, "temperature": 0}

    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}

    assert len(texts) == 1
    deadline_s = time.monotonic() + WAIT_S
    while num_accepted_drafts(client) == 0:
        assert time.monotonic() < deadline_s, client.get("/metrics").text
        time.sleep(POLL_PERIOD_S)


def num_accepted_drafts(client: httpx.Client) -> float:
    families = text_string_to_metric_families(client.get("/metrics").text)
    name = "baton:accepted_draft_tokens_total"
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def wait_for_replacement(client: httpx.Client, router_id: str) -> dict[str, Any]:
    """The first status in which the router is gone and there are two others."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        time.sleep(POLL_PERIOD_S)
        try:
            status = read_status(client)
        except (httpx.TransportError, ValueError):
            continue
        states = {row["router_id"]: row["state"] for row in status.get("routers", ())}
        if states.get(router_id) == "departed" and list(states.values()).count("running") == 2:
            return status
    raise AssertionError(f"no replacement of {router_id} within {WAIT_S:.0f} s: {read_status(client)}")


@pytest.fixture
def both(cluster: ClusterProcess) -> Iterator[list[httpx.Client]]:
    """A connection to each router, once both know of two that run."""
    deadline_s = time.monotonic() + WAIT_S
    found: dict[str, httpx.Client] = {}
    with ExitStack() as opened:
        while len(found) < 2:
            assert time.monotonic() < deadline_s, found
            headers = {"Authorization": f"Bearer {ADMIN}"}
            client = httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False, headers=headers)
            status = read_status(opened.enter_context(client))
            if [row["state"] for row in status["routers"]].count("running") == 2:
                found[status["router"]["router_id"]] = client
        yield list(found.values())


def respond(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json={"temperature": 0, **fields})
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_responses_of_one_router_are_followed_and_deleted_at_the_other(both: list[httpx.Client]) -> None:
    maker, other = both
    first = respond(maker, input="The sea.")
    here = respond(maker, input="And then?", previous_response_id=first["id"])
    there = respond(other, input="And then?", previous_response_id=first["id"])
    back = respond(maker, input="So?", previous_response_id=there["id"])

    assert there["output"][0]["content"] == here["output"][0]["content"]
    items = other.get(f"/v1/responses/{back['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant", "user"]
    assert other.get(f"/v1/responses/{first['id']}").json() == first
    user = {"Authorization": f"Bearer {USER}"}
    assert other.get(f"/v1/responses/{first['id']}", headers=user).status_code == httpx.codes.NOT_FOUND
    assert other.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert maker.get(f"/v1/responses/{first['id']}").status_code == httpx.codes.NOT_FOUND


def test_a_response_is_cancelled_at_the_other_router(both: list[httpx.Client]) -> None:
    maker, other = both
    deadline_s = time.monotonic() + WAIT_S
    body = {"input": "Go on.", "stream": True, "max_output_tokens": 100, "ignore_eos": True}
    is_cancelled = False
    while not is_cancelled:  # it may have come to its end before the order did
        assert time.monotonic() < deadline_s
        with maker.stream("POST", "/v1/responses", json=body) as response:
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
            response_id = json.loads(next(events))["response"]["id"]
            order = other.post(f"/v1/responses/{response_id}/cancel")
            is_cancelled = order.status_code == httpx.codes.OK
            last = [json.loads(event) for event in events][-1]

    assert order.json()["status"] == "cancelled"
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert maker.get(f"/v1/responses/{response_id}").json() == order.json()


def test_keys_are_asked_for(cluster: ClusterProcess) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False) as client:
        user = {"Authorization": f"Bearer {USER}"}
        assert client.get("/health").status_code == httpx.codes.OK
        assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers=user).status_code == httpx.codes.OK
        assert client.get("/status", headers=user).status_code == httpx.codes.FORBIDDEN


def test_limits_hold_behind_the_proxy(client: httpx.Client) -> None:
    many = {f"X-{number}": "a" for number in range(150)}
    ids = {"prompt": [5] * 600_000}

    assert client.get("/health", headers=many).status_code == httpx.codes.REQUEST_HEADER_FIELDS_TOO_LARGE
    assert client.post("/v1/completions", json=ids).json()["error"]["code"] == "too_many_values"
    assert client.post("/v1/completions", content=b"{}").json()["error"]["code"] == "unsupported_media_type"


def test_scrape_has_vllms_names_where_they_are_asked_for(client: httpx.Client) -> None:
    text = client.get("/metrics").text

    for name in ("num_requests_running", "kv_cache_usage_perc", "prefix_cache_hits_total", "request_success_total"):
        assert f"vllm:{name}{{" in text, name


def test_commands_take_the_key(cluster: ClusterProcess) -> None:
    refused = run_baton("status", "--url", cluster.url)
    shown = run_baton("status", "--url", cluster.url, "--api-key", ADMIN)

    assert (refused.returncode, "no API key was sent" in refused.stderr) == (1, True)
    assert (shown.returncode, "prefill" in shown.stdout, "routers: " in shown.stdout) == (0, True, True)


def test_cases_made_from_the_openapi_document_are_answered_as_it_says(cluster: ClusterProcess) -> None:
    target = Target(url=cluster.url, key=ADMIN)

    assert fuzz(target, phases="fuzzing", num_examples=NUM_EXAMPLES, seed=1) > 3 * NUM_EXAMPLES
    check_at_rest(target)
