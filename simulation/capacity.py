"""The capacity of a machine for each mix of requests. Loads are scaled by it."""

from __future__ import annotations

import asyncio

from simulation.cluster import virtual_cluster
from simulation.layout import unified
from simulation.loads import MIXES, LoadSpec, make_load
from simulation.machine import Machine
from simulation.virtual_loop import run_virtually

CONCURRENCY = 4
"""Concurrent requests at one worker."""

NUM_REQUESTS = 80


def measure_capacity(machine: Machine) -> dict[str, float]:
    """Requests per second of each mix that one worker serves to ``CONCURRENCY`` clients without pauses."""
    return {mix: run_virtually(_serve(machine, mix)) for mix in MIXES}


async def _serve(machine: Machine, mix: str) -> float:
    spec = LoadSpec(mix=mix, shape="steady", rates={mix: 100.0}, seconds=NUM_REQUESTS / 50)
    waiting = iter(make_load(spec)[:NUM_REQUESTS])
    async with virtual_cluster(unified(1, machine)) as cluster:
        began_s = asyncio.get_running_loop().time()

        async def keep_asking() -> int:
            num_answers = 0
            for arrival in waiting:
                await cluster.ask(arrival)
                num_answers += 1
            return num_answers

        counts = await asyncio.gather(*(keep_asking() for _ in range(CONCURRENCY)))
        return sum(counts) / (asyncio.get_running_loop().time() - began_s)
