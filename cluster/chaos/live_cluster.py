"""A running cluster as a scenario sees it: its status, its processes on this machine, and ways to break them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Set
from typing import Any

import httpx
import psutil

from cluster.chaos.scenario import MEMBERS, Choice, ScenarioError
from cluster.client import answer_of, code_of
from cluster.config.names import FORK_SERVER, RAYLET

PARTITION = {"handshake_refused": 1.0, "read_fails": 1.0, "notification_lost": 1.0}
"""Faults that make workers unreachable for each other: no handshake, no read and no notification succeeds."""

BUSY_TIMEOUT_S = 120.0
BUSY_POLL_S = 0.02
NODE_END_S = 30.0
NOTICED_TIMEOUT_S = 60.0
NOTICED_POLL_S = 0.2

BUSY = ("num_running", "num_waiting", "num_loading")
RESTING = (*BUSY, "num_leased_blocks", "num_held_blocks")

Row = dict[str, Any]


class LiveCluster:
    """Reads /status, gives orders over /admin, and sends signals to the processes that /status names."""

    def __init__(self, client: httpx.AsyncClient, *, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._stopped: set[int] = set()

    async def status(self) -> dict[str, Any]:
        """The current answer of /status.

        Raises:
            httpx.HTTPError: The cluster does not answer.
        """
        return answer_of(await self._client.get("/status"), "pools", "routers", "totals")

    async def choose(self, choice: Choice) -> list[Row]:
        """The chosen workers or routers, as soon as they are as busy as the choice asks for.

        Raises:
            ScenarioError: There is none, or none was busy enough within ``BUSY_TIMEOUT_S``.
        """
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            rows = members(await self.status(), choice.role)
            rows = self._pick(choice, [row for row in rows if choice.node_ip in (None, row.get("node_ip"))])
            num_running = sum(running_of(row) for row in rows)
            if num_running >= choice.min_running:
                return rows
            if time.monotonic() > deadline_s:
                raise ScenarioError(
                    f"no {choice.role} ran {choice.min_running} requests within {BUSY_TIMEOUT_S:g} s, only "
                    f"{num_running}: give the load more streams or longer answers"
                )
            await asyncio.sleep(BUSY_POLL_S)

    def _pick(self, choice: Choice, rows: list[Row]) -> list[Row]:
        if not rows:
            where = "" if choice.node_ip is None else f" on {choice.node_ip}"
            raise ScenarioError(f"there is no running {choice.role}{where}")
        if choice.choose == "all":
            return rows
        if choice.choose == "random":
            return [self._random.choice(rows)]
        rows.sort(key=load_of)
        return [rows[-1] if choice.choose == "busiest" else rows[0]]

    def signal(self, row: Row, number: signal.Signals) -> None:
        """Send a signal to a process of the cluster.

        Raises:
            ScenarioError: The process is not on this machine.
        """
        process = local_process(row)
        if number == signal.SIGSTOP:
            self._stopped.add(process.pid)
        process.send_signal(number)

    def resume(self) -> None:
        """Let all stopped processes go on."""
        for pid in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(signal.SIGCONT)
        self._stopped.clear()

    async def kill_node(self, row: Row) -> list[Row]:
        """Kill a worker's raylet; Ray then ends the rest of its node.

        Returns:
            All workers and routers of that node.

        Raises:
            ScenarioError: The raylet's process cannot be determined.
        """
        raylet = raylet_of(local_process(row))
        if raylet is None:
            raise ScenarioError(f"process {row['pid']} has no raylet")
        status = await self.status()
        rows = [found for role in MEMBERS for found in members(status, role)]
        below = {process.pid: process for process in processes_of(raylet)}
        lost = [found for found in rows if found["pid"] in below and is_here(found)]
        processes = [below[found["pid"]] for found in lost]
        raylet.kill()
        await asyncio.to_thread(psutil.wait_procs, processes, NODE_END_S)
        return lost

    async def proxies(self) -> list[psutil.Process]:
        """The processes that listen on the API's port: Serve's proxies on this machine, or HAProxy.

        Raises:
            ScenarioError: The cluster has no such process on this machine, or its routers listen themselves.
        """
        port = self._client.base_url.port
        status = await self.status()
        # Of all roles: a proxy may be on a node without a router.
        rows = [row for role in MEMBERS for row in members(status, role)]
        # In a thread, because it is slow and the load must go on.
        listening = await asyncio.to_thread(listening_beside, rows, port)
        if not listening:
            raise ScenarioError(
                f"no process of the cluster listens on port {port} of this machine: run this on the machine where one "
                "does"
            )
        routers = {row["pid"] for row in members(status, "router")}
        if any(process.pid in routers for process in listening):
            raise ScenarioError(
                "kill_proxy: this cluster has no proxy, its routers listen themselves (`http_proxy: none`): use kill"
            )
        return listening

    async def drain(self, row: Row) -> None:
        """Do what `baton drain` does."""
        response = await self._client.post("/admin/drain", json={"replica": row["replica_id"]})
        response.raise_for_status()

    async def set_faults(self, faults: dict[str, float]) -> None:
        """Inject these faults, and no others, into all connectors.

        Retries, because a worker that was just killed does not answer until the cluster has noticed its end.

        Raises:
            ScenarioError: The cluster does not allow faults.
            httpx.HTTPError: The cluster does not answer, or refuses these faults.
        """
        deadline_s = time.monotonic() + NOTICED_TIMEOUT_S
        while True:
            response = await self._client.post("/admin/faults", json={"faults": faults})
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(NOTICED_POLL_S)
        if code_of(response) == "faults_not_allowed":
            raise ScenarioError(
                "steps of this scenario inject faults, which the cluster does not allow: start it with "
                "kv_transfer: {allow_faults: true} in its configuration"
            )
        response.raise_for_status()


def members(status: dict[str, Any], role: str) -> list[Row]:
    """The running processes of a role; none if the cluster has no such pool."""
    rows: list[Row] = status["routers"] if role == "router" else status["pools"].get(role, [])
    return [row for row in rows if row["state"] == "running" and row["pid"] is not None]


def is_whole(status: dict[str, Any], wanted: dict[str, int], *, ended: Set[str] = frozenset()) -> bool:
    """True when each role has as many members as before, and all of them take requests. Members in ``ended`` do not
    count, even if the cluster has not noticed their end yet."""
    return all(
        len([row for row in members(status, role) if name_of(row) not in ended and takes_requests(row)]) >= number
        for role, number in wanted.items()
    )


def takes_requests(row: Row) -> bool:
    """False for a worker that is left out or drains."""
    return not row.get("is_left_out") and not row.get("is_draining")


def name_of(row: Row) -> str:
    """The id of a worker or router."""
    name: str = row.get("replica_id") or row["router_id"]
    return name


def leaks_of(status: dict[str, Any]) -> list[str]:
    """Resources that workers still hold although they have no requests."""
    found: list[str] = []
    for role, rows in status["pools"].items():
        for row in rows:
            held = {name: row[name] for name in RESTING if row[name]}
            if row["num_free_blocks"] != row["num_blocks"]:
                held["num_free_blocks"] = row["num_free_blocks"]
            if row["counters"].get("num_integrity_failures"):
                held["num_integrity_failures"] = row["counters"]["num_integrity_failures"]
            if held:
                found.append(f"{role} {row['replica_id']}: {', '.join(f'{name} {held[name]}' for name in held)}")
    return found


def load_of(row: Row) -> float:
    """How busy a worker or router is."""
    return running_of(row) + float(row.get("kv_usage", 0.0))


def running_of(row: Row) -> int:
    """How many requests a worker or a router has."""
    if "server_load" in row:
        return int(row["server_load"])
    return sum(int(row[name]) for name in BUSY)


def local_process(row: Row) -> psutil.Process:
    """The process behind a row.

    Raises:
        ScenarioError: The process is on another machine, or gone.
    """
    if not is_here(row):
        raise ScenarioError(f"process {row['pid']} is on {row['node_ip']}: run this scenario there")
    try:
        return psutil.Process(row["pid"])
    except psutil.NoSuchProcess as error:
        raise ScenarioError(f"process {row['pid']} is gone") from error


def is_here(row: Row) -> bool:
    """True when a row's process is, or was, on this machine."""
    addresses = {address.address for found in psutil.net_if_addrs().values() for address in found}
    node_ip = row.get("node_ip")
    return node_ip is None or node_ip in addresses or str(node_ip).startswith("127.")


def listening_beside(rows: list[Row], port: int | None) -> list[psutil.Process]:
    """The processes on this machine that listen on a port, among those of the raylets of these rows."""
    raylets: set[psutil.Process | None] = set()
    for row in rows:
        with contextlib.suppress(ScenarioError):
            raylets.add(raylet_of(local_process(row)))
    processes = {process for raylet in raylets if raylet is not None for process in processes_of(raylet)}
    return [process for process in processes if listens_on(process, port)]


def raylet_of(process: psutil.Process) -> psutil.Process | None:
    """The raylet that asked for a process: above it, or beside the fork server that the process is a fork of."""
    raylet = ancestor(process, RAYLET)
    with contextlib.suppress(psutil.NoSuchProcess):
        for parent in process.parents() if raylet is None else ():
            if _is_fork_server(parent):
                return next((found for found in _beside(parent) if found.name() == RAYLET), None)
    return raylet


def processes_of(raylet: psutil.Process) -> list[psutil.Process]:
    """The processes below a raylet, and below a fork server beside it."""
    servers = filter(_is_fork_server, _beside(raylet))
    return [child for parent in (raylet, *servers) for child in parent.children(recursive=True)]


def _beside(process: psutil.Process) -> list[psutil.Process]:
    """A process and the others that its parent started."""
    parent = process.parent()
    return [] if parent is None else parent.children()


def _is_fork_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return FORK_SERVER in process.cmdline()
    return False


def listens_on(process: psutil.Process, port: int | None) -> bool:
    """True for a process that listens on a port."""
    with contextlib.suppress(psutil.Error):
        connections = process.net_connections("tcp")
        return any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in connections)
    return False


def ancestor(process: psutil.Process, name: str) -> psutil.Process | None:
    """The nearest ancestor with this name; None if there is none, or if a process in between has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for parent in process.parents():
            words = [word.rsplit("/", 1)[-1] for word in parent.cmdline()[:2]]
            if name in (parent.name(), *words):
                return parent
    return None
