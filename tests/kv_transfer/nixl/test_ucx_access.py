"""The network devices that UCX may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kv_transfer.layout import MemoryKind
from kv_transfer.nixl.ucx_access import (
    POSIX_TAKES_BYTES,
    POSIX_WANTS_BYTES,
    VARIABLE,
    choose_net_devices,
    confine_ucx,
    network_ucx,
    rdma_ports,
    shared_memory_lack,
)


def make_port(folder: Path, device: str, port: int, state: str) -> None:
    path = folder / device / "ports" / str(port)
    path.mkdir(parents=True)
    (path / "state").write_text(f"{state}\n")


def test_the_interface_of_the_address_is_chosen(tmp_path: Path) -> None:
    assert choose_net_devices("127.0.0.1", infiniband=tmp_path) == "lo"


def test_rdma_ports_that_are_up_come_first(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", 1, "4: ACTIVE")
    make_port(tmp_path, "mlx5_0", 2, "4: ACTIVE")
    make_port(tmp_path, "mlx5_0", 1, "1: DOWN")

    assert rdma_ports(tmp_path) == ["mlx5_0:2", "mlx5_1:1"]
    assert choose_net_devices("127.0.0.1", infiniband=tmp_path) == "mlx5_0:2,mlx5_1:1,lo"


def test_an_address_that_no_interface_has_leaves_the_choice_to_ucx(tmp_path: Path) -> None:
    assert choose_net_devices("203.0.113.1", infiniband=tmp_path) is None


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "mlx5_7:1")
    monkeypatch.delenv("UCX_TLS", raising=False)

    assert confine_ucx("127.0.0.1") == "UCX transports any, devices mlx5_7:1"


@pytest.mark.parametrize("memory", MemoryKind)
def test_agents_of_the_network_get_what_makes_reads_fast_unless_it_is_set(
    memory: MemoryKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TCP_RX_SEG_SIZE", "64k")
    before = dict(os.environ)

    with network_ucx(memory):
        added = dict(set(os.environ.items()) - set(before.items()))

    of_gpus = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"} if memory is MemoryKind.VRAM else {}
    assert added == {"UCX_TCP_TX_SEG_SIZE": "512k"} | of_gpus
    assert dict(os.environ) == before


def give_free_bytes(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let every file system have so many bytes free."""
    values = [1, 1, num_bytes, num_bytes, num_bytes, 0, 0, 0, 0, 255]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))


def test_agents_have_room_for_what_each_keeps_and_for_what_ucx_wants_free_at_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_free_bytes(monkeypatch, POSIX_WANTS_BYTES + 2 * POSIX_TAKES_BYTES)

    assert shared_memory_lack(num_agents=3) == ""
    assert "for 4 workers /dev/shm must have 30 MiB free, and it has 25.3; " in shared_memory_lack(num_agents=4)


def test_shared_memory_that_is_not_there_is_told(tmp_path: Path) -> None:
    lack = shared_memory_lack(folder=tmp_path / "none")

    assert lack.endswith("none cannot be used: No such file or directory; mount a tmpfs there")
