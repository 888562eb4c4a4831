"""After a step: store what was sampled, publish the blocks that became full, end what ended (C8, C9, B3, K7)."""

from __future__ import annotations

import numpy as np

from engine.core.block_hash import BlockHash, hash_block
from engine.core.counters import Counters
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.request import Request
from engine.core.request_book import RequestBook
from engine.core.row_table import RowArray, RowTable
from engine.core.step_draft import StepInFlight
from engine.core.step_result import StepResult
from engine.messages import FinishReason, TokenDelta
from engine.step import IntArray, SchedulerOutput


class Outcome:
    """Applies the results of steps to rows, blocks and requests."""

    def __init__(self, *, table: RowTable, kv_cache: KVCacheManager, book: RequestBook, counters: Counters) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._book = book
        self._counters = counters

    def apply(self, step: StepInFlight, output: SchedulerOutput, sampled_token_ids: IntArray) -> StepResult:
        """Take in a step's tokens.

        Rows whose request ended or was preempted since the step was scheduled are skipped: nobody waits for them.
        """
        rows, ends, is_sampling = step.rows, step.ends, output.is_sampling
        num_sampling = step.num_sampling
        if step.num_releases != self._table.num_releases:
            is_live = self._table.epoch[rows] == step.epochs
            rows, ends, is_sampling = rows[is_live], ends[is_live], is_sampling[is_live]
            sampled_token_ids = sampled_token_ids[is_live]
            num_sampling = int(is_sampling.sum())
        all_rows, all_ends = rows, ends
        if num_sampling != rows.size:
            rows, ends, sampled_token_ids = rows[is_sampling], ends[is_sampling], sampled_token_ids[is_sampling]
        self._table.store_tokens(rows, ends, sampled_token_ids)
        self._publish_full_blocks(all_rows, all_ends)
        return self._emit(rows, ends + 1, sampled_token_ids)

    def publish_loaded(self, request: Request, frontier: int) -> None:
        """Offer the blocks of a loaded request that its load confirmed (K3, B3)."""
        block_size = self._kv_cache.block_size
        holes = request.holes
        hashes = request.hashes(block_size)
        first_hole = holes[0].start // block_size if holes else frontier // block_size
        for index in range(request.num_published_blocks, frontier // block_size):
            start = index * block_size
            if any(hole.start <= start < hole.end for hole in holes):
                continue
            tokens = request.token_ids[start : start + block_size]
            self._publish(request, index, request.block_ids[index], hashes[index], tokens)
            if index > first_hole:
                request.confirmed_blocks.add(index)
        request.num_published_blocks = max(request.num_published_blocks, first_hole)

    def _emit(self, rows: RowArray, lengths: IntArray, token_ids: IntArray) -> StepResult:
        table = self._table
        self._counters.num_generated_tokens += rows.size
        owners = table.owners[rows].tolist()
        tokens = token_ids.tolist()
        special: dict[int, TokenDelta] = {}
        if table.silent_rows:
            silent = table.silent_rows
            for index, row in enumerate(rows.tolist()):
                if row in silent:
                    special[index] = self._first(owners[index], tokens[index])
            silent.difference_update(rows.tolist())
        for index in table.ends(rows, lengths, token_ids).tolist():
            is_first = index in special
            special[index] = self._last(owners[index], tokens[index], int(lengths[index]), is_first=is_first)
        return StepResult(requests=owners, token_ids=tokens, special=special, news=self._book.take_news())

    @staticmethod
    def _first(request: Request, token_id: int) -> TokenDelta:
        request.is_silent = False
        return TokenDelta(
            request_id=request.request_id,
            token_ids=(token_id,),
            num_cached_tokens=request.num_cached_tokens,
            num_remote_tokens=request.num_remote_tokens,
        )

    def _last(self, request: Request, token_id: int, length: int, *, is_first: bool) -> TokenDelta:
        is_stop = token_id in request.stop_ids and length >= request.first_stop
        kv_transfer = None
        if is_stop:
            reason = FinishReason.STOP
        elif length < request.full_limit:
            reason = FinishReason.HANDED_OVER
        else:
            reason = FinishReason.LENGTH
        if reason is FinishReason.HANDED_OVER:
            kv_transfer = self._book.hand_over(request)
        else:
            self._book.finish(request)
        return TokenDelta(
            request_id=request.request_id,
            token_ids=(token_id,),
            finish_reason=reason,
            stop_token_id=token_id if is_stop else None,
            kv_transfer=kv_transfer,
            num_cached_tokens=request.num_cached_tokens if is_first else None,
            num_remote_tokens=request.num_remote_tokens if is_first else None,
        )

    def _publish_full_blocks(self, rows: RowArray, ends: IntArray) -> None:
        """Offer the blocks that this step completed: their KV is in the cache now."""
        full = np.flatnonzero(ends >= self._table.publish_goal[rows])
        if full.size:
            for row, end in zip(rows[full].tolist(), ends[full].tolist(), strict=True):
                self._publish_row(row, end)

    def _publish_row(self, row: int, end: int) -> None:
        table, block_size = self._table, self._table.block_size
        request = table.owner(row)
        first, stop = int(table.publish_goal[row]) // block_size - 1, end // block_size
        hashes = request.block_hashes
        block_ids = table.block_table[row, first:stop].tolist()
        for index, block_id in enumerate(block_ids, start=first):
            tokens = table.token_ids[row, index * block_size : (index + 1) * block_size]
            if index == len(hashes):
                hashes.append(hash_block(hashes[-1] if hashes else request.root, tokens.tobytes()))
            self._publish(request, index, block_id, hashes[index], tokens)
        while stop in request.confirmed_blocks:
            stop += 1
        request.num_published_blocks = stop
        table.publish_goal[row] = (stop + 1) * block_size

    def _publish(self, request: Request, index: int, block_id: int, block_hash: BlockHash, tokens: IntArray) -> None:
        if self._kv_cache.publish(block_id, block_hash) and self._kv_cache.records_events:
            parent = request.block_hashes[index - 1] if index else request.root
            self._kv_cache.record_stored(block_hash, parent, tuple(tokens.tolist()))
