"""Where requests go by policies, among workers that take any work."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.messages import LoadReport
from router.pool.demand import Demand
from router.pool.elastic_placement import ElasticPlacement
from router.pool.pool import ReplicaPool
from router.pool.united_workers import UnitedWorkers
from router.roles import ROLES
from tests.support.clock import ManualClock
from tests.support.engine.requests import greedy_request
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool
from tests.support.router.router_rig import FAST

DEMAND = Demand(greedy_request("a", [1, 2, 3], max_tokens=4))


class Bench:
    """One worker of each role, which take any work, on a clock of their own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        prefill = FakePrefillPool(1)
        workers = UnitedWorkers({"prefill": prefill, "decode": FakeDecodePool(1, prefill=prefill)})
        self.pool = ReplicaPool(
            ROLES["decode"],
            workers,
            policy="queued_tokens",
            settings=FAST,
            clock=self.clock,
            also={ROLES["prefill"]: "queued_tokens"},
        )
        self.placement = ElasticPlacement(self.pool, settings=FAST, num_new_tokens=lambda: 16.0)

    def report(self, replica_id: str) -> None:
        self.pool.note_load(replica_id, LoadReport(num_blocks=100, num_free_blocks=100))

    def placed(self) -> tuple[str, str]:
        """Who computes the prompt, and who generates."""
        placed = self.placement.place(DEMAND, num_blocks=1)
        assert placed is not None
        assert placed.prompt is not None
        return placed.prompt.replica_id, placed.stream.replica_id


@pytest.fixture
async def bench() -> Bench:
    bench = Bench()
    await asyncio.gather(*bench.pool.refresh())
    for replica_id in ("prefill-0", "decode-0"):
        bench.report(replica_id)
    return bench


async def test_by_policies_each_does_what_it_leans_to(bench: Bench) -> None:
    assert bench.placed() == ("prefill-0", "decode-0")


@pytest.mark.parametrize("heard", ["prefill-0", "decode-0"])
async def test_by_policies_no_prompt_goes_to_a_silent_worker_while_another_is_heard(bench: Bench, heard: str) -> None:
    bench.clock.advance(FAST.stale_after_s + 0.1)
    bench.report(heard)

    assert bench.placed() == (heard, heard)


async def test_by_policies_each_does_what_it_leans_to_while_none_is_heard(bench: Bench) -> None:
    bench.clock.advance(FAST.stale_after_s + 0.1)

    assert bench.placed() == ("prefill-0", "decode-0")
