"""Several routers: each one reports on all of them, and on those that are gone."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import time as wall_clock_s
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.report.router_report import MAX_DEPARTED, LeaningNote, RouterReport
from tests.support.loop_time import LoopTime
from tests.support.router.router_peers import PeerNet, report_of
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

T = TypeVar("T")
QUICK = replace(FAST, peer_period_s=0.02)
SLOW = replace(FAST, peer_period_s=3600.0)


@dataclass(slots=True)
class Routers:
    """Two routers that know each other."""

    net: PeerNet
    one: RouterRig
    two: RouterRig


async def two_routers(model_dir: Path, stack: AsyncExitStack, settings: Any) -> Routers:
    net = PeerNet()
    rigs = []
    for name in ("one", "two"):
        rig = await stack.enter_async_context(
            router_rig(model_dir, settings=settings, router_id=name, peers=net.seen_by(name))
        )
        net.views[name] = rig.service.view
        rigs.append(rig)
    return Routers(net, *rigs)


@pytest.fixture
async def routers(model_dir: Path) -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:
        yield await two_routers(model_dir, stack, SLOW)


async def samples(rig: RouterRig) -> dict[tuple[str, ...], float]:
    families = list(text_string_to_metric_families((await rig.client.get("/metrics")).text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family is there twice"
    rows = [(item.name, *item.labels.values()) for family in families for item in family.samples]
    assert len(rows) == len(set(rows)), "a row is there twice"
    return {(item.name, *item.labels.values()): item.value for family in families for item in family.samples}


async def totals(rig: RouterRig) -> dict[str, Any]:
    answer: dict[str, Any] = (await rig.client.get("/status")).json()
    return answer["totals"]


async def until_known(rig: RouterRig) -> None:
    """Return when a router knows of another one that has finished a request."""
    board = rig.service.view._board
    await until(lambda: any(item.report.counters.num_finished == 1 for item in board.others))


async def test_either_router_tells_what_both_counted(routers: Routers) -> None:
    await routers.one.complete([5] * 7, max_tokens=5, ignore_eos=True)
    await routers.two.complete([5] * 9, max_tokens=3, ignore_eos=True)
    await routers.two.complete([5] * 9, max_tokens=3, ignore_eos=True)

    for rig in (routers.one, routers.two):
        found = await samples(rig)
        assert found["baton:generation_tokens_total", "one"] == 5
        assert found["baton:generation_tokens_total", "two"] == 6
        assert found["baton:time_to_first_token_seconds_count", "one"] == 1
        assert found["baton:time_to_first_token_seconds_count", "two"] == 2
        status = await totals(rig)
        assert (status["requests"], status["tokens"], status["prompt_tokens"]) == (3, 11, 25)


async def test_status_has_a_row_for_each_router_the_one_that_answers_first(routers: Routers) -> None:
    status = (await routers.two.client.get("/status")).json()

    assert [(row["router_id"], row["state"]) for row in status["routers"]] == [("two", "running"), ("one", "running")]
    assert status["router"] == status["routers"][0]


async def test_router_that_does_not_answer_is_told_as_it_was_last_known(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        routers, time = await two_routers(model_dir, stack, SLOW), LoopTime()
        await routers.one.complete([5] * 7, max_tokens=5, ignore_eos=True)
        assert (await totals(routers.two))["tokens"] == 5
        routers.net.silent.add("one")

        async def in_vain(asking: Coroutine[Any, Any, T]) -> T:
            num_before, task = routers.net.num_in_vain, asyncio.create_task(asking)
            await until(lambda: routers.net.num_in_vain > num_before)
            time.advance(SLOW.status_timeout_s)
            return await task

        status = (await in_vain(routers.two.client.get("/status"))).json()
        found = await in_vain(samples(routers.two))

    assert [(row["router_id"], row["state"]) for row in status["routers"]][1] == ("one", "unreachable")
    assert status["totals"]["tokens"] == 5
    assert (found["baton:router_up", "one"], found["baton:router_up", "two"]) == (0, 1)


async def test_router_that_is_gone_stays_in_the_counts_but_not_in_the_gauges(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = await two_routers(model_dir, stack, QUICK)
        await routers.one.complete([5] * 7, max_tokens=5, ignore_eos=True)
        await until_known(routers.two)
        del routers.net.views["one"]

        found = await samples(routers.two)
        status = await totals(routers.two)

    assert status["tokens"] == found["baton:generation_tokens_total", "one"] == 5
    assert ("baton:router_up", "one") not in found
    assert ("baton:router_requests_in_progress", "one") not in found


async def test_router_that_comes_later_knows_of_those_that_went(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        routers = await two_routers(model_dir, stack, QUICK)
        await routers.one.complete([5] * 7, max_tokens=5, ignore_eos=True)
        await until_known(routers.two)
        del routers.net.views["one"]
        await totals(routers.two)
        peers = routers.net.seen_by("three")
        late = await stack.enter_async_context(router_rig(model_dir, settings=SLOW, router_id="three", peers=peers))

        answer = (await late.client.get("/status")).json()

    states = {row["router_id"]: row["state"] for row in answer["routers"]}
    assert states == {"three": "running", "two": "running", "one": "departed"}
    assert answer["totals"]["tokens"] == 5


async def test_workers_that_only_one_router_saw_are_in_the_counts_of_both(routers: Routers) -> None:
    one = routers.one
    await one.complete([5] * 20, max_tokens=4, ignore_eos=True)
    counted = (await totals(one))["counters"]["num_generated_tokens"]
    one.decode.add("decode-new")
    one.decode.hidden.add("decode-0")
    await until(lambda: [item.replica_id for item in one.service.decode_pool.replicas] == ["decode-new"])

    assert counted == 4
    # The other router's own workers have the same names here; what it learns is the process that it never saw.
    departed = one.service.view.report().departed["decode"]
    assert [item.replica_id for item in departed] == ["decode-0"]


async def test_router_that_takes_over_from_the_last_one_knows_all_that_was_counted(model_dir: Path) -> None:
    """A rolling update: the old router leaves the list when the new one is ready, and ends later."""
    net = PeerNet()
    async with AsyncExitStack() as new, AsyncExitStack() as old:
        first = await old.enter_async_context(
            router_rig(model_dir, settings=SLOW, router_id="old", peers=net.seen_by("old"))
        )
        net.views["old"] = first.service.view
        await first.complete([5] * 7, max_tokens=5, ignore_eos=True)
        second = await new.enter_async_context(
            router_rig(model_dir, settings=SLOW, router_id="new", peers=net.seen_by("new"))
        )
        net.views = {"new": second.service.view}
        known = (await totals(second))["tokens"]
        await first.complete([5] * 7, max_tokens=3, ignore_eos=True)
        await old.aclose()

        assert (known, (await totals(second))["tokens"]) == (5, 8)


async def test_workers_that_a_router_saw_are_told_once_however_many_routers_went(model_dir: Path) -> None:
    """Each farewell used to list all departed workers again, so that reports and memory grew with the product
    of both.
    """
    async with AsyncExitStack() as stack:
        routers = await two_routers(model_dir, stack, SLOW)
        one, two = routers.one, routers.two
        await one.complete([5] * 20, max_tokens=4, ignore_eos=True)
        one.decode.add("decode-new")
        one.decode.hidden.add("decode-0")
        await until(lambda: [item.replica_id for item in one.service.decode_pool.replicas] == ["decode-new"])
        two.decode.add("decode-other")
        two.decode.hidden.add("decode-0")
        await until(lambda: [item.replica_id for item in two.service.decode_pool.replicas] == ["decode-other"])
        last_word = one.service.view.report()
        two.service.view.note_farewell(last_word)
        routers.net.views.pop("one")
        await totals(two)

        report = two.service.view.report()

    assert [item.replica_id for item in last_word.departed["decode"]] == ["decode-0"]
    assert "decode-0" in [item.replica_id for item in report.departed["decode"]]
    assert [(gone.router_id, dict(gone.departed)) for gone in report.gone] == [("one", {})]


async def test_report_passes_between_processes(routers: Routers) -> None:
    await routers.one.complete([5] * 7, max_tokens=5, ignore_eos=True)
    report = routers.one.service.view.report()

    assert pickle.loads(pickle.dumps(report)) == report


async def test_totals_keep_what_routers_counted_that_are_not_remembered_any_more(model_dir: Path) -> None:
    """Routers that start later learn of them too, whichever router they ask."""
    num_gone = MAX_DEPARTED + 30
    went = [report_of(f"router-{number:03}", created_s=number, num_finished=3) for number in range(num_gone)]
    async with AsyncExitStack() as stack:
        routers = await two_routers(model_dir, stack, SLOW)
        for rig, order in ((routers.one, went), (routers.two, went[::-1])):
            for report in order:
                rig.service.view.note_farewell(report)
                if report is went[80]:
                    await totals(rig)
        finished = [(await totals(rig))["finished"] for rig in (routers.one, routers.two, routers.one, routers.two)]
        peers = routers.net.seen_by("three")
        late = await stack.enter_async_context(router_rig(model_dir, settings=SLOW, router_id="three", peers=peers))
        routers.net.views["three"] = late.service.view
        everybody = (late, routers.one, routers.two, late)
        finished += [(await totals(rig))["finished"] for rig in everybody]
        last = report_of("router-last", created_s=999, num_finished=3)
        for rig in everybody:
            rig.service.view.note_farewell(last)
        after = [(await totals(rig))["finished"] for rig in (*everybody, *everybody)]
        rows = (await late.client.get("/status")).json()["routers"]

    assert finished == [3 * num_gone] * 8
    assert after == [3 * (num_gone + 1)] * 8
    assert [row["state"] for row in rows].count("departed") == MAX_DEPARTED


async def test_last_word_that_comes_after_its_router_was_forgotten_adds_nothing(model_dir: Path) -> None:
    went = [report_of(f"router-{number:03}", created_s=number, num_finished=3) for number in range(MAX_DEPARTED + 1)]
    async with router_rig(model_dir, settings=SLOW) as rig:
        for report in went:
            rig.service.view.note_farewell(report)
        before = (await totals(rig))["finished"]
        rig.service.view.note_farewell(went[0])

        assert before == (await totals(rig))["finished"] == 3 * len(went)


def test_report_of_a_router_of_an_older_version_can_be_read() -> None:
    """Routers are replaced one by one: what one of before does not tell has its default."""
    report = report_of("new", num_finished=3)
    older = RouterReport.__new__(RouterReport)

    older.__setstate__([getattr(report, item.name) for item in fields(report)][:9])

    assert older == report


async def test_leanings_that_an_operator_holds_are_known_to_all_and_outlive_the_router_that_was_told(
    model_dir: Path,
) -> None:
    async with AsyncExitStack() as stack:
        routers = await two_routers(model_dir, stack, replace(QUICK, roles="elastic"))
        one, two = (rig.service.view for rig in (routers.one, routers.two))
        one.hold_leaning("decode-0", until_s=4e9)
        one.hold_leaning("long ago", until_s=1.0)
        one.note_leaning(LeaningNote(replica_id="decode-1", leaning="prefill", reason="prompts wait", changed_at_s=5.0))
        await until(lambda: "decode-0" in two.held_leanings())
        assert sorted(two.live_router_ids()) == ["one", "two"]

        del routers.net.views["one"]
        await until(lambda: two.live_router_ids() == ["two"])
        told = (await routers.two.client.get("/status")).json()["leanings"]

    assert told == {
        "decided_by": "two",
        "last_change": {
            "replica_id": "decode-1",
            "leaning": "prefill",
            "reason": "prompts wait",
            "changed_at_s": 5.0,
        },
        "held_until": {"decode-0": 4e9},
    }


async def test_where_roles_are_fixed_nobody_decides_on_leanings(routers: Routers) -> None:
    told = (await routers.one.client.get("/status")).json()["leanings"]

    assert told == {"decided_by": None, "last_change": None, "held_until": {}}


async def test_leaning_held_of_a_worker_that_is_gone_is_not_told(routers: Routers) -> None:
    view = routers.one.service.view
    end_s = wall_clock_s() + 3600
    view.hold_leaning("decode-0", until_s=end_s)
    view.hold_leaning("decode-gone", until_s=end_s)

    told = (await routers.one.client.get("/status")).json()["leanings"]["held_until"]

    assert told == {"decode-0": end_s}
