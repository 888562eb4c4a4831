"""Blocks that must stay free when a request is admitted, so that those admitted before it can go on. Free of torch."""

from __future__ import annotations

import numpy as np

from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowTable


class Headroom:
    """A share of all blocks, the ``watermark``, and one block in each KV cache group for each request that will grow.

    An engine without an admitted request needs none: otherwise a request as large as the cache could never start.
    """

    def __init__(
        self,
        watermark: float,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        remote: RemoteKV,
    ) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._remote = remote
        self._watermark = int(watermark * kv_cache.num_blocks)

    @property
    def num_admitted(self) -> int:
        """The number of requests that have blocks."""
        return self._table.num_requests + len(self._live_requests.ready) + self._remote.num_loading

    def of(self, request: Request) -> int:
        """Blocks that must stay free when ``request`` is admitted."""
        if not self.num_admitted:
            return 0
        table, rows = self._table, self._table.order
        num_growing = int(np.count_nonzero(table.limit[rows] - 1 > table.capacity[rows]))
        grows = request.limit - 1 > self._kv_cache.num_blocks_for(request.num_tokens) * self._kv_cache.block_size
        num_growing += self.num_admitted - table.num_requests + table.num_rows_to_come + grows * request.num_rows
        return self._watermark + num_growing * self._kv_cache.groups.num_groups

    def most(self, request: Request) -> int:
        """The most that ``of`` can say, without a look at the rows: as if all requests would grow."""
        num_growing = self.num_admitted + len(self._table) + self._table.num_rows_to_come + request.num_rows
        return self._watermark + num_growing * self._kv_cache.groups.num_groups

    def num_rows_counted(self, request: Request) -> int:
        """How many rows of this running or loaded request ``of`` counts as growing."""
        if not (rows := list(request.rows)):
            return 1
        is_growing = self._table.limit[rows] - 1 > self._table.capacity[rows]
        return int(is_growing.sum()) + request.num_rows - len(rows)

    def rows_that_grow_now(self) -> set[int]:
        """Rows that take a block in the coming step and, for ``of``, still count as growing after it."""
        table, rows = self._table, self._table.order
        capacity = table.capacity[rows]
        is_full = np.minimum(table.num_expected[rows], table.ceiling[rows]) > capacity
        return set(rows[is_full & (table.limit[rows] - 1 > capacity + np.int32(table.block_size))].tolist())
