"""The bytes of KV blocks on a GPU. Loads torch: import it only where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from kv_transfer.device_bytes import device_blocks
from kv_transfer.layout import KVRegion


class DeviceBlockMemory:
    """Implements ``BlockMemory`` for a region in VRAM.

    The hash is that of host memory, so that both kinds of memory can be compared, and is made there: blocks come over
    through one page-locked buffer. That costs the bus once more, which is why checksums are off on GPUs unless they
    are asked for.
    """

    def __init__(self, region: KVRegion) -> None:
        self._region = region
        self._blocks = device_blocks(region)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._region.block_bytes

    def checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """The 64-bit XXH3 of each block's bytes as they are now."""
        buffer = torch.empty(self._region.block_bytes, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
        checksums = []
        for block_id in block_ids:
            with torch.cuda.stream(stream):
                buffer.copy_(self._blocks[block_id], non_blocking=True)
            stream.synchronize()
            checksums.append(xxhash.xxh3_64_intdigest(buffer.numpy().tobytes()))
        return tuple(checksums)

    def flip_bit(self, block_id: int, bit: int) -> None:
        """Damage one bit of a block."""
        self._blocks[block_id, bit // 8] ^= 1 << bit % 8
        torch.cuda.synchronize(self._blocks.device)
