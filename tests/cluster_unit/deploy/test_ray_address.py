"""A Ray that Ray itself would try to reach for minutes: `auto` and loopback addresses stand for the machine's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from ray._private import services

from cluster.deploy.ray_address import check_reachable
from cluster.deploy.ray_home import RayUnavailableError, connect

OWN_ADDRESS = "127.0.0.9"
"""Stands for the machine's address in its network."""


@pytest.fixture(autouse=True)
def own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "get_node_ip_address", lambda *_: OWN_ADDRESS)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize("is_auto", [False, True])
def test_ray_that_keeps_to_the_loopback_address_is_refused_at_once(
    listener: socket.socket, is_auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)

    with pytest.raises(RayUnavailableError, match=r"as the private Ray of a `baton serve` does \(that command ends it"):
        connect("auto" if is_auto else address)


def test_ray_that_is_gone_is_refused_at_once(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = listener.getsockname()[1]
    listener.close()
    monkeypatch.setenv("RAY_ADDRESS", f"{OWN_ADDRESS}:{port}")

    with pytest.raises(RayUnavailableError, match=rf"{OWN_ADDRESS}:{port}, but nothing answers there \(start a Ray"):
        connect("auto")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1", OWN_ADDRESS])
def test_ray_that_listens_on_the_machines_address_passes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((OWN_ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")

        check_reachable(address if address == "auto" else f"{address}:{port}")
