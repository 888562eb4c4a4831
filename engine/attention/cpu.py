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
from engine.device.kv_cache import KVCache
from engine.layers.heads import HeadTransform
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
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        output: torch.Tensor,
    ) -> None:
        """Write their rows of ``output``, of the shape of ``query`` [num_tokens, num_heads, head_dim].

        key, value: [num_tokens, num_kv_heads, head_dim], of all the step's tokens; they are in the cache as well.
        """


class CPUAttention:
    """Paged attention for float32, bfloat16 and float16."""

    def __init__(self, cache: KVCache, *, choose_kernel: ChooseKernel = choose_run_kernel) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._paged_kernel = PagedKernel(cache)
        self._run_kernel = choose_kernel(cache)
        self._rotation_pass = RotationPass(cache)
        self._last: tuple[AttentionBatch, CPUPlan] | None = None

    def plan(self, batch: AttentionBatch) -> CPUPlan:
        """Part the requests by how many tokens they compute. The plan before is of no use any more.

        That of a reused batch has nothing of it but addresses, and holds until another batch comes.
        """
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        plan = self._new_plan(batch)
        self._last = (batch, plan) if batch.is_reused else None
        return plan

    def _new_plan(self, batch: AttentionBatch) -> CPUPlan:
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
            slots=torch.from_numpy(batch.slots),
            rotation_pass=self._rotation_pass,
            paged=paged,
            runs=self._plan_runs(batch, long) if long.size else None,
        )

    def _plan_runs(self, batch: AttentionBatch, requests: npt.NDArray[np.intp]) -> TokenRuns:
        if self._run_kernel is not None:
            return PagedRuns(self._run_kernel, batch, requests)
        return GatheredRuns(self._cache, batch, requests)

    def gathered_bytes(self, max_model_len: int) -> int:  # noqa: ARG002  (the Protocol's)
        """Nothing: they are read where they are."""
        return 0


class CPUPlan:
    """One step of ``CPUAttention``."""

    def __init__(
        self,
        *,
        cache: KVCache,
        rows: torch.Tensor,
        slots: torch.Tensor,
        rotation_pass: RotationPass,
        paged: PagedQueries | None,
        runs: TokenRuns | None,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._slots = slots
        self._rotation_pass = rotation_pass
        self._paged = paged
        self._runs = runs

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        block_size = self._cache.layout.block_size
        key_rows = torch.from_numpy(self._cache.key_rows(self._slots.numpy())) + layer * 2 * block_size
        self._rows.index_copy_(0, key_rows, key)
        self._rows.index_copy_(0, key_rows + block_size, value)
        return self._attend(layer, query, key, value, window)

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        query = self._rotation_pass.run(layer, heads, transform, rotations, self._slots)
        first_value = transform.num_heads + transform.num_kv_heads
        key, value = heads[:, transform.num_heads : first_value], heads[:, first_value:]
        return self._attend(layer, query, key, value, window)

    def _attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attend; the step's keys and values are in the cache."""
        if self._runs is None:
            assert self._paged is not None, "a step has tokens"
            return self._paged.attend(layer, query, window).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self._paged is not None:
            tokens = self._paged.tokens
            assert tokens is not None, "a step with runs is no decode step"
            output.index_copy_(0, tokens, self._paged.attend(layer, query.index_select(0, tokens), window))
        self._runs.attend(layer, query, key, value, window, output)
        return output.flatten(1)
