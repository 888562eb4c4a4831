"""Single queries for the compiled paged kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.kernels import paged_attention as kernel
from engine.kernels.call import KernelCall
from engine.kernels.compiled import NUM_SCORE_NUMBERS, SCALE, SOFTCAP
from engine.layers.attention_layer import AttentionLayer

NO_WINDOW = 1 << 62


class ScoreParameters:
    """What a layer's scores go by, at addresses for the compiled kernels."""

    def __init__(self) -> None:
        self._numbers = (ctypes.c_float * NUM_SCORE_NUMBERS)()
        self.address = ctypes.addressof(self._numbers)

    def set(self, layer: AttentionLayer) -> int:
        """Take those of a layer, and return the address of its sinks, or 0."""
        self._numbers[SCALE], self._numbers[SOFTCAP] = layer.spec.scale, layer.spec.softcap or 0.0
        return 0 if layer.sinks is None else layer.sinks.data_ptr()


class PagedKernel:
    """The compiled kernel over one cache. One step at a time."""

    def __init__(self, cache: KVCache) -> None:
        layout = cache.layout
        self.num_kv_heads = layout.num_kv_heads
        self.rows_per_layer = 2 * layout.block_size
        self.scores = ScoreParameters()
        rows_per_head = layout.layers_per_block * self.rows_per_layer
        rows_per_block = layout.num_kv_heads * rows_per_head
        self.call = KernelCall(kernel.compiled_attention(layout.dtype), kernel.NUM_PARAMETERS)
        parameters = self.call.parameters
        parameters[kernel.ROWS] = cache.blocks.data_ptr()
        parameters[kernel.NUM_KV_HEADS], parameters[kernel.HEAD_DIM] = layout.num_kv_heads, layout.head_dim
        parameters[kernel.BLOCK_SIZE] = layout.block_size
        parameters[kernel.BLOCK_ROWS], parameters[kernel.HEAD_ROWS] = rows_per_block, rows_per_head
        parameters[kernel.NUM_CACHE_ROWS] = cache.num_blocks * rows_per_block
        parameters[kernel.NUMBERS] = self.scores.address


class PagedQueries:
    """The tokens of one step that take the paged kernel, each a query with its own block table and position.

    They are those of ``requests``, indices into the batch, or of all where each computes one token. ``tables`` are the
    block tables of the batch for one KV cache group.
    tokens: [num_queries] their places in the batch, int64; None: all, in their order.
    """

    def __init__(
        self,
        paged: PagedKernel,
        batch: AttentionBatch,
        tables: IntArray,
        requests: npt.NDArray[np.intp] | None = None,
    ) -> None:
        self._paged = paged
        self.tokens: torch.Tensor | None = None
        # The kernel has the addresses of these two.
        if requests is None:
            self._positions: IntArray = np.ascontiguousarray(batch.first_positions, dtype=np.int32)
            self._tables: IntArray = np.ascontiguousarray(tables, dtype=np.int32)
        else:
            tokens, owners, positions = _queries(batch, requests)
            self.tokens = torch.from_numpy(tokens)
            self._positions = positions.astype(np.int32)
            self._tables = np.ascontiguousarray(tables[owners], dtype=np.int32)
        self._addresses = self._tables.ctypes.data, self._positions.ctypes.data

    def attend(self, layer: AttentionLayer, query: torch.Tensor) -> torch.Tensor:
        """Attend with [num_queries, num_heads, head_dim]; keys and values are in the cache already."""
        query = query.contiguous()
        output = torch.empty_like(query)
        paged = self._paged
        parameters = paged.call.parameters
        parameters[kernel.QUERY], parameters[kernel.OUTPUT] = query.data_ptr(), output.data_ptr()
        parameters[kernel.TABLES], parameters[kernel.POSITIONS] = self._addresses
        parameters[kernel.NUM_ROWS], parameters[kernel.TABLE_WIDTH] = self._tables.shape
        parameters[kernel.GROUP] = query.shape[1] // paged.num_kv_heads
        parameters[kernel.FIRST_ROW] = layer.index * paged.rows_per_layer
        parameters[kernel.WINDOW] = NO_WINDOW if layer.spec.window is None else layer.spec.window
        parameters[kernel.SINKS] = paged.scores.set(layer)
        paged.call.run(max_threads=len(query) * paged.num_kv_heads)
        return output


def _queries(
    batch: AttentionBatch, requests: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """All tokens of these requests, each [num_queries]: their places in the batch, their requests, their positions."""
    starts, counts = batch.query_starts[requests].astype(np.int64), batch.query_lens[requests]
    owners, within = requests, np.zeros(1, dtype=np.int64)
    if counts.max() > 1:
        owners = np.repeat(requests, counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(starts, counts)
    return starts + within, owners, batch.first_positions[owners] + within
