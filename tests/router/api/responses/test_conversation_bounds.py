"""What a response follows on counts as its body does, and a page of items reads no more than it needs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.stored_responses.store import StoredResponse
from tests.support.router.router_rig import FAST, RouterRig, router_rig

PATH = "/v1/responses"
ITEM = {"role": "user", "content": "[hi], {you}"}
NUM_KEPT = 10


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    """Takes 30 such items in a body: one is an object and two texts, and a stored one two objects and more."""
    async with router_rig(model_dir, settings=replace(FAST, max_body_values=1000)) as rig:
        yield rig


async def kept(rig: RouterRig, **fields: Any) -> str:
    """The id of a response to some items."""
    answer = await rig.client.post(PATH, json={"input": [ITEM] * NUM_KEPT, "max_output_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def test_a_conversation_and_a_body_that_are_small_together_are_taken(rig: RouterRig) -> None:
    previous = await kept(rig)
    for path in (PATH, f"{PATH}/input_tokens"):
        answer = await rig.client.post(path, json={"input": [ITEM], "previous_response_id": previous})

        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_a_conversation_and_a_body_that_have_too_many_values_together_are_refused(
    rig: RouterRig, path: str
) -> None:
    previous = await kept(rig)
    num_seen = len(rig.prefill[0].seen)

    answer = await rig.client.post(path, json={"input": [ITEM] * NUM_KEPT, "previous_response_id": previous})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (413, "too_many_values")
    assert error["message"].startswith("the conversation so far and the body have ")
    assert len(rig.prefill[0].seen) == num_seen


async def test_a_body_that_follows_on_nothing_counts_as_it_was_sent(rig: RouterRig) -> None:
    answer = await rig.client.post(PATH, json={"input": [ITEM] * 30, "max_output_tokens": 1})

    assert answer.status_code == 200, answer.text


async def test_log_probabilities_do_not_count_in_what_is_followed_on(rig: RouterRig) -> None:
    """They have no effect there, and more values than all else."""
    told = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    previous = await kept(rig, **told)
    stored = json.loads((await rig.client.get(f"{PATH}/{previous}")).text)
    answer = await rig.client.post(PATH, json={"input": [ITEM], "previous_response_id": previous})

    assert stored["output"][0]["content"][0]["logprobs"] != []
    assert answer.status_code == 200, answer.text


def listed(*names: str) -> bytes:
    return json.dumps([{"id": name} for name in names]).encode()


@pytest.mark.parametrize(
    ("query", "items", "expected"),
    [
        ("limit=2&order=asc", (listed("a", "b", "c"), b"never read"), ["a", "b"]),
        ("limit=2", (b"never read", listed("a"), listed("b", "c")), ["c", "b"]),
        ("limit=1&order=asc&after=b", (listed("a"), listed("b", "c", "d"), b"never read"), ["c"]),
        ("limit=1&after=c", (b"never read", listed("a"), listed("b"), listed("c")), ["b"]),
    ],
)
async def test_a_page_reads_no_more_turns_than_it_needs(
    rig: RouterRig, query: str, items: tuple[bytes, ...], expected: list[str]
) -> None:
    store = rig.service.responses.store
    stored = StoredResponse(response_id=store.new_id(), owner="", body=b"{}", items=(*items, b"[]"))
    store.put(stored)

    page = (await rig.client.get(f"{PATH}/{stored.response_id}/input_items?{query}")).json()

    assert ([item["id"] for item in page["data"]], page["has_more"]) == (expected, True)


async def test_a_response_is_followed_on_without_reading_it(rig: RouterRig) -> None:
    """Its log-probabilities can be megabytes."""
    store = rig.service.responses.store
    stored = StoredResponse(
        response_id=store.new_id(), owner="", body=b"never read", items=(b"[]",), status="completed"
    )
    store.put(stored)

    answer = await rig.client.post(PATH, json={"input": [ITEM], "previous_response_id": stored.response_id})

    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("status", ["completed", "in_progress"])
async def test_a_response_of_a_router_that_tells_no_status_is_read_for_it(rig: RouterRig, status: str) -> None:
    store = rig.service.responses.store
    body = json.dumps({"status": status}).encode()
    stored = StoredResponse(response_id=store.new_id(), owner="", body=body, items=(b"[]",))
    store.put(stored)

    answer = await rig.client.post(PATH, json={"input": [ITEM], "previous_response_id": stored.response_id})

    assert answer.status_code == (200 if status == "completed" else 400), answer.text
