"""The requests that a running cluster recorded become a load."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import NotBatonError
from cluster.commands.clients.recorded import recorded_requests, reported_workers
from engine.contract.promise import Promise
from simulation.machine import MachineFileError
from simulation.outcome import figures
from simulation.whatif.parts import Part
from simulation.whatif.recorded import RecordedRequest, RecordedSource
from simulation.whatif.reported import reported_calibration
from tests.support.router.live_app import live_app
from tests.support.router.live_router import live_router
from tests.support.router.router_rig import router_rig

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
    outcomes = RecordedSource(requests=found).outcomes()
    assert [outcome.ttft_s * 1e3 for outcome in outcomes] == pytest.approx(
        [row["ttft_ms"] for row in reversed(listed)], abs=0.01
    )
    for outcome, row in zip(outcomes, reversed(listed), strict=True):
        assert 0.0 < sum(outcome.gaps_s) <= 1.05 * (row["total_ms"] - row["ttft_ms"]) / 1e3 + 1e-3
        assert len(outcome.gaps_s) == sum(count for _, count in row["gaps"]) < row["completion_tokens"]


async def test_choices_are_made_of_their_prompts_and_prompts_are_requests_of_their_own(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        asked = await live.client.post(
            "/v1/completions",
            json={"prompt": [PROMPT, [9] * 20], "n": 2, "max_tokens": 6, "ignore_eos": True, "seed": 1},
        )
        assert asked.status_code == 200
        found = await asyncio.to_thread(recorded_requests, str(live.client.base_url))

    lengths = [(item.num_prompt_tokens, item.num_output_tokens, item.other_outputs) for item in found]
    assert lengths == [(70, 6, [6]), (20, 6, [6])]
    assert [arrival.other_outputs for arrival in RecordedSource(requests=found).load()] == [[6], [6]]
    [outcome] = RecordedSource(requests=found).outcomes()
    assert (len(outcome.gaps_s), outcome.num_tokens) == (5, 12)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_gaps_are_those_of_tokens_however_many_come_together(model_dir: Path, tokens_per_step: int) -> None:
    """A simulation tells each token's, to which these are compared."""
    async with router_rig(model_dir, tokens_per_step=tokens_per_step) as rig:
        body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
        assert (await rig.client.post("/v1/completions", json=body)).status_code == 200
        [row] = (await rig.client.get("/v1/requests")).json()["data"]

    assert sum(count for _, count in row["gaps"]) == row["completion_tokens"] - 1 == 29


def test_what_was_recorded_is_compared_where_times_and_lengths_are_as_they_were() -> None:
    gaps = [(20.0, 3), (80.0, 1)]
    requests = [
        RecordedRequest(at_s=at_s, num_prompt_tokens=9, num_output_tokens=5, ttft_ms=ttft_ms, gaps=gaps)
        for at_s, ttft_ms in ((7.0, 50.0), (8.0, 150.0), (9.0, 250.0), (9.5, None))
    ]

    found = figures(RecordedSource(requests=requests).outcomes(), Promise(ttft_ms=200.0, itl_ms=100.0))

    assert (found.num_requests, found.share_good) == (3, pytest.approx(200 / 3))
    assert (found.ttft_p50_ms, found.itl_p50_ms, found.itl_p99_ms) == pytest.approx((150.0, 20.0, 80.0))
    assert len(RecordedSource(requests=requests, part=Part(start_s=0.5, seconds=1.0)).outcomes()) == 1
    for changed in (Part(speed=2.0), Part(scale=2)):
        assert not RecordedSource(requests=requests, part=changed).outcomes()


async def test_workers_that_have_not_said_what_steps_take_are_no_calibration(model_dir: Path) -> None:
    async with live_router(model_dir) as live:
        url = str(live.client.base_url)
        workers = await asyncio.to_thread(reported_workers, url)

    assert workers
    with pytest.raises(MachineFileError, match="has computed 256 tokens of prompts"):
        reported_calibration(url, workers)


async def test_rows_that_say_too_little_are_no_load() -> None:
    body = json.dumps(
        {
            "object": "list",
            "data": [{"state": "finished", "completion_tokens": 3}],
            "pools": {"decode": [{"state": "running", "block_size": 16}]},
        }
    ).encode()

    async def older(scope: object, receive: object, send: object) -> None:  # an ASGI application
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    async with live_app(older) as url:
        with pytest.raises(NotBatonError, match="started_unix_s"):
            await asyncio.to_thread(recorded_requests, url)
        with pytest.raises(NotBatonError, match="step_time"):
            await asyncio.to_thread(reported_workers, url)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--recorded", "http://127.0.0.1:9"), 1, "nothing answers at http://127.0.0.1:9"),
        (("--calibration", "http://127.0.0.1:9"), 1, "nothing answers at http://127.0.0.1:9"),
        (("--start-s", "3", "--mix", "balanced", "--rate", "1"), 2, "need --trace or --recorded"),
        ((), 2, "--trace FILE, --recorded URL, or --mix and --rate"),
    ],
)
def test_what_is_wrong_with_the_question_is_said(arguments: tuple[str, ...], code: int, text: str) -> None:
    result = CliRunner().invoke(app, ["whatif", "--layouts", "unified:1", *arguments])

    assert result.exit_code == code
    assert text in " ".join(result.stderr.split())
