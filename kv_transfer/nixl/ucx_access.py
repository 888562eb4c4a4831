"""What UCX may use: chosen network devices between machines, and one user's shared memory within a machine.

By default UCX uses all devices of a host, even those that no other host can reach. A container bridge has the same
address on every host, and a virtual interface may lead nowhere: connections over them hang or reach the wrong host. So
UCX is limited to the RDMA devices that are up, and to the interface with the address by which the cluster's hosts know
each other. Imports no NIXL.
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
"""Where the UCX transport ``posix`` allocates its memory."""

POSIX_WANTS_BYTES: Final = 17 * 1024**2
"""Free shared memory that UCX needs for ``posix``. With less than 16 MiB free it does without, and says so only in its
own log (measured, NIXL 1.5.1); the rest is a margin for other processes."""

POSIX_TAKES_BYTES: Final = 4_333_568
"""Shared memory that one agent holds, however much it moves (measured)."""

_HARMLESS = "UCX_LOG_"

_OF_TCP: Final = {"UCX_TCP_TX_SEG_SIZE": "512k", "UCX_TCP_RX_SEG_SIZE": "512k"}
"""Over TCP the peer sends data in segments, by default of 8 KiB. Between two processes of one machine that gives
1 GB/s, and 5 GB/s with larger ones (benchmarks/kv_transfer.py). GPU memory is copied by segment: 0.5 and 2 GB/s."""

_OF_GPUS: Final = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""By default UCX reads another process's GPU memory directly only over NVLink, and otherwise by segments through the
host. Allow direct reads always: the source is usually the same GPU, or one behind the same PCIe switch."""

_ATTACH_FORBIDDEN = 2
"""At this value or above, even processes of the same user may not read each other's memory."""


def confine_ucx(node_ip: str) -> str:
    """Set ``UCX_NET_DEVICES`` for this process, unless it is set. Returns a readable text of what UCX will use.

    This is for agents that use the network. Call it before the first agent is made, since UCX reads its environment
    then.
    """
    devices = os.environ.get(VARIABLE) or choose_net_devices(node_ip)
    if devices is not None:
        os.environ[VARIABLE] = devices
    return ucx_environment()


def ucx_environment() -> str:
    """A readable text of what UCX may use in this process."""
    transports = os.environ.get("UCX_TLS", "any")
    return f"UCX transports {transports}, devices {os.environ.get(VARIABLE, 'any')}"


@contextmanager
def network_ucx(memory: MemoryKind) -> Iterator[None]:
    """Agents that are made in this context use settings for fast transfers, unless the environment sets them."""
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
    """Agents that are made in this context have no listening ports, and reach only this user's processes here.

    ``posix`` is unnamed shared memory, found through the file descriptors of the process that made it. ``cma`` is a
    copy by the kernel from process to process. Both are refused to other users. UCX's environment variables, except
    those for its log, are ignored in this context, because any of them might open a port.
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
    """A readable text of what ``local_ucx`` lets UCX use."""
    copies = "" if has_cma() else "; without cma, which this machine forbids: slower, and a dead peer goes unnoticed"
    return f"UCX transports {_local_transports(memory)}, this user's processes on this machine only{copies}"


def shared_memory_lack(*, num_agents: int = 1, folder: Path = SHARED_MEMORY) -> str:
    """Why ``num_agents`` more agents cannot connect over ``posix``, and what to do about it; empty when they can.

    Without ``posix`` they cannot connect at all: ``cma`` copies blocks, but carries no messages.
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
    """The value for ``UCX_NET_DEVICES``; None when no interface has the address ``node_ip``."""
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
