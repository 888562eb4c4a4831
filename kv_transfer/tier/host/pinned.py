"""The host tier's memory for blocks that lie on a GPU. Loads torch: import it only where there is a GPU."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence

import torch

from kv_transfer.errors import InvalidOptionError
from kv_transfer.layout import KVRegion, host_region
from kv_transfer.memory.device_memory import device_blocks


def page_locked(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory, [num_bytes] uint8, for copies at full speed. ``unlock`` it before it is freed.

    torch's own pinned memory is rounded up to a power of two: 40 GiB would take 64 GiB.

    Raises:
        InvalidOptionError: The system does not allow this much memory to be locked.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0))  # type: ignore[no-untyped-call]
    if status != 0:
        raise InvalidOptionError(f"host_bytes: {num_bytes} bytes cannot be page-locked here (CUDA error {status})")
    return tensor


def unlock(memory: torch.Tensor) -> None:
    """Unlock memory from ``page_locked``."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


class PinnedArena:
    """An arena in page-locked memory, so that copies run at the speed of the bus.

    Each direction has its own CUDA stream, and each call returns when its copies are over. So it does not matter which
    stream or network card writes the blocks next. Blocks that a step in flight writes are never evicted.
    """

    def __init__(self, blocks: KVRegion, *, num_slots: int) -> None:
        self._blocks = device_blocks(blocks)
        memory = page_locked(num_slots * blocks.block_bytes)
        weakref.finalize(self, unlock, memory)
        self._slots = memory.view(num_slots, blocks.block_bytes)
        self._store_stream = torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
        self._load_stream = torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
        self.region = host_region(self._slots.data_ptr(), num_slots=num_slots, block_bytes=blocks.block_bytes)

    def store(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy blocks into slots."""
        with torch.cuda.stream(self._store_stream):
            for block_id, slot in zip(block_ids, slots, strict=True):
                self._slots[slot].copy_(self._blocks[block_id], non_blocking=True)
        self._store_stream.synchronize()

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots into blocks."""
        with torch.cuda.stream(self._load_stream):
            for slot, block_id in zip(slots, block_ids, strict=True):
                self._blocks[block_id].copy_(self._slots[slot], non_blocking=True)
        self._load_stream.synchronize()
