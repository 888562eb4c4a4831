"""Attention by its definition, one request and one formula at a time: the oracle for the other backends."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBatch
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations


class ReferenceAttention:
    """Computes everything in float64, whatever the model's dtype. Far too slow to serve with."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def plan(self, batch: AttentionBatch) -> list[ReferencePlan]:
        """Nothing to prepare."""
        return [ReferencePlan(self._cache, batch, group) for group in range(self._cache.layout.num_groups)]

    def gathered_bytes(self, max_model_len: int) -> int:  # noqa: ARG002  (the Protocol's)
        """0: keys and values are read in place."""
        return 0


class ReferencePlan:
    """One step of ``ReferenceAttention``, for one KV cache group."""

    def __init__(self, cache: KVCache, batch: AttentionBatch, group: int) -> None:
        self._cache = cache
        self._batch = batch
        self._slots = batch.slots[group]
        self._tables = batch.block_tables[group]

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        slots, block_size = torch.from_numpy(self._slots).to(key.device), self._cache.layout.block_size
        self._cache.write(layer.index, (slots // block_size, slots % block_size), key, value)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for request in range(self._batch.num_reqs):
            start, end = self._batch.query_starts[request : request + 2].tolist()
            if start < end:
                output[start:end] = self._attend_request(layer, request, query[start:end])
        return output.flatten(1)

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return self.attend(layer, *layer.transform(heads, rotations))

    def _attend_request(self, layer: AttentionLayer, request: int, query: torch.Tensor) -> torch.Tensor:
        """Attend with the queries of one request, [num_tokens, num_heads, head_dim], each at its position."""
        spec, block_size = layer.spec, self._cache.layout.block_size
        first = int(self._batch.first_positions[request])
        own = torch.arange(first, first + len(query), device=query.device)[:, None]
        first_seen = 0 if spec.window is None else max(first - spec.window + 1, 0)
        positions = torch.arange(first_seen, first + len(query), device=query.device)
        table = torch.as_tensor(self._tables[request], device=query.device)
        blocks, offsets = table[positions // block_size], positions % block_size
        group = query.shape[1] // self._cache.layout.num_kv_heads
        keys, values = (
            cached[blocks, offsets].double().repeat_interleave(group, dim=1)
            for cached in (self._cache.keys(layer.index), self._cache.values(layer.index))
        )
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        is_seen = positions <= own
        if spec.window is not None:
            is_seen &= positions > own - spec.window
        scores = scores.masked_fill(~is_seen, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat((scores, sinks), dim=2)
        weights = scores.softmax(dim=2)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values[..., : spec.value_size])
