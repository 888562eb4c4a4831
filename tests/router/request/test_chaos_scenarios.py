"""Scenarios of `baton chaos` against a router over real engines in this process."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import ScenarioError, parse_scenario
from router.api.app import build_app
from router.service import RouterService
from tests.support.engine.engine_pools import engine_pools
from tests.support.engine.loop_paced_runner import LoopPacedRunner
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import FAST

SMALL_LOAD = {"streams": 16, "distinct": 20, "prompt_tokens": [3, 60], "output_tokens": [40, 80]}


async def test_scenario_runs_against_a_router_and_its_report_tells_of_the_move(model_dir: Path) -> None:
    scenario = parse_scenario(
        {
            "name": "drain in one process",
            "load": SMALL_LOAD,
            "steps": [
                {"wait_for_tokens": 200},
                {"drain": {"role": "decode", "min_running": 6}, "expects": ["drain_moves"]},
                {"run": {"command": [sys.executable, "-c", "print()"]}},
                {"wait_for_tokens": 400},
            ],
            "checks": {"recomputed": False, "struck": True},
        },
        where="test",
    )
    told: list[str] = []
    paced = functools.partial(LoopPacedRunner, num_turns=8)
    async with engine_pools(num_prefill=2, num_decode=2, wrap_decode_runner=paced) as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, FAST)
        await service.start()
        try:
            async with live_app(build_app(service)) as url:
                report = await ChaosRunner(scenario, url=url, headers={}, tell=told.append).run()
        finally:
            await service.close()

    assert report.problems == []
    assert report.num_requests >= 16
    assert report.counted["drain_moves"] > 0
    assert told[1].strip().startswith("drain decode decode-")
    assert report.lines()[-1] == "  all checks hold"


async def test_faults_that_the_cluster_does_not_allow_are_refused_before_any_load(model_dir: Path) -> None:
    content = {"name": "x", "load": SMALL_LOAD, "steps": [{"wait_for_tokens": 200}, {"partition": "workers"}]}
    told: list[str] = []
    async with engine_pools(num_prefill=1, num_decode=1) as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, FAST)
        await service.start()
        try:
            async with live_app(build_app(service)) as url:
                with pytest.raises(ScenarioError, match=r"start it with kv_transfer: \{allow_faults: true\}"):
                    await ChaosRunner(parse_scenario(content, where="x"), url=url, headers={}, tell=told.append).run()
        finally:
            await service.close()

    assert told == []
    assert prefill.submitted == decode.submitted == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such deployment')"], "ended with 1: no such deployment"),
        (["/nowhere/baton", "deploy"], "`/nowhere/baton deploy` cannot be started: No such file or directory"),
        (["/"], "`/` cannot be started: Permission denied"),
        (["echo", "\0"], "cannot be started: embedded null byte"),
    ],
)
async def test_command_that_fails_ends_the_scenario_with_what_it_said(
    model_dir: Path, words: list[str], said: str
) -> None:
    scenario = parse_scenario({"name": "x", "load": SMALL_LOAD, "steps": [{"run": {"command": words}}]}, where="test")
    async with engine_pools(num_prefill=1, num_decode=1) as (prefill, decode):
        service = RouterService(model_dir, "tiny", {"prefill": prefill, "decode": decode}, FAST)
        await service.start()
        try:
            async with live_app(build_app(service)) as url:
                with pytest.raises(ScenarioError, match=said):
                    await ChaosRunner(scenario, url=url, headers={}, tell=lambda _: None).run()
        finally:
            await service.close()
