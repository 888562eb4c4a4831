"""Sixteen virtual workers divide the work in bursts of prompts, and lose nothing when those die that generate."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet
from dataclasses import replace

from engine.contract.promise import Promise
from engine.contract.role import Work
from simulation.cluster import VirtualCluster, VirtualRouter, virtual_cluster
from simulation.layout import elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.virtual_loop import run_virtually

LAYOUT = replace(elastic(16, CPU_CORE, Promise(ttft_ms=2000.0, itl_ms=100.0)), num_routers=2)
BURSTS = LoadSpec(mix="prompt_heavy", shape="bursts", rates={"prompt_heavy": 13.0}, seconds=12.0, seed=5)
LEARNING = LoadSpec(mix="balanced", shape="steady", rates={"balanced": 8.0}, seconds=5.0, seed=6)


def generating(router: VirtualRouter) -> AbstractSet[str]:
    """The workers that keep to streams, by one router."""
    replicas = {item for link in router.links.values() for item in link.pool.replicas}
    return {item.replica_id for item in replicas if item.keeps_to is Work.STREAM}


async def until_divided(cluster: VirtualCluster, *, without: AbstractSet[str] = frozenset()) -> AbstractSet[str]:
    """Wait until all routers have the same living workers generate."""
    while True:
        found = [generating(router) for router in cluster.routers]
        if found[0] and found[0] == found[1] and not found[0] & without:
            return found[0]
        await asyncio.sleep(0.05)


def test_workers_that_generate_are_killed_and_others_generate_instead() -> None:
    async def serve() -> None:
        async with virtual_cluster(LAYOUT) as cluster:
            await cluster.send(make_load(LEARNING))
            sending = asyncio.create_task(cluster.send(make_load(BURSTS)))
            killed = await until_divided(cluster)
            await asyncio.sleep(1.0)
            for name in killed:
                cluster.workers[name].kill()
            others = await until_divided(cluster, without=killed)

            assert len(others) <= 4
            outcomes = await sending
            assert {outcome.error for outcome in outcomes} == {None}
            await cluster.rest()

    run_virtually(serve())


def test_routers_divide_alike_and_stop_when_the_bursts_have_ended() -> None:
    async def serve() -> None:
        async with virtual_cluster(LAYOUT) as cluster:
            await cluster.send(make_load(LEARNING))
            sending = asyncio.create_task(cluster.send(make_load(BURSTS)))
            assert len(await until_divided(cluster)) <= 4
            await sending
            await asyncio.sleep(15.0)

            assert not any(generating(router) for router in cluster.routers)
            assert all(router.counters.num_divisions >= 1 for router in cluster.routers)
            await cluster.rest()

    run_virtually(serve())
