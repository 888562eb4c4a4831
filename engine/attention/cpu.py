"""Attention on the CPU: compiled paged kernels for single queries and for prefill chunks, or torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.gathered_runs import GatheredRuns
from engine.attention.paged_queries import PagedKernel, PagedQueries
from engine.attention.paged_runs import PagedRuns, RunKernel, choose_run_kernel
from engine.attention.rotation_pass import RotationPass
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations

MAX_PAGED_QUERIES = 4
"""Requests that compute no more tokens than this take the kernel of single queries: beyond, multiplying matrices of
queries and keys is faster."""

ChooseKernel = Callable[[KVCache], RunKernel | None]

EMPTY_REQUESTS: Final = np.empty(0, dtype=np.intp)


class TokenRuns(Protocol):
    """The requests of a step that compute more than a few tokens."""

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write their rows of ``output`` [num_tokens, num_heads, head_dim], or of the size of a value.

        query: [num_tokens, num_heads, head_dim]. key, value: [num_tokens, num_kv_heads, head_dim], of all the step's
        tokens; they are in the cache as well.
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
        """Part the requests by how many tokens they compute.

        The plans of a reused batch have nothing of it but addresses, and hold until another batch comes.
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
        """Nothing: they are read where they are."""
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
        return self._attend(layer, query, key, value)

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``AttentionPlan``."""
        query = self._rotation_pass.run(layer, heads, rotations, self._slots)
        transform = layer.transform
        first_value = transform.num_heads + transform.num_kv_heads
        key, value = heads[:, transform.num_heads : first_value], heads[:, first_value:]
        return self._attend(layer, query, key, value)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attend; the step's keys and values are in the cache."""
        if self._runs is None:
            assert self._paged is not None, "a step has tokens"
            return self._paged.attend(layer, query).flatten(1)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        if self._paged is not None:
            tokens = self._paged.tokens
            assert tokens is not None, "a step with runs is no decode step"
            output.index_copy_(0, tokens, self._paged.attend(layer, query.index_select(0, tokens)))
        self._runs.attend(layer, query, key, value, output)
        return output.flatten(1)
