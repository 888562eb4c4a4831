"""The disk tier: its settings, and its storage in files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.errors import InvalidOptionError
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.tier.disk.folder import WorkerFolder
from kv_transfer.tier.disk.storage import DiskStorage
from kv_transfer.tier.host.arena import build_arena
from kv_transfer.tier.options import TierOptions

BUFFER_BYTES = 64 << 20
"""Main memory for blocks that wait to be written, and for reads; at least two blocks."""

_PAGE_BYTES = 4096
"""File systems allocate space in units of this size."""


@dataclass(frozen=True, kw_only=True)
class DiskTierOptions(TierOptions):
    """The settings of the disk tier."""

    disk_bytes: int = field(
        default=0,
        metadata={
            "description": "Disk space in bytes that each worker's disk tier may use under `disk_path`. It needs up "
            "to 64 MiB of main memory besides."
        },
    )
    disk_path: str | None = field(
        default=None,
        metadata={
            "description": "Absolute path of the disk tier's folder, preferably on a local disk; created if missing. "
            "Each worker on a machine has its own subfolder, which its successor takes over with its content."
        },
    )

    def main_memory_bytes(self) -> int:
        """The size of the buffer."""
        return min(self.disk_bytes, BUFFER_BYTES)

    def check(self) -> None:
        """Refuse a size without a path, and a path without a size.

        Raises:
            InvalidOptionError: Names both options.
        """
        if bool(self.disk_bytes) != (self.disk_path is not None):
            raise InvalidOptionError(
                f"disk_bytes is {self.disk_bytes} and disk_path is {self.disk_path}: the disk tier needs both"
            )
        if self.disk_path is not None and not Path(self.disk_path).is_absolute():
            raise InvalidOptionError(f"disk_path must be absolute, got {self.disk_path!r}")


def open_disk_storage(
    options: DiskTierOptions,
    *,
    layout: KVLayout,
    region: KVRegion,
    has_checksums: bool,  # noqa: ARG001  (files always have them: disks are less reliable than memory)
) -> DiskStorage:
    """Open files for as many blocks as fit into ``disk_bytes``, including those that an earlier worker left.

    Raises:
        InvalidOptionError: The size is below one block or above the disk's size, or the folder cannot be used.
    """
    assert options.disk_path is not None
    path = Path(options.disk_path)
    num_slots = options.disk_bytes // (-(-region.block_bytes // _PAGE_BYTES) * _PAGE_BYTES)
    if num_slots < 1:
        raise InvalidOptionError(
            f"disk_bytes: {options.disk_bytes} is less than one KV block, whose file takes {region.block_bytes} bytes "
            f"in pages of {_PAGE_BYTES}"
        )
    folder = WorkerFolder.claim(path, layout_hash=layout.layout_hash, block_bytes=region.block_bytes)
    try:
        total_bytes = shutil.disk_usage(path).total
        if options.disk_bytes > total_bytes:
            raise InvalidOptionError(f"disk_bytes: {options.disk_bytes} is more than the {total_bytes} of {path}")
        num_ways = max(min(num_slots, BUFFER_BYTES // region.block_bytes), 1) + 1
        arena = build_arena(region, host_bytes=num_ways * region.block_bytes)
        return DiskStorage(folder, folder.keep_newest(num_slots), num_slots=num_slots, arena=arena)
    except OSError as error:
        folder.give_up()
        raise InvalidOptionError(f"disk_path: {path} cannot be used: {error.strerror or error}") from error
    except InvalidOptionError:
        folder.give_up()
        raise
