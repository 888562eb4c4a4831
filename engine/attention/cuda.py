"""Attention on NVIDIA GPUs: torch's variable-length FlashAttention over the paged cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.varlen import varlen_attn

from engine.attention.batch import AttentionBatch
from engine.errors import ConfigError
from engine.runner.kv_cache import KVCache


class CUDAAttention:
    """Prefill chunks and decode rows in one call a layer.

    Raises:
        ConfigError: The kernel does not take the cache's dtype.
    """

    def __init__(self, cache: KVCache) -> None:
        if cache.blocks.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"dtype {cache.layout.dtype} does not run on cuda; use bfloat16 or float16")
        self._cache = cache

    def plan(self, batch: AttentionBatch) -> CUDAPlan:
        """Copy the step's tables to the device."""
        return CUDAPlan(self._cache, batch)


class CUDAPlan:
    """One step of ``CUDAAttention``."""

    def __init__(self, cache: KVCache, batch: AttentionBatch) -> None:
        self._cache = cache
        device = cache.blocks.device
        seq_lens = batch.seq_lens
        max_blocks = -(-int(seq_lens.max()) // cache.layout.block_size)
        self._slots = _upload(batch.slots, device)
        self._query_starts = _upload(batch.query_starts, device)
        self._seq_lens = _upload(seq_lens, device)
        self._block_tables = _upload(np.ascontiguousarray(batch.block_tables[:, :max_blocks]), device)
        self._max_query_len = int(batch.query_lens.max())
        self._max_seq_len = int(seq_lens.max())

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        keys, values = self._cache.blocks[:, layer, 0], self._cache.blocks[:, layer, 1]
        block_size = self._cache.layout.block_size
        place = (self._slots // block_size, self._slots % block_size)
        keys.index_put_(place, key)
        values.index_put_(place, value)
        output = varlen_attn(
            query,
            keys,
            values,
            self._query_starts,
            None,
            self._max_query_len,
            self._max_seq_len,
            # the kernel counts the positions to the left of a token, ours counts the token as well
            window_size=(-1, 0) if window is None else (window - 1, 0),
            enable_gqa=True,
            seqused_k=self._seq_lens,
            block_table=self._block_tables,
            num_splits=1,
        )
        assert isinstance(output, torch.Tensor)
        return output.flatten(1)


def _upload(array: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for it."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
