"""Attention on the CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional as F

from engine.attention.batch import AttentionBatch
from engine.runner.kv_cache import KVCache


class CPUAttention:
    """Decode rows together, prefill chunks one after the other."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def plan(self, batch: AttentionBatch) -> CPUPlan:
        """Split the batch into decode rows and prefill chunks."""
        return CPUPlan(self._cache, batch)


class CPUPlan:
    """One step of ``CPUAttention``."""

    def __init__(self, cache: KVCache, batch: AttentionBatch) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._batch = batch
        block_size, num_layers = cache.layout.block_size, cache.layout.num_layers
        self._layer_stride = 2 * block_size
        blocks, offsets = np.divmod(batch.slots, block_size)
        self._write_rows = torch.from_numpy(blocks * (num_layers * self._layer_stride) + offsets)
        self._tables = torch.from_numpy(batch.block_tables.astype(np.int64))
        self._seq_lens = batch.seq_lens

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        first = layer * self._layer_stride
        self._rows.index_copy_(0, self._write_rows + first, key)
        self._rows.index_copy_(0, self._write_rows + first + self._cache.layout.block_size, value)
        output = torch.empty_like(query)
        for request in range(self._batch.num_reqs):
            start, end = self._batch.query_starts[request : request + 2].tolist()
            output[start:end] = self._attend_one(layer, request, query[start:end], window)
        return output.flatten(1)

    def _attend_one(self, layer: int, request: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        seq_len = int(self._seq_lens[request])
        num_blocks = -(-seq_len // self._cache.layout.block_size)
        history = self._cache.blocks[self._tables[request, :num_blocks], layer]
        keys, values = (history[:, half].flatten(0, 1)[None, :seq_len].transpose(1, 2) for half in (0, 1))
        last = torch.arange(seq_len - len(query), seq_len)[:, None]
        positions = torch.arange(seq_len)[None, :]
        visible = positions <= last
        if window is not None:
            visible &= positions > last - window
        mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -math.inf)
        attended = F.scaled_dot_product_attention(
            query[None].transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended[0].transpose(0, 1)
