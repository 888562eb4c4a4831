"""Runs of tokens through torch's SDPA, on machines where no compiled kernel is faster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from engine.attention.backend import AttentionBatch
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer

QUERY_TILE = 256
"""Queries of a run that share one mask. This bounds the mask, and skips keys that none of them sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive tokens of one request: their place in the batch, their first position, the request's block table."""

    start: int
    end: int
    first_position: int
    table: torch.Tensor


class GatheredRuns:
    """The runs of one step: those of ``requests``, indices into the batch. Implements ``TokenRuns``.

    tables: the block tables of the batch, for one KV cache group.
    """

    def __init__(self, cache: KVCache, batch: AttentionBatch, tables: IntArray, requests: npt.NDArray[np.intp]) -> None:
        self._cache = cache
        self._runs = [_run(batch, tables, request) for request in requests]

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """See ``TokenRuns``."""
        spec = layer.spec
        has_scores_only = spec.softcap is None and not spec.has_sinks
        for run in self._runs:
            part = slice(run.start, run.end)
            if (
                has_scores_only
                and run.first_position == 0
                and (spec.window is None or spec.window >= run.end - run.start)
            ):
                output[part] = _attend_causal(query[part], key[part], value[part], spec.scale)
            else:
                self._attend_history(layer, run, query[part], output[part])

    def _attend_history(self, layer: AttentionLayer, run: Run, query: torch.Tensor, output: torch.Tensor) -> None:
        """Attend to the cache, tile by tile. A tile gathers only the positions that its queries see."""
        block_size, window = self._cache.layout.block_size, layer.spec.window
        for start in range(0, len(query), QUERY_TILE):
            tile = query[start : start + QUERY_TILE]
            first = run.first_position + start
            end = first + len(tile)
            lowest = 0 if window is None else max(first - window + 1, 0)
            table = run.table[lowest // block_size : -(-end // block_size)]
            base = lowest // block_size * block_size
            keys, values = (
                cached[table].flatten(0, 1)[: end - base]
                for cached in (self._cache.keys(layer.index), self._cache.values(layer.index))
            )
            last = torch.arange(first, end)[:, None]
            positions = torch.arange(base, end)[None, :]
            visible = positions <= last
            if window is not None:
                visible &= positions > last - window
            values = values[..., : layer.spec.value_size]
            attend = _attend_masked if layer.spec.softcap is None and layer.sinks is None else _attend_by_definition
            output[start : start + len(tile)] = attend(layer, tile, keys, values, visible)


def _run(batch: AttentionBatch, tables: IntArray, request: np.intp) -> Run:
    start, end = batch.query_starts[request : request + 2].tolist()
    return Run(
        start=start,
        end=end,
        first_position=int(batch.first_positions[request]),
        table=torch.from_numpy(tables[request].astype(np.int64)),
    )


def _attend_causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a whole sequence to itself, without a mask tensor."""
    query, key, value = _by_head(query), _by_head(key), _by_head(value)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scale)[0].transpose(
        0, 1
    )


def _attend_masked(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    query, key, value = _by_head(query), _by_head(key), _by_head(value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, enable_gqa=True, scale=layer.spec.scale
    )[0].transpose(0, 1)


def _attend_by_definition(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Attention by its definition, with softcap and sinks, which SDPA does not support."""
    spec, group = layer.spec, query.shape[1] // key.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, len(query), 1)), dim=2)
    weights = scores.softmax(dim=2)[:, :, : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def _by_head(tokens: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] as the [1, num_heads, num_tokens, head_dim] of SDPA, without a copy."""
    return tokens[None].transpose(1, 2)
