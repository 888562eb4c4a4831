"""Blocks in files. A separate thread reads and writes them, so the engine never waits for a disk."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.connector import StoreOrder
from kv_transfer.memory.block_memory import BlockChecksums, HostBlockMemory
from kv_transfer.tier.disk.folder import DamagedFileError, KeptFile, WorkerFolder
from kv_transfer.tier.host.arena import HostArena
from kv_transfer.tier.storage import LostSlot
from kv_transfer.transport import ReadState

logger = logging.getLogger(f"baton.{__name__}")

REFUSAL_S = 60.0
"""How long nothing is stored after a file could not be written."""

_CLOSE_TIMEOUT_S = 5.0
_READ_WAY = 0
_NOTHING_ARRIVED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """Content in the arena, at place ``way``, that waits to be written. Without ``block_hash`` the slot is emptied."""

    slot: int
    block_hash: bytes = b""
    way: int = -1
    checksum: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class DiskRead:
    """Implements ``Read``: the copy of slots into blocks, block by block."""

    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    state: ReadState = ReadState.ACTIVE

    def poll(self) -> ReadState:
        """The state now."""
        return self.state

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class ArrivedBlocks:
    """Implements ``BlockChecksums`` with the checksum of what was last read into each block, known from the read."""

    found: dict[int, int] = field(default_factory=dict)

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The 64-bit XXH3 of what was read; for blocks into which nothing was read, a number that no block has."""
        return tuple(self.found.get(block_id, _NOTHING_ARRIVED) for block_id in block_ids)


class DiskStorage:
    """Implements ``TierStorage``: a slot is a file of ``folder``.

    Evicted blocks are copied into the ``arena``, and written from there to their files. One place of the arena is
    reserved for reads; the others limit how many blocks can wait for their files, and further blocks are refused. Reads
    go before writes, unless the content to read is itself still to be written. After a write failed nothing is stored
    for ``REFUSAL_S``.
    """

    def __init__(
        self,
        folder: WorkerFolder,
        kept: Sequence[KeptFile],
        *,
        num_slots: int,
        arena: HostArena,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots = num_slots
        self.on_event: Callable[[], None] | None = None
        self._blocks = ArrivedBlocks()
        self.arrived: BlockChecksums | None = self._blocks
        self.kept = tuple(file.block_hash for file in kept)
        self._folder = folder
        self._arena = arena
        self._memory = HostBlockMemory(arena.region)
        self._clock = clock
        self._files: dict[int, KeptFile] = dict(enumerate(kept))
        self._slot_of = {file.name: slot for slot, file in self._files.items()}
        self._checksums: dict[int, int] = {slot: file.checksum for slot, file in self._files.items()}
        self._condition = threading.Condition()
        self._ways = deque(range(_READ_WAY + 1, arena.region.num_blocks))
        self._num_reserved = 0
        self._writes: deque[_Write] = deque()
        self._unwritten: Counter[int] = Counter()
        self._reads: deque[DiskRead] = deque()
        self._lost: deque[LostSlot] = deque()
        self._num_lost = 0
        self._refuses_until_s: float | None = None
        self._has_complained = False
        self._closes_at_s: float | None = None
        self._copy_lock = threading.Lock()
        self._is_closed = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="baton-kv-disk", daemon=True)
        self._thread.start()

    def reserve(self) -> bool:
        """Reserve one place in the arena; False when there is none, or nothing is stored now."""
        with self._condition:
            is_refusing = self._refuses_until_s is not None and self._clock() < self._refuses_until_s
            if is_refusing or self._has_ended or self._closes_at_s is not None or self._num_reserved == len(self._ways):
                return False
            self._num_reserved += 1
            return True

    def store(self, order: StoreOrder) -> None:
        """Copy blocks into the arena and queue their writes; queue the deletion of the files of emptied slots."""
        with self._condition:
            ways = [self._ways.popleft() for _ in order.slots]
            self._num_reserved -= len(ways)
        self._arena.store(order.block_ids, ways)
        writes = [_Write(slot=slot) for slot in order.dropped_slots]
        checksums = self._memory.checksums(ways)
        for slot, block_hash, way, checksum in zip(order.slots, order.block_hashes, ways, checksums, strict=True):
            self._checksums[slot] = checksum
            writes.append(_Write(slot=slot, block_hash=block_hash, way=way, checksum=checksum))
        with self._condition:
            self._writes.extend(writes)
            self._unwritten.update(write.slot for write in writes)
            self._condition.notify()

    def checksums(self, slots: Sequence[int]) -> tuple[int, ...] | None:
        """The checksums of what was stored, or for files of an earlier worker, the ones in their names."""
        return tuple(self._checksums[slot] for slot in slots)

    def start_read(self, slots: Sequence[int], block_ids: Sequence[int]) -> DiskRead:
        """Queue the read of files into blocks."""
        read = DiskRead(slots=tuple(slots), block_ids=tuple(block_ids))
        with self._condition:
            if self._has_ended:
                read.state = ReadState.FAILED
            else:
                self._reads.append(read)
                self._condition.notify()
        return read

    def take_lost(self) -> Sequence[LostSlot]:
        """The slots whose files could not be written, or were damaged, since the last call."""
        return tuple(self._lost.popleft() for _ in range(len(self._lost)))

    def counters(self) -> Mapping[str, int]:
        """How many stored blocks were lost."""
        return {"lost_blocks": self._num_lost}

    def close(self) -> None:
        """Stop reading into blocks, and write waiting files for at most 5 s. The files stay for the next worker."""
        with self._condition:
            if self._closes_at_s is not None:
                return
            self._closes_at_s = self._clock() + _CLOSE_TIMEOUT_S
            self._condition.notify()
        self._thread.join(2 * _CLOSE_TIMEOUT_S)
        with self._copy_lock:
            self._is_closed = True
        if self._thread.is_alive():
            logger.error("the disk tier's thread did not stop: a read or write of %s hangs", self._folder.path)
        else:
            self._folder.give_up()

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            logger.exception("the disk tier's thread stopped: it no longer stores or loads blocks")
        finally:
            with self._condition:
                self._has_ended = True
                for read in self._reads:
                    read.state = ReadState.FAILED

    def _work(self) -> None:
        while True:
            with self._condition:
                while (job := self._next_job()) is None and self._closes_at_s is None:
                    self._condition.wait()
            if job is None:
                return
            if isinstance(job, DiskRead):
                self._read(job)
            else:
                self._write(job)

    def _next_job(self) -> DiskRead | _Write | None:
        """The next job; None when there is none, or when this storage is closed and its time is up."""
        if self._closes_at_s is not None:
            while self._reads:
                self._reads.popleft().state = ReadState.FAILED
            if self._clock() >= self._closes_at_s:
                return None
        for read in self._reads:
            if not any(self._unwritten[slot] for slot in read.slots):
                self._reads.remove(read)
                return read
        return self._writes.popleft() if self._writes else None

    def _write(self, write: _Write) -> None:
        """Replace a slot's file by one with its new content."""
        self._delete(write.slot)
        if write.block_hash:
            name = self._folder.name_of(write.block_hash, write.checksum)
            try:
                self._folder.write(name, self._view(write.way))
            except OSError as error:
                self._lose(write.slot, write.block_hash)
                self._refuse(error)
            else:
                self._files[write.slot] = KeptFile(name=name, block_hash=write.block_hash, checksum=write.checksum)
                self._slot_of[name] = write.slot
                if self._refuses_until_s is not None:
                    logger.info("the disk tier can write again: %s", self._folder.path)
                    self._refuses_until_s = None
        with self._condition:
            self._unwritten[write.slot] -= 1
            if not self._unwritten[write.slot]:
                del self._unwritten[write.slot]
            if write.block_hash:
                self._ways.append(write.way)

    def _read(self, read: DiskRead) -> None:
        """Copy intact files into blocks; report damaged ones as lost."""
        for slot, block_id in zip(read.slots, read.block_ids, strict=True):
            self._blocks.found[block_id] = _NOTHING_ARRIVED
            file = self._files.get(slot)
            if file is None:
                continue
            try:
                self._folder.read(file.name, file.checksum, self._view(_READ_WAY))
            except DamagedFileError as error:
                if not self._has_complained:
                    logger.warning(
                        "the disk tier lost a block, which is computed again; further ones are only counted: %s", error
                    )
                    self._has_complained = True
                self._delete(slot)
                self._lose(slot, file.block_hash)
                continue
            with self._copy_lock:
                if self._is_closed:
                    read.state = ReadState.FAILED
                    return
                self._arena.load((_READ_WAY,), (block_id,))
            self._blocks.found[block_id] = file.checksum
        read.state = ReadState.DONE
        if self.on_event is not None:
            self.on_event()

    def _delete(self, slot: int) -> None:
        """Delete a slot's file, unless another slot has a file of the same name by now."""
        file = self._files.pop(slot, None)
        if file is not None and self._slot_of[file.name] == slot:
            del self._slot_of[file.name]
            self._folder.delete(file.name)

    def _lose(self, slot: int, block_hash: bytes) -> None:
        self._num_lost += 1
        self._lost.append(LostSlot(slot=slot, block_hash=block_hash))

    def _refuse(self, error: OSError) -> None:
        """Store nothing for a while, and log it once."""
        if self._refuses_until_s is None:
            logger.error(
                "the disk tier stores nothing for now, because it cannot write to %s: %s",
                self._folder.path,
                error.strerror or error,
            )
        self._refuses_until_s = self._clock() + REFUSAL_S

    def _view(self, way: int) -> memoryview:
        """The bytes of one place in the arena."""
        region = self._arena.region
        return memoryview((ctypes.c_ubyte * region.block_bytes).from_address(region.block_address(way))).cast("B")
