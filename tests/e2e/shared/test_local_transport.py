"""What the workers of a default `baton serve` open to other users of the machine: no port, and no memory."""

from __future__ import annotations

import psutil
import pytest

from tests.support.cluster.cluster import ClusterProcess
from tests.support.cluster.http_completions import complete_all, read_status
from tests.support.cluster.other_user import assert_memory_is_closed
from tests.support.cluster.stranger import ASKS_FOR_CERTIFICATE, kind_of

PROMPTS = [[3 + (7 * index + offset) % 250 for offset in range(40)] for index in range(4)]


@pytest.fixture
async def pids(cluster: ClusterProcess) -> list[int]:
    """The workers' processes, between which KV has moved."""
    await complete_all(cluster.url, PROMPTS, max_tokens=[4] * len(PROMPTS))
    pools = read_status(cluster.url)["pools"]
    rows = [*pools["prefill"], *pools["decode"]]
    assert sum(row["counters"]["num_bytes"] for row in pools["decode"]) > 0
    for row in rows:
        assert row["transport"].startswith("UCX transports posix,cma,self, this user's processes"), row["transport"]
    return [row["pid"] for row in rows]


@pytest.mark.known_failure(38)
async def test_no_port_of_a_worker_is_ucxs(pids: list[int]) -> None:
    """Each of them belongs to a server of Ray, which talks to nobody without this cluster's certificate."""
    ports = [port for pid in pids for port in _listening_ports(pid)]

    assert ports
    assert {kind_of(*port) for port in ports} == {ASKS_FOR_CERTIFICATE}


@pytest.mark.known_failure(38)
async def test_another_user_reads_and_writes_no_memory_of_a_worker(pids: list[int]) -> None:
    for pid in pids:
        assert_memory_is_closed(pid)


def _listening_ports(pid: int) -> list[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("tcp")
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return [
        (wildcards.get(item.laddr.ip, item.laddr.ip), item.laddr.port)
        for item in connections
        if item.status == psutil.CONN_LISTEN
    ]
