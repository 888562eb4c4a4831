"""The scenario language, the report of a run, and what counts as lost, wrong or leaked."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.chaos.fault_names import words_of
from cluster.chaos.live_cluster import LiveCluster, ancestor, is_here, is_whole, leaks_of
from cluster.chaos.load import Answer, Breaker, ChaosRequest, LoadRun
from cluster.chaos.report import ChaosReport, FaultRecord, ProxyLoss, RouterLoss
from cluster.chaos.scenario import ScenarioError, load_scenario, parse_scenario
from router.api.errors import error_event, error_response
from router.errors import InternalError
from tests.support.router.live_app import live_app
from tests.support.router.router_rig import until

SAMPLES = sorted((Path(__file__).parents[3] / "deploy" / "chaos").glob("*.yaml"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_sample_scenario_can_be_read(path: Path) -> None:
    scenario = load_scenario(path)

    assert scenario.load.streams >= 16
    assert (scenario.checks.lost, scenario.checks.wrong, scenario.checks.leaks) == (0, 0, False)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"name": "x", "steps": []}, "steps"),
        ({"name": "x", "steps": [{}]}, "exactly one action, but this one has none"),
        ({"name": "x", "steps": [{"sleep": 1, "heal": "all"}]}, "this one has heal, sleep"),
        ({"name": "x", "steps": [{"kill": {"role": "nurse"}}]}, r"steps\.0\.kill\.role"),
        ({"name": "x", "steps": [{"sleep": 1}], "load": {"pause_s": -1}}, r"load\.pause_s"),
        ({"name": "x", "steps": [{"zigzag": 1}]}, r"unknown key 'steps\.0\.zigzag'; known keys: .*, continue, "),
        ({"name": "x", "steps": [{"kil": {"role": "decode"}}]}, r"'steps\.0\.kil'; did you mean 'steps\.0\.kill'\?"),
        ({"name": "x", "steps": [{"kill": {"rol": "decode"}}]}, r"did you mean 'steps\.0\.kill\.role'\?"),
        ({"name": "x", "steps": [{"continu": "all"}]}, r"did you mean 'steps\.0\.continue'\?"),
        ({"name": "x", "steps": [{"kill": None}]}, r"steps\.0: kill needs a value"),
        ({"name": "x", "distinct": 4, "steps": [{"sleep": 1}]}, r"did you mean 'load\.distinct'\?"),
        ({"name": "x", "steps": [{"faults": {"read_fail": 1}}]}, r"steps\.0\.faults: .*did you mean 'read_fails'\?"),
        ({"name": "x", "steps": [{"faults": {"read_fails": 2}}]}, r"faults\.read_fails: a probability lies in 0 to 1"),
        ({"name": "x", "steps": [{"sleep": 1, "expects": ["migrations"]}]}, "sleep is not a fault"),
        ({"name": "x", "steps": [{"expects": ["migrations"]}]}, "this one has none"),
        ({"name": "x", "steps": [{"replace": 9, "expects": ["moves"]}]}, r"steps\.0\.expects\.0: .*got 'moves'"),
        ({"name": "x", "steps": [{"sleep": 1}], "load": {"prompt_tokens": [9, 2]}}, r"the shortest is 9, .* is 2"),
        ({"name": "x", "steps": [{"sleep": 1}], "load": {"prompt_tokens": [0, 2]}}, r"load\.prompt_tokens\.0: .*got 0"),
        ({"name": "x", "steps": [{"sleep": 1}], "load": {"output_tokens": [3, -1]}}, r"load\.output_tokens\.1"),
        ({"name": "x", "steps": [{"drain": {"role": "router"}}]}, "only workers can be drained"),
        ({"steps": [{"sleep": 1}]}, "name is missing"),
        ("nothing", "valid dictionary"),
    ],
)
def test_mistake_in_a_scenario_is_named(content: Any, problem: str) -> None:
    with pytest.raises(ScenarioError, match=problem):
        parse_scenario(content, where="file")


def test_all_mistakes_in_a_scenario_are_told_at_once() -> None:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario({"steps": [{"kil": 1}], "lod": {}}, where="file")

    assert [told.partition(",")[0] for told in str(caught.value).split("; ") if told.startswith("file: ")] == [
        "file: name is missing",
        "file: unknown key 'steps.0.kil'",
        "file: unknown key 'lod'",
    ]


def test_missing_scenario_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "none.yaml"

    with pytest.raises(ScenarioError) as caught:
        load_scenario(file)

    assert str(caught.value) == f"cannot read the scenario {file}: No such file or directory"


def test_faults_are_told_in_words() -> None:
    told = words_of({"seed": 7.0, "read_fails": 0.2, "late_s": 0.5, "bit_flips": 0.125})

    assert told == "read_fails 20 %, bit_flips 12.5 %, late by 0.5 s, seed 7"


LOSS = RouterLoss(asked_s=2.0, gone_s=2.5, num_open=1)


def answer(
    ask: ChaosRequest,
    tokens: list[int],
    times: list[float],
    *,
    error: str = "",
    started_s: float = 0.0,
    broken_by: Breaker = "connection",
) -> Answer:
    return Answer(
        ask=ask,
        started_s=started_s,
        tokens=tokens,
        event_times_s=times,
        error=error,
        broken_by=broken_by if error else None,
    )


def test_lost_and_wrong_answers_are_counted_apart() -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    good = answer(ask, [4, 5, 6], [1.0, 2.0, 9.0])
    wrong = answer(ask, [4, 5, 7], [1.0, 2.0, 3.0])
    broken = answer(ask, [4], [1.0], error="broke")
    report = ChaosReport(scenario="x", faults=[FaultRecord(what="kill", began_s=2.5), FaultRecord(what="b", began_s=8)])

    report.judge_answers([good, wrong, broken, broken], {ask: [4, 5, 6]}, losses=[LOSS])

    assert (report.num_lost, report.num_broken_with_router, report.num_wrong) == (1, 1, 1)
    assert [fault.longest_pause_s for fault in report.faults] == [7.0, 7.0]


def test_broken_answer_that_was_wrong_before_it_broke_is_wrong() -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    report = ChaosReport(scenario="x")

    report.judge_answers([answer(ask, [9], [1.0], error="broke")], {ask: [4, 5, 6]}, losses=[LOSS])

    assert (report.num_lost, report.num_wrong) == (0, 1)


def test_killed_router_excuses_what_was_open_there_then_and_no_more() -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    later = answer(ask, [], [], error="broke", started_s=3.0)
    on_its_way = answer(ask, [4], [2.4], error="broke", started_s=1.9)
    earlier = answer(ask, [4], [1.0], error="broke")
    ended = dataclasses.replace(earlier, ended_s=1.5)
    report = ChaosReport(scenario="x")

    report.judge_answers([later, on_its_way, earlier, earlier, ended], {ask: [4, 5, 6]}, losses=[LOSS])

    assert report.num_broken_with_router == 2, "the one that it had, and the one that had not arrived when it was asked"
    assert report.num_lost == 3


def test_killed_proxy_excuses_what_was_open_until_another_listens_and_no_more() -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    open_then = answer(ask, [4], [1.0], error="broke")
    refused = answer(ask, [], [], error="ConnectError", started_s=3.0)
    before = dataclasses.replace(open_then, ended_s=1.5)
    after = answer(ask, [], [], error="ConnectError", started_s=6.0)
    told = answer(ask, [4], [1.0], error='{"error": {}}', broken_by=None)
    report = ChaosReport(scenario="x")

    report.judge_answers(
        [open_then, refused, before, after, told], {ask: [4, 5, 6]}, losses=[ProxyLoss(asked_s=2.0, back_s=5.0)]
    )

    assert (report.num_broken_with_router, report.num_lost) == (2, 3)


@pytest.mark.parametrize("is_away", [True, False])
async def test_refused_connection_is_tried_again_only_while_the_proxy_is_known_to_be_away(is_away: bool) -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=1)
    asked: list[httpx.Request] = []

    def refuse_once(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            raise httpx.ConnectError("All connection attempts failed")
        return httpx.Response(200, text='data: {"choices": [{"token_ids": [4]}]}\n\ndata: [DONE]\n\n')

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse_once), base_url="http://x") as client:
        load = LoadRun(client, [ask], num_streams=1)
        load.is_proxy_away = is_away
        if is_away:
            assert await load.once() == {ask: [4]}
        else:
            with pytest.raises(httpx.HTTPError, match="ConnectError"):
                await load.once()

    assert len(asked) == (2 if is_away else 1)


async def test_stream_rests_between_two_requests_and_ends_when_it_is_told_to() -> None:
    begun: list[float] = []

    def answer(_request: httpx.Request) -> httpx.Response:
        begun.append(asyncio.get_running_loop().time())
        return httpx.Response(200, text='data: {"choices": [{"token_ids": [4]}]}\n\ndata: [DONE]\n\n')

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as client:
        load = LoadRun(client, [ChaosRequest(prompt=(1,), num_tokens=1)], num_streams=1, pause_s=0.05)
        load.start()
        await until(lambda: len(begun) >= 3)
        await load.finish()

    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(begun))
    assert [item.error for item in load.answers] == [""] * len(begun)


def test_proxy_that_has_not_noticed_yet_is_excused_too() -> None:
    """It sent a request to a router that was gone."""
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    at_once, too_late = (
        answer(ask, [], [], error="HTTP 500: x", started_s=when, broken_by="proxy") for when in (3.0, 8.0)
    )
    elsewhere = answer(ask, [], [], error="broke", started_s=3.0)
    report = ChaosReport(scenario="x")

    report.judge_answers([at_once, too_late, elsewhere], {ask: [4, 5, 6]}, losses=[LOSS])

    assert (report.num_broken_with_router, report.num_lost) == (1, 2)


@pytest.mark.parametrize("started_s", [1.9, 3.0])
def test_error_that_baton_tells_is_excused_by_no_router(started_s: float) -> None:
    """Whoever tells it lives. Two routers were killed, one of which had a request that broke."""
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    told = answer(ask, [], [], error='HTTP 500: {"error": {}}', started_s=started_s, broken_by=None)
    broken = answer(ask, [4], [1.0], error="broke")
    report = ChaosReport(scenario="x")

    report.judge_answers([told, broken], {ask: [4, 5, 6]}, losses=[LOSS, LOSS])

    assert (report.num_broken_with_router, report.num_lost) == (1, 1)


async def _serves_nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve's proxy when an answer does not come: it leaves the response to its HTTP server."""


async def _breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
    await send({"type": "http.response.body", "body": b'data: {"choices":[]}\n\n', "more_body": True})


async def _ends_early(scope: Scope, receive: Receive, send: Send) -> None:
    await Response('data: {"choices":[]}\n\n')(scope, receive, send)


async def _tells_in_the_stream(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(error_event(InternalError()))(scope, receive, send)


@pytest.mark.parametrize(
    ("app", "broken_by"),
    [
        (_serves_nobody, "proxy"),
        (_breaks_off, "connection"),
        (_ends_early, "connection"),
        (error_response(InternalError()), None),
        (_tells_in_the_stream, None),
    ],
)
async def test_error_of_baton_is_told_apart_from_one_of_what_stands_before_it(app: ASGIApp, broken_by: str) -> None:
    ask = ChaosRequest(prompt=(1,), num_tokens=3)
    async with live_app(app) as url, httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        load = LoadRun(client, [ask], num_streams=1)
        load.start()
        async with asyncio.timeout(60):
            while not load.answers:  # noqa: ASYNC110 (the load offers no event)
                await asyncio.sleep(0.001)
        await load.finish()

    assert load.answers[0].error
    assert load.answers[0].broken_by == broken_by


def row(**changes: Any) -> dict[str, Any]:
    base = {"replica_id": "a", "state": "running", "pid": 1, "is_left_out": False, "is_draining": False}
    counts = dict.fromkeys(("num_running", "num_waiting", "num_loading", "num_leased_blocks", "num_held_blocks"), 0)
    return {**base, **counts, "num_blocks": 9, "num_free_blocks": 9, "counters": {}, **changes}


@pytest.mark.parametrize("change", [{"num_leased_blocks": 2}, {"num_free_blocks": 8}, {"num_running": 1}])
def test_what_is_held_at_rest_is_a_leak(change: dict[str, int]) -> None:
    status = {"pools": {"decode": [row(), row(replica_id="leaky", **change)]}}

    (leak,) = leaks_of(status)

    ((name, value),) = change.items()
    assert leak == f"decode leaky: {name} {value}"


@pytest.mark.parametrize("change", [{"is_left_out": True}, {"is_draining": True}, {"state": "unreachable"}])
def test_cluster_is_whole_when_every_member_takes_requests(change: dict[str, Any]) -> None:
    wanted = {"prefill": 1, "decode": 2, "router": 1}
    routers = [{"router_id": "r", "state": "running", "pid": 1}]
    whole = {"routers": routers, "pools": {"prefill": [row()], "decode": [row(), row()]}}
    broken = {"routers": routers, "pools": {"prefill": [row()], "decode": [row(), row(**change)]}}

    assert is_whole(whole, wanted)
    assert not is_whole(broken, wanted)
    assert not is_whole(whole, wanted, ended={"r"}), "its end was not noticed yet"


async def test_faults_reach_all_workers_though_one_has_just_been_killed() -> None:
    """It is in the lists until the cluster has noticed, and does not answer."""
    codes = [503, 503, 200]

    async with httpx.AsyncClient(
        base_url="http://x", transport=httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    ) as client:
        await LiveCluster(client, seed=0).set_faults({"read_fails": 0.5})

    assert codes == []


def test_process_that_ended_meanwhile_is_not_resumed_and_has_nothing_above_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        assert ancestor(process, psutil.Process().name()) == psutil.Process()
        cluster = LiveCluster(httpx.AsyncClient(), seed=0)
        cluster.signal({"pid": child.pid, "node_ip": "127.0.0.1"}, signal.SIGSTOP)
        child.kill()
        child.wait()

        cluster.resume()

    assert ancestor(process, psutil.Process().name()) is None


@pytest.mark.parametrize(("node_ip", "is_ours"), [(None, True), ("127.0.0.2", True), ("203.0.113.9", False)])
def test_rows_of_this_machine_are_told_from_others(node_ip: str | None, is_ours: bool) -> None:
    assert is_here({"pid": 1, "node_ip": node_ip}) is is_ours


async def test_refused_faults_end_the_scenario_at_once() -> None:
    codes = [400, 200]

    async with httpx.AsyncClient(
        base_url="http://x", transport=httpx.MockTransport(lambda request: httpx.Response(codes.pop(0)))
    ) as client:
        with pytest.raises(httpx.HTTPStatusError):
            await LiveCluster(client, seed=0).set_faults({"read_fails": 0.5})

    assert codes == [200]
