"""The files of one worker: one per block. A file's name says what it must contain."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from kv_transfer.errors import InvalidOptionError

_NAME = re.compile(r"([0-9a-f]{16})-((?:[0-9a-f]{2}){1,32})-([0-9a-f]{16})\.kv")
_UNFINISHED = ".tmp"
_LOCK = "lock"
_MAX_FOLDERS = 1024


class DamagedFileError(Exception):
    """A file is missing, or its content does not match its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file with the content of one block. ``checksum`` is the 64-bit XXH3 of its bytes."""

    name: str
    block_hash: bytes
    checksum: int


class WorkerFolder:
    """A folder that one worker uses at a time, private to its user (0700, files 0600).

    Files are written atomically. A file is used only if its length is a block's and its checksum is the one in its
    name. A file that was cut short, changed or replaced counts as missing.
    """

    def __init__(self, path: Path, lock: int, *, layout_hash: str, block_bytes: int) -> None:
        self.path = path
        self._lock = lock
        self._layout_hash = layout_hash
        self._block_bytes = block_bytes

    @classmethod
    def claim(cls, parent: Path, *, layout_hash: str, block_bytes: int) -> Self:
        """Lock the first of ``worker-0``, ``worker-1``, ... that no live worker uses. A restart finds its files again.

        The operating system releases a lock when the process that held it ends, for whatever reason.

        Raises:
            InvalidOptionError: No folder can be created or locked there.
        """
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in itertools.islice(itertools.count(), _MAX_FOLDERS):
                path = parent / f"worker-{number}"
                lock = _try_to_lock(path)
                if lock is not None:
                    return cls(path, lock, layout_hash=layout_hash, block_bytes=block_bytes)
        except OSError as error:
            raise InvalidOptionError(f"disk_path: {parent} cannot be used: {error.strerror or error}") from error
        raise InvalidOptionError(
            f"disk_path: all {_MAX_FOLDERS} folders in {parent} are in use or belong to others: use another disk_path"
        )

    def name_of(self, block_hash: bytes, checksum: int) -> str:
        """The name of the file for this content."""
        return f"{self._layout_hash}-{block_hash.hex()}-{checksum:016x}.kv"

    def keep_newest(self, max_files: int) -> list[KeptFile]:
        """The usable files that earlier workers left, least recently used first. Other files of the tier are deleted.

        These are files of another layout or length, duplicates, unfinished files, and the least recently used files
        beyond ``max_files``. Files that the tier did not make are left alone.
        """
        found: dict[bytes, KeptFile] = {}
        for name, num_bytes in self._newest_first():
            match = _NAME.fullmatch(name)
            is_ours = match is not None and match[1] == self._layout_hash and num_bytes == self._block_bytes
            block_hash = bytes.fromhex(match[2]) if match is not None else b""
            if match is None or not is_ours or block_hash in found or len(found) == max_files:
                self.delete(name)
            else:
                found[block_hash] = KeptFile(name=name, block_hash=block_hash, checksum=int(match[3], 16))
        return list(reversed(found.values()))

    def write(self, name: str, content: memoryview) -> None:
        """Write a file.

        Raises:
            OSError: It could not be written; nothing of it is left.
        """
        unfinished = self.path / (name + _UNFINISHED)
        try:
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                while content:
                    content = content[os.write(handle, content) :]
            finally:
                os.close(handle)
            unfinished.rename(self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, name: str, checksum: int, content: memoryview) -> None:
        """Read a file, which marks it as used now.

        Raises:
            DamagedFileError: It is missing, cannot be read, or its content does not match its name.
        """
        try:
            handle = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_size != len(content):
                    raise DamagedFileError(f"{name} has {os.fstat(handle).st_size} bytes, not {len(content)}")
                rest = content
                while rest:
                    num_read = os.readv(handle, [rest])
                    if not num_read:
                        raise DamagedFileError(f"{name} is truncated")
                    rest = rest[num_read:]
                with contextlib.suppress(OSError):
                    os.utime(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise DamagedFileError(f"{name}: {error.strerror or error}") from error
        if xxhash.xxh3_64_intdigest(content) != checksum:
            raise DamagedFileError(f"{name} has other content than was written")

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    def give_up(self) -> None:
        """Release the folder and its files to the next worker. To be called once."""
        os.close(self._lock)

    def _newest_first(self) -> Iterator[tuple[str, int]]:
        """Names and lengths of the files that a tier made, most recently used first."""
        with os.scandir(self.path) as entries:
            files = [
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name, entry.stat(follow_symlinks=False).st_size)
                for entry in entries
                if _NAME.fullmatch(entry.name.removesuffix(_UNFINISHED)) and not entry.is_dir(follow_symlinks=False)
            ]
        for _, name, num_bytes in sorted(files, reverse=True):
            yield name, num_bytes


def _try_to_lock(path: Path) -> int | None:
    """Create a folder if needed, and lock it; None when it belongs to another live worker or to another user."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None
    path.chmod(0o700)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise
    return lock
