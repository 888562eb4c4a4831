"""The disk tier's storage on a disk that is full, slow or loses blocks."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.connector import StoreOrder
from kv_transfer.errors import InvalidOptionError
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.tier.disk.folder import WorkerFolder
from kv_transfer.tier.disk.storage import REFUSAL_S, DiskRead, DiskStorage
from kv_transfer.tier.disk.tier import DiskTierOptions, open_disk_storage
from kv_transfer.tier.host.arena import build_arena
from kv_transfer.tier.storage import LostSlot
from kv_transfer.transport import ReadState
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.waiting import wait_until

LAYOUT = KVEngineSpec(engine_id="any").layout
NUM_BYTES = LAYOUT.block_bytes
NUM_SLOTS = 8


class TroubledFolder(WorkerFolder):
    """Writes fail while ``is_full``, and wait while ``may_write`` is not set."""

    is_full = False
    may_write = threading.Event()

    def write(self, name: str, content: memoryview) -> None:
        """Write, unless the disk is full."""
        assert self.may_write.wait(120)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(name, content)


class World:
    """Eight blocks of memory, a folder, and a clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 0.0
        self.memory = np.arange(1, NUM_SLOTS + 1, dtype=np.uint8)[:, None].repeat(NUM_BYTES, axis=1)
        self.region = KVRegion(
            base_address=self.memory.ctypes.data,
            num_blocks=NUM_SLOTS,
            block_bytes=NUM_BYTES,
            memory=MemoryKind.DRAM,
            device_index=0,
        )
        self.open()

    def open(self, *, num_ways: int = NUM_SLOTS) -> None:
        self.folder = TroubledFolder.claim(self.path, layout_hash=LAYOUT.layout_hash, block_bytes=NUM_BYTES)
        self.folder.may_write = threading.Event()
        self.folder.may_write.set()
        self.storage = DiskStorage(
            self.folder,
            self.folder.keep_newest(NUM_SLOTS),
            num_slots=NUM_SLOTS,
            arena=build_arena(self.region, host_bytes=(num_ways + 1) * NUM_BYTES),
            clock=lambda: self.now_s,
        )

    def store(self, *numbers: int) -> bool:
        """Have block n written to slot n, if there is a way for each."""
        if not all(self.storage.reserve() for _ in numbers):
            return False
        hashes = tuple(b"hash-%d" % number for number in numbers)
        self.storage.store(StoreOrder(block_ids=numbers, slots=numbers, block_hashes=hashes))
        return True

    def load(self, slot: int, block_id: int) -> DiskRead:
        """Read a slot to the end."""
        read = self.storage.start_read((slot,), (block_id,))
        wait_until(lambda: read.poll() is not ReadState.ACTIVE)
        return read

    def files(self) -> int:
        return len(list(self.folder.path.glob("*.kv")))

    def lost(self) -> list[LostSlot]:
        """The first loss that is reported."""
        lost: list[LostSlot] = []
        wait_until(lambda: bool(lost.extend(self.storage.take_lost()) or lost))
        return lost


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.folder.may_write.set()
    world.storage.close()


def test_a_full_disk_is_said_once_and_nothing_is_stored_for_a_while(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.folder.is_full = True
    with caplog.at_level(logging.INFO, logger="baton"):
        assert world.store(0, 1)
        lost = world.lost()
        wait_until(
            lambda: len(lost) + len(world.storage.take_lost()) == 2 or world.storage.counters() == {"lost_blocks": 2}
        )
        assert lost[0] == LostSlot(slot=0, block_hash=b"hash-0")
        assert not world.store(2)
        world.now_s = REFUSAL_S
        world.folder.is_full = False
        assert world.store(2)
        wait_until(lambda: world.files() == 1)
        wait_until(lambda: "can write again" in caplog.text)

    messages = [record.message for record in caplog.records]
    assert ["No space left" in message for message in messages] == [True, False]
    assert [path.suffix for path in world.folder.path.iterdir() if path.name != "lock"] == [".kv"], (
        "nothing is left over"
    )


def test_a_disk_that_is_too_slow_refuses_more_than_is_on_its_way(world: World) -> None:
    world.folder.may_write.clear()

    assert world.store(*range(NUM_SLOTS))
    assert not world.store(0)

    world.folder.may_write.set()
    wait_until(lambda: world.files() == NUM_SLOTS)
    wait_until(world.storage.reserve)


def test_a_read_waits_for_its_own_write_and_passes_those_of_others(world: World) -> None:
    assert world.store(0)
    wait_until(lambda: world.files() == 1)
    world.folder.may_write.clear()
    assert world.store(1, 2)
    own = world.storage.start_read((2,), (6,))
    assert own.poll() is ReadState.ACTIVE
    world.folder.may_write.set()
    world.memory[5] = 0

    assert world.load(0, 5).poll() is ReadState.DONE
    wait_until(lambda: own.poll() is ReadState.DONE)

    assert set(world.memory[5]) == {1}
    assert set(world.memory[6]) == {3}


@pytest.mark.parametrize("damage", ["bit", "cut short", "gone"])
def test_a_damaged_file_is_lost_and_its_block_is_known_to_be_wrong(world: World, damage: str) -> None:
    assert world.store(3)
    wait_until(lambda: world.files() == 1)
    (path,) = world.folder.path.glob("*.kv")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(NUM_BYTES if damage == "bit" else 10))

    assert world.load(3, 5).poll() is ReadState.DONE

    assert world.storage.arrived is not None
    assert world.storage.arrived.checksums((5,)) != world.storage.checksums((3,))
    assert set(world.memory[5]) == {6}, "nothing of it was copied"
    assert list(world.storage.take_lost()) == [LostSlot(slot=3, block_hash=b"hash-3")]
    assert world.storage.counters() == {"lost_blocks": 1}
    assert world.files() == 0


def test_what_arrived_has_the_checksum_that_was_stored(world: World) -> None:
    assert world.store(3)
    world.load(3, 5)

    assert world.storage.arrived is not None
    assert world.storage.arrived.checksums((5,)) == world.storage.checksums((3,))


def test_content_that_is_stored_twice_keeps_its_file_when_one_of_the_slots_is_emptied(world: World) -> None:
    """A slot that is being read when the cache is reset is emptied after its content was stored again elsewhere."""
    assert world.store(0)
    assert world.storage.reserve()
    world.storage.store(StoreOrder(block_ids=(0,), slots=(4,), block_hashes=(b"hash-0",)))
    world.storage.store(StoreOrder(dropped_slots=(0,)))
    world.load(4, 7)

    assert set(world.memory[7]) == {1}
    world.storage.store(StoreOrder(dropped_slots=(4,)))
    wait_until(lambda: world.files() == 0)


def test_what_waits_for_its_file_is_written_before_the_next_worker_comes(world: World) -> None:
    assert world.store(2, 3)
    world.storage.close()

    world.open()

    assert sorted(world.storage.kept) == [b"hash-2", b"hash-3"]
    slot = list(world.storage.kept).index(b"hash-3")
    world.load(slot, 7)
    assert set(world.memory[7]) == {4}


def test_a_closed_storage_takes_and_reads_nothing(world: World) -> None:
    world.storage.close()
    world.storage.close()

    assert not world.storage.reserve()
    assert world.storage.start_read((0,), (1,)).poll() is ReadState.FAILED


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(NUM_BYTES - 1, "less than one KV block"), (1 << 62, "is more than the")]
)
def test_a_size_that_cannot_be_is_refused(world: World, num_bytes: int, words: str) -> None:
    options = DiskTierOptions(disk_bytes=num_bytes, disk_path=str(world.path))

    with pytest.raises(InvalidOptionError, match=words):
        open_disk_storage(options, layout=LAYOUT, region=world.region, has_checksums=True)
