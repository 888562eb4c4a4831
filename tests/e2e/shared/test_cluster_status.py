"""The status of a running cluster."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.chaos.live_cluster import processes_of, raylet_of
from cluster.config.names import FORK_SERVER, RAYLET
from tests.support.cluster.cluster import ClusterProcess, run_baton
from tests.support.cluster.http_completions import wait_for_rest

NUM_TOKENS = 8
NUM_REPLICAS = 3
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


@pytest.fixture
def client(cluster: ClusterProcess) -> httpx.Client:
    return httpx.Client(base_url=cluster.url, timeout=60.0, trust_env=False)


def complete(client: httpx.Client, prompt: list[int], **parameters: Any) -> dict[str, Any]:
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **parameters,
    }
    response = client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_prefill_and_decode_are_processes_of_the_command(client: httpx.Client, cluster: ClusterProcess) -> None:
    pools = client.get("/status").json()["pools"]

    pids = [replica["pid"] for pool in ("prefill", "decode") for replica in pools[pool]]

    assert len(set(pids)) == 2
    assert set(pids) <= {process.pid for process in cluster.processes()}


def test_workers_and_routers_are_forks_of_one_process_and_have_a_raylet(
    client: httpx.Client, cluster: ClusterProcess
) -> None:
    status = client.get("/status").json()
    rows = [*status["routers"], *(replica for pool in status["pools"].values() for replica in pool)]
    processes = [psutil.Process(row["pid"]) for row in rows]

    (server,) = {process.parent() for process in processes}

    assert server is not None
    assert FORK_SERVER in server.cmdline()
    (raylet,) = {raylet_of(process) for process in processes}
    assert raylet == cluster.process_named(RAYLET)
    assert raylet is not None
    assert set(processes) <= set(processes_of(raylet))


def test_transferred_bytes_are_the_blocks_of_the_prompt(client: httpx.Client, cluster: ClusterProcess) -> None:
    before = wait_for_rest(cluster.url)
    block = before["pools"]["decode"][0]
    prompt = [3 + index % 250 for index in range(5 * block["block_size"] + 3)]

    complete(client, prompt)

    after = wait_for_rest(cluster.url)
    moved = {
        name: after["totals"][name] - before["totals"][name]
        for name in ("transfers", "transferred_blocks", "transferred_bytes")
    }
    assert moved == {"transfers": 1, "transferred_blocks": 6, "transferred_bytes": 6 * block["block_bytes"]}


def test_a_lone_stream_is_computed_with_the_idle_workers_cores_too(
    client: httpx.Client, cluster: ClusterProcess
) -> None:
    complete(client, [9, 8, 7, 6], max_tokens=100)

    workers = [row for pool in wait_for_rest(cluster.url)["pools"].values() for row in pool]
    assert [row["borrows_cores"] for row in workers] == [True, True]
    num_cores = len(os.sched_getaffinity(0))
    borrowing = [row for row in workers if row["counters"]["num_borrowed_steps"]]
    assert bool(borrowing) is (num_cores > 1), workers


def test_whatif_takes_load_and_workers_from_the_running_cluster(
    client: httpx.Client, cluster: ClusterProcess, tmp_path: Path
) -> None:
    for number in range(8):
        complete(client, [3 + (number * 31 + index) % 250 for index in range(120)], max_tokens=24)
    wait_for_rest(cluster.url)
    file = tmp_path / "answer.json"

    url, layouts = cluster.url, "elastic:2,apart:1+1"
    result = run_baton(
        *("whatif", "--recorded", url, "--calibration", url, "--layouts", layouts, "--json-file", str(file)),
        *("--ttft-ms", "2000", "--itl-ms", "100"),
    )

    assert result.returncode == 0, result.stderr
    answer = json.loads(file.read_text())
    assert answer["calibration"]["origin"].startswith(f"2 of {url}, by ")
    real, *rows = answer["recorded"], *answer["layouts"]
    assert real["num_requests"] >= 8
    assert 0.0 < real["ttft_p50_ms"] < real["ttft_p99_ms"]
    assert [row["layout"] for row in rows] == ["elastic:2", "apart:1+1"]
    assert all(row["num_requests"] == real["num_requests"] and not row["num_failed"] for row in rows)
    assert "recorded: latencies of " in result.stdout


def test_workers_hold_nothing_at_rest(client: httpx.Client, cluster: ClusterProcess) -> None:
    complete(client, list(range(3, 60)))

    pools = wait_for_rest(cluster.url)["pools"]

    for replica in (*pools["prefill"], *pools["decode"]):
        held = [replica[key] for key in ("num_running", "num_waiting", "num_loading", "num_leased_blocks")]
        assert held == [0, 0, 0, 0], replica


def test_nothing_listens_beyond_the_loopback_address_but_serves_own_transport(cluster: ClusterProcess) -> None:
    exposed = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
            exposed += [
                (process.name(), connection.laddr)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN and connection.laddr.ip not in LOOPBACK
            ]

    assert all(name.startswith("ray::ServeRepl") for name, _ in exposed), exposed
    assert len(exposed) <= NUM_REPLICAS, f"more than one port a replica: {exposed}"
