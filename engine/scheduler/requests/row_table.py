"""The running requests as arrays: what changes in every step, and only that. Free of torch.

The scheduler never loops over running requests in Python. Compiled passes (``row_passes``) do, over these arrays; a
``Request`` object is used only when a request starts, ends or fills a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from engine.contract.step import IntArray
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from kv_transfer.cache_groups import ABSENT_BLOCK, BlockTables, CacheGroups, first_held_block

RowArray: TypeAlias = npt.NDArray[np.intp]
"""Row numbers in the type that numpy indexes fastest by."""

NEVER: Final = row_passes.NO_GAP
"""A position that no request reaches; also the gap of a row without a promised gap."""

STOP_COLUMNS: Final = 8
"""How many stop ids are compared by array; a request with more of them is checked by itself."""

_NO_TOKEN: Final = -1
_CACHE_LINE_ELEMENTS: Final = 16


def _width(num_columns: int) -> int:
    """The number of columns, rounded up to an odd number of cache lines so that rows do not share cache sets."""
    num_lines = -(-num_columns // _CACHE_LINE_ELEMENTS)
    return (num_lines | 1) * _CACHE_LINE_ELEMENTS


class RowTable:
    """One row for each running request, or each beam. Positions are absolute, from the first token of the prompt.

    num_tokens: tokens whose value is known.
    num_expected: ``num_tokens``, plus the tokens that steps in flight will sample.
    num_computed: positions whose KV is in the cache once the steps in flight have returned.
    ceiling: no position from here on is computed now: the last token needs no KV, and an invalid span has an end.
    capacity: positions that the row's blocks can hold, in every group.
    limit: total tokens at which the request ends.
    first_stop: total tokens from which on stop ids count.
    publish_goal: positions that must be computed before the next block is full.
    epoch: how many requests have left the row.
    promised_gap: the microseconds promised between two tokens.
    is_stalled: 1 while the row gets no tokens in the step that is being put together.
    num_releases, num_spans: how often a row was given up, and how often one began to compute a span of known tokens.
    columns: [num_columns, max_num_seqs] all of these, in the form that the passes take.
    block_table: [num_groups, max_num_seqs, width] block ids. Held are those from first_blocks to num_blocks, both
        [num_groups, max_num_seqs]; earlier ones left the window of their group.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.block_size = block_size
        self.groups = CacheGroups(tuple(windows), block_size)
        self.max_num_seqs = max_num_seqs
        max_blocks = -(-max_model_len // block_size)
        self.columns = np.zeros((row_passes.FIRST_STOP_ID + STOP_COLUMNS, max_num_seqs), np.int32)
        self.num_tokens: IntArray = self.columns[row_passes.NUM_TOKENS]
        self.num_expected: IntArray = self.columns[row_passes.NUM_EXPECTED]
        self.num_computed: IntArray = self.columns[row_passes.NUM_COMPUTED]
        self.ceiling: IntArray = self.columns[row_passes.CEILING]
        self.capacity: IntArray = self.columns[row_passes.CAPACITY]
        self.limit: IntArray = self.columns[row_passes.LIMIT]
        self.first_stop: IntArray = self.columns[row_passes.FIRST_STOP]
        self.publish_goal: IntArray = self.columns[row_passes.PUBLISH_GOAL]
        self.epoch: IntArray = self.columns[row_passes.EPOCH]
        self.is_stalled: IntArray = self.columns[row_passes.IS_STALLED]
        self.promised_gap: IntArray = self.columns[row_passes.PROMISED_GAP]
        self.stop_ids: IntArray = self.columns[row_passes.FIRST_STOP_ID :]
        self.stop_ids[:] = _NO_TOKEN
        self.num_stop_columns = 0
        self.owners = np.empty(max_num_seqs, dtype=object)
        # Only the part in use is touched: the operating system backs only pages that were written.
        self.token_ids = np.empty((max_num_seqs, _width(max_model_len + 1)), np.int32)
        self.block_table = np.empty((len(windows), max_num_seqs, _width(max_blocks)), np.int32)
        self.num_blocks: IntArray = np.zeros((len(windows), max_num_seqs), np.int32)
        self.first_blocks: IntArray = np.zeros((len(windows), max_num_seqs), np.int32)
        self.unanswered_rows: set[int] = set()
        self.wide_rows: set[int] = set()
        self.beam_rows: set[int] = set()
        self.predicted_rows: set[int] = set()
        self.damaged_rows: set[int] = set()
        self.num_releases = self.num_spans = self.num_promised = self.num_requests = self._num_rows_due = 0
        self._flat_token_ids = self.token_ids.reshape(-1)
        self._token_stride = self.token_ids.shape[1]
        self._block_offsets = np.arange(block_size)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._running: dict[int, Request] = {}
        self.rows = self._running.keys()  # those in use, always up to date
        self._order: RowArray | None = None
        self._order_int32: IntArray | None = None
        self._requests: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_free_rows(self) -> int:
        """Rows that no request has, nor will need for its beams."""
        return self.max_num_seqs - self._num_rows_due

    @property
    def num_rows_to_come(self) -> int:
        """Rows that running requests do not have yet, but will need for their beams."""
        return self._num_rows_due - len(self._running)

    @property
    def order(self) -> RowArray:
        """[num_running] the rows in use, in the order in which their requests started."""
        if self._order is None:
            self._order = np.fromiter(self._running, dtype=np.intp, count=len(self._running))
            self._order.setflags(write=False)
        return self._order

    @property
    def order_int32(self) -> IntArray:
        """``order`` in the type that the runner gets."""
        if self._order_int32 is None:
            self._order_int32 = self.order.astype(np.int32)
            self._order_int32.setflags(write=False)
        return self._order_int32

    def order_without(self, leaving_rows: Sequence[int]) -> RowArray:
        """``order`` without some rows."""
        return self.order[~np.isin(self.order, leaving_rows)] if leaving_rows else self.order

    def running(self) -> list[Request]:
        """The requests in the order in which they started."""
        return list(dict.fromkeys(self._running.values()) if self.beam_rows else self._running.values())

    def requests_of(self, rows: RowArray) -> list[Request]:
        """The requests in some rows; for ``order`` itself always the same list, which must not be changed."""
        if rows is not self._order:
            requests: list[Request] = self.owners[rows].tolist()
            return requests
        if self._requests is None:
            self._requests = list(self._running.values())
        return self._requests

    def owner(self, row: int) -> Request:
        """The request in a row."""
        return self._running[row]

    def place(self, request: Request, tables: BlockTables, *, publishes: bool) -> int:
        """Give a request a row; its tokens and block tables move there."""
        row = self._free_rows.pop()
        num_tokens = request.num_tokens
        self.num_tokens[row] = self.num_expected[row] = num_tokens
        self.capacity[row] = min(map(len, tables)) * self.block_size
        for group, table in enumerate(tables):
            self.num_blocks[group, row] = len(table)
            self.first_blocks[group, row] = first_held_block(table)
            self.block_table[group, row, : len(table)] = table
        self.limit[row] = request.limit
        self.first_stop[row] = request.first_stop
        self.promised_gap[row] = request.promised_gap
        self.num_promised += request.promised_gap != NEVER
        self.token_ids[row, :num_tokens] = request.token_ids
        self.publish_goal[row] = (request.num_published_blocks + 1) * self.block_size if publishes else NEVER
        self.owners[row] = request
        self._set_stop_ids(row, request.stop_ids)
        if request.is_unanswered:
            self.unanswered_rows.add(row)
        if request.prediction is not None:
            self.predicted_rows.add(row)
        request.row = row
        self.num_requests += 1
        self._num_rows_due += request.num_rows
        if request.beams is not None:
            self.beam_rows.add(row)
        self._running[row] = request
        self._forget_order()
        self.begin_next_span(row)
        return row

    def begin_next_span(self, row: int) -> None:
        """Set a row to compute its first invalid span; when none is left, the positions after all computed ones."""
        request = self._running[row]
        self.num_spans += 1
        if request.invalid_spans:
            span = request.invalid_spans.pop(0)
            self.num_computed[row], self.ceiling[row] = span.start, span.end
            self.damaged_rows.add(row)
        else:
            end = request.limit - 1 if request.beams is None else request.num_tokens
            self.num_computed[row], self.ceiling[row] = request.num_computed_tokens, end
            self.damaged_rows.discard(row)

    def leave_computed_spans(self) -> None:
        """Set damaged rows whose span was computed in the step just scheduled to compute what comes next."""
        for row in tuple(self.damaged_rows):
            if self.num_computed[row] >= self.ceiling[row]:
                self.begin_next_span(row)

    def release(self, row: int) -> BlockTables:
        """Take a request out of its row; its known tokens move back to it.

        Returns:
            Its block tables, which the caller must release.
        """
        request = self._running[row]
        assert not request.more_rows, "the last row of a request is released"
        if request.beams is None:
            request.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        request.row = None
        self.num_requests -= 1
        self._num_rows_due -= request.num_rows
        self.num_promised -= request.promised_gap != NEVER
        return self._vacate(row)

    def release_one(self, row: int) -> BlockTables:
        """Take one row from a request that has several; it may get as many as before again.

        Returns:
            The row's block tables, which the caller must release.
        """
        request = self._running[row]
        request.row, *more_rows = (other for other in request.rows if other != row)
        request.more_rows = tuple(more_rows)
        return self._vacate(row)

    def fork(self, row: int, num_computed: int, copies: Sequence[int]) -> int:
        """Make another row of the request in ``row``, with the same first tokens and blocks; then call ``go_on_with``.

        The caller must hold the full blocks once more. ``copies``, one per group, replace a last block that
        ``num_computed`` positions do not fill; empty when they fill it.
        """
        request, forked = self._running[row], self._free_rows.pop()
        num_full = num_computed // self.block_size
        self.token_ids[forked, :num_computed] = self.token_ids[row, :num_computed]
        self.block_table[:, forked, :num_full] = self.block_table[:, row, :num_full]
        if copies:
            self.block_table[:, forked, num_full] = copies
        self.num_blocks[:, forked] = num_full + bool(copies)
        self.first_blocks[:, forked] = self.first_blocks[:, row]
        self.limit[forked], self.is_stalled[forked] = self.limit[row], 0
        self.promised_gap[forked] = self.promised_gap[row]
        self.stop_ids[:, forked] = _NO_TOKEN
        self.owners[forked] = request
        self.beam_rows.add(forked)
        request.more_rows = (*request.more_rows, forked)
        self._running[forked] = request
        self._forget_order()
        self.set_capacity(np.array([forked]))
        return forked

    def go_on_with(self, row: int, num_computed: int, token_ids: Sequence[int]) -> None:
        """Let a beam go on with known tokens after its first ``num_computed`` positions; it computes no further."""
        end = num_computed + len(token_ids)
        self.token_ids[row, num_computed:end] = token_ids
        self.num_computed[row], self.num_spans = num_computed, self.num_spans + 1
        self.num_tokens[row] = self.num_expected[row] = self.ceiling[row] = end
        self.publish_goal[row] = NEVER

    def _vacate(self, row: int) -> BlockTables:
        del self._running[row]
        tables = self.block_tables(row)
        self.owners[row] = None
        self.epoch[row] += 1
        self.num_releases += 1
        for rows in (self.unanswered_rows, self.wide_rows, self.beam_rows, self.predicted_rows, self.damaged_rows):
            rows.discard(row)
        self._free_rows.append(row)
        self._forget_order()
        return tables

    def block_tables(self, row: int) -> BlockTables:
        """The block tables of a row, one per group."""
        return [
            table[row, :num_blocks].tolist()
            for table, num_blocks in zip(self.block_table, self.num_blocks[:, row].tolist(), strict=True)
        ]

    def padded_block_tables(self, row: int) -> IntArray:
        """[num_groups, num_blocks] the block tables of a row, padded with ABSENT_BLOCK; a copy."""
        num_blocks = self.num_blocks[:, row]
        tables: IntArray = self.block_table[:, row, : max(num_blocks.tolist())].copy()
        if len(tables) > 1:
            tables[np.arange(tables.shape[1]) >= num_blocks[:, np.newaxis]] = ABSENT_BLOCK
        return tables

    def lacking_blocks(self, rows: RowArray, ends: IntArray) -> IntArray:
        """[num_groups, num_rows] how many blocks rows lack to compute up to ``ends``."""
        lacks: IntArray = -(-ends // np.int32(self.block_size)) - self.num_blocks[:, rows]
        return np.maximum(lacks, 0)

    def append_blocks(
        self, rows: RowArray, counts: IntArray, block_ids: IntArray, *, group: int = 0
    ) -> tuple[IntArray, IntArray]:
        """Append ``counts[i]`` blocks to one group's table of ``rows[i]``; then call ``set_capacity``.

        Returns:
            The rows and columns of ``block_ids`` in the block tables, for the runner.
        """
        num_blocks = self.num_blocks[group]
        if block_ids.size == rows.size and (counts == 1).all():
            repeated, columns = rows, num_blocks[rows]
        else:
            repeated = np.repeat(rows, counts)
            starts = np.repeat(np.cumsum(counts) - counts, counts)
            columns = num_blocks[repeated] + (np.arange(block_ids.size, dtype=np.int32) - starts.astype(np.int32))
        self.block_table[group][repeated, columns] = block_ids
        num_blocks[rows] += counts
        return repeated.astype(np.int32), columns

    def set_capacity(self, rows: RowArray) -> None:
        """Update the capacity of these rows after blocks were appended to their tables."""
        num_blocks = self.num_blocks[0, rows] if len(self.num_blocks) == 1 else self.num_blocks[:, rows].min(axis=0)
        self.capacity[rows] = num_blocks * np.int32(self.block_size)

    def trim_blocks(self, row: int) -> list[int]:
        """Remove the blocks that a row's known tokens do not need.

        Returns them; the caller must release them.
        """
        num_needed = -(-int(self.num_tokens[row]) // self.block_size)
        surplus: list[int] = []
        for table, num_blocks in zip(self.block_table, self.num_blocks, strict=True):
            if num_blocks[row] > num_needed:
                surplus += table[row, num_needed : num_blocks[row]].tolist()
                num_blocks[row] = num_needed
        if surplus:
            self.capacity[row] = num_needed * self.block_size
        return surplus

    def leave_windows(self, rows: RowArray, ends: IntArray) -> list[int]:
        """Drop the blocks that no position of ``rows[i]`` from ``ends[i] - 1`` on sees.

        Returns:
            The blocks, which the caller must release.
        """
        left: list[int] = []
        for group, window in enumerate(self.groups.windows):
            if window is None:
                continue
            firsts = np.maximum(ends - np.int32(window), 0) // np.int32(self.block_size)
            has_moved = firsts > self.first_blocks[group, rows]
            for row, first in zip(rows[has_moved].tolist(), firsts[has_moved].tolist(), strict=True):
                behind = slice(int(self.first_blocks[group, row]), first)
                left += self.block_table[group, row, behind].tolist()
                self.block_table[group, row, behind] = ABSENT_BLOCK
                self.first_blocks[group, row] = first
        return left

    def check_windows(self, row: int) -> None:
        """Compare what a row holds with what its windows need.

        Raises:
            AssertionError: It holds a block that left a window, or lacks one inside a window.
        """
        for group, table in enumerate(self.block_tables(row)):
            num_absent = first_held_block(table)
            assert num_absent == self.first_blocks[group, row], f"row {row}, group {group}: {num_absent} are absent"
            assert ABSENT_BLOCK not in table[num_absent:], f"row {row}, group {group} has a gap in its table"
            assert num_absent <= self.groups.first_block(group, int(self.num_computed[row])), (
                f"row {row}, group {group} lacks a block of its window"
            )

    def blocks_ending_at(self, rows: RowArray, ends: IntArray) -> tuple[list[int], list[list[int]], bytes]:
        """The block of each row and group that ends at position ``ends[i]``.

        Returns:
            Its index in the row's tables, its ids, [num_groups][num_rows], and the token ids of all rows' blocks one
            after the other.
        """
        columns = ends // np.int32(self.block_size) - 1
        starts = rows * self._token_stride + (ends - np.int32(self.block_size))
        token_ids = self._flat_token_ids[starts[:, None] + self._block_offsets]
        block_ids = [table[rows, columns].tolist() for table in self.block_table]
        return columns.tolist(), block_ids, token_ids.tobytes()

    def wide_ends(self, rows: RowArray, token_ids: IntArray) -> set[int]:
        """Indices into ``rows`` of requests with more stop ids than columns whose new token is a stop id."""
        return {
            index
            for index, row in enumerate(rows.tolist())
            if row in self.wide_rows
            and self.num_tokens[row] >= self.first_stop[row]
            and int(token_ids[index]) in self._running[row].stop_ids
        }

    def _forget_order(self) -> None:
        self._order = self._order_int32 = self._requests = None

    def _set_stop_ids(self, row: int, stop_ids: frozenset[int]) -> None:
        self.stop_ids[:, row] = _NO_TOKEN
        if len(stop_ids) > STOP_COLUMNS:
            self.wide_rows.add(row)
        elif stop_ids:
            self.stop_ids[: len(stop_ids), row] = list(stop_ids)
            self.num_stop_columns = max(self.num_stop_columns, len(stop_ids))
