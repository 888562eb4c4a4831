"""What routers report to each other if pools follow the promises: the requests that came, and the sizes that they
ordered.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from router.report.arrivals import Told
from router.report.router_report import ScalingNote
from router.scaling_rules import PoolBounds, ScalingRules
from tests.support.router.router_peers import PeerNet
from tests.support.router.router_rig import FAST, RouterRig, router_rig, until

SCALED = replace(
    FAST,
    peer_period_s=0.02,
    scaling=ScalingRules(pools={"decode": PoolBounds(least=1, most=4)}),
)


async def two_routers(model_dir: Path, stack: AsyncExitStack) -> tuple[PeerNet, RouterRig, RouterRig]:
    net, rigs = PeerNet(), []
    for name in ("one", "two"):
        rig = await stack.enter_async_context(
            router_rig(model_dir, settings=SCALED, router_id=name, peers=net.seen_by(name))
        )
        net.views[name] = rig.service.view
        rigs.append(rig)
    return (net, *rigs)


async def test_what_came_to_each_router_is_known_to_all_with_what_it_turned_out_to_be(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        _, one, two = await two_routers(model_dir, stack)
        await one.complete([5] * 40, max_tokens=4, ignore_eos=True)
        await one.complete([5] * 40, max_tokens=1, ignore_eos=True)

        def known() -> list[Told]:
            return [item for sample in two.service.view.arrivals() for item in sample.told()]

        await until(lambda: [item.num_output_tokens for item in known()] == [4, 1])
        told = known()

    assert [(item.num_prompt_tokens, item.num_output_tokens) for item in told] == [(40, 4), (40, 1)]
    assert all(item.num_cached_tokens >= 0 for item in told)


async def test_where_nothing_follows_the_promises_nothing_is_remembered_of_what_comes(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 40, max_tokens=4, ignore_eos=True)

        assert rig.service.view.arrivals() == []
        assert (await rig.client.get("/status")).json()["scaling"] == {"decided_by": None, "last_changes": []}


async def test_changes_of_sizes_are_known_to_all_and_outlive_the_router_that_ordered_them(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        net, one, two = await two_routers(model_dir, stack)
        views = [rig.service.view for rig in (one, two)]
        for wanted in (2, 3):
            views[0].note_scaling(
                ScalingNote(role="decode", wanted=wanted, before=wanted - 1, reason="more", changed_at_s=float(wanted))
            )
        await until(lambda: len(views[1].scaling_notes()) == 2)
        del net.views["one"]
        await until(lambda: views[1].live_router_ids() == ["two"])
        told = (await two.client.get("/status")).json()["scaling"]
        last = views[1].last_scaling("decode")

    assert told["decided_by"] == "two"
    assert [change["wanted"] for change in told["last_changes"]] == [2, 3]
    assert last is not None
    assert last.wanted == 3
    assert views[1].last_scaling("prefill") is None
