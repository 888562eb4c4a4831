"""Attention on the CPU: a compiled paged kernel for single queries, torch's SDPA for prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from engine.attention.batch import AttentionBatch
from engine.attention.paged_queries import PagedKernel, PagedQueries
from engine.attention.rotation_pass import RotationPass
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations
from engine.runner.kv_cache import KVCache

MAX_PAGED_QUERIES = 4
"""Requests that compute no more tokens than this take the paged kernel: beyond, gathering the context once and
multiplying matrices is faster."""

QUERY_TILE = 256
"""Queries of a chunk that share one mask: bounds the mask, and skips what none of them sees."""


EMPTY_REQUESTS: Final = np.empty(0, dtype=np.intp)


class CPUAttention:
    """Paged attention for float32, bfloat16 and float16."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._paged_kernel = PagedKernel(cache)
        self._rotation_pass = RotationPass(cache)

    def plan(self, batch: AttentionBatch) -> CPUPlan:
        """Part the requests by how many tokens they compute. The plan before is of no use any more."""
        paged: PagedQueries | None
        if batch.is_decode:
            paged, long = PagedQueries(self._paged_kernel, batch), EMPTY_REQUESTS
        else:
            is_long = batch.query_lens > MAX_PAGED_QUERIES
            long = np.flatnonzero(is_long)
            paged = None if is_long.all() else PagedQueries(self._paged_kernel, batch, np.flatnonzero(~is_long))
        return CPUPlan(
            cache=self._cache,
            rows=self._rows,
            key_rows=torch.from_numpy(self._cache.key_rows(batch.slots)),
            rotation_pass=self._rotation_pass,
            paged=paged,
            chunks=[_chunk(batch, request) for request in long],
        )

    def gathered_bytes(self, max_model_len: int) -> int:  # noqa: ARG002  (the Protocol's)
        """Nothing: they are read where they are."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens of one request: its place in the batch, its first position, its block table."""

    start: int
    end: int
    first_position: int
    table: torch.Tensor


class CPUPlan:
    """One step of ``CPUAttention``."""

    def __init__(
        self,
        *,
        cache: KVCache,
        rows: torch.Tensor,
        key_rows: torch.Tensor,
        rotation_pass: RotationPass,
        paged: PagedQueries | None,
        chunks: Sequence[Chunk],
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._key_rows = key_rows
        self._rotation_pass = rotation_pass
        self._paged = paged
        self._chunks = chunks

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        block_size = self._cache.layout.block_size
        key_rows = self._key_rows + layer * 2 * block_size
        self._rows.index_copy_(0, key_rows, key)
        self._rows.index_copy_(0, key_rows + block_size, value)
        return self._attend(layer, query, key, value, window)

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        query = self._rotation_pass.run(layer, heads, transform, rotations, self._key_rows)
        first_value = transform.num_heads + transform.num_kv_heads
        key, value = heads[:, transform.num_heads : first_value], heads[:, first_value:]
        return self._attend(layer, query, key, value, window)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attend; the step's keys and values are in the cache."""
        if self._paged is not None and not self._chunks:
            return self._paged.attend(layer, query, window).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._paged is not None:
            tokens = self._paged.tokens
            assert tokens is not None, "a step with chunks is no decode step"
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
