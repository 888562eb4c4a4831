"""Serve's HTTP proxy in front of the routers: it dies, starts slowly, and holds back what clients send."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import LoadSection, load_scenario
from tests.support.cluster.cluster import POLL_PERIOD_S, READY_TIMEOUT_S, ClusterProcess, assert_left_nothing
from tests.support.cluster.http_completions import assert_at_rest, complete_all, read_status, wait_for_rest

SCENARIO = Path(__file__).parents[2] / "deploy" / "chaos" / "proxy-killed.yaml"
PROXY, ROUTER = "ray::ProxyActor", "ray::ServeReplica:baton:router"
MIB = 1 << 20
NUM_CLIENTS = 40
BODY_BYTES = 7 * MIB
ROOM_BYTES = 16 * MIB
CHUNK = b" " * (MIB // 4)

LONG = LoadSection(streams=16, distinct=8, output_tokens=(800, 900))
"""Long answers, so that none is complete before the routers learn that their client has left."""

GONE_S = 30.0
"""So long before its bodies' time to wait for room is over, everything that its clients left is gone from the proxy."""

STALLED_S = 2.0
"""If no bytes of a client are read for this long, it is being held back."""


async def test_killed_proxy_costs_its_connections_and_is_replaced(interrupted: Interrupted) -> None:
    """The requests on its connections are computed for nobody, so they are aborted on every worker."""
    cluster = interrupted.cluster
    before = read_status(cluster.url)["totals"]
    scenario = load_scenario(SCENARIO).model_copy(update={"load": LONG})

    report = await ChaosRunner(scenario, url=cluster.url, headers={}, tell=print).run()
    status = wait_for_rest(cluster.url)

    print("\n".join(report.lines()))
    assert report.problems == [], report.lines()
    # A stream that broke may ask again in the moment in which the proxy's last connections are taken.
    assert 0 < report.num_broken_with_router <= 2 * scenario.load.streams
    new = {name: status["totals"][name] - before[name] for name in ("requests", "finished", "cancelled", "failed")}
    assert new["failed"] == 0
    assert 0 < new["cancelled"] <= report.num_broken_with_router
    assert new["requests"] == new["finished"] + new["cancelled"]
    assert_at_rest(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A cluster whose first proxy was killed while it started."""

    cluster: ClusterProcess
    killed_pid: int


@pytest.fixture(scope="module")
def interrupted(served_model: Path) -> Iterator[Interrupted]:
    """Its proxy ends while the command waits for it, as where Serve ends one that starts too slowly for it; and it has
    little room for bodies."""
    limits = {"max_body_bytes": 8 * MIB, "max_reading_bytes": ROOM_BYTES, "reading_wait_s": 60}
    config = {"model": str(served_model), "dtype": "float32", "http_proxy": "serve", "router": limits}
    cluster = ClusterProcess(config)
    try:
        (proxy,) = wait_for_processes(cluster, PROXY)
        proxy.kill()
        cluster.wait_for_output("curl ")
        yield Interrupted(cluster=cluster, killed_pid=proxy.pid)
        processes = cluster.processes()
        assert cluster.stop() == 0, cluster.log
        assert_left_nothing(cluster, processes)
    finally:
        cluster.close()


def wait_for_processes(cluster: ClusterProcess, *names: str) -> list[psutil.Process]:
    """The cluster's processes whose names begin like this, once there is at least one of each."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [process for process in cluster.processes() if process.name().startswith(names)]
            if len(found) == len(names):
                return found
        time.sleep(POLL_PERIOD_S)
    raise AssertionError(f"no {names} within {READY_TIMEOUT_S:.0f} s:\n{cluster.log}")


async def test_proxy_that_ended_while_it_started_is_replaced(interrupted: Interrupted) -> None:
    (proxy,) = wait_for_processes(interrupted.cluster, PROXY)

    assert proxy.pid != interrupted.killed_pid
    await complete_all(interrupted.cluster.url, [[5] * 9], max_tokens=[4])


async def test_bodies_that_nobody_reads_stay_with_their_clients(interrupted: Interrupted) -> None:
    """All of them together would take 280 MiB in the proxy, and then in the router."""
    cluster, url = interrupted.cluster, interrupted.cluster.url
    before = memory_of(cluster)

    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        clients = [group.create_task(send_all_but_the_end(cluster.port, stack)) for _ in range(NUM_CLIENTS)]
        sent = await asyncio.gather(*clients)
        grown = memory_of(cluster) - before
        small = await complete_all(url, [[5] * 9], max_tokens=[4])
    print(
        f"{sum(sent) / MIB:.0f} MiB of {NUM_CLIENTS * BODY_BYTES / MIB:.0f} MiB were sent, "
        f"proxy and router grew by {grown / MIB:.0f} MiB"
    )

    assert grown < 6 * ROOM_BYTES
    assert len(small[0]) == 4
    large = await complete_large_once_there_is_room(url)
    assert "user" in large.text or large.status_code == httpx.codes.OK, "the room is free again"


async def complete_large_once_there_is_room(url: str) -> httpx.Response:
    """The answer to a large body; the proxy hears some time after its clients have left that they have."""
    body = {"prompt": "x", "max_tokens": 1, "user": "u" * BODY_BYTES}
    deadline_s = time.monotonic() + GONE_S
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        while True:
            answer = await client.post("/v1/completions", json=body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline_s:
                return answer
            await asyncio.sleep(POLL_PERIOD_S)


async def send_all_but_the_end(port: int, stack: contextlib.AsyncExitStack) -> int:
    """Send a body that never ends, on a connection that stays open; returns how much was accepted, or may have been."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(lambda: None if writer.transport.is_closing() else writer.transport.abort())
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {BODY_BYTES}\r\n\r\n"
    )
    writer.write(head.encode())
    num_sent = 0
    while num_sent + len(CHUNK) < BODY_BYTES:
        writer.write(CHUNK)
        try:
            await asyncio.wait_for(writer.drain(), STALLED_S)
        except (TimeoutError, ConnectionError):  # held back, or refused
            break
        num_sent += len(CHUNK)
    return num_sent


def memory_of(cluster: ClusterProcess) -> int:
    """Bytes of memory of the proxy and the router."""
    return sum(process.memory_info().rss for process in wait_for_processes(cluster, PROXY, ROUTER))
