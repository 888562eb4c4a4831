"""Runs of tokens through the compiled kernel, which reads the blocks in place."""

from __future__ import annotations

import platform
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import binding

from engine.attention.backend import AttentionBatch
from engine.attention.paged_queries import NO_WINDOW, HeadGroups, set_scores
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.kernels.amx import has_tiles, tile_sizes
from engine.kernels.attention import run_attention as kernel
from engine.kernels.call import KernelCall
from engine.kernels.compiled import NUM_SCORE_NUMBERS
from engine.kernels.lanes import HAS_BFLOAT16_UNIT
from engine.layers.attention_layer import AttentionLayer

TARGET_ROWS = 384
"""Query rows (queries times heads of a group) that share a tile's packed keys: packing then costs a few percent."""


_TILE_SIZES = tile_sizes({})
"""Whole tiles; kernels hold its address."""


class RunKernel:
    """The compiled kernel over one cache. One step at a time."""

    def __init__(self, cache: KVCache, *, has_pairs: bool, in_tiles: bool = False) -> None:
        layout = cache.layout
        self.head_groups = groups = HeadGroups(layout)
        self.rows_per_layer = layout.num_parts * layout.block_size
        compiled = partial(kernel.compiled_run_attention, layout.dtype, has_pairs=has_pairs, in_tiles=in_tiles)
        self.call = KernelCall(
            compiled, kernel.NUM_PARAMETERS, numbers_at=kernel.NUMBERS, num_numbers=NUM_SCORE_NUMBERS
        )
        parameters = self.call.parameters
        parameters[kernel.CACHE] = cache.blocks.data_ptr()
        parameters[kernel.HEAD_DIM], parameters[kernel.BLOCK_SIZE] = layout.head_dim, layout.block_size
        parameters[kernel.BLOCK_ROWS], parameters[kernel.HEAD_ROWS] = groups.rows_per_block, groups.rows_between
        parameters[kernel.NUM_CACHE_ROWS] = cache.num_blocks * groups.rows_per_block
        parameters[kernel.VALUE_ROWS] = (layout.num_parts - 1) * layout.block_size
        parameters[kernel.TILE_SIZES] = _TILE_SIZES.ctypes.data


class PagedRuns:
    """The runs of one step: those of ``requests``, indices into the batch. Implements ``TokenRuns``.

    tables: the block tables of the batch, for one KV cache group.
    """

    def __init__(
        self, run_kernel: RunKernel, batch: AttentionBatch, tables: IntArray, requests: npt.NDArray[np.intp]
    ) -> None:
        self._kernel = run_kernel
        self._batch = batch
        self._requests = requests
        # The kernel holds the addresses of these two arrays.
        self._tables: IntArray = np.ascontiguousarray(tables[requests], dtype=np.int32)
        self._items: IntArray = np.empty((0, kernel.ITEM_WIDTH), dtype=np.int32)
        self._addresses = 0, 0
        self._max_queries = 0

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """See ``TokenRuns``."""
        del key, value  # the cache has them
        assert output.is_contiguous()
        query = query.contiguous()
        runs = self._kernel
        num_groups = runs.head_groups.count(query.shape[1])
        group = query.shape[1] // num_groups
        if not len(self._items):
            self._cut(max(TARGET_ROWS // group, 1))
        parameters = runs.call.parameters
        parameters[kernel.QUERY], parameters[kernel.OUTPUT] = query.data_ptr(), output.data_ptr()
        parameters[kernel.NUM_TOKENS] = query.shape[0]
        parameters[kernel.NUM_KV_HEADS], parameters[kernel.GROUP] = num_groups, group
        parameters[kernel.VALUE_DIM] = output.shape[2]
        parameters[kernel.TABLES], parameters[kernel.ITEMS] = self._addresses
        parameters[kernel.NUM_TABLES], parameters[kernel.TABLE_WIDTH] = self._tables.shape
        parameters[kernel.NUM_ITEMS], parameters[kernel.MAX_QUERIES] = len(self._items), self._max_queries
        parameters[kernel.FIRST_ROW] = layer.index * runs.rows_per_layer
        parameters[kernel.WINDOW] = NO_WINDOW if layer.spec.window is None else layer.spec.window
        parameters[kernel.SINKS] = set_scores(runs.call, layer)
        runs.call.run(max_threads=len(self._items) * num_groups)

    def _cut(self, num_queries: int) -> None:
        """Cut the runs into items of at most so many queries, most work first: threads then end at about the same
        time.
        """
        items: list[tuple[int, int, int, int]] = []
        for table, request in enumerate(self._requests.tolist()):
            start, end = self._batch.query_starts[request : request + 2].tolist()
            before = int(self._batch.first_positions[request]) - start
            items.extend(
                (token, min(num_queries, end - token), before + token, table)
                for token in range(start, end, num_queries)
            )
        items.sort(key=lambda item: item[kernel.NUM_QUERIES] * sum(item[1:3]), reverse=True)
        self._items = np.array(items, dtype=np.int32)
        self._addresses = self._tables.ctypes.data, self._items.ctypes.data
        self._max_queries = max(item[kernel.NUM_QUERIES] for item in items)


def choose_run_kernel(cache: KVCache) -> RunKernel | None:
    """The compiled kernel where it is faster than torch's SDPA, else None.

    Measured by ``benchmarks/run_attention.py``. With AMX it multiplies bfloat16 in tiles, as SDPA does.
    """
    if cache.blocks.device.type != "cpu" or not is_run_machine():
        return None
    has_pairs = cache.layout.dtype == "bfloat16" and HAS_BFLOAT16_UNIT and cache.layout.head_dim % 2 == 0
    return RunKernel(cache, has_pairs=has_pairs, in_tiles=has_pairs and has_tiles())


@cache
def is_run_machine() -> bool:
    """True on x86 with AVX2 and fused multiply-add."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    features = binding.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx2", "fma", "f16c"))
