"""Bodies that would hold up everybody else are refused before they are parsed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.http.json_size import exact_size, rough_size
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST, RouterRig, router_rig

JSON = {"Content-Type": "application/json"}
SMALL = replace(FAST, max_body_values=1000, read_timeout_s=0.2)

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a\\"[]{},:\n\u00e9'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='\\"[{,'), inner),
    max_leaves=20,
)


@pytest.fixture
async def rig(model_dir: Path) -> AsyncIterator[RouterRig]:
    async with router_rig(model_dir, settings=SMALL) as rig:
        yield rig


def count(value: Any) -> tuple[int, int, int]:
    """Commas, arrays and objects that a JSON text of a value has."""
    if not isinstance(value, (list, dict)):
        return 0, 0, 0
    items = list(value.values()) if isinstance(value, dict) else value
    below = [count(item) for item in items]
    return (
        max(len(items) - 1, 0) + sum(item[0] for item in below),
        isinstance(value, list) + sum(item[1] for item in below),
        isinstance(value, dict) + sum(item[2] for item in below),
    )


@given(value=ANY_JSON)
def test_exact_size_counts_what_stands_outside_of_strings(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    exact, rough = exact_size(text), rough_size(text)

    assert (exact.num_commas, exact.num_arrays, exact.num_objects) == count(value)
    assert rough.num_values >= exact.num_values


@given(text=st.binary())
def test_size_of_what_is_no_json_is_found_too(text: bytes) -> None:
    assert exact_size(text).num_values <= rough_size(text).num_values


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 1001},
        {"prompt": [[5]] * 300},
        {"prompt": "a", "metadata": {str(number): "a" for number in range(1001)}},
        {"prompt": "a", "user": [{}] * 45},
    ],
    ids=("ids", "lists", "fields", "objects"),
)
async def test_too_many_values_are_refused(rig: RouterRig, body: dict[str, Any]) -> None:
    response = await rig.client.post("/v1/completions", json=body)

    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_values")


async def test_text_full_of_commas_and_braces_is_one_value(rig: RouterRig) -> None:
    response = await rig.complete('{"a": [1, 2]}, ' * 100 + '\\" \\', truncate_prompt_tokens=8, max_tokens=1)

    assert response.status_code == 200, response.text


def called(*arguments: str) -> dict[str, Any]:
    """A conversation in which calls were made with these arguments."""
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": text}}
        for at, text in enumerate(arguments)
    ]
    asked = {"role": "user", "content": "hi"}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}, asked], "max_tokens": 1}


@pytest.mark.parametrize(
    "arguments", [[json.dumps([5] * 1001)], [json.dumps({"a": [5] * 400})] * 3, ['{"a": [' + "{}," * 50]]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_too_many_values_in_the_arguments_of_calls_are_refused(
    rig: RouterRig, arguments: list[str], path: str
) -> None:
    body = called(*arguments)
    response = await rig.client.post(path, json=body if path != "/tokenize" else {"messages": body["messages"]})

    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (413, "too_many_values")
    assert error["message"].startswith("the arguments of the calls in the conversation have ")


async def test_a_file_in_the_arguments_of_a_call_is_one_value(rig: RouterRig) -> None:
    body = called(json.dumps({"file": 'x = [{"a", 1}, \\"b"]\n' * 1000}))
    response = await rig.client.post("/tokenize", json={"messages": body["messages"]})

    assert response.status_code == 200, response.text


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_body_that_a_web_page_could_send_unasked_is_refused(rig: RouterRig, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await rig.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)

    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


async def test_charset_after_the_media_type_is_fine(rig: RouterRig) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    response = await rig.client.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)

    assert response.status_code == 200, response.text


async def test_body_that_does_not_arrive_is_given_up(rig: RouterRig) -> None:
    async with live_app(rig.app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b'\r\n{"prompt":')
        line = await reader.readline()
        writer.close()

    assert line.split()[1] == b"408"


async def test_garbage_collection_goes_on_after_a_body(rig: RouterRig) -> None:
    await rig.complete("a", max_tokens=1)
    await rig.client.post("/v1/completions", content=b"no json", headers=JSON)

    assert gc.isenabled()
