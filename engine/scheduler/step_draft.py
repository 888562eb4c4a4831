"""The step that is being put together; once complete, it becomes a ``SchedulerOutput``. Free of torch.

``Batch`` and ``StepInFlight`` have slots, and every step makes them by position: with the caches that a model's step
leaves behind, a named tuple made with names takes twice as long. The order of their fields matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from engine.contract.step import EMPTY_INTS, IntArray, NewRow, SchedulerOutput
from engine.scheduler.live_requests import NOTHING_TO_REPORT, Reports
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowArray, RowTable
from kv_transfer.connector import ConnectorOrders

NO_ROWS: RowArray = np.empty(0, np.intp)

NO_LIMIT: Final = int(np.iinfo(np.int32).max)
"""More tokens than any step computes."""


@dataclass(slots=True, eq=False)
class Batch:
    """The rows that compute in a step, as aligned arrays.

    ``rows_int32`` are the same rows in the type that the runner gets. ``ends`` are the positions (exclusive) up to
    which each row computes known tokens; draft tokens may follow. ``epochs`` tell later whether a row still has the
    same request. ``draft_token_ids`` are the drafts of all rows, ``num_samples - 1`` of each row that samples.
    """

    rows: RowArray
    rows_int32: IntArray
    first_positions: IntArray
    num_scheduled_tokens: IntArray
    ends: IntArray
    epochs: IntArray
    num_samples: IntArray
    draft_token_ids: IntArray
    num_tokens: int
    total_samples: int

    @property
    def is_decode(self) -> bool:
        """True when each row computes one token and samples the next."""
        return self.num_tokens == self.total_samples == self.rows.size

    @property
    def decodes_often(self) -> bool:
        """True when its rows make several decode steps."""
        return self.total_samples > self.rows.size and not self.draft_token_ids.size

    @property
    def has_prompts(self) -> bool:
        """True when some row computes several known tokens."""
        return self.num_tokens > self.total_samples and self.num_tokens - self.draft_token_ids.size > self.rows.size


@dataclass(slots=True, eq=False)
class StepInFlight:
    """What ``update`` needs to know of a step as it was when scheduled.

    num_releases: the row table's count.
    since_s: from when on the engine has worked for it: where it did not rest, since the step before returned.
    is_alone: no other step was in flight.
    """

    step_id: int
    batch: Batch
    num_releases: int
    scheduled_s: float
    since_s: float
    is_alone: bool


class Appended(NamedTuple):
    """Blocks given to running rows, all of one KV cache group."""

    rows: IntArray
    columns: IntArray
    block_ids: IntArray
    group: int


class ForkedRow(NamedTuple):
    """A row in which a beam goes on; ``is_fresh``: the runner does not know the row yet.

    ``copies`` are pairs of a block to copy and the block that it is copied to.
    """

    row: int
    epoch: int
    is_fresh: bool
    copies: tuple[tuple[int, int], ...] = ()


class StartedRow(NamedTuple):
    """A row whose request starts in this step."""

    row: int
    first_position: int
    num_tokens: int
    num_samples: int
    epoch: int


@dataclass(slots=True, kw_only=True)
class StepDraft:
    """The decisions made so far for one step. Made in each step, so it begins without a single list.

    is_under_way: the step computes already; only hand-overs may begin, early ones too, in room that is free anyway.
    is_blocked: no waiting request is admitted in this step.
    has_preempted: a request was preempted, so the step must be sent even if it computes nothing.
    prefill_share: the most tokens for a single prefill; 0: no limit.
    prompt_budget: the most tokens for all rows with more than one token to compute, so that decoding rows do not wait
        too long for theirs.
    favoured: the request that is admitted first, because room was made or is reserved for it.
    leaving_rows: while victims of a preemption are chosen: rows that would be given up.
    num_decode_steps: how many decode steps the running rows make in this step.
    """

    token_budget: int
    is_under_way: bool = False
    is_blocked: bool = False
    has_preempted: bool = False
    prefill_share: int = 0
    prompt_budget: int = NO_LIMIT
    favoured: Request | None = None
    leaving_rows: tuple[int, ...] = ()
    num_decode_steps: int = 1
    running: Batch | None = None
    started: tuple[StartedRow, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    appended: tuple[Appended, ...] = ()
    forked: tuple[ForkedRow, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def append(self, rows: IntArray, columns: IntArray, block_ids: IntArray, *, group: int) -> None:
        """Record blocks given to running rows, for the runner."""
        self.appended += (Appended(rows, columns, block_ids, group),)

    def has_tokens(self, num_tokens: int, *, is_chunked: bool) -> bool:
        """True when there is budget for a request that must compute ``num_tokens``: for all unless ``is_chunked``."""
        fits = is_chunked or num_tokens <= self.token_budget
        return self.token_budget > 0 and fits and (num_tokens <= 1 or self.prompt_budget > 0)

    def start(self, table: RowTable, request: Request, num_tokens: int) -> None:
        """Add a request that just got its row, with ``num_tokens`` positions to compute."""
        row = request.row
        assert row is not None
        first = int(table.num_computed[row])
        num_samples = int(first + num_tokens == int(table.num_expected[row]))
        table.num_computed[row] += num_tokens
        table.num_expected[row] += num_samples
        self.token_budget -= num_tokens
        self.prompt_budget -= num_tokens if num_tokens > 1 else 0
        self.started += (StartedRow(row, first, num_tokens, num_samples, int(table.epoch[row])),)
        self.new_rows += (
            NewRow(
                row=row,
                request_id=request.request_id,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=table.padded_block_tables(row),
                sampling=request.message.sampling,
                num_prompt_logprobs=request.num_prompt_logprobs,
            ),
        )

    def batch(self) -> Batch:
        """All rows of the step: first those that ran before, then those that start."""
        if not self.started:
            return self.running or EMPTY_BATCH
        before = self.running or EMPTY_BATCH
        num_before, num_tokens, total_samples = before.rows.size, before.num_tokens, before.total_samples
        lines = np.empty((6, num_before + len(self.started)), np.int32)
        lines[:, :num_before] = (
            before.rows_int32,
            before.first_positions,
            before.num_scheduled_tokens,
            before.ends,
            before.epochs,
            before.num_samples,
        )
        for at, (row, first, count, num_samples, epoch) in enumerate(self.started, num_before):
            lines[:, at] = row, first, count, first + count, epoch, num_samples
            num_tokens += count
            total_samples += num_samples
        rows_int32, first_positions, num_scheduled_tokens, ends, epochs, samples = lines
        return Batch(
            rows=rows_int32.astype(np.intp),
            rows_int32=rows_int32,
            first_positions=first_positions,
            num_scheduled_tokens=num_scheduled_tokens,
            ends=ends,
            epochs=epochs,
            num_samples=samples,
            draft_token_ids=before.draft_token_ids,
            num_tokens=num_tokens,
            total_samples=total_samples,
        )

    def output(
        self,
        batch: Batch,
        *,
        step_id: int,
        reports: Reports,
        connector_orders: ConnectorOrders,
        num_used_blocks: int,
    ) -> SchedulerOutput:
        """The message to the runner."""
        output = SchedulerOutput(
            step_id,
            batch.rows_int32,
            batch.first_positions,
            batch.num_scheduled_tokens,
            batch.num_samples,
            batch.draft_token_ids,
            batch.is_decode,
            self.num_decode_steps,
            connector_orders,
            num_used_blocks,
        )
        if reports is NOTHING_TO_REPORT and not (self.new_rows or self.appended or self.copies):
            return output  # as in most steps
        append_rows, append_columns, append_block_ids, append_groups = (
            self._joined() if self.appended else NOTHING_APPENDED
        )
        copies = np.array(self.copies, np.int32).reshape(-1, 2).T if self.copies else (EMPTY_INTS, EMPTY_INTS)
        return output._replace(
            released_rows=reports.released_rows,
            new_rows=self.new_rows,
            append_rows=append_rows,
            append_columns=append_columns,
            append_block_ids=append_block_ids,
            append_groups=append_groups,
            copy_sources=copies[0],
            copy_targets=copies[1],
            finished_request_ids=reports.finished_request_ids,
        )

    def _joined(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Rows, columns, ids and groups of all appended blocks; no groups when all are in the first."""
        parts = self.appended
        if len(parts) == 1 and parts[0].group == 0:
            return parts[0].rows, parts[0].columns, parts[0].block_ids, EMPTY_INTS
        return (
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.block_ids for part in parts]),
            np.concatenate([np.full(part.rows.size, part.group, np.int32) for part in parts]),
        )


NOTHING_APPENDED: Final = (EMPTY_INTS, EMPTY_INTS, EMPTY_INTS, EMPTY_INTS)

EMPTY_BATCH = Batch(
    rows=NO_ROWS,
    rows_int32=EMPTY_INTS,
    first_positions=EMPTY_INTS,
    num_scheduled_tokens=EMPTY_INTS,
    ends=EMPTY_INTS,
    epochs=EMPTY_INTS,
    num_samples=EMPTY_INTS,
    draft_token_ids=EMPTY_INTS,
    num_tokens=0,
    total_samples=0,
)
