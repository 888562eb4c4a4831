"""Attention as it is defined, one request and one formula at a time: the oracle of the other backends."""

from __future__ import annotations

import math

import torch

from engine.attention.backend import AttentionBatch
from engine.device.kv_cache import KVCache
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations


class ReferenceAttention:
    """Computes everything in float64, whatever the model's dtype. Far too slow to serve with."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def plan(self, batch: AttentionBatch) -> ReferencePlan:
        """Nothing to prepare."""
        return ReferencePlan(self._cache, batch)

    def gathered_bytes(self, max_model_len: int) -> int:  # noqa: ARG002  (the Protocol's)
        """Nothing: they are read where they are."""
        return 0


class ReferencePlan:
    """One step of ``ReferenceAttention``."""

    def __init__(self, cache: KVCache, batch: AttentionBatch) -> None:
        self._cache = cache
        self._batch = batch

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        blocks = self._cache.blocks
        block_size = blocks.shape[3]
        for token, slot in enumerate(self._batch.slots.tolist()):
            block, offset = divmod(slot, block_size)
            blocks[block, layer, 0, offset] = key[token]
            blocks[block, layer, 1, offset] = value[token]
        output = torch.empty_like(query)
        for request in range(self._batch.num_reqs):
            start, end = self._batch.query_starts[request : request + 2].tolist()
            output[start:end] = self._attend_one(layer, request, query[start:end], window).to(query.dtype)
        return output.flatten(1)

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return self.attend(layer, *transform(heads, rotations), window)

    def _attend_one(self, layer: int, request: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        blocks = self._cache.blocks
        seq_len = int(self._batch.seq_lens[request])
        num_blocks = -(-seq_len // blocks.shape[3])
        table = torch.from_numpy(self._batch.block_tables[request, :num_blocks].copy()).long()
        history = blocks[table.to(blocks.device), layer].double()
        keys, values = (history[:, half].flatten(0, 1)[:seq_len] for half in (0, 1))
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / math.sqrt(query.shape[-1])
        last = torch.arange(seq_len - len(query), seq_len, device=query.device)[:, None]
        positions = torch.arange(seq_len, device=query.device)[None, :]
        visible = positions <= last
        if window is not None:
            visible &= positions > last - window
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
