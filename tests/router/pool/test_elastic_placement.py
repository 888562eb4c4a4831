"""Placement among elastic workers: by policies, and with workers that are about to leave."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.contract.messages import LoadReport
from engine.contract.step_time import StepTimeModel
from router.pool.admission import Admission, RoomWish
from router.pool.demand import Demand
from router.pool.elastic_placement import ElasticPlacement
from router.pool.pool import ReplicaPool
from router.pool.united_workers import UnitedWorkers
from router.roles import ROLES
from tests.support.clock import ManualClock
from tests.support.engine.requests import greedy_request
from tests.support.router.fake_workers import FakeDecodePool, FakePrefillPool
from tests.support.router.router_rig import FAST

BLOCK_SIZE = 16
ELASTIC = replace(FAST, roles="elastic")
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
            settings=ELASTIC,
            clock=self.clock,
            also={ROLES["prefill"]: "queued_tokens"},
        )
        self.placement = ElasticPlacement(self.pool, settings=ELASTIC, num_new_tokens=lambda: 16.0)

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


@pytest.mark.known_failure(7)
@pytest.mark.parametrize(("num_tokens", "num_apart"), [(60 * BLOCK_SIZE - 1, 1), (30 * BLOCK_SIZE - 1, 3)])
async def test_known_failure_7_no_two_workers_keep_prompts_for_each_other_without_room(
    bench: Bench, num_tokens: int, num_apart: int
) -> None:
    """Of 100 blocks, a prompt takes 60 (or 30) where it is computed and as many where its tokens are generated."""
    admission = Admission(bench.pool, settings=ELASTIC, placement=bench.placement)
    wish = RoomWish(
        demand=Demand(greedy_request("a", [1] * num_tokens, max_tokens=1)),
        num_blocks=bench.pool.blocks_for(num_tokens + 1),
        num_own_blocks=1,
        priority=0,
    )

    tickets = [admission.enter([wish])[0][0] for _ in range(4)]

    placed = [ticket.placed for ticket in tickets if ticket.placed is not None]
    assert sum(not item.is_colocated for item in placed) == num_apart
    assert all(replica.num_available_blocks >= 0 for replica in bench.pool.replicas)
    for ticket in tickets:
        admission.leave(ticket)
    assert [replica.num_available_blocks for replica in bench.pool.replicas] == [100, 100]
    await admission.close()


async def test_a_worker_that_keeps_blocks_for_a_reader_is_not_idle(bench: Bench) -> None:
    load = LoadReport(num_blocks=100, num_free_blocks=40, num_leased_blocks=60)
    for replica_id in ("prefill-0", "decode-0"):
        bench.pool.note_load(replica_id, load)

    assert bench.placement.place(DEMAND, num_blocks=60) is None


KNOWN = StepTimeModel(base_s=0.01, row_s=0.001, prompt_token_s=0.001, error=0.1, num_steps=50, core_gain=1.0)
BUSY = LoadReport(num_blocks=100, num_free_blocks=50, num_running=4, num_decoding=4, is_draining=True, step_time=KNOWN)


@pytest.mark.parametrize(
    ("about_to_go", "ttft_s"), [(BUSY, 0.013), (replace(BUSY, num_running=0, num_decoding=0), 0.0066)]
)
async def test_a_worker_that_is_about_to_go_keeps_its_cores_until_then(
    bench: Bench, about_to_go: LoadReport, ttft_s: float
) -> None:
    """Nothing is sent there; but what it still does decides how fast the other one of its host computes."""
    for replica in bench.pool.replicas:
        assert replica.info is not None
        replica.info = replace(replica.info, borrows_cores=True, num_threads=1, num_host_cores=2)
    counters = {"num_scheduled_tokens": 1000.0}
    idle = LoadReport(num_blocks=100, num_free_blocks=100, step_time=KNOWN, counters=counters)
    bench.pool.note_load("decode-0", replace(about_to_go, counters=counters))
    bench.pool.note_load("prefill-0", idle)
    demand = Demand(greedy_request("a", [1, 2, 3], max_tokens=4))
    demand.is_traced = True

    placed = ElasticPlacement(bench.pool, settings=replace(FAST, roles="elastic"), num_new_tokens=lambda: 16.0).place(
        demand, num_blocks=1
    )

    assert placed is not None
    assert (placed.prompt, placed.stream) == (bench.pool.get("prefill-0"), bench.pool.get("prefill-0"))
    assert placed.weighed[0].ttft_s == pytest.approx(ttft_s, rel=0.05)


@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-a"), ("GPU-a", "GPU-b")])
async def test_few_streams_stay_together_only_on_a_gpu_that_workers_share(bench: Bench, gpus: tuple[str, str]) -> None:
    """Another worker that decodes there has the weights read twice; one on a GPU of its own does not."""
    for replica, gpu in zip(bench.pool.replicas, gpus, strict=True):
        assert replica.info is not None
        replica.info = replace(
            replica.info, device="cuda", num_threads=0, borrows_cores=True, num_host_cores=2, shared_gpu=gpu
        )
    counters = {"num_scheduled_tokens": 1000.0}
    idle = LoadReport(num_blocks=100, num_free_blocks=100, step_time=KNOWN, counters=counters)
    busy = replace(idle, num_free_blocks=50, num_running=8, num_decoding=8)
    bench.pool.note_load("decode-0", busy)
    bench.pool.note_load("prefill-0", idle)

    placed = ElasticPlacement(bench.pool, settings=replace(FAST, roles="elastic"), num_new_tokens=lambda: 16.0).place(
        Demand(greedy_request("a", [1, 2, 3], max_tokens=4)), num_blocks=1
    )

    assert placed is not None
    assert placed.stream is bench.pool.get("decode-0" if gpus[0] == gpus[1] else "prefill-0")
