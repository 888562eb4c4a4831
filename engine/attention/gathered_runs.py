"""Runs of tokens for torch's SDPA, where no compiled kernel is faster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from engine.attention.backend import AttentionBatch
from engine.device.kv_cache import KVCache

QUERY_TILE = 256
"""Queries of a run that share one mask: bounds the mask, and skips what none of them sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens of one request: their place in the batch, their first position, the request's block table."""

    start: int
    end: int
    first_position: int
    table: torch.Tensor


class GatheredRuns:
    """The runs of one step: those of ``requests``, indices into the batch. Implements ``TokenRuns``."""

    def __init__(self, cache: KVCache, batch: AttentionBatch, requests: npt.NDArray[np.intp]) -> None:
        self._cache = cache
        self._runs = [_run(batch, request) for request in requests]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        output: torch.Tensor,
    ) -> None:
        """See ``TokenRuns``."""
        for run in self._runs:
            part = slice(run.start, run.end)
            if run.first_position == 0 and (window is None or window >= run.end - run.start):
                output[part] = _attend_causal(query[part], key[part], value[part])
            else:
                self._attend_history(layer, run, query[part], window, output[part])

    def _attend_history(
        self, layer: int, run: Run, query: torch.Tensor, window: int | None, output: torch.Tensor
    ) -> None:
        """Attend to the cache, tile by tile: each gathers no more positions than its queries see."""
        block_size = self._cache.layout.block_size
        for start in range(0, len(query), QUERY_TILE):
            tile = query[start : start + QUERY_TILE]
            first = run.first_position + start
            end = first + len(tile)
            lowest = 0 if window is None else max(first - window + 1, 0)
            table = run.table[lowest // block_size : -(-end // block_size)]
            base = lowest // block_size * block_size
            history = self._cache.blocks[table, layer]
            keys, values = (history[:, half].flatten(0, 1)[: end - base] for half in (0, 1))
            last = torch.arange(first, end)[:, None]
            positions = torch.arange(base, end)[None, :]
            visible = positions <= last
            if window is not None:
                visible &= positions > last - window
            output[start : start + len(tile)] = _attend_masked(tile, keys, values, visible)


def _run(batch: AttentionBatch, request: np.intp) -> Run:
    start, end = batch.query_starts[request : request + 2].tolist()
    return Run(
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
