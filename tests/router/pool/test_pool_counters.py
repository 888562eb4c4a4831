"""Counters of a pool never fall, whoever leaves, comes back, or reports late, and count every process once."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.pool.pool_counters import PoolCounters
from tests.support.router.router_rig import RouterRig, router_rig, until

STEPS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["report", "late", "restart", "leave"])), max_size=200
)


@given(steps=STEPS)
def test_total_is_the_sum_over_all_processes_that_ever_reported(steps: list[tuple[str, str]]) -> None:
    counters = PoolCounters()
    truth: dict[tuple[str, int], int] = {}
    incarnations = {"a": 0, "b": 0}
    for name, step in steps:
        if step == "leave":
            counters.keep([other for other in incarnations if other != name])
            continue
        if step == "restart":
            incarnations[name] += 1
        key = (name, incarnations[name])
        if step != "late":
            truth[key] = truth.get(key, 0) + 3
        elif key not in truth:
            continue
        said = truth[key] - 1 if step == "late" else truth[key]
        counters.note(name, str(incarnations[name]), {"num_steps": float(said)})

        assert counters.total()["num_steps"] == sum(truth.values())


def test_what_two_routers_know_of_departed_workers_is_counted_once() -> None:
    one, two = PoolCounters(), PoolCounters()
    for number in range(100):
        for counters in (one, two):
            counters.note(f"worker-{number}", "1", {"num_steps": 3.0})
    one.keep([])
    two.keep([f"worker-{number}" for number in range(50, 100)])
    two.keep([])
    for _ in range(3):
        one.learn(two.departed())
        two.learn(one.departed())

    assert one.total()["num_steps"] == two.total()["num_steps"] == 300


def test_router_that_comes_later_knows_what_all_workers_before_it_counted() -> None:
    one, two, later = PoolCounters(), PoolCounters(), PoolCounters()
    for number in range(200):
        for counters in (one, two):
            counters.note(f"worker-{number}", "1", {"num_steps": 3.0})
    one.keep([])
    two.keep([f"worker-{number}" for number in range(0, 200, 2)])  # in another order
    two.keep([])
    later.note("worker-199", "1", {"num_steps": 3.0})  # a list that still has it
    for other in (one, two, one):
        later.learn(other.departed(), other.forgotten())
        other.learn(later.departed(), later.forgotten())
    later.keep([])

    assert [counters.total()["num_steps"] for counters in (one, two, later)] == [600, 600, 600]


def test_no_row_jumps_by_what_another_worker_counted() -> None:
    """A rate over the rows would show it as work done in that moment."""
    counters = PoolCounters()
    for number in range(200):
        counters.note(f"worker-{number}", "1", {"num_steps": 3.0})
        counters.keep([])
        assert {row["num_steps"] for row in counters.by_replica().values()} == {3.0}

    assert len(counters.by_replica()) == 64
    assert counters.total()["num_steps"] == 600


async def test_totals_and_metrics_do_not_fall_when_a_replica_is_replaced(model_dir: Path) -> None:
    async with router_rig(model_dir) as rig:
        await rig.complete([5] * 20, max_tokens=4, ignore_eos=True)
        before = await _generated(rig)
        rig.decode.add("decode-new")
        rig.decode.hidden.add("decode-0")
        await until(lambda: [item.replica_id for item in rig.service.decode_pool.replicas] == ["decode-new"])

        after = await _generated(rig)

        assert (before, after) == ((4, 4), (4, 4))


async def _generated(rig: RouterRig) -> tuple[float, float]:
    """Tokens that the workers counted, by /status and by /metrics."""
    totals = (await rig.client.get("/status")).json()["totals"]
    families = text_string_to_metric_families((await rig.client.get("/metrics")).text)
    name = "baton:worker_num_generated_tokens_total"
    return (
        totals["counters"]["num_generated_tokens"],
        sum(item.value for family in families for item in family.samples if item.name == name),
    )
