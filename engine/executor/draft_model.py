"""Draft tokens from a smaller model with the same vocabulary, which runs beside the main model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from engine.contract.messages import SamplingParams
from engine.contract.step import EMPTY_INTS, IntArray, NewRow, PendingStep, SchedulerOutput
from engine.drafting.prompt_lookup import NO_DRAFT
from engine.drafting.proposer import Draft, DraftContext
from engine.executor.draft_rows import DraftRow, DraftRows, table_of

CATCH_UP_TOKENS: Final = 256
"""Most tokens, over all requests, that the draft model catches up with in one step of the main model. So no request's
next token waits for another request's whole prompt."""


FEW_TOKENS: Final = 16
"""A request with at most so many new tokens is computed in full; the limit above applies to the others."""


class DraftRunner(Protocol):
    """What computes the draft model: a model runner."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """See ``StepRunner``."""

    def write(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Overwrite tokens of rows."""


@dataclass(slots=True, eq=False)
class _Job:
    """The work for one request: compute known tokens from ``start`` on, then draft as many tokens as are wanted."""

    context: DraftContext
    row: DraftRow
    start: int
    num_tokens: int
    drafts: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of known tokens of the request."""
        return int(self.context.token_ids.size)

    @property
    def is_complete(self) -> bool:
        """True if this computes all known tokens, so that drafts can follow."""
        return self.start + self.num_tokens == self.length


@dataclass(slots=True)
class _Changes:
    """Changes of rows that the runner must hear of before the next call."""

    new_rows: list[NewRow] = field(default_factory=list)
    appended: list[tuple[int, int, int, int]] = field(default_factory=list)
    written: list[tuple[IntArray, IntArray, IntArray]] = field(default_factory=list)


class DraftModel:
    """Implements ``Proposer`` with the steps of another model: one step for the new tokens of all requests, then one
    step for each further draft token, over all requests at once.

    It has its own rows and KV cache (``DraftRows``), which depend only on the requests' tokens. Tokens that it has not
    seen yet, mostly prompts, it computes in chunks; it proposes nothing for a request until it has caught up. So a
    hand-over, a move or an eviction costs time but never correctness. A preempted request keeps its row.

    Drafts are sampled as the main model samples: with the request's own parameters and the same (seed, position). Two
    models with similar distributions then nearly always draw the same token, even at high temperatures. A greedy draft
    would be right only as often as the likeliest token is drawn. Grammars mask drafts as they mask tokens.
    """

    def __init__(self, runner: DraftRunner, rows: DraftRows, *, max_model_len: int) -> None:
        self._runner: DraftRunner | None = runner
        self._max_model_len = max_model_len
        self.rows = rows

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See ``Proposer``."""
        changes = _Changes()
        jobs = self._plan(contexts, changes)
        if jobs:
            self._compute(jobs, changes)
        drafts = {job.context.request_id: job.drafts for job in jobs}
        return [
            Draft(np.array(found, np.int32)) if (found := drafts.get(context.request_id)) else NO_DRAFT
            for context in contexts
        ]

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the rows and blocks of requests that have ended."""
        self.rows.forget(request_ids)

    def close(self) -> None:
        """Free the weights and the KV cache. Idempotent."""
        self._runner = None

    def _plan(self, contexts: Sequence[DraftContext], changes: _Changes) -> list[_Job]:
        """The jobs of this call, with the changes of rows noted in ``changes``. Requests with fewest missing tokens
        come first.
        """
        keep = {context.request_id for context in contexts}
        jobs: list[_Job] = []
        for context in contexts:
            row = self._row_of(context, keep, changes)
            if row is not None:
                num_missing = int(context.token_ids.size) - row.num_computed
                jobs.append(_Job(context, row, row.num_computed, num_missing))
        budget = CATCH_UP_TOKENS
        for job in sorted(jobs, key=lambda job: job.num_tokens):
            if job.num_tokens > FEW_TOKENS:
                job.num_tokens = min(job.num_tokens, budget)
                budget -= job.num_tokens
            job.row.num_computed = job.start + job.num_tokens
        return [job for job in jobs if job.num_tokens]

    def _row_of(self, context: DraftContext, keep: set[str], changes: _Changes) -> DraftRow | None:
        """The request's row, with blocks for its tokens and drafts; None if there is no room."""
        length = int(context.token_ids.size)
        num_tokens = length + context.max_tokens
        if num_tokens > self._max_model_len:
            return None
        row = self.rows.find(context.request_id)
        if row is None:
            row = self.rows.admit(context.request_id, num_tokens=num_tokens, keep=keep)
            if row is not None:
                row.take_in(context.token_ids)
                changes.new_rows.append(_new_row(row, context))
            return row
        new = self.rows.extend(row, num_tokens=num_tokens, keep=keep)
        if new is None:
            return None
        for group, block_ids in enumerate(row.block_ids):
            changes.appended.extend((row.row, column, block_ids[column], group) for column in new)
        num_expected = row.num_known + len(row.drafts)
        num_standing = row.take_in(context.token_ids)
        if num_standing < num_expected and context.sampling is not None and context.sampling.grammar is not None:
            changes.new_rows.append(_new_row(row, context))  # its grammar matcher has followed a wrong draft
        elif num_standing < length:
            positions = np.arange(num_standing, length, dtype=np.int32)
            changes.written.append((np.full_like(positions, row.row), positions, context.token_ids[num_standing:]))
        return row

    def _compute(self, jobs: list[_Job], changes: _Changes) -> None:
        """Compute the missing known tokens, then sample drafts behind them."""
        assert self._runner is not None, "the draft model is closed"
        self._tell(changes)
        ready = [job for job in jobs if job.is_complete]
        step = SchedulerOutput(
            step_id=0,
            rows=_ints([job.row.row for job in jobs]),
            first_positions=_ints([job.start for job in jobs]),
            num_scheduled_tokens=_ints([job.num_tokens for job in jobs]),
            num_samples=_ints([int(job.is_complete) for job in jobs]),
        )
        while ready:
            for job, token_id in zip(ready, self._runner.launch(step).result().sampled_token_ids.tolist(), strict=True):
                job.drafts.append(token_id)
            ready = [job for job in ready if len(job.drafts) < job.context.max_tokens]
            ones = np.ones(len(ready), np.int32)
            step = SchedulerOutput(
                step_id=0,
                rows=_ints([job.row.row for job in ready]),
                first_positions=_ints([job.length + len(job.drafts) - 1 for job in ready]),
                num_scheduled_tokens=ones,
                num_samples=ones,
                is_decode=True,
            )
        if not any(job.is_complete for job in jobs):
            self._runner.launch(step).result()
        for job in jobs:
            job.row.drafts = job.drafts

    def _tell(self, changes: _Changes) -> None:
        """Apply the noted changes to the runner's rows."""
        assert self._runner is not None
        if changes.new_rows or changes.appended:
            rows, columns, block_ids, groups = (
                zip(*changes.appended, strict=True) if changes.appended else ((), (), (), ())
            )
            told = SchedulerOutput(
                step_id=0,
                rows=EMPTY_INTS,
                first_positions=EMPTY_INTS,
                num_scheduled_tokens=EMPTY_INTS,
                num_samples=EMPTY_INTS,
                new_rows=tuple(changes.new_rows),
                append_rows=_ints(rows),
                append_columns=_ints(columns),
                append_block_ids=_ints(block_ids),
                append_groups=_ints(groups),
            )
            self._runner.launch(told)
        if changes.written:
            rows_, positions, token_ids = (np.concatenate(parts) for parts in zip(*changes.written, strict=True))
            self._runner.write(rows_, positions, token_ids)


def _new_row(row: DraftRow, context: DraftContext) -> NewRow:
    sampling = context.sampling or SamplingParams(max_tokens=context.max_tokens)
    return NewRow(
        row=row.row,
        request_id=context.request_id,
        token_ids=context.token_ids,
        num_prompt_tokens=context.num_prompt_tokens,
        block_ids=table_of(row),
        sampling=replace(sampling, num_logprobs=None, num_prompt_logprobs=None),
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, np.int32)
