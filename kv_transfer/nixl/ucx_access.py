"""What UCX may use. Between machines: which network devices; within one: memory that the kernel keeps to one user.

Left to itself UCX takes all devices of a host, also those that no other host reaches: a bridge of containers has the
same address on every host, and a virtual interface may lead nowhere: connections over them hang or meet the wrong host.
So it gets the RDMA devices that are up, and the interface of the address by which the hosts of the cluster know each
other. Imports no NIXL.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from kv_transfer.layout import MemoryKind

INFINIBAND = Path("/sys/class/infiniband")
VARIABLE = "UCX_NET_DEVICES"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")

SHARED_MEMORY = Path("/dev/shm")
"""Where ``posix`` takes its memory."""

POSIX_WANTS_BYTES: Final = 17 * 1024**2
"""With less than 16 MiB free, UCX does without ``posix``, and says so in its own words only (measured, NIXL 1.5.1); the
rest is for what others put there meanwhile."""

POSIX_TAKES_BYTES: Final = 4_333_568
"""So much of it an agent keeps, whatever it moves (measured)."""

_HARMLESS = "UCX_LOG_"

_OF_TCP: Final = {"UCX_TCP_TX_SEG_SIZE": "512k", "UCX_TCP_RX_SEG_SIZE": "512k"}
"""Over TCP the other side sends what is read in segments, by default of 8 KiB: of these, between two processes of one
machine, 1 GB/s arrives, of larger ones 5 (benchmarks/kv_transfer.py). Of GPU memory, which is copied segment by
segment, 0.5 and 2."""

_OF_GPUS: Final = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""UCX reads directly from another process's GPU memory only where it finds NVLink, and else segment by segment through
the host. It may: what is read here most often lies on the same GPU, or on one behind the same PCIe switch."""

_ATTACH_FORBIDDEN = 2
"""From this value on, not even processes of one user may read each other's memory."""


def confine_ucx(node_ip: str) -> str:
    """Set ``UCX_NET_DEVICES`` for this process, unless it is set; returns what UCX will use, for people to read.

    For agents that use the network. Call it before the first one is made: UCX reads its environment then.
    """
    devices = os.environ.get(VARIABLE) or choose_net_devices(node_ip)
    if devices is not None:
        os.environ[VARIABLE] = devices
    return ucx_environment()


def ucx_environment() -> str:
    """What UCX may use in this process, for people to read."""
    transports = os.environ.get("UCX_TLS", "any")
    return f"UCX transports {transports}, devices {os.environ.get(VARIABLE, 'any')}"


@contextmanager
def network_ucx(memory: MemoryKind) -> Iterator[None]:
    """Agents that are made meanwhile move blocks fast, by settings that the environment does not have."""
    settings = _OF_TCP | (_OF_GPUS if memory is MemoryKind.VRAM else {})
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def local_ucx(memory: MemoryKind) -> Iterator[None]:
    """Agents that are made meanwhile listen on nothing and reach only processes of this user, on this machine.

    ``posix`` is shared memory without a name, found through the file descriptors of the process that made it, ``cma``
    a copy by the kernel from process to process: both are refused to other users. What the environment says of UCX
    does not hold meanwhile, but for its log: any of it might open a port again.
    """
    inherited = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    for name in inherited:
        if not name.startswith(_HARMLESS):
            del os.environ[name]
    settings = {"UCX_TLS": _local_transports(memory), "UCX_POSIX_USE_PROC_LINK": "y"}
    settings |= _OF_GPUS if memory is MemoryKind.VRAM else {}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        os.environ.update(inherited)


def describe_local_ucx(memory: MemoryKind) -> str:
    """What ``local_ucx`` lets UCX use, for people to read."""
    copies = "" if has_cma() else "; without cma, which this machine forbids: slower, and a dead peer goes unnoticed"
    return f"UCX transports {_local_transports(memory)}, this user's processes on this machine only{copies}"


def shared_memory_lack(*, num_agents: int = 1, folder: Path = SHARED_MEMORY) -> str:
    """What keeps so many more agents from meeting over ``posix``, and what to do about it; empty where nothing does.

    Without it they do not meet at all: ``cma`` copies blocks, and carries no messages.
    """
    needed = POSIX_WANTS_BYTES + (num_agents - 1) * POSIX_TAKES_BYTES
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"KV moves over shared memory here, but {folder} cannot be used: {error.strerror}; mount a tmpfs there"
    free = found.f_bavail * found.f_frsize
    if free >= needed:
        return ""
    readers = "a worker" if num_agents == 1 else f"{num_agents} workers"
    mebibytes = 1024**2
    return (
        f"KV moves over shared memory here: for {readers} {folder} must have {math.ceil(needed / mebibytes)} MiB free, "
        f"and it has {free / mebibytes:.1f}; remove what fills it, or make it larger (docker run --shm-size, on "
        "Kubernetes an emptyDir in memory)"
    )


def _local_transports(memory: MemoryKind) -> str:
    return "posix,cma,cuda,self" if memory is MemoryKind.VRAM else "posix,cma,self"


def has_cma(*, ptrace_scope: Path = PTRACE_SCOPE) -> bool:
    """True when processes of one user may copy from each other's memory here."""
    if ptrace_scope.exists() and int(ptrace_scope.read_text(encoding="ascii")) >= _ATTACH_FORBIDDEN:
        return False
    there, here = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    source, destination = _IOVec(ctypes.addressof(there), 1), _IOVec(ctypes.addressof(here), 1)
    copy = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if copy is None:
        return False
    return bool(copy(os.getpid(), ctypes.byref(destination), 1, ctypes.byref(source), 1, 0) == 1)


class _IOVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def choose_net_devices(node_ip: str, *, infiniband: Path = INFINIBAND) -> str | None:
    """The value for ``UCX_NET_DEVICES``; None where no interface has the address, so that nothing is known."""
    interface = next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address == node_ip for address in addresses)
        ),
        None,
    )
    if interface is None:
        return None
    return ",".join([*rdma_ports(infiniband), interface])


def rdma_ports(infiniband: Path = INFINIBAND) -> list[str]:
    """The RDMA ports that are up, as UCX names them: ``mlx5_0:1``."""
    ports = sorted(infiniband.glob("*/ports/*/state"))
    return [f"{port.parts[-4]}:{port.parts[-2]}" for port in ports if "ACTIVE" in port.read_text(encoding="ascii")]
