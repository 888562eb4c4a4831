"""Running requests first: share out the token budget, find blocks, preempt when there are none (C1, C2, C6)."""

from __future__ import annotations

import numpy as np

from engine.config import SchedulerConfig
from engine.core.early_loads import EarlyLoads
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.partial_prefills import PartialPrefills
from engine.core.preemption import PreemptionPolicy
from engine.core.request import Request
from engine.core.request_book import RequestBook
from engine.core.row_table import RowArray, RowTable
from engine.core.step_draft import Batch, StepDraft
from engine.step import IntArray


class RunningPass:
    """Schedules what already runs. A step in which every request takes one token is arithmetic on arrays."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        book: RequestBook,
        early: EarlyLoads,
        preemption: PreemptionPolicy,
        partial_prefills: PartialPrefills | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._kv_cache = kv_cache
        self._book = book
        self._early = early
        self._preemption = preemption
        self._partial_prefills = partial_prefills

    def run(self, draft: StepDraft) -> None:
        """Add the running requests to the step."""
        stalled: set[int] = set()
        while len(self._table):
            rows = self._table.order
            computed = self._table.num_computed[rows]
            need = np.minimum(self._table.num_expected[rows], self._table.ceiling[rows]) - computed
            if stalled:
                need[[row in stalled for row in rows.tolist()]] = 0
            grants = self._share(need, draft)
            ends = computed + grants
            lacking = np.flatnonzero(ends > self._table.capacity[rows])
            if lacking.size == 0 or self._extend(draft, rows[lacking], ends[lacking]):
                self._advance(draft, rows, computed, grants, ends)
                return
            draft.is_blocked = True
            num_running = len(self._table)
            stalled |= self._make_room(rows[lacking], ends[lacking])
            draft.has_preempted |= len(self._table) < num_running

    def _share(self, need: IntArray, draft: StepDraft) -> IntArray:
        """Tokens for each, in order, within the budget and each request's own cap (C3)."""
        threshold = self._config.long_prefill_token_threshold
        if threshold:
            need = np.minimum(need, np.int32(threshold))
        if self._partial_prefills is not None:
            return self._partial_prefills.share(need, draft)
        if int(need.sum()) <= draft.token_budget:
            return need
        before = np.cumsum(need, dtype=np.int32) - need
        grants: IntArray = np.clip(np.int32(draft.token_budget) - before, 0, need)
        if not self._config.enable_chunked_prefill:
            grants[grants < need] = 0
        return grants

    def _extend(self, draft: StepDraft, rows: RowArray, ends: IntArray) -> bool:
        """Append the blocks that these rows lack; False when there are not enough, and then none was taken."""
        counts = -(-(ends - self._table.capacity[rows]) // np.int32(self._table.block_size))
        num_blocks = int(counts.sum())
        if num_blocks > self._kv_cache.num_free:
            return False
        block_ids = np.array(self._kv_cache.allocate(num_blocks), np.int32)
        draft.appended = (*self._table.append_blocks(rows, counts, block_ids), block_ids)
        return True

    def _advance(self, draft: StepDraft, rows: RowArray, computed: IntArray, grants: IntArray, ends: IntArray) -> None:
        """Count the granted tokens as computed (C8), and the successors of the last known ones as expected."""
        table = self._table
        rows_int32 = table.order_int32
        if not grants.all():
            active = np.flatnonzero(grants)
            rows, rows_int32, computed = rows[active], rows_int32[active], computed[active]
            grants, ends = grants[active], ends[active]
        expected = table.num_expected[rows]
        is_sampling = ends == expected
        table.num_computed[rows] = ends
        table.num_expected[rows] = expected + is_sampling
        draft.token_budget -= int(grants.sum())
        draft.running = Batch(
            rows=rows,
            rows_int32=rows_int32,
            first_positions=computed,
            num_scheduled_tokens=grants,
            is_sampling=is_sampling,
        )

    def _make_room(self, rows: RowArray, ends: IntArray) -> set[int]:
        """Free blocks for those of these rows that are served first, at the cost of those served last.

        Returns:
            Rows that have to wait: nobody is served after them, or the blocks come back when a step has returned.
        """
        lacks = -(-(ends - self._table.capacity[rows]) // np.int32(self._table.block_size))
        askers = [(self._table.owner(row), int(lack)) for row, lack in zip(rows.tolist(), lacks, strict=True)]
        stalled: set[int] = set()
        num_taken = 0
        for asker, num_blocks in sorted(askers, key=lambda pair: self._preemption.key(pair[0])):
            if asker.row is None:
                continue
            if self._preempt_until(asker, num_taken + num_blocks):
                num_taken += num_blocks
            else:
                stalled.add(asker.row)
        return stalled

    def _preempt_until(self, asker: Request, num_blocks: int) -> bool:
        while self._kv_cache.num_free < num_blocks:
            if self._kv_cache.num_free + self._kv_cache.num_fenced >= num_blocks:
                return False
            if self._early.drop_newest():
                continue
            victim = self._preemption.victim_for(asker, self._table.running(), list(self._book.ready))
            if victim is None:
                return False
            self._book.preempt(victim)
        return True
