"""Each kind of fault once on a live cluster, under 16 streams: nothing lost, nothing wrong, nothing held at rest.

`make soak` does the same many times over, and for longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.chaos.report import ChaosReport
from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import Scenario, load_scenario, parse_scenario
from tests.support.cluster import ClusterProcess, running_cluster

CHAOS = Path(__file__).parents[2] / "deploy" / "chaos"
LOAD = {"streams": 16, "distinct": 20, "prompt_tokens": [20, 120], "output_tokens": [80, 200]}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chaos_cluster(served_model: Path) -> Iterator[ClusterProcess]:
    """Two of everything, with faults allowed and leases that end soon."""
    with running_cluster(
        model=str(served_model),
        dtype="float32",
        prefill_replicas=2,
        decode_replicas=2,
        router_replicas=2,
        kv_transfer={"allow_faults": True, "lease_ttl_s": 10},
    ) as running:
        yield running


def sample(name: str) -> Scenario:
    """A scenario that comes with Baton, under a load that suits a small model."""
    scenario = load_scenario(CHAOS / f"{name}.yaml")
    return scenario.model_copy(update={"load": scenario.load.model_validate(LOAD)})


async def run(cluster: ClusterProcess, scenario: Scenario) -> ChaosReport:
    report = await ChaosRunner(scenario, url=cluster.url, headers={}, tell=print).run()
    print("\n".join(report.lines()))
    assert report.problems == [], report.lines()
    return report


@pytest.mark.parametrize("name", ["prefill-killed", "decode-killed", "both-killed"])
async def test_killed_workers_cost_time_only(chaos_cluster: ClusterProcess, name: str) -> None:
    report = await run(chaos_cluster, sample(name))

    assert all(fault.whole_s is not None for fault in report.faults)
    assert name == "prefill-killed" or report.counted["migrations"] > 0


async def test_killed_router_breaks_its_own_connections_only(chaos_cluster: ClusterProcess) -> None:
    report = await run(chaos_cluster, sample("router-killed"))

    assert report.num_lost == 0


@pytest.mark.parametrize("name", ["decode-drained", "prefill-drained"])
async def test_drained_workers_compute_nothing_again(chaos_cluster: ClusterProcess, name: str) -> None:
    report = await run(chaos_cluster, sample(name))

    assert report.counted["migrations"] == report.counted["recomputed_tokens"] == 0
    assert name == "prefill-drained" or report.counted["drain_moves"] > 0


async def test_connector_faults_and_a_partition_are_not_noticed(chaos_cluster: ClusterProcess) -> None:
    report = await run(chaos_cluster, sample("connector-faults"))
    await run(chaos_cluster, sample("partition"))

    assert report.counted["failed_loads"] > 0


async def test_workers_that_stand_still_are_done_without(chaos_cluster: ClusterProcess) -> None:
    """Decode for 30 s; prefill for longer than its leases live."""
    steps: list[dict[str, Any]] = [
        {"wait_for_tokens": 500},
        {"pause": {"role": "decode", "seconds": 30}},
        {"pause": {"role": "prefill", "seconds": 20}},
        {"sleep": 31},
        {"wait_for_recovery": 120},
    ]
    scenario = parse_scenario({"name": "workers that stand still", "load": LOAD, "steps": steps}, where="test")
    report = await run(chaos_cluster, scenario)

    assert report.counted["migrations"] > 0
