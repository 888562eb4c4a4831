"""Each kind of fault on a live cluster of two Ray nodes, under 16 streams: nothing lost, nothing wrong, nothing held.

Where two faults do not touch each other they share a run: half of the time is spent on starting what replaces the dead.
`make soak` does the same many times over, and for longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_nodes import SECOND_NODE_IP, TwoNodes, two_nodes
from cluster.chaos.report import ChaosReport
from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import load_scenario, parse_scenario

CHAOS = Path(__file__).parents[2] / "deploy" / "chaos"
LOAD = {"streams": 16, "distinct": 20, "prompt_tokens": [20, 120], "output_tokens": [80, 240]}
RECOVERY_S = 240
LEASE_TTL_S = 10
HEALTH_CHECK_S = 30
SILENCE_S = 15
"""Less than any stopped worker stands still here, and more than one waits for a core while others start."""

Steps = Sequence[Mapping[str, Any]]


async def suffer(cluster: TwoNodes, name: str, *steps: Mapping[str, Any], **checks: Any) -> ChaosReport:
    """Run a scenario with these steps; all checks must hold."""
    content = {"name": name, "load": LOAD, "checks": checks}
    scenario = parse_scenario({**content, "steps": [*steps, {"wait_for_recovery": RECOVERY_S}]}, where=name)
    report = await ChaosRunner(scenario, url=cluster.url, headers=cluster.headers, tell=print).run()
    print("\n".join(report.lines()))
    print("\n".join(cluster.ray.said("decode lost", "is left out")))
    assert report.problems == [], report.lines()
    assert all(fault.whole_s is not None for fault in report.faults)
    return report


@pytest.fixture(scope="module")
def cluster(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two of everything on two nodes, one decode worker on each, with faults allowed and leases that end soon."""
    config = {
        "model": str(served_model),
        "dtype": "float32",
        "roles": "fixed",  # so that every request is handed over, and meets what is broken
        "prefill_replicas": 2,
        "decode_replicas": 2,
        "router_replicas": 2,
        "decode": {"max_per_node": 1},
        "router": {"stream_silence_timeout_s": SILENCE_S, "unresponsive_after_s": SILENCE_S},
        "kv_transfer": {"allow_faults": True, "lease_ttl_s": LEASE_TTL_S},
    }
    with two_nodes(tmp_path_factory.mktemp("deployed"), config) as deployed:
        yield deployed


def steps_of(name: str) -> Steps:
    """The steps of a scenario that comes with Baton."""
    steps = load_scenario(CHAOS / f"{name}.yaml").steps
    return [
        step.model_dump(exclude_unset=True, by_alias=True)
        for step in steps
        if step.name not in ("wait_for_recovery", "sleep")
    ]


async def test_killed_router_and_decode_worker_cost_time_and_that_router_s_connections(cluster: TwoNodes) -> None:
    """The router first: what it counted in its last seconds goes with it."""
    report = await suffer(cluster, "router and decode", *steps_of("router-killed"), *steps_of("decode-killed"))

    assert report.counted["migrations"] > 0


async def test_killed_proxy_costs_its_connections_and_seconds(cluster: TwoNodes) -> None:
    report = await suffer(cluster, "proxy", *steps_of("proxy-killed"))

    assert report.num_broken_with_router > 0
    assert report.counted["migrations"] == 0


async def test_killed_prefill_worker_and_connector_faults_are_not_noticed(cluster: TwoNodes) -> None:
    report = await suffer(cluster, "prefill and reads", *steps_of("prefill-killed"), *steps_of("connector-faults"))

    assert report.counted["failed_loads"] > 0


async def test_prefill_and_decode_killed_together_cost_time_only(cluster: TwoNodes) -> None:
    report = await suffer(cluster, "both", *steps_of("both-killed"))

    assert report.counted["migrations"] > 0


async def test_drained_workers_compute_nothing_again(cluster: TwoNodes) -> None:
    report = await suffer(
        cluster, "drained", *steps_of("decode-drained"), *steps_of("prefill-drained"), recomputed=False
    )

    assert report.counted["migrations"] == report.counted["recomputed_tokens"] == 0
    assert report.counted["drain_moves"] > 0


async def test_partition_is_not_noticed(cluster: TwoNodes) -> None:
    report = await suffer(cluster, "partition", *steps_of("partition"))

    assert report.counted["failed_loads"] > 0


async def test_workers_that_stand_still_are_done_without(cluster: TwoNodes) -> None:
    """Decode for as long as Serve waits for a health check; prefill for longer than its leases live."""
    report = await suffer(
        cluster,
        "stand still",
        {"wait_for_tokens": 500},
        {"pause": {"role": "decode", "seconds": HEALTH_CHECK_S, "min_running": 4}},
        {"pause": {"role": "prefill", "seconds": LEASE_TTL_S + 10}},
        {"sleep": HEALTH_CHECK_S + 1},
    )

    assert report.counted["migrations"] > 0


async def test_rolling_update_is_not_noticed(cluster: TwoNodes) -> None:
    command = cluster.deploy_command("update", scheduler={"max_num_batched_tokens": 1024})
    report = await suffer(
        cluster, "update", {"wait_for_tokens": 500}, {"run": {"command": command, "seconds": 400}}, recomputed=False
    )

    assert report.counted["migrations"] == 0


async def test_killed_raylet_takes_its_node_along_and_nothing_else(cluster: TwoNodes) -> None:
    victim = {"role": "decode", "node_ip": SECOND_NODE_IP, "min_running": 4}
    report = await suffer(cluster, "node", {"wait_for_tokens": 500}, {"kill_node": victim})

    lost = sum(report.counted[name] for name in ("migrations", "prefill_retries", "local_prefills"))
    assert lost + report.num_broken_with_router > 0, "streams, prompts, or connections where a router of that node died"
