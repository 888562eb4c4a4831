"""What another user of the machine can read and write of a default `baton serve`: only what the API is for.

Needs root, to become another user; tests/conftest.py says so where it leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from router.host_rule import is_loopback_name
from tests.support.cluster.cluster import ClusterProcess, run_baton
from tests.support.cluster.stranger import ASKS_FOR_CERTIFICATE, Target, answer_over_tls, findings_of, kind_of

STRANGER = 61_003
"""An unused user id and group id."""

GROUP = 61_002
"""The group in which the cluster runs: what has it belongs to the cluster, wherever it lies."""

CHECKOUT = Path(__file__).parents[2]
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
STREAM = "0001"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home directory that others may look into, as many are."""
    folder = Path(tempfile.mkdtemp(prefix="bt-home-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[ClusterProcess]:
    """`baton serve` of a user whose home and temporary folder have the usual permissions."""
    cluster = ClusterProcess({}, group=GROUP, environment={"HOME": str(home)})
    try:
        cluster.folder.chmod(0o755)
        cluster.session_folder.chmod(0o1777)
        cluster.wait_until_ready()
        complete(cluster)
        yield cluster
        assert cluster.stop() == 0, cluster.log
    finally:
        cluster.close()


def complete(cluster: ClusterProcess) -> str:
    """The text of a short answer."""
    body = {"prompt": "The code of the blue fox is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == httpx.codes.OK, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def findings(target: Target) -> list[str]:
    return findings_of(target, uid=STRANGER)


def files_of_group() -> list[Path]:
    """Files that the cluster's processes made in folders shared by all users, except compiled code next to ours."""
    found = []
    for top in SHARED_FOLDERS:
        for folder, folders, files in os.walk(top):
            if Path(folder) == CHECKOUT:
                folders.clear()
                continue
            for path in (Path(folder, name) for name in (*folders, *files)):
                try:
                    if path.lstat().st_gid == GROUP:
                        found.append(path)
                except FileNotFoundError:
                    continue
    return found


def sockets_of(processes: list[psutil.Process]) -> set[str]:
    """Inodes of the sockets that processes have."""
    targets = []
    for process in processes:
        with contextlib.suppress(FileNotFoundError):  # it ended just now
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was closed just now
                    targets.append(os.readlink(link))
    return {target[len("socket:[") : -1] for target in targets if target.startswith("socket:[")}


def listening(processes: list[psutil.Process]) -> dict[int, str]:
    """Ports on which processes listen, and their addresses."""
    return {item.laddr.port: item.laddr.ip for process in processes for item in listeners_of(process)}


def listeners_of(process: psutil.Process) -> list[Any]:
    """The TCP sockets on which a process listens; none when it ended just now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [item for item in process.net_connections("tcp") if item.status == psutil.CONN_LISTEN]
    return []


def reachable(address: str) -> str:
    """An address of this machine by which what listens on ``address`` is reached."""
    return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address.removeprefix("::ffff:"))


def port_findings(cluster: ClusterProcess) -> list[str]:
    """What ports other than the API's answer to a stranger."""
    ports = listening(cluster.processes())
    del ports[cluster.port]
    assert ports
    return findings(Target(ports={str(port): reachable(address) for port, address in ports.items()}))


def unix_sockets(processes: list[psutil.Process]) -> list[tuple[str, str]]:
    """Name and type of the unix sockets that have a name; abstract ones begin with @."""
    mine = sockets_of(processes)
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [(row[7], row[4]) for row in rows if len(row) > 7 and row[6] in mine]


def segments_of_group() -> list[int]:
    """Ids of the segments of System V shared memory that the cluster's processes made."""
    header, *lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    column = {name: index for index, name in enumerate(header.split())}
    rows = [line.split() for line in lines]
    return [int(row[column["shmid"]]) for row in rows if int(row[column["cgid"]]) == GROUP]


def test_files_can_neither_be_read_nor_written_nor_moved(cluster: ClusterProcess) -> None:
    paths = files_of_group()
    assert any(path.is_socket() for path in paths)
    assert any(path.suffix == ".log" for path in paths)

    assert findings(Target(paths=tuple(map(str, paths)))) == []


def test_processes_and_their_shared_memory_are_closed(cluster: ClusterProcess) -> None:
    pids = tuple(process.pid for process in cluster.processes())

    assert findings(Target(processes=pids, sysv_segments=tuple(segments_of_group()))) == []


@pytest.mark.known_failure(40)
def test_unix_sockets_take_nobody_else(cluster: ClusterProcess) -> None:
    named = unix_sockets(cluster.processes())
    streams = [name for name, kind in named if kind == STREAM]
    abstract = tuple(name[1:] for name, _ in named if name.startswith("@"))
    before = complete(cluster)

    assert {name.rpartition("-")[0] for name in streams if name.startswith("@")} == {"@baton-frames"}
    paths = tuple({name for name in streams if not name.startswith("@")})
    assert paths
    assert findings(Target(paths=paths, abstract_sockets=abstract)) == []
    assert complete(cluster) == before


@pytest.mark.known_failure(39)
def test_ports_refuse_whoever_has_neither_token_nor_certificate(cluster: ClusterProcess) -> None:
    assert [line for line in port_findings(cluster) if "/" in line] == []


@pytest.mark.known_failure(39)
def test_certificate_is_what_keeps_them_out(cluster: ClusterProcess) -> None:
    (certificate,) = cluster.session_folder.glob("*/certificate.pem")
    ports = [(reachable(address), port) for port, address in listening(cluster.processes()).items()]
    closed = [item for item in ports if kind_of(*item) == ASKS_FOR_CERTIFICATE]

    assert len(closed) > len(ports) / 2
    key = certificate.with_name("key.pem")
    assert all("\\x04" in answer_over_tls(*item, certificate=certificate, key=key) for item in closed)


def test_only_serves_transport_between_replicas_listens_beyond_this_machine(cluster: ClusterProcess) -> None:
    beyond = [
        process.cmdline()[0]
        for process in cluster.processes()
        for item in listeners_of(process)
        if not is_loopback_name(item.laddr.ip)
    ]

    assert sorted(beyond) == [f"ray::ServeReplica:baton:{name}" for name in ("decode", "prefill", "router")]


def test_orders_are_taken_only_from_who_started_the_cluster(cluster: ClusterProcess, home: Path) -> None:
    for path in ("/admin/drain", "/admin/faults"):
        answer = httpx.post(f"{cluster.url}{path}", json={"replica": "x"}, timeout=60, trust_env=False)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")

    own = run_baton("drain", "nobody", "--url", cluster.url, environment={"HOME": str(home)})

    assert "there is no worker 'nobody'" in own.stderr


def test_no_port_speaks_anything_but_http_and_grpc(cluster: ClusterProcess) -> None:
    assert [line for line in port_findings(cluster) if "/" not in line] == []
