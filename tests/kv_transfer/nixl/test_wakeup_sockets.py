"""Datagrams from other processes to the sockets with which UCX wakes a worker."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.kv.kv_world import KVWorld
from tests.support.kv.ucx import confined_ucx


def abstract_sockets(pid: int) -> list[str]:
    """The abstract names of a process's sockets."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7][1:] for row in rows if len(row) > 7 and row[7].startswith("@") and row[6] in inodes]


@pytest.mark.known_failure(40)
@pytest.mark.parametrize("datagram", [b"", b"\xff", b"\xff" * 1000], ids=["empty", "one byte", "long"])
def test_strangers_datagrams_do_not_end_a_worker(datagram: bytes) -> None:
    with confined_ucx():
        world = KVWorld("nixl")
        try:
            source = world.make_source(world.spec("source"))
            reader = world.make_reader(world.spec("reader"))
            assert world.child is not None
            assert world.child.process.pid is not None
            names = abstract_sockets(world.child.process.pid)
            assert names
            for name in names:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                    for _ in range(3):
                        stranger.sendto(datagram, f"\0{name}")

            source.fill((1, 2), world.seed())
            loads = [reader.load(f"{number}", source.grant(f"{number}", (1, 2)), (3, 4)) for number in range(20)]

            assert [ended.error for ended in loads] == [None] * 20
            assert reader.content((3, 4)) == source.content((1, 2))
        finally:
            world.close()
