"""What a running cluster recorded becomes a load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import NotBatonError
from cluster.commands.clients.recorded import recorded_requests
from simulation.whatif.parts import Part
from simulation.whatif.recorded import RecordedSource
from tests.support.router.live_app import live_app
from tests.support.router.live_router import live_router

PROMPT = list(range(1, 71))


async def test_requests_of_a_cluster_are_a_load_with_their_lengths_times_and_cached_prefixes(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        for prompt, num_tokens in ((PROMPT, 5), ([9] * 20, 3), (PROMPT, 4)):
            assert (await live.complete(prompt, max_tokens=num_tokens)).status_code == 200
        url = str(live.client.base_url)
        listed = (await live.client.get("/v1/requests")).json()["data"]
        found = await asyncio.to_thread(recorded_requests, url)

    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in found] == [(70, 5), (20, 3), (70, 4)]
    assert [request.at_s for request in found] == [row["started_unix_s"] for row in reversed(listed)]
    num_cached = found[2].num_cached_tokens
    assert 0 < num_cached < 70
    first, other, again = RecordedSource(requests=found, part=Part()).load()
    assert first.at_s == 0.0 < other.at_s < again.at_s
    assert again.prompt.tolist()[:num_cached] == first.prompt.tolist()[:num_cached]
    assert again.prompt[num_cached] != first.prompt[num_cached]
    assert other.prompt[0] != first.prompt[0]


async def test_rows_that_say_too_little_are_no_load() -> None:
    body = json.dumps({"object": "list", "data": [{"state": "finished", "completion_tokens": 3}]}).encode()

    async def older(scope: object, receive: object, send: object) -> None:  # an ASGI application
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    async with live_app(older) as url:
        with pytest.raises(NotBatonError, match="started_unix_s"):
            await asyncio.to_thread(recorded_requests, url)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--recorded", "http://127.0.0.1:9"), 1, "nothing answers at http://127.0.0.1:9"),
        (("--start-s", "3", "--mix", "balanced", "--rate", "1"), 2, "are of a --trace or of --recorded"),
        ((), 2, "--trace FILE, --recorded URL, or --mix and --rate"),
    ],
)
def test_what_is_wrong_with_the_question_is_said(arguments: tuple[str, ...], code: int, text: str) -> None:
    result = CliRunner().invoke(app, ["whatif", "--layouts", "unified:1", *arguments])

    assert result.exit_code == code
    assert text in " ".join(result.stderr.split())
