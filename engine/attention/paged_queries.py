"""Single queries for the compiled paged kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import AttentionBatch
from engine.kernels import paged_attention as kernel
from engine.kernels.call import KernelCall
from engine.runner.kv_cache import KVCache
from engine.step import IntArray

NO_WINDOW = 1 << 62


class PagedQueries:
    """The tokens of one step that take the paged kernel, each a query with its own block table and length.

    tokens: [num_queries] their places in the batch, int64.
    """

    def __init__(
        self, cache: KVCache, kernel_address: int, batch: AttentionBatch, requests: npt.NDArray[np.intp]
    ) -> None:
        starts, counts = batch.query_starts[requests].astype(np.int64), batch.query_lens[requests]
        owners, within = requests, np.zeros(1, dtype=np.int64)
        if counts.max() > 1:
            owners = np.repeat(requests, counts)
            within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(starts, counts)
        self.tokens = torch.from_numpy(starts + within)
        self._lengths: IntArray = (batch.first_positions[owners] + within + 1).astype(np.int32)
        self._tables: IntArray = np.ascontiguousarray(batch.block_tables[owners], dtype=np.int32)
        self._num_kv_heads = cache.layout.num_kv_heads
        self._rows_per_layer = 2 * cache.layout.block_size * cache.layout.num_kv_heads
        self._call = self._prepare(cache, kernel_address)

    def _prepare(self, cache: KVCache, kernel_address: int) -> KernelCall:
        layout = cache.layout
        call = KernelCall(kernel_address, kernel.NUM_PARAMETERS)
        parameters = call.parameters
        parameters[kernel.TABLES] = self._tables.ctypes.data
        parameters[kernel.LENGTHS] = self._lengths.ctypes.data
        parameters[kernel.ROWS] = cache.blocks.data_ptr()
        parameters[kernel.NUM_ROWS], parameters[kernel.TABLE_WIDTH] = self._tables.shape
        parameters[kernel.NUM_KV_HEADS], parameters[kernel.HEAD_DIM] = layout.num_kv_heads, layout.head_dim
        parameters[kernel.BLOCK_SIZE] = layout.block_size
        parameters[kernel.BLOCK_ROWS] = layout.num_layers * self._rows_per_layer
        parameters[kernel.NUM_CACHE_ROWS] = cache.num_blocks * layout.num_layers * self._rows_per_layer
        return call

    def attend(self, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """Attend with [num_queries, num_heads, head_dim]; keys and values are in the cache already."""
        query = query.contiguous()
        output = torch.empty_like(query)
        parameters = self._call.parameters
        parameters[kernel.QUERY], parameters[kernel.OUTPUT] = query.data_ptr(), output.data_ptr()
        parameters[kernel.GROUP] = query.shape[1] // self._num_kv_heads
        parameters[kernel.FIRST_ROW] = layer * self._rows_per_layer
        parameters[kernel.WINDOW] = NO_WINDOW if window is None else window
        self._call.run(max_threads=len(query) * self._num_kv_heads)
        return output
