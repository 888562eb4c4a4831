"""Rotation of queries and keys and the write to the cache, as one compiled pass over a step's tokens."""

from __future__ import annotations

import ctypes

import torch

from engine.device.kv_cache import KVCache
from engine.kernels import rotary as kernel
from engine.kernels.call import KernelCall
from engine.kernels.rms_norm import EPSILON, NUM_NORM_NUMBERS, OFFSET
from engine.layers.attention_layer import AttentionLayer
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations


class RotationPass:
    """For one cache; one step at a time."""

    def __init__(self, cache: KVCache) -> None:
        layout = cache.layout
        self._rows_per_layer = 2 * layout.block_size
        rows_per_head = layout.layers_per_block * self._rows_per_layer
        rows_per_block = layout.num_kv_heads * rows_per_head
        self._numbers = (ctypes.c_float * NUM_NORM_NUMBERS)()
        self._call = KernelCall(kernel.compiled_rotation(layout.dtype), kernel.NUM_PARAMETERS)
        parameters = self._call.parameters
        parameters[kernel.ROWS] = cache.blocks.data_ptr()
        parameters[kernel.NUM_CACHE_ROWS] = len(cache.blocks) * rows_per_block
        parameters[kernel.BLOCK_SIZE] = layout.block_size
        parameters[kernel.BLOCK_ROWS], parameters[kernel.HEAD_ROWS] = rows_per_block, rows_per_head
        parameters[kernel.NUMBERS] = ctypes.addressof(self._numbers)
        parameters[kernel.HEAD_DIM] = layout.head_dim

    def run(
        self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations, slots: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values to the cache and return the queries, [num_tokens, num_heads, head_dim].

        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its keys are rotated in place.
        slots: [num_tokens] where they go: block id * block_size + offset, int64.
        """
        assert heads.is_contiguous()
        assert heads.dtype == rotations.table.dtype
        assert layer.spec.value_size is None, "latents come without values beside them"
        transform = layer.transform
        query = heads.new_empty(len(heads), transform.num_heads, heads.shape[2])
        parameters = self._call.parameters
        parameters[kernel.HEADS], parameters[kernel.QUERY] = heads.data_ptr(), query.data_ptr()
        parameters[kernel.POSITIONS] = rotations.positions.data_ptr()
        parameters[kernel.TABLE], parameters[kernel.NUM_POSITIONS] = rotations.table.data_ptr(), len(rotations.table)
        parameters[kernel.HALF] = rotations.table.shape[2]
        parameters[kernel.SLOTS], parameters[kernel.FIRST_KEY] = slots.data_ptr(), layer.index * self._rows_per_layer
        parameters[kernel.NUM_TOKENS] = len(heads)
        parameters[kernel.NUM_HEADS], parameters[kernel.NUM_KV_HEADS] = transform.num_heads, transform.num_kv_heads
        self._set_norms(transform)
        self._call.run_over(heads.numel())
        return query

    def _set_norms(self, transform: HeadTransform) -> None:
        parameters = self._call.parameters
        query_norm, key_norm = transform.query_norm, transform.key_norm
        parameters[kernel.QUERY_NORM] = 0 if query_norm is None else query_norm.weight.data_ptr()
        parameters[kernel.KEY_NORM] = 0 if key_norm is None else key_norm.weight.data_ptr()
        if query_norm is not None:
            self._numbers[EPSILON], self._numbers[OFFSET] = query_norm.spec.eps, query_norm.spec.offset
