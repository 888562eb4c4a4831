"""The pass over running requests: share out the token budget, find blocks, preempt when there are none."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.contract.config import SchedulerConfig
from engine.contract.step import EMPTY_INTS, IntArray
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.gates import PartialPrefills
from engine.scheduler.policy.preemption import PreemptionPolicy
from engine.scheduler.remote.early_loads import EarlyLoads
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from engine.scheduler.step_draft import NO_LIMIT, Batch, StepDraft

NO_ROWS: Final[frozenset[int]] = frozenset()


class RunningPass:
    """Schedules the running requests, in one compiled pass over their rows unless some lack blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        early: EarlyLoads,
        preemption: PreemptionPolicy,
        partial_prefills: PartialPrefills | None = None,
    ) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._is_chunked = config.enable_chunked_prefill
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._early = early
        self._preemption = preemption
        self._partial_prefills = partial_prefills
        self._ones = EMPTY_INTS

    def run(self, draft: StepDraft) -> None:
        """Add the running requests to the step."""
        table, stalled = self._table, NO_ROWS
        while (order := table.order_int32).size:
            lines = np.empty((row_passes.NUM_LINES, order.size), np.int32)
            num_lacking, num_rows, num_tokens, num_samples = row_passes.advance(
                table.columns,
                order,
                row_passes.NO_SHARES if self._partial_prefills is None else self._shares(self._partial_prefills, draft),
                self._threshold,
                draft.token_budget,
                draft.prompt_budget,
                self._is_chunked,
                lines,
            )
            if not num_lacking:
                draft.token_budget -= num_tokens
                draft.running = self._batch(order, lines, num_rows, num_tokens, num_samples)
                if num_tokens > num_rows and draft.prompt_budget < NO_LIMIT:
                    counts = draft.running.num_scheduled_tokens
                    draft.prompt_budget -= int(counts[counts > 1].sum())
                break
            lacking = lines[row_passes.LACKING, :num_lacking]
            rows, ends = table.order[lacking], lines[row_passes.ENDS, lacking]
            if self.extend(draft, rows, ends):
                continue
            draft.is_blocked = True
            num_running = len(table)
            stalled |= self._make_room(rows, ends)
            table.is_stalled[list(stalled)] = 1
            draft.has_preempted |= len(table) < num_running
        if stalled:
            table.is_stalled[:] = 0

    def _shares(self, partial_prefills: PartialPrefills, draft: StepDraft) -> IntArray:
        """Tokens of each running request where prefills share the budget."""
        table = self._table
        rows = table.order
        need = np.minimum(table.num_expected[rows], table.ceiling[rows]) - table.num_computed[rows]
        if self._threshold:
            need = np.minimum(need, np.int32(self._threshold))
        need[table.is_stalled[rows] != 0] = 0
        return partial_prefills.share(need, draft)

    def _batch(self, order: IntArray, lines: IntArray, num_rows: int, num_tokens: int, total_samples: int) -> Batch:
        if num_rows == order.size:
            rows, rows_int32 = self._table.order, order
        else:
            lines = lines[:, :num_rows]
            rows_int32 = lines[row_passes.ROWS]
            rows = rows_int32.astype(np.intp)
        if num_tokens == total_samples == num_rows:
            if self._ones.size != num_rows:
                self._ones = np.ones(num_rows, np.int32)
                self._ones.setflags(write=False)
            counts = num_samples = self._ones
        else:
            counts, num_samples = lines[row_passes.COUNTS], lines[row_passes.NUM_SAMPLES]
        return Batch(
            rows,
            rows_int32,
            lines[row_passes.FIRST_POSITIONS],
            counts,
            lines[row_passes.ENDS],
            lines[row_passes.EPOCHS],
            num_samples,
            EMPTY_INTS,
            num_tokens,
            total_samples,
        )

    def extend(self, draft: StepDraft, rows: RowArray, ends: IntArray) -> bool:
        """Append the blocks that these rows need to reach ``ends``. All or nothing: False when there are too few."""
        counts = self._table.lacking_blocks(rows, ends)
        num_blocks = counts.sum(axis=1).tolist()
        if sum(num_blocks) > self._kv_cache.num_free:
            return False
        for group, taken in enumerate(self._kv_cache.allocate_by_group(num_blocks)):
            if taken:
                block_ids = np.array(taken, np.int32)
                places = self._table.append_blocks(rows, counts[group], block_ids, group=group)
                draft.append(*places, block_ids, group=group)
        self._table.set_capacity(rows)
        return True

    def _make_room(self, rows: RowArray, ends: IntArray) -> set[int]:
        """Find blocks for these rows, those served first before others, by preempting those served last.

        Returns:
            Rows that have to wait: no request is served after them, or the blocks are free only once a step returns.
        """
        lacks = self._table.lacking_blocks(rows, ends).sum(axis=0)
        askers = [(self._table.owner(row), int(lack)) for row, lack in zip(rows.tolist(), lacks, strict=True)]
        stalled: set[int] = set()
        num_taken = 0
        for asker, num_blocks in sorted(askers, key=lambda pair: self._preemption.key(pair[0])):
            if asker.row is None:
                continue
            if self.find_room(asker, num_taken + num_blocks):
                num_taken += num_blocks
            else:
                stalled.update(asker.rows)
        return stalled

    def find_room(self, asker: Request, num_blocks: int) -> bool:
        """Preempt requests served after ``asker`` until ``num_blocks`` are free; False when it has to wait."""
        while self._kv_cache.num_free < num_blocks:
            if self._kv_cache.num_free + self._kv_cache.num_fenced >= num_blocks:
                return False
            if self._early.drop_newest():
                continue
            victim = self._preemption.victim_for(asker, self._table.running(), list(self._live_requests.ready))
            if victim is None:
                return False
            self._live_requests.preempt(victim)
        return True
