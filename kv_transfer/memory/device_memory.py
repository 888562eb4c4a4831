"""The bytes of KV blocks on a GPU. Loads torch: import it only where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from kv_transfer.layout import KVRegion


class _Region:
    """What the CUDA array interface asks for: bytes at an address."""

    def __init__(self, region: KVRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_blocks, region.block_bytes),
            "typestr": "|u1",
            "data": (region.base_address, False),
            "version": 3,
        }


def device_blocks(region: KVRegion) -> torch.Tensor:
    """The region as [num_blocks, block_bytes] uint8: the same memory."""
    return torch.as_tensor(_Region(region), device=torch.device("cuda", region.device_index))


def enter_device(device_index: int) -> None:
    """Make a GPU's context current in the calling thread now; choosing the device alone does so at its first use."""
    torch.cuda.set_device(device_index)
    torch.cuda.mem_get_info(device_index)


class DeviceBlockMemory:
    """Implements ``BlockMemory`` for a region in VRAM.

    The hash is the same as for host memory, so that checksums of both kinds of memory can be compared. It is computed
    on the host: blocks are copied there through one page-locked buffer. This copy over the bus is why checksums are off
    on GPUs by default.
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
