"""Which network devices UCX may use. Left to itself it takes all of a host's, also those that no other host reaches.

A bridge of containers has the same address on every host, and a virtual interface may lead nowhere: connections over
them hang or meet the wrong host. So UCX gets the RDMA devices that are up, and the interface of the address by which
the hosts of the cluster know each other. Imports no NIXL.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

INFINIBAND = Path("/sys/class/infiniband")
VARIABLE = "UCX_NET_DEVICES"


def confine_ucx(node_ip: str) -> str:
    """Set ``UCX_NET_DEVICES`` for this process, unless it is set; returns what UCX will use, for people to read.

    Call it before the first agent is made: UCX reads its environment then.
    """
    devices = os.environ.get(VARIABLE) or choose_net_devices(node_ip)
    if devices is not None:
        os.environ[VARIABLE] = devices
    return ucx_environment()


def ucx_environment() -> str:
    """What UCX may use in this process, for people to read."""
    transports = os.environ.get("UCX_TLS", "any")
    return f"UCX transports {transports}, devices {os.environ.get(VARIABLE, 'any')}"


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
