"""The router in random worlds with faults: every request ends once with its own tokens, and nothing is left of it.

BATON_FAULT_WORLDS are tried. What a world is: tests/support/simulation/fault_plan.py; what must hold: verdict.py there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from router.balance.leanings import EVIDENCE_S, MIN_STAY_S
from router.report.router_report import LeaningNote
from simulation.cluster import virtual_cluster
from simulation.faults.network import Connections
from simulation.layout import Layout, elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.virtual_loop import run_virtually
from tests.support.simulation.fault_plan import WorldPlan
from tests.support.simulation.fault_strategies import leaning_worlds, worlds
from tests.support.simulation.fault_world import FaultWorld, Told, run_world
from tests.support.simulation.verdict import wrongs

NUM_WORLDS = int(os.environ.get("BATON_FAULT_WORLDS", "90"))
NUM_LEANING_WORLDS = max(NUM_WORLDS // 30, 1)
PROMPTS = LoadSpec(
    mix="prompt_heavy", shape="steady", rates={"prompt_heavy": 4.0}, seconds=MIN_STAY_S + 3 * EVIDENCE_S, seed=1
)
"""More prompts than four workers compute in time."""


def leaning_layout(plan: WorldPlan) -> Layout:
    layout = elastic(plan.num_workers, CPU_CORE, plan.promise)
    return replace(
        layout,
        prefill=replace(layout.prefill, num_workers=plan.num_prefill),
        decode=replace(layout.decode, num_workers=plan.num_decode),
        num_routers=plan.num_routers,
    )


pytestmark = pytest.mark.timeout(max(1800, NUM_WORLDS * 5))


@given(plan=worlds())
@settings(max_examples=NUM_WORLDS, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_happens_every_request_ends_once_and_nothing_is_left(plan: WorldPlan) -> None:
    assert wrongs(plan, run_world(plan)) == []


@given(plan=leaning_worlds())
@settings(max_examples=NUM_LEANING_WORLDS, deadline=None, suppress_health_check=list(HealthCheck))
def test_leanings_follow_the_load_after_any_faults(plan: WorldPlan) -> None:
    async def serve() -> Sequence[LeaningNote]:
        async with virtual_cluster(leaning_layout(plan), network=Connections) as cluster:
            await FaultWorld(plan, cluster, Told()).run()
            began_s = asyncio.get_running_loop().time()
            await cluster.send(make_load(PROMPTS))
            return [note for note in cluster.board.leaning_notes if note.changed_at_s > began_s]

    notes = run_virtually(serve())

    assert notes
    assert {note.leaning for note in notes} == {"prefill"}
