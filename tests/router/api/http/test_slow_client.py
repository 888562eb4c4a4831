"""A client that stays and does not read: its request is given up, and nobody waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Scope

from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

SCOPE: Scope = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "scheme": "http",
    "server": ("router", 80),
    "client": ("client", 1),
}
IMPATIENT = dataclasses.replace(FAST, write_timeout_s=0.05)


async def ask(rig: RouterRig, body: dict[str, Any], *, blocks_at: Callable[[Message], bool]) -> list[Message]:
    """The messages sent to a client that reads nothing from some message on."""
    return await post(rig, "/v1/completions", {"prompt": "hi", "ignore_eos": True, "seed": 2, **body}, blocks_at)


async def post(rig: RouterRig, path: str, body: dict[str, Any], blocks_at: Callable[[Message], bool]) -> list[Message]:
    never = asyncio.Event()
    content = json.dumps(body).encode()
    requests: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not requests:
            await never.wait()
        return requests.pop()

    async def send(message: Message) -> None:
        sent.append(message)
        if blocks_at(message):
            await never.wait()

    async with asyncio.timeout(60):
        await rig.app({**SCOPE, "path": path, "raw_path": path.encode()}, receive, send)
    return sent


def is_body(message: Message) -> bool:
    return message["type"] == "http.response.body"


def is_last(message: Message) -> bool:
    return is_body(message) and not message.get("more_body")


async def test_client_that_does_not_read_is_given_up(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=IMPATIENT) as rig:
        rig.decode[0].gate.clear()
        sent = await ask(rig, {"max_tokens": 400, "stream": True}, blocks_at=is_body)

        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        rig.decode[0].gate.set()
        await until(rig.is_at_rest)
        assert rig.service.counters.num_cancelled == 1


async def test_client_that_does_not_even_take_the_status_is_given_up(model_dir: Path) -> None:
    async with router_rig(model_dir, settings=IMPATIENT) as rig:
        rig.decode[0].gate.clear()
        sent = await ask(rig, {"max_tokens": 400, "stream": True}, blocks_at=lambda _: True)

        assert [message["type"] for message in sent] == ["http.response.start"]
        rig.decode[0].gate.set()
        await until(rig.is_at_rest)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("error_code", [None, "kv_load_failed"])
async def test_last_write_does_not_wait_for_ever(model_dir: Path, is_stream: bool, error_code: str | None) -> None:
    async with router_rig(model_dir, settings=IMPATIENT) as rig:
        rig.decode[0].error_code = error_code
        sent = await ask(rig, {"max_tokens": 4, "stream": is_stream}, blocks_at=is_last)

        assert is_last(sent[-1])
        assert (error_code is None) == (b"error" not in sent[-1]["body"])
        await until(rig.is_at_rest)


@pytest.mark.parametrize("spec_version", ["2.0", "2.4"])
@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [50, 51]})])
async def test_client_that_does_not_read_what_is_not_generated_is_given_up_too(
    model_dir: Path, path: str, body: dict[str, Any], spec_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCOPE, "asgi", {"version": "3.0", "spec_version": spec_version})
    async with router_rig(model_dir, settings=IMPATIENT) as rig:
        sent = await post(rig, path, body, is_body)

    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_path_begins_no_line_of_the_log(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="baton")
    async with router_rig(model_dir, settings=IMPATIENT) as rig:
        await post(rig, "/x\n2026-01-01 ERROR 1 baton: all is lost\x1b[2J", {}, is_body)

    (told,) = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert told.isprintable()
