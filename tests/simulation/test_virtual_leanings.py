"""Routers of a virtual cluster change its workers' leanings like those of a real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from engine.contract.promise import Promise
from router.balance.leanings import MIN_STAY_S
from router.report.router_report import LeaningNote
from simulation.cluster import virtual_cluster
from simulation.layout import Layout, elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.virtual_loop import run_virtually

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
MOSTLY_PROMPTS = LoadSpec(
    mix="prompt_heavy", shape="steady", rates={"prompt_heavy": 4.0}, seconds=MIN_STAY_S + 15.0, seed=1
)
"""More prompts than four workers compute in time."""


def layout(*, adapts: bool, num_routers: int) -> Layout:
    """One worker leans to prompts, three to tokens."""
    found = elastic(4, CPU_CORE, PROMISE)
    return replace(
        found,
        prefill=replace(found.prefill, num_workers=1),
        decode=replace(found.decode, num_workers=3),
        settings=replace(found.settings, adapt_leanings=adapts),
        num_routers=num_routers,
    )


def serve(served: Layout) -> tuple[Sequence[LeaningNote], Mapping[str, str]]:
    """The changes, and what each worker leans to at the end."""

    async def run() -> tuple[Sequence[LeaningNote], Mapping[str, str]]:
        async with virtual_cluster(served) as cluster:
            await cluster.send(make_load(MOSTLY_PROMPTS))
            await cluster.rest()
            return cluster.board.leaning_notes, {name: worker.leaning for name, worker in cluster.workers.items()}

    return run_virtually(run())


@pytest.mark.parametrize("num_routers", [1, 2])
def test_workers_lean_to_the_work_that_has_too_few(num_routers: int) -> None:
    notes, leanings = serve(layout(adapts=True, num_routers=num_routers))

    assert notes
    assert all(note.leaning == "prefill" and note.changed_at_s >= MIN_STAY_S for note in notes)
    assert len({note.replica_id for note in notes}) == len(notes)  # two routers order no change twice
    assert list(leanings.values()).count("prefill") == 1 + len(notes)


def test_they_keep_their_leanings_where_routers_may_not_change_them() -> None:
    notes, leanings = serve(layout(adapts=False, num_routers=1))

    assert not notes
    assert list(leanings.values()).count("prefill") == 1
