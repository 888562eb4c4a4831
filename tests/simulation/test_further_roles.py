"""Roles besides prefill and decode: a record in the registry is all that routers and workers need to use its pool."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from engine.contract.promise import Promise
from engine.contract.role import LoadMeasure, Role, Work
from router.roles import ROLES
from router.settings import RolesMode
from simulation.cluster import VirtualCluster, virtual_cluster
from simulation.layout import ROUTER, Layout, Pool
from simulation.loads import Arrival, LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.outcome import Outcome
from simulation.virtual_loop import run_virtually

PROMISE = Promise(ttft_ms=3000.0, itl_ms=300.0)
LOAD = LoadSpec(mix="balanced", shape="steady", rates={"balanced": 2.0}, seconds=8.0, seed=3)
KINDS = {"both": (Work.PROMPT, Work.STREAM), "prompts": (Work.PROMPT,), "streams": (Work.STREAM,)}


def role_of(prefers: tuple[Work, ...]) -> Role:
    return Role(name="further", prefers=prefers, measure=LoadMeasure.KV_USAGE, policy="kv_usage", prompt_share=0.5)


@pytest.fixture
def further(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Role:
    """A role that only the registry knows."""
    role = role_of(KINDS[request.param])
    monkeypatch.setitem(cast("dict[str, Role]", ROLES), role.name, role)
    return role


def layout_of(roles: RolesMode, role: Role, *, num_workers: int = 2) -> Layout:
    pool = Pool(num_workers=1, machine=CPU_CORE)
    return Layout(
        name="three",
        prefill=pool,
        decode=pool,
        others={role.name: replace(pool, num_workers=num_workers)},
        settings=replace(ROUTER, roles=roles),
        promise=PROMISE,
    )


async def served(cluster: VirtualCluster, load: Sequence[Arrival]) -> tuple[list[Outcome], dict[str, dict[str, float]]]:
    """The outcomes of a load, and what the workers of each role did for it."""
    outcomes = await cluster.send(load)
    await cluster.rest()
    done: dict[str, dict[str, float]] = {role: {} for role in cluster.pools}
    for worker in cluster.workers.values():
        of_role, counters = done[worker.spec.role], worker.load.counters
        num_generated = counters["num_generated_tokens"]
        for name, number in (
            ("tokens", num_generated),
            ("prompts", counters["num_scheduled_tokens"] - num_generated),
            ("transfers", counters["num_transfers"]),
        ):
            of_role[name] = of_role.get(name, 0.0) + number
    return outcomes, done


@pytest.mark.parametrize("roles", ["fixed", "elastic"])
@pytest.mark.parametrize("further", KINDS, indirect=True)
def test_workers_of_a_further_role_serve_beside_the_others(further: Role, roles: RolesMode) -> None:
    load = make_load(LOAD)

    async def run() -> tuple[list[Outcome], dict[str, dict[str, float]]]:
        async with virtual_cluster(layout_of(roles, further)) as cluster:
            return await served(cluster, load)

    outcomes, done = run_virtually(run())

    assert [outcome.error for outcome in outcomes] == [None] * len(load)
    own = done[further.name]
    assert own["prompts"] > 0 or own["tokens"] > 0
    if roles == "elastic":
        return
    assert done["decode"]["tokens"] > 0, "streams go to all that are for them"
    assert done["prefill"]["prompts"] > 0
    if Work.PROMPT in further.prefers:
        assert own["prompts"] > 100
    if Work.STREAM in further.prefers:
        assert own["tokens"] > 100
    else:
        assert own["transfers"] == 0, "it generates nothing but first tokens"


@pytest.mark.parametrize("further", ["both"], indirect=True)
def test_where_roles_are_fixed_whoever_is_for_both_kinds_computes_the_prompts_of_its_streams(further: Role) -> None:
    load = make_load(LOAD)

    async def run() -> tuple[list[Outcome], dict[str, dict[str, float]]]:
        layout = layout_of("fixed", further, num_workers=1)
        async with virtual_cluster(layout) as cluster:
            return await served(cluster, load)

    _, done = run_virtually(run())

    assert done[further.name]["transfers"] == 0
    assert done["decode"]["transfers"] > 0


@pytest.mark.parametrize("further", ["both"], indirect=True)
@pytest.mark.parametrize("drained", ["prefill", "decode", "further"])
def test_where_roles_are_fixed_requests_outlive_the_workers_of_each_role(further: Role, drained: str) -> None:
    load = make_load(LOAD)

    async def run() -> list[Outcome]:
        async with virtual_cluster(layout_of("fixed", further, num_workers=1)) as cluster:
            worker = next(item for item in cluster.workers.values() if item.spec.role == drained)
            sent = asyncio.ensure_future(cluster.send(load))
            await asyncio.sleep(LOAD.seconds / 2)
            await cluster.pools[drained].drain(worker.spec.name)
            assert not sent.done()
            return await sent

    assert [outcome.error for outcome in run_virtually(run())] == [None] * len(load)
