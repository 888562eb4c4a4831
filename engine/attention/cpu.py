"""Attention on the CPU: compiled paged kernels for single queries and for prefill chunks, or torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.gathered_runs import GatheredRuns
from engine.attention.paged_queries import PagedKernel, PagedQueries
from engine.attention.paged_runs import PagedRuns, RunKernel, choose_run_kernel
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.kernels import rotary as kernel
from engine.kernels.call import KernelCall
from engine.kernels.norms import EPSILON, NUM_NORM_NUMBERS, OFFSET
from engine.layers.attention_layer import AttentionLayer, HeadTransform
from engine.layers.rotary import Rotations

MAX_PAGED_QUERIES = 4
"""Requests that compute at most so many tokens use the kernel for single queries. For more, multiplying matrices of
queries and keys is faster."""

EMPTY_REQUESTS: Final = np.empty(0, dtype=np.intp)


class RotationPass:
    """The compiled norms, rotation and cache write for one cache. One step at a time."""

    def __init__(self, cache: KVCache) -> None:
        layout = cache.layout
        self._rows_per_layer = 2 * layout.block_size
        rows_per_head = layout.layers_per_block * self._rows_per_layer
        rows_per_block = layout.num_kv_heads * rows_per_head
        self._call = KernelCall(
            partial(kernel.compiled_rotation, layout.dtype),
            kernel.NUM_PARAMETERS,
            numbers_at=kernel.NUMBERS,
            num_numbers=NUM_NORM_NUMBERS,
            rows_at=kernel.NUM_TOKENS,
        )
        parameters = self._call.parameters
        parameters[kernel.ROWS] = cache.blocks.data_ptr()
        parameters[kernel.NUM_CACHE_ROWS] = len(cache.blocks) * rows_per_block
        parameters[kernel.BLOCK_SIZE] = layout.block_size
        parameters[kernel.BLOCK_ROWS], parameters[kernel.HEAD_ROWS] = rows_per_block, rows_per_head
        parameters[kernel.HEAD_DIM] = layout.head_dim

    def run(
        self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations, slots: torch.Tensor
    ) -> torch.Tensor:
        """Write keys and values to the cache and return the queries, [num_tokens, num_heads, head_dim].

        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; its keys are rotated in place.
        slots: [num_tokens] int64 slots of the tokens: block id * block_size + offset.
        """
        assert heads.is_contiguous()
        assert heads.dtype == rotations.table.dtype
        assert layer.spec.value_size is None, "latents come without values beside them"
        transform = layer.transform
        query = heads.new_empty(heads.shape[0], transform.num_heads, heads.shape[2])
        parameters = self._call.parameters
        parameters[kernel.HEADS], parameters[kernel.QUERY] = heads.data_ptr(), query.data_ptr()
        parameters[kernel.POSITIONS] = rotations.positions.data_ptr()
        parameters[kernel.TABLE] = rotations.table.data_ptr()
        parameters[kernel.NUM_POSITIONS], _, parameters[kernel.HALF] = rotations.table.shape
        parameters[kernel.SLOTS], parameters[kernel.FIRST_KEY] = slots.data_ptr(), layer.index * self._rows_per_layer
        parameters[kernel.NUM_TOKENS] = heads.shape[0]
        parameters[kernel.NUM_HEADS], parameters[kernel.NUM_KV_HEADS] = transform.num_heads, transform.num_kv_heads
        self._set_norms(transform)
        self._call.run_over(heads.numel())
        return query

    def _set_norms(self, transform: HeadTransform) -> None:
        parameters, numbers = self._call.parameters, self._call.numbers
        query_norm, key_norm = transform.query_norm, transform.key_norm
        parameters[kernel.QUERY_NORM] = 0 if query_norm is None else query_norm.weight.data_ptr()
        parameters[kernel.KEY_NORM] = 0 if key_norm is None else key_norm.weight.data_ptr()
        if query_norm is not None:
            numbers[EPSILON], numbers[OFFSET] = query_norm.spec.eps, query_norm.spec.offset


ChooseKernel = Callable[[KVCache], RunKernel | None]


class TokenRuns(Protocol):
    """The requests of a step that compute more than ``MAX_PAGED_QUERIES`` tokens."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write these requests' rows of ``output``, [num_tokens, num_heads, head_dim or the size of a value].

        query: [num_tokens, num_heads, head_dim]. key, value: [num_tokens, num_kv_heads, head_dim], of all the step's
            tokens; they are in the cache too.
        """


class CPUAttention:
    """Paged attention for float32, bfloat16 and float16."""

    def __init__(self, cache: KVCache, *, choose_kernel: ChooseKernel = choose_run_kernel) -> None:
        self._cache = cache
        self._paged_kernel = PagedKernel(cache)
        self._run_kernel = choose_kernel(cache)
        self._rotation_pass = RotationPass(cache)
        self._last: tuple[AttentionBatch, list[CPUPlan]] | None = None

    def plan(self, batch: AttentionBatch) -> list[CPUPlan]:
        """Split the requests by how many tokens they compute.

        Plans of a reused batch keep only the addresses of its arrays. They are reused until another batch comes.
        """
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        plans = [self._new_plan(batch, group) for group in range(len(batch.slots))]
        self._last = (batch, plans) if batch.is_reused else None
        return plans

    def _new_plan(self, batch: AttentionBatch, group: int) -> CPUPlan:
        tables = batch.block_tables[group]
        paged: PagedQueries | None
        if batch.is_decode:
            paged, long = PagedQueries(self._paged_kernel, batch, tables), EMPTY_REQUESTS
        else:
            is_long = batch.query_lens > MAX_PAGED_QUERIES
            long = np.flatnonzero(is_long)
            short = np.flatnonzero(~is_long)
            paged = PagedQueries(self._paged_kernel, batch, tables, short) if short.size else None
        return CPUPlan(
            cache=self._cache,
            slots=torch.from_numpy(batch.slots[group]),
            rotation_pass=self._rotation_pass,
            paged=paged,
            runs=self._plan_runs(batch, tables, long) if long.size else None,
        )

    def _plan_runs(self, batch: AttentionBatch, tables: IntArray, requests: npt.NDArray[np.intp]) -> TokenRuns:
        if self._run_kernel is not None:
            return PagedRuns(self._run_kernel, batch, tables, requests)
        return GatheredRuns(self._cache, batch, tables, requests)

    def gathered_bytes(self, max_model_len: int) -> int:  # noqa: ARG002  (the Protocol's)
        """0: keys and values are read in place."""
        return 0


class CPUPlan:
    """One step of ``CPUAttention``, for one KV cache group."""

    def __init__(
        self,
        *,
        cache: KVCache,
        slots: torch.Tensor,
        rotation_pass: RotationPass,
        paged: PagedQueries | None,
        runs: TokenRuns | None,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._rotation_pass = rotation_pass
        self._paged = paged
        self._runs = runs

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        block_size = self._cache.layout.block_size
        self._cache.write(layer.index, (self._slots // block_size, self._slots % block_size), key, value)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        return self._attend(layer, query, key, value, output).flatten(1)

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``AttentionPlan``."""
        query = self.place(layer, heads, rotations)
        return self.attend_placed(layer, heads, query, torch.empty_like(query)).flatten(1)

    def place(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``PlanInTwo``."""
        return self._rotation_pass.run(layer, heads, rotations, self._slots)

    def attend_placed(
        self, layer: AttentionLayer, heads: torch.Tensor, query: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """See ``PlanInTwo``."""
        transform = layer.transform
        first_value = transform.num_heads + transform.num_kv_heads
        key, value = heads[:, transform.num_heads : first_value], heads[:, first_value:]
        return self._attend(layer, query, key, value, output)

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Fill and return ``output``; the step's keys and values are already in the cache."""
        if self._runs is None:
            assert self._paged is not None, "a step has tokens"
            return self._paged.attend(layer, query, output)
        if self._paged is not None:
            tokens, span = self._paged.tokens, self._paged.span
            assert tokens is not None, "a step with runs is no decode step"
            if span is not None:
                self._paged.attend(layer, query[span], output[span])
            else:
                output.index_copy_(0, tokens, self._paged.attend(layer, query.index_select(0, tokens)))
        self._runs.attend(layer, query, key, value, output)
        return output
