"""Attention on the CPU: a compiled paged kernel for single queries, torch's SDPA for prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from engine.attention import paged_kernel
from engine.attention.batch import AttentionBatch
from engine.attention.thread_team import run_on_team
from engine.runner.kv_cache import KVCache
from engine.step import IntArray

MAX_PAGED_QUERIES = 4
"""Requests that compute no more tokens than this take the paged kernel: beyond, gathering the context once and
multiplying matrices is faster."""

QUERY_TILE = 256
"""Queries of a chunk that share one mask: bounds the mask, and skips what none of them sees."""

NO_WINDOW = 1 << 62


class CPUAttention:
    """Paged attention for float32, bfloat16 and float16."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._kernel_address = paged_kernel.compiled_attention(cache.layout.dtype)

    def plan(self, batch: AttentionBatch) -> CPUPlan:
        """Part the requests by how many tokens they compute."""
        return CPUPlan(self._cache, self._kernel_address, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens of one request: its place in the batch, its first position, its block table."""

    start: int
    end: int
    first_position: int
    table: torch.Tensor


class CPUPlan:
    """One step of ``CPUAttention``."""

    def __init__(self, cache: KVCache, kernel_address: int, batch: AttentionBatch) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        layout = cache.layout
        self._layer_rows = 2 * layout.block_size
        blocks, offsets = np.divmod(batch.slots, layout.block_size)
        self._key_rows = torch.from_numpy(blocks * (layout.num_layers * self._layer_rows) + offsets)
        query_lens = batch.query_lens
        is_paged = query_lens <= MAX_PAGED_QUERIES
        self._chunks = [_chunk(batch, request) for request in np.flatnonzero(~is_paged)]
        self._paged = PagedQueries(cache, kernel_address, batch, np.flatnonzero(is_paged)) if is_paged.any() else None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        key_rows = self._key_rows + layer * self._layer_rows
        self._rows.index_copy_(0, key_rows, key)
        self._rows.index_copy_(0, key_rows + self._cache.layout.block_size, value)
        if self._paged is not None and not self._chunks:
            return self._paged.attend(layer, query, window).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._paged is not None:
            tokens = self._paged.tokens
            output.index_copy_(0, tokens, self._paged.attend(layer, query.index_select(0, tokens), window))
        for chunk in self._chunks:
            part = slice(chunk.start, chunk.end)
            if chunk.first_position == 0 and (window is None or window >= chunk.end - chunk.start):
                output[part] = _attend_causal(query[part], key[part], value[part])
            else:
                self._attend_history(layer, chunk, query[part], window, output[part])
        return output.flatten(1)

    def _attend_history(
        self, layer: int, chunk: Chunk, query: torch.Tensor, window: int | None, output: torch.Tensor
    ) -> None:
        """Attend to the cache, tile by tile: each gathers no more positions than its queries see."""
        block_size = self._cache.layout.block_size
        for start in range(0, len(query), QUERY_TILE):
            tile = query[start : start + QUERY_TILE]
            first = chunk.first_position + start
            end = first + len(tile)
            lowest = 0 if window is None else max(first - window + 1, 0)
            table = chunk.table[lowest // block_size : -(-end // block_size)]
            base = lowest // block_size * block_size
            history = self._cache.blocks[table, layer]
            keys, values = (history[:, half].flatten(0, 1)[: end - base] for half in (0, 1))
            last = torch.arange(first, end)[:, None]
            positions = torch.arange(base, end)[None, :]
            visible = positions <= last
            if window is not None:
                visible &= positions > last - window
            output[start : start + len(tile)] = _attend_masked(tile, keys, values, visible)


def _chunk(batch: AttentionBatch, request: np.intp) -> Chunk:
    start, end = batch.query_starts[request : request + 2].tolist()
    return Chunk(
        start=start,
        end=end,
        first_position=int(batch.first_positions[request]),
        table=torch.from_numpy(batch.block_tables[request].astype(np.int64)),
    )


def _attend_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The whole sequence attends to itself; no mask is made."""
    query, key, value = _by_head(query), _by_head(key), _by_head(value)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _attend_masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    query, key, value = _by_head(query), _by_head(key), _by_head(value)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)


def _by_head(tokens: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] as SDPA wants it, [1, num_heads, num_tokens, head_dim], without a copy."""
    return tokens[None].transpose(1, 2)


class PagedQueries:
    """The tokens of one step that take the paged kernel, each a query with its own block table and length.

    tokens: [num_queries] their places in the batch, int64.
    """

    def __init__(
        self, cache: KVCache, kernel_address: int, batch: AttentionBatch, requests: npt.NDArray[np.intp]
    ) -> None:
        starts, counts = batch.query_starts[requests].astype(np.int64), batch.query_lens[requests]
        owners = np.repeat(requests, counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.tokens = torch.from_numpy(np.repeat(starts, counts) + within)
        self._lengths: IntArray = (batch.first_positions[owners] + within + 1).astype(np.int32)
        self._tables: IntArray = np.ascontiguousarray(batch.block_tables[owners], dtype=np.int32)
        self._kernel_address = kernel_address
        self._cache = cache
        self._counter: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._parameters = self._fill_parameters()

    def _fill_parameters(self) -> npt.NDArray[np.int64]:
        layout, k = self._cache.layout, paged_kernel
        rows_per_layer = 2 * layout.block_size * layout.num_kv_heads
        parameters: npt.NDArray[np.int64] = np.zeros(k.NUM_PARAMETERS, dtype=np.int64)
        parameters[k.COUNTER] = self._counter.ctypes.data
        parameters[k.TABLES] = self._tables.ctypes.data
        parameters[k.LENGTHS] = self._lengths.ctypes.data
        parameters[k.ROWS] = self._cache.blocks.data_ptr()
        parameters[k.NUM_ROWS], parameters[k.TABLE_WIDTH] = self._tables.shape
        parameters[k.NUM_KV_HEADS], parameters[k.HEAD_DIM] = layout.num_kv_heads, layout.head_dim
        parameters[k.BLOCK_SIZE] = layout.block_size
        parameters[k.BLOCK_ROWS] = layout.num_layers * rows_per_layer
        parameters[k.NUM_CACHE_ROWS] = self._cache.num_blocks * layout.num_layers * rows_per_layer
        return parameters

    def attend(self, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        """Attend with [num_queries, num_heads, head_dim]; keys and values are in the cache already."""
        query = query.contiguous()
        output = torch.empty_like(query)
        layout, parameters, k = self._cache.layout, self._parameters, paged_kernel
        self._counter[0] = 0
        parameters[k.QUERY], parameters[k.OUTPUT] = query.data_ptr(), output.data_ptr()
        parameters[k.GROUP] = query.shape[1] // layout.num_kv_heads
        parameters[k.FIRST_ROW] = layer * 2 * layout.block_size * layout.num_kv_heads
        parameters[k.WINDOW] = NO_WINDOW if window is None else window
        num_items = len(query) * layout.num_kv_heads
        run_on_team(self._kernel_address, parameters.ctypes.data, max_threads=num_items)
        return output
