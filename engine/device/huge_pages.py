"""Memory in huge pages. With small ones a CPU translates an address every 4 KiB, and its prefetchers stop there:
reading weights takes a tenth longer, and so does attention over scattered blocks.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from threading import Lock

import torch

HUGE_PAGE = 2 << 20
CHUNK_BYTES = 16 * HUGE_PAGE
"""Bytes that are mapped at once, for several tensors: one alone would leave half a page unused on average."""

ALIGNMENT = 64
"""Tensors start at a cache line."""

SWITCH = "THP_MEM_ALLOC_ENABLE"
"""torch's variable for huge pages; 0 turns them off for weights, too."""


def map_huge(num_bytes: int) -> mmap.mmap:
    """Map zeroed memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HugePages:
    """Allocates tensors one behind the other, and never in the place of one that is gone: it is for what stays.

    A chunk of memory is given back when its last tensor is gone and another chunk has begun.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0
        self._lock = Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous tensor on the CPU."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes >= CHUNK_BYTES:
            return _aligned_bytes(num_bytes).view(dtype).view(shape)
        with self._lock:
            start = -(-self._num_used // ALIGNMENT) * ALIGNMENT
            if start + num_bytes > len(self._chunk):
                self._chunk, start = _aligned_bytes(CHUNK_BYTES), 0
            self._num_used = start + num_bytes
            return self._chunk[start : start + num_bytes].view(dtype).view(shape)


def _aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Allocate bytes that start where a huge page does, if they may lie in huge pages."""
    if os.environ.get(SWITCH) == "0":
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = torch.frombuffer(map_huge(num_bytes + HUGE_PAGE), dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]


WEIGHTS = HugePages()
"""Where this process keeps the weights that kernels read."""
