"""A client that stays and does not read: its request is given up, and nobody waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

from starlette.types import Message

from tests.support.router_rig import FAST, router_rig, until


async def test_client_that_does_not_read_is_given_up(model_dir: Path) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 2}).encode()
    scope = {
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
    never = asyncio.Event()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not requests:
            await never.wait()
        return requests.pop()

    async def send(message: Message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await never.wait()

    async with router_rig(model_dir, settings=dataclasses.replace(FAST, write_timeout_s=0.05)) as rig:
        rig.decode[0].gate.clear()
        async with asyncio.timeout(5):
            await rig.app(scope, receive, send)

        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        rig.decode[0].gate.set()
        await until(rig.is_at_rest)
        assert rig.service.counters.num_cancelled == 1
