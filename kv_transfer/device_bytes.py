"""The bytes of a region in GPU memory as a tensor, without copying.

Loads torch: import it only where there is a GPU.
"""

from __future__ import annotations

import torch

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
    """Make a GPU's context that of the calling thread. Choosing the device alone waits for its first use."""
    torch.cuda.set_device(device_index)
    torch.cuda.mem_get_info(device_index)
