"""A cluster on machines of its own: `ray up`, `baton deploy`, requests, faults, updates, `ray down`.

The tests share one cluster and run in their order: each leaves it whole.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from benchmarks.report import Row
from tests.cluster.host_cluster import WAIT_TIMEOUT_S, HostCluster
from tests.cluster.hosts import HOME, Host
from tests.cluster.load import NUM_TOKENS, KnownAnswers, running_load
from tests.support.cluster.http_completions import assert_at_rest, complete_all

pytestmark = pytest.mark.timeout(1800)

CONFIG: dict[str, Any] = {
    "model": f"{HOME}/model",
    "served_model_name": "tiny",
    "host": "0.0.0.0",
    "device": "cpu",
    "dtype": "float32",
    "decode_replicas": 2,
    "roles": "fixed",  # so that every request goes from one machine to another
    "router_per_node": True,
    "health": {"drain_timeout_s": 20},
    "cache": {"num_blocks": 1024},
    # One worker a machine, as where it has one GPU: what a lost machine ran waits for its return.
    "prefill": {"resources": {"baton_prefill": 1}},
    "decode": {"resources": {"baton_decode": 1}},
}
CHANGED: dict[str, Any] = {**CONFIG, "decode": {**CONFIG["decode"], "scheduler": {"max_num_seqs": 64}}}

BYTES_TOLERANCE = 0.10


def seconds(name: str, value: float) -> Row:
    """A figure."""
    return Row(name=name, value=value, unit="s")


def lives(cluster: HostCluster) -> dict[str, str]:
    """Which life of which worker."""
    return {row["replica_id"]: row["incarnation"] for pool in ("prefill", "decode") for row in cluster.replicas(pool)}


def in_service(cluster: HostCluster) -> set[str]:
    """The addresses of the decode workers that get requests."""
    rows = cluster.replicas("decode")
    return {row["node_ip"] for row in rows if row["state"] == "running" and not row["is_left_out"]}


def generated_tokens(cluster: HostCluster, host: Host) -> int:
    """The number of tokens that the decode worker of a machine has generated."""
    return sum(
        row["counters"]["num_generated_tokens"] for row in cluster.replicas("decode") if row["node_ip"] == host.address
    )


def assert_used(cluster: HostCluster, known: KnownAnswers, host: Host) -> None:
    """A handful of requests at the same time reach a machine, too, and are answered right.

    Not the first ones, perhaps: while others can serve, nothing goes where the router has not heard a stream begin.
    """
    before, deadline_s = generated_tokens(cluster, host), time.monotonic() + WAIT_TIMEOUT_S
    while generated_tokens(cluster, host) == before:
        assert time.monotonic() < deadline_s, f"{host.address} is not used\n{cluster.describe()}"
        answers = asyncio.run(complete_all(cluster.url, known.prompts[:16], max_tokens=[NUM_TOKENS] * 16))
        assert tuple(answers) == known.answers[:16]


def is_whole(cluster: HostCluster) -> bool:
    """All workers serve, each on its machine."""
    return in_service(cluster) == {host.address for host in cluster.decode} and len(cluster.replicas("prefill")) == 1


def test_deploy_serves_with_each_pool_on_its_machines(cluster: HostCluster) -> None:
    result = cluster.deploy(CONFIG)

    assert result.returncode == 0, result.stderr + cluster.describe()
    pools = cluster.status()["pools"]
    assert {row["node_ip"] for row in pools["prefill"]} == {cluster.prefill.address}
    assert {row["node_ip"] for row in pools["decode"]} == {host.address for host in cluster.decode}
    assert {row["transport"] for pool in pools.values() for row in pool} == {"UCX transports any, devices eth0"}


@pytest.mark.parametrize(("devices", "outcome"), [("eth0", "met prefill/1"), ("lo", "refused")])
def test_hosts_that_reach_each_other_s_devices_meet_and_others_say_why_not(
    cluster: HostCluster, devices: str, outcome: str
) -> None:
    hello = cluster.prefill.disk / "hello"
    meet = "cd ~/baton; ~/baton-venv/bin/python -m tests.cluster.meet"
    with cluster.prefill.running(f"export UCX_NET_DEVICES={devices}; {meet} introduce ~/hello prefill") as introduced:
        assert introduced == "introduced"
        (cluster.decode[0].disk / "hello").write_bytes(hello.read_bytes())
        said = cluster.decode[0].run(f"export UCX_NET_DEVICES=eth0; {meet} meet ~/hello decode")

    assert said.splitlines()[-1].startswith(outcome), said
    if outcome == "refused":
        assert "UCX reaches no network device of the peer from here, where it uses" in said
        assert "devices eth0" in said


async def test_64_requests_say_what_one_engine_says_and_their_kv_crosses_the_bridge(
    cluster: HostCluster, known: KnownAnswers, seen: list[Row]
) -> None:
    before = [host.link.received_bytes() for host in cluster.decode], cluster.status()["totals"]["transferred_bytes"]

    answers = await complete_all(cluster.url, known.prompts, max_tokens=[NUM_TOKENS] * len(known.prompts))

    assert len(known.prompts) == 64
    assert tuple(answers) == known.answers
    status = await asyncio.to_thread(cluster.status)
    moved = status["totals"]["transferred_bytes"] - before[1]
    crossed = sum(host.link.received_bytes() for host in cluster.decode) - sum(before[0])
    seen.append(Row(name="KV moved, by /status", value=moved / 1e6, unit="MB"))
    seen.append(Row(name="bytes that reached the decode hosts", value=crossed / 1e6, unit="MB"))
    assert moved > 50_000_000
    assert crossed == pytest.approx(moved, rel=BYTES_TOLERANCE)
    assert status["totals"]["failed_loads"] == 0
    assert_at_rest(status)


def test_the_same_configuration_again_changes_nothing(cluster: HostCluster) -> None:
    before = lives(cluster)

    result = cluster.deploy(CONFIG)

    assert result.returncode == 0, result.stderr
    assert "is the running one" in result.stderr
    assert lives(cluster) == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"decode_replicas": "two"}, "decode_replicas"),
        ({"model": "/nowhere"}, "/nowhere"),
        ({"decode": {"resources": {"baton_decoder": 0.001}}}, "baton_decoder"),
        ({"cache": {"num_blocks": 8}}, "num_blocks"),
        ({"served_model_name": "other"}, "served_model_name"),
    ],
)
def test_a_wrong_configuration_is_refused_and_changes_nothing(
    cluster: HostCluster, change: dict[str, Any], complaint: str
) -> None:
    before = lives(cluster)

    result = cluster.deploy({**CONFIG, **change})

    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("baton: error: ")]
    assert len(errors) == 1, result.stderr
    assert complaint in errors[0]
    assert lives(cluster) == before


def test_an_update_fails_no_request(cluster: HostCluster, known: KnownAnswers, seen: list[Row]) -> None:
    before = lives(cluster)

    with running_load(cluster.url, known) as load:
        started_s = time.monotonic()
        result = cluster.deploy(CHANGED)
        seen.append(seconds("update of two decode workers", time.monotonic() - started_s))
        assert result.returncode == 0, result.stderr + cluster.describe()
        load.wait_for(12)
    seen.append(seconds("update: slowest answer", load.slowest_s))

    cluster.wait(lambda: is_whole(cluster), "whole cluster")
    after = lives(cluster)
    prefill = cluster.replicas("prefill")[0]["replica_id"]
    assert after[prefill] == before[prefill], "the prefill worker was not concerned"
    assert not (set(after) - {prefill}) & set(before), "every decode worker was replaced"


def test_a_decode_host_that_is_cut_off_comes_back(cluster: HostCluster, known: KnownAnswers, seen: list[Row]) -> None:
    lost = cluster.decode[0]
    with running_load(cluster.url, known) as load:
        lost.link.cut()
        try:
            seen.append(
                seconds(
                    "host cut off: left out after",
                    cluster.wait(lambda: lost.address not in in_service(cluster), "worker left out"),
                )
            )
            load.wait_for(12)
        finally:
            lost.link.mend()
        seen.append(
            seconds("host cut off: in service again after", cluster.wait(lambda: is_whole(cluster), "whole cluster"))
        )
        assert_used(cluster, known, lost)
    seen.append(seconds("host cut off: slowest answer", load.slowest_s))


def test_a_host_that_is_killed_costs_no_request_and_comes_back_when_it_boots(
    cluster: HostCluster, known: KnownAnswers, seen: list[Row]
) -> None:
    lost = cluster.decode[1]
    with running_load(cluster.url, known) as load:
        lost.link.cut()  # a power cut says no good-bye
        lost.kill()
        seen.append(
            seconds(
                "host killed: left out after",
                cluster.wait(lambda: lost.address not in in_service(cluster), "worker left out"),
            )
        )
        load.wait_for(12)
        load.ease()
        cluster.hosts.restart(lost)
        seen.append(
            seconds(
                "host killed: in service again after its boot", cluster.wait(lambda: is_whole(cluster), "whole cluster")
            )
        )
        assert_used(cluster, known, lost)
    seen.append(seconds("host killed: slowest answer", load.slowest_s))


def test_requests_go_on_while_ray_s_head_restarts(cluster: HostCluster, known: KnownAnswers, seen: list[Row]) -> None:
    with running_load(cluster.url, known) as load:
        load.ease()
        cluster.restart_head()
        load.wait_for(12)
        seen.append(
            seconds(
                "head restarted: nodes joined again after",
                cluster.wait(lambda: cluster.num_living_nodes() == 4, "four living nodes"),
            )
        )
        seen.append(
            seconds(
                "head restarted: Serve at work again after",
                cluster.wait(lambda: cluster.deploy(CHANGED).returncode == 0, "deployment"),
            )
        )
        load.wait_for(12)
    seen.append(seconds("head restarted: slowest answer", load.slowest_s))
    cluster.wait(lambda: is_whole(cluster), "whole cluster")


def test_shutdown_and_ray_down_leave_nothing_running(cluster: HostCluster) -> None:
    assert cluster.baton("shutdown").returncode == 0
    again = cluster.baton("shutdown")
    assert (again.returncode, "nothing is deployed" in again.stderr) == (0, True)

    cluster.launcher.stop()
    cluster.launcher.down()

    for host in (cluster.head, *cluster.workers):
        left = [process.name() for process in host.processes() if "ray" in process.name()]
        assert not left, f"{host.address}: {left}"
