"""`baton trace`, asked of a router: one request's waterfall, the last requests, and what went wrong with one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.clients.trace import BAR_WIDTH, bar_of, in_order
from router.roles import ROLES
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import router_rig
from tests.support.router.router_tokenizer import write_model_dir

PARTS = ("tokenize", "queue", "prefill_queue", "prefill", "transfer", "decode")


async def baton(*words: str, url: str, columns: int = 100) -> Result:
    """The output of a command, which runs in another thread, since the router answers in this one."""
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return await asyncio.to_thread(runner.invoke, app, [*words, "--url", url])


async def test_waterfall_has_a_line_for_every_part_and_every_choice(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        answer = await rig.complete([7] * 9, max_tokens=5, n=2, seed=1, ignore_eos=True)
        result = await baton("trace", answer.headers["x-request-id"], url=url)

    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines[0] == [
        answer.headers["x-request-id"],
        "finished",
        "/v1/completions",
        *["9", "+", "10", "tokens,", "0", "cached"],
    ]
    assert [words[0] for words in lines if words and words[0] in PARTS][: len(PARTS)] == list(PARTS)
    assert ["choice", "2", "finished", "5", "tokens"] in lines
    assert [words[:2] for words in lines if words[:1] == ["first_choice"]]
    assert sum(words[:1] == ["total"] for words in lines) == 2
    assert f"prefill-0 > decode-0, policy {ROLES['prefill'].policy}" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "█" in line) <= 100


async def test_narrow_terminal_cuts_nothing_off(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        request_id = (await rig.complete([7] * 9, max_tokens=5)).headers["x-request-id"]
        result = await baton("trace", request_id, url=url, columns=64)
        told = json.loads((await baton("trace", request_id, "--json", url=url)).stdout)

    assert f"\nfirst token after {told['ttft_ms']:,.1f} ms\n" in result.stdout
    assert "…" not in result.stdout


async def test_refused_request_says_why(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        answer = await rig.complete([7] * 9, temperature=-1.0)
        result = await baton("trace", answer.headers["x-request-id"], url=url)

    reason = answer.json()["error"]["message"]
    assert f"refused with 400 invalid_parameter: {reason}" in result.stdout


async def test_last_requests_are_listed_newest_first(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        ids = [(await rig.complete([7] * 9, max_tokens=2)).headers["x-request-id"] for _ in range(2)]
        listed = await baton("trace", url=url)
        as_json = await baton("trace", ids[0], "--json", url=url)

    assert [listed.stdout.index(name) for name in reversed(ids)] == sorted(listed.stdout.index(name) for name in ids)
    assert json.loads(as_json.stdout)["id"] == ids[0]


async def test_trace_that_nobody_has_is_an_error_in_one_line(tmp_path: Path) -> None:
    async with router_rig(write_model_dir(tmp_path)) as rig, live_app(rig.app) as url:
        result = await baton("trace", "nobody", url=url)

    assert result.exit_code == 1
    assert "nobody" in result.stderr
    assert "Traceback" not in result.stderr


def test_parts_are_followed_by_those_inside_of_them() -> None:
    parents = (None, None, 0, 1, 0)

    ordered = in_order([{"name": index, "parent": parent} for index, parent in enumerate(parents)])

    assert [span["name"] for span in ordered] == [0, 2, 4, 1, 3]


@pytest.mark.parametrize(
    ("start_ms", "duration_ms", "begin", "length"),
    [(0.0, 100.0, 0, BAR_WIDTH), (50.0, 0.0, BAR_WIDTH // 2, 1), (100.0, 0.0, BAR_WIDTH - 1, 1), (99.9, 5.0, 23, 1)],
)
def test_bar_lies_where_its_part_does(start_ms: float, duration_ms: float, begin: int, length: int) -> None:
    bar = bar_of(start_ms, duration_ms, total_ms=100.0)

    assert len(bar) == BAR_WIDTH
    assert (bar.index("█"), bar.count("█")) == (begin, length)
