"""Workers on one machine open nothing to others."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kv_transfer.layout import MemoryKind
from kv_transfer.nixl.ucx_access import describe_local_ucx, has_cma, local_ucx
from kv_transfer.transport import TransportError
from tests.support.cluster.other_user import as_nobody, assert_memory_is_closed, segments_of
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx

NUM_DATAGRAMS = 2000
UNDOING = {"UCX_TLS": "tcp,sysv,self", "UCX_NET_DEVICES": "all", "UCX_POSIX_USE_PROC_LINK": "n"}
"""UCX settings that a user's environment may contain."""


@pytest.fixture(scope="module")
def ports_before() -> set[Any]:
    """Ports that this process has open from tests of other files."""
    return set(_ports(os.getpid()))


@pytest.fixture(scope="module")
def world(ports_before: set[Any]) -> Iterator[KVWorld]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in UNDOING.items():
            patch.setenv(name, value)
        world = KVWorld("nixl", transport="local")
        yield world
        world.close()


@pytest.fixture(scope="module")
def pair(world: KVWorld) -> tuple[KVEngine, Any]:
    """A reader here and a source in another process, over whose connection blocks and messages went."""
    reader, source = world.make_reader(world.spec("reader")), world.make_source(world.spec("source"))
    _assert_load_works(world, reader, source)
    return reader, source


def _assert_load_works(world: KVWorld, reader: KVEngine, source: Any) -> None:
    request_id = world.unique("request")
    source.fill((1, 2), world.seed())
    assert reader.load(request_id, source.grant(request_id, (1, 2)), (3, 4)).error is None
    assert reader.content((3, 4)) == source.content((1, 2))


def _pids(world: KVWorld) -> tuple[int, int]:
    assert world.child is not None
    assert world.child.process.pid is not None
    return os.getpid(), world.child.process.pid


def _ports(pid: int) -> list[Any]:
    return psutil.Process(pid).net_connections("inet")


@pytest.mark.known_failure(38)
def test_no_process_has_a_port_whatever_the_environment_says(
    ports_before: set[Any], world: KVWorld, pair: tuple[KVEngine, Any]
) -> None:
    assert [set(_ports(pid)) - ports_before for pid in _pids(world)] == [set(), set()]


def test_over_the_network_each_process_listens() -> None:
    """Shows that the test above would notice a connector that is not local."""
    with confined_ucx():
        world = KVWorld("nixl")
        reader, source = world.make_reader(world.spec("reader")), world.make_source(world.spec("source"))
        _assert_load_works(world, reader, source)

        ports = [_ports(pid) for pid in _pids(world)]
        world.close()

    assert all(any(port.status == psutil.CONN_LISTEN for port in of_process) for of_process in ports)


@pytest.mark.known_failure(38)
def test_shared_memory_has_no_name_and_is_its_owners_alone(world: KVWorld, pair: tuple[KVEngine, Any]) -> None:
    for pid in _pids(world):
        mapped = {line.split(None, 5)[5].strip() for line in _maps(pid) if re.search(r"/dev/shm/|/SYSV|/memfd:", line)}
        assert mapped
        assert all(name.startswith("/dev/shm/ucx_shm_posix_") and name.endswith("(deleted)") for name in mapped)
        for link in segments_of(pid):
            assert link.stat().st_mode & 0o077 == 0
            assert link.stat().st_uid == os.getuid()


@pytest.mark.known_failure(38)
def test_another_user_reads_and_writes_nothing(world: KVWorld, pair: tuple[KVEngine, Any]) -> None:
    """As root, a process of another user tries it; otherwise it is at least checked that no process can be
    inspected.
    """
    for pid in _pids(world):
        assert_memory_is_closed(pid)
    if os.geteuid() == 0:
        assert as_nobody(_TRY_TO_COPY, str(pair[0].memory.ctypes.data), str(os.getpid())) == "refused"


@pytest.mark.known_failure(38)
def test_datagrams_of_others_wake_a_process_and_change_nothing(world: KVWorld, pair: tuple[KVEngine, Any]) -> None:
    """Each process has a socket of the abstract name space, to which everybody on the machine may send."""
    addresses = [address for pid in _pids(world) for address in _abstract_addresses(pid)]
    assert addresses
    before = [engine.stats().num_unknown_notifications for engine in pair]

    if os.geteuid() == 0:
        assert int(as_nobody(_SEND, str(NUM_DATAGRAMS), *addresses)) > 0
    else:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            for address in addresses:
                sender.sendto(b"\xff", f"\0{address}")
    _assert_load_works(world, *pair)

    assert [engine.stats().num_unknown_notifications for engine in pair] == before


def test_the_environment_is_as_before_when_the_agent_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNDOING.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    before = dict(os.environ)

    with local_ucx(MemoryKind.VRAM):
        inside = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}

    assert inside == {
        "UCX_TLS": "posix,cma,cuda,self",
        "UCX_POSIX_USE_PROC_LINK": "y",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "UCX_LOG_LEVEL": "error",
    }
    assert dict(os.environ) == before


def test_a_machine_that_forbids_copies_between_processes_is_told_apart(tmp_path: Path) -> None:
    scope = tmp_path / "ptrace_scope"

    assert has_cma(ptrace_scope=scope)
    for value, is_there in (("1", True), ("2", False), ("3", False)):
        scope.write_text(f"{value}\n")
        assert has_cma(ptrace_scope=scope) is is_there


def test_what_is_used_is_said() -> None:
    said = describe_local_ucx(MemoryKind.DRAM)

    assert said.startswith("UCX transports posix,cma,self, this user's processes on this machine only")


def test_a_peer_that_uses_the_network_is_refused_with_the_remedy() -> None:
    with confined_ucx(transports="tcp,self"):
        world = KVWorld("nixl")
        local = world.make_reader(world.spec("local", transport="local"))
        source = world.make_source(world.spec("source"))

        with pytest.raises(TransportError, match=re.escape("kv_transfer.transport is 'local' here")):
            local.accept(source.hello())
        world.close()


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def _abstract_addresses(pid: int) -> list[str]:
    return [
        connection.laddr[1:]
        for connection in psutil.Process(pid).net_connections("unix")
        if connection.type == socket.SOCK_DGRAM and connection.laddr.startswith("@")
    ]


_TRY_TO_COPY = """
libc = ctypes.CDLL(None, use_errno=True)
class IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
here = ctypes.create_string_buffer(1)
local, remote = IOVec(ctypes.addressof(here), 1), IOVec(int(sys.argv[1]), 1)
results = [
    copy(int(sys.argv[2]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    for copy in (libc.process_vm_readv, libc.process_vm_writev)
]
print("refused" if results == [-1, -1] else results)
"""

_SEND = """
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
num_sent = 0
for address in sys.argv[2:]:
    for number in range(int(sys.argv[1])):
        try:
            num_sent += sender.sendto(bytes([number % 256]) * (1 + number % 300), "\\0" + address) > 0
        except BlockingIOError:
            pass
print(num_sent)
"""
