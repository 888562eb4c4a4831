"""Single queries through the compiled paged kernel."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.contract.step import IntArray
from engine.device.kv_cache import KVCache
from engine.kernels.attention import paged_attention as kernel
from engine.kernels.call import KernelCall
from engine.kernels.compiled import NUM_SCORE_NUMBERS, SCALE, SOFTCAP
from engine.kernels.lanes import LANES
from engine.layers.attention_layer import AttentionLayer
from kv_transfer.layout import LATENTS, KVLayout

NO_WINDOW = 1 << 62


def set_scores(call: KernelCall, layer: AttentionLayer) -> int:
    """Give a kernel a layer's numbers for scores; returns the address of its sinks, or 0."""
    call.numbers[SCALE], call.numbers[SOFTCAP] = layer.spec.scale, layer.spec.softcap or 0.0
    return 0 if layer.sinks is None else layer.sinks.data_ptr()


MAX_LATENT_GROUP = 8
"""Most query heads that process a latent together. All heads share one latent; threads share these groups."""


class HeadGroups:
    """How the query heads of one cache are grouped: by shared key head; for latents, by a fixed size."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._is_latent = layout.num_parts == LATENTS and layout.num_kv_heads == 1
        rows_per_head = layout.layers_per_block * layout.num_parts * layout.block_size
        self.rows_per_block = layout.num_kv_heads * rows_per_head
        self.rows_between = 0 if self._is_latent else rows_per_head
        """Distance in cache rows between what two groups read; 0 if all read the same."""

    def count(self, num_heads: int) -> int:
        """The number of groups for ``num_heads`` query heads."""
        if not self._is_latent:
            return self._layout.num_kv_heads
        most = min(num_heads, MAX_LATENT_GROUP)
        return num_heads // next(size for size in range(most, 0, -1) if num_heads % size == 0)


class PagedKernel:
    """The compiled kernel over one cache. One step at a time."""

    def __init__(self, cache: KVCache) -> None:
        layout = cache.layout
        self.head_groups = groups = HeadGroups(layout)
        self.rows_per_layer = layout.num_parts * layout.block_size
        fills_registers = layout.head_dim % LANES == 0
        compiled = partial(kernel.compiled_attention, layout.dtype, fills_registers=fills_registers)
        self.call = KernelCall(
            compiled, kernel.NUM_PARAMETERS, numbers_at=kernel.NUMBERS, num_numbers=NUM_SCORE_NUMBERS
        )
        parameters = self.call.parameters
        parameters[kernel.ROWS] = cache.blocks.data_ptr()
        parameters[kernel.HEAD_DIM], parameters[kernel.BLOCK_SIZE] = layout.head_dim, layout.block_size
        parameters[kernel.BLOCK_ROWS], parameters[kernel.HEAD_ROWS] = groups.rows_per_block, groups.rows_between
        parameters[kernel.NUM_CACHE_ROWS] = cache.num_blocks * groups.rows_per_block
        parameters[kernel.VALUE_ROWS] = (layout.num_parts - 1) * layout.block_size


class PagedQueries:
    """The tokens of one step that use the paged kernel, each as a query with its own block table and position.

    ``requests`` are indices into the batch; None: all requests, each of which computes one token. ``tables`` are the
    batch's block tables for one KV cache group.
    tokens: [num_queries] int64 indices of the tokens in the batch; None: all in order.
    span: the range of these indices if they are consecutive, else None.
    """

    def __init__(
        self,
        paged: PagedKernel,
        batch: AttentionBatch,
        tables: IntArray,
        requests: npt.NDArray[np.intp] | None = None,
    ) -> None:
        self._paged = paged
        self.tokens: torch.Tensor | None = None
        self.span: slice | None = None
        # The kernel holds the addresses of these two arrays.
        if requests is None:
            self._positions: IntArray = np.ascontiguousarray(batch.first_positions, dtype=np.int32)
            self._tables: IntArray = tables if has_plain_rows(tables) else np.ascontiguousarray(tables, dtype=np.int32)
            if batch.is_reused:
                assert self._positions is batch.first_positions, "later steps change the batch's own arrays"
                assert self._tables is tables
        else:
            tokens, owners, positions = _queries(batch, requests)
            self.tokens = torch.from_numpy(tokens)
            first, last = int(tokens[0]), int(tokens[-1])
            if last - first == len(tokens) - 1:  # consecutive, since requests and their tokens are in batch order
                self.span = slice(first, last + 1)
            self._positions = positions.astype(np.int32)
            self._tables = np.ascontiguousarray(tables[owners], dtype=np.int32)
        self._addresses = self._tables.ctypes.data, self._positions.ctypes.data
        self._width = self._tables.strides[0] // self._tables.itemsize

    def attend(self, layer: AttentionLayer, query: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
        """Attend with [num_queries, num_heads, head_dim]; keys and values are in the cache already.

        ``output``, if given, is contiguous [num_queries, num_heads, size of a value]; it is filled and returned.
        """
        query = query.contiguous()
        num_queries, num_heads, head_dim = query.shape
        value_size = layer.spec.value_size or head_dim
        if output is None:
            output = query.new_empty(num_queries, num_heads, value_size)
        paged = self._paged
        parameters = paged.call.parameters
        parameters[kernel.QUERY], parameters[kernel.OUTPUT] = query.data_ptr(), output.data_ptr()
        parameters[kernel.TABLES], parameters[kernel.POSITIONS] = self._addresses
        parameters[kernel.NUM_ROWS], parameters[kernel.TABLE_WIDTH] = num_queries, self._width
        num_groups = paged.head_groups.count(num_heads)
        parameters[kernel.NUM_KV_HEADS], parameters[kernel.GROUP] = num_groups, num_heads // num_groups
        parameters[kernel.VALUE_DIM] = value_size
        parameters[kernel.FIRST_ROW] = layer.index * paged.rows_per_layer
        parameters[kernel.WINDOW] = NO_WINDOW if layer.spec.window is None else layer.spec.window
        parameters[kernel.SINKS] = set_scores(paged.call, layer)
        paged.call.run(max_threads=num_queries * num_groups)
        return output


def has_plain_rows(tables: IntArray) -> bool:
    """True if the numbers of each row of a table, [num_rows, width], are int32 and next to each other."""
    return tables.dtype == np.int32 and tables.strides[1] == tables.itemsize


def _queries(
    batch: AttentionBatch, requests: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """All tokens of these requests, each [num_queries]: their indices in the batch, their requests, their positions."""
    starts, counts = batch.query_starts[requests].astype(np.int64), batch.query_lens[requests]
    owners, within = requests, np.zeros(1, dtype=np.int64)
    if counts.max() > 1:
        owners = np.repeat(requests, counts)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(starts, counts)
    return starts + within, owners, batch.first_positions[owners] + within
