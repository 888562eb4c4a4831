"""A small file in shared memory in which the workers of a host publish whose cores are idle. Does not import torch.

It holds a header and one slot a worker. Only its worker writes to a slot, one word at a time, and each word is complete
in itself. A reader may see one new and one old word, and corrects that at its next step. So readers and writers need no
lock. A worker holds the join lock only while it joins or leaves. It also holds a lock on its slot for life; the kernel
releases that lock when the process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

SHARED_MEMORY: Final = Path("/dev/shm")
VERSION: Final = 1
"""Version of the layout: part of the file's name and of its first word."""

MAX_WORKERS: Final = 128
MAX_CORES: Final = 1024
JOIN_TIMEOUT_S: Final = 5.0
"""How long a worker that joins or leaves waits for others that do."""

_JOIN_POLL_S: Final = 0.002
_MAX_TRIES: Final = 10
_WORD: Final = 8
_MASK: Final = MAX_CORES // 8
_FIRST_SLOT: Final = 4 * _WORD
_MASKS: Final = _FIRST_SLOT + MAX_WORKERS * _WORD
_OWN, _USABLE, _USED = 0, 1, 2
_NUM_MASKS: Final = 3
SIZE: Final = _MASKS + MAX_WORKERS * _NUM_MASKS * _MASK
_MAGIC: Final = 0x6261746F6E0000 + VERSION
_MAGIC_WORD, _GENERATION_WORD = 0, 1
_JOIN_LOCK: Final = 0
_LOCK: Final = struct.Struct("hhqqi4x")
"""The kernel's ``struct flock`` on 64-bit machines: type, whence, start, length, process."""

_COMPUTES, _BORROWS = 1, 2
_TIME_SHIFT: Final = 2
PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600


class CoreTableError(Exception):
    """The workers of this host cannot share a table of idle cores."""


class SlotState(NamedTuple):
    """The word of a slot: whether its worker computes, since when (nanoseconds of the host's monotonic clock), and
    whether it borrows cores."""

    computes: bool
    borrows: bool
    since_ns: int

    @classmethod
    def of(cls, word: int) -> Self:
        """Decode a word."""
        return cls(bool(word & _COMPUTES), bool(word & _BORROWS), word >> _TIME_SHIFT)


class CoreTable:
    """One worker's slot in the host's file, and a view of the other slots.

    Raises:
        CoreTableError: The folder is not this user's alone, the file has another layout, there is no room, or the
            system has no such locks.
    """

    def __init__(self, path: Path, *, borrows: bool, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.path = path
        self._clock_ns = clock_ns
        self._flags = _BORROWS if borrows else 0
        try:
            self._file = self._open()
            self._memory = mmap.mmap(self._file, SIZE)
        except (OSError, AttributeError) as error:  # AttributeError: this system has no OFD locks
            raise CoreTableError(f"{path} cannot be shared: {error}") from error
        self._words = memoryview(self._memory).cast("q")
        self.slot = self._take_slot()

    def _open(self) -> int:
        """Open the file at full size with its header, holding the join lock. Retries if another worker removes it
        meanwhile.
        """
        for _ in range(_MAX_TRIES):
            _make_private(self.path.parent)
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
            except FileNotFoundError:  # the folder was empty, and another worker removed it
                continue
            try:
                _wait_for_lock(file)
                state = os.fstat(file)
                if state.st_nlink and os.path.samestat(state, os.stat(self.path)):
                    if state.st_uid != os.geteuid():
                        raise CoreTableError(f"{self.path} belongs to another user")
                    if state.st_size != SIZE:
                        os.posix_fallocate(file, 0, SIZE)  # else a write kills the process when memory runs out
                        os.pwrite(file, struct.pack("q", _MAGIC), 0)
                    if os.pread(file, _WORD, 0) != struct.pack("q", _MAGIC):
                        raise CoreTableError(f"{self.path} does not have the layout of version {VERSION}: remove it")
                    return file
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(file)
                raise
            os.close(file)
        raise CoreTableError(f"{self.path} is removed repeatedly by another process")

    def _take_slot(self) -> int:
        """Take the first slot that no living process holds, and clear those of dead ones. The join lock stays held; it
        is released if all slots are taken.
        """
        free = None
        for slot in range(MAX_WORKERS):
            if self.is_held(slot):
                continue
            self._clear(slot)
            if free is None and _lock(self._file, 1 + slot):
                free = slot
        if free is None:
            self._release()
            raise CoreTableError(f"all {MAX_WORKERS} slots of {self.path} are taken")
        return free

    def admit(self, own: frozenset[int], usable: frozenset[int]) -> None:
        """Publish this worker's cores, and release the join lock that ``__init__`` took."""
        for number, cores in ((_OWN, own), (_USABLE, usable), (_USED, own)):
            self._write_mask(self.slot, number, cores)
        self.mark(computes=False)
        self._words[_GENERATION_WORD] += 1
        _unlock(self._file, _JOIN_LOCK)

    def change_own(self, cores: frozenset[int]) -> None:
        """Own other cores from now on. Call it within ``changing``."""
        self._write_mask(self.slot, _OWN, cores)
        self._words[_GENERATION_WORD] += 1

    @contextlib.contextmanager
    def changing(self) -> Iterator[bool]:
        """Try to take the join lock for the block, without waiting; yields whether it was taken."""
        has_lock = _lock(self._file, _JOIN_LOCK)
        try:
            yield has_lock
        finally:
            if has_lock:
                _unlock(self._file, _JOIN_LOCK)

    @property
    def generation(self) -> int:
        """Changes whenever a worker joins, leaves, or gets other cores of its own."""
        return self._words[_GENERATION_WORD]

    def others(self) -> list[int]:
        """The slots of all other workers; the same until ``generation`` changes."""
        return [slot for slot in range(MAX_WORKERS) if slot != self.slot and self.word(slot)]

    def word(self, slot: int) -> int:
        """The state word of a worker (``SlotState``); 0: the slot is empty."""
        return self._words[_FIRST_SLOT // _WORD + slot]

    def mark(self, *, computes: bool) -> None:
        """Publish that this worker begins to compute now, or is idle from now on."""
        state = _COMPUTES if computes else 0
        self._words[_FIRST_SLOT // _WORD + self.slot] = self._clock_ns() << _TIME_SHIFT | self._flags | state

    def own(self, slot: int) -> frozenset[int]:
        """The cores that a worker owns."""
        return self._read_mask(slot, _OWN)

    def usable(self, slot: int) -> frozenset[int]:
        """The cores that a worker may use at all."""
        return self._read_mask(slot, _USABLE)

    def used(self, slot: int) -> frozenset[int]:
        """The cores that a worker's step computes on."""
        return self._read_mask(slot, _USED)

    def use(self, cores: frozenset[int]) -> None:
        """Publish the cores that this worker's steps use from now on."""
        self._write_mask(self.slot, _USED, cores)

    def is_held(self, slot: int) -> bool:
        """True while the worker of another slot lives."""
        return _is_locked(self._file, 1 + slot)

    def close(self) -> None:
        """Leave, and remove the file if no other worker is left."""
        if self._file < 0:
            return
        with contextlib.suppress(CoreTableError):
            _wait_for_lock(self._file)
            self._clear(self.slot)
            self._words[_GENERATION_WORD] += 1
            if not any(self.is_held(slot) for slot in range(MAX_WORKERS)):
                self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        """Close the file, which also releases its locks."""
        file, self._file = self._file, -1
        self._words.release()
        self._memory.close()
        os.close(file)

    def _clear(self, slot: int) -> None:
        self._words[_FIRST_SLOT // _WORD + slot] = 0
        for number in range(_NUM_MASKS):
            self._write_mask(slot, number, frozenset())

    def _read_mask(self, slot: int, number: int) -> frozenset[int]:
        at = _mask_at(slot, number)
        mask = int.from_bytes(self._memory[at : at + _MASK], "little")
        cores = []
        while mask:
            lowest = mask & -mask
            cores.append(lowest.bit_length() - 1)
            mask ^= lowest
        return frozenset(cores)

    def _write_mask(self, slot: int, number: int, cores: frozenset[int]) -> None:
        at, mask = _mask_at(slot, number), sum(1 << core for core in cores)
        self._memory[at : at + _MASK] = mask.to_bytes(_MASK, "little")


def table_path(name: str, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The file in which the workers of the cluster ``name`` meet on each host."""
    return shared_memory / f"baton-{os.geteuid()}" / f"cores-v{VERSION}-{name}"


def remove_left_over(shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove this user's files that no living worker holds, and their folder if it is empty then."""
    folder = table_path("", shared_memory).parent
    with contextlib.suppress(OSError, AttributeError):
        for path in folder.iterdir():
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(file, _JOIN_LOCK) and not any(_is_locked(file, 1 + slot) for slot in range(MAX_WORKERS)):
                    path.unlink(missing_ok=True)
            finally:
                os.close(file)
        folder.rmdir()


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=PRIVATE_FOLDER)
    state = folder.lstat()
    is_private = state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if not stat.S_ISDIR(state.st_mode) or not is_private:
        raise CoreTableError(f"{folder} is not a folder that only this user can access: remove it")


def _mask_at(slot: int, number: int) -> int:
    return _MASKS + (slot * _NUM_MASKS + number) * _MASK


def _wait_for_lock(file: int) -> None:
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while not _lock(file, _JOIN_LOCK):
        if time.monotonic() > deadline_s:
            raise CoreTableError(f"another worker has held the table's lock for {JOIN_TIMEOUT_S:g} s")
        time.sleep(_JOIN_POLL_S)


def _lock(file: int, byte: int) -> bool:
    """Take the lock of one byte for this open file; False if another open file holds it."""
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _unlock(file: int, byte: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def _is_locked(file: int, byte: int) -> bool:
    asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = _LOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
