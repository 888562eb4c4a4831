"""How much a machine can serve of each mix of requests, from which loads of any weight are made."""

from __future__ import annotations

import asyncio

from simulation.cluster import virtual_cluster
from simulation.layout import unified
from simulation.loads import MIXES, LoadSpec, make_load
from simulation.machine import Machine
from simulation.virtual_loop import run_virtually

CONCURRENCY = 4
"""Requests that one worker has at a time."""

NUM_REQUESTS = 80


def measure_capacity(machine: Machine) -> dict[str, float]:
    """Requests a second of each mix that one worker serves to ``CONCURRENCY`` clients that are never idle."""
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
