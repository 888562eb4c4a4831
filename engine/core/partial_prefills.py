"""Limits on concurrent partial prefills, so that short prompts overtake long ones (O3). Free of torch."""

from __future__ import annotations

import numpy as np

from engine.config import SchedulerConfig
from engine.core.admission_gate import Verdict
from engine.core.request import Request
from engine.core.request_book import RequestBook
from engine.core.row_table import RowTable
from engine.core.step_draft import StepDraft
from engine.step import IntArray


class PartialPrefills:
    """Shares a step's budget evenly among the prefills, and limits how many are under way at once.

    A prefill is partial while tokens of it remain after the step. The share is in whole blocks when prefix caching is
    on, because only whole blocks can be published. A prompt is long beyond ``long_prefill_token_threshold`` tokens.
    """

    def __init__(self, config: SchedulerConfig, *, table: RowTable, book: RequestBook, share_in_blocks: bool) -> None:
        self._max_partial = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills or config.max_num_partial_prefills
        self._long_tokens = config.long_prefill_token_threshold
        self._table = table
        self._book = book
        self._granularity = table.block_size if share_in_blocks else 1

    def prepare(self, draft: StepDraft) -> None:
        """Work out the share of this step, before the step is put together."""
        rows = self._table.order
        num_prefilling = int((self._table.num_expected[rows] - self._table.num_computed[rows] > 1).sum())
        num_sharing = num_prefilling + (self._book.num_waiting if self._table.num_free_rows else 0)
        num_sharing = max(min(num_sharing, self._max_partial), 1)
        num_units = (draft.token_budget - rows.size + num_prefilling) // num_sharing // self._granularity
        draft.prefill_share = max(num_units, 1) * self._granularity

    def share(self, need: IntArray, draft: StepDraft) -> IntArray:
        """Tokens for each running request: decodes whole, prefills evenly, those about to finish first."""
        is_prefill = need > 1
        grants: IntArray = np.where(is_prefill, 0, need).astype(np.int32)
        budget = draft.token_budget - int(grants.sum())
        prefills = np.flatnonzero(is_prefill)
        for index in prefills[np.argsort(need[prefills], kind="stable")].tolist():
            grant = min(int(need[index]), draft.prefill_share, max(budget, 0))
            grants[index] = grant
            budget -= grant
        return grants

    def ask(self, request: Request, draft: StepDraft, /) -> Verdict:
        """Let in what finishes within its share; else only as many as may be partial at once."""
        if request.num_tokens <= min(draft.prefill_share, draft.token_budget):
            return Verdict.ADMITTED
        rows = self._table.order
        partial = rows[self._table.num_computed[rows] < self._table.num_tokens[rows]]
        if partial.size >= self._max_partial:
            return Verdict.PASSED_OVER
        num_long = int((self._table.num_tokens[partial] > self._long_tokens).sum())
        is_long = request.num_tokens > self._long_tokens
        return Verdict.PASSED_OVER if is_long and num_long >= self._max_long else Verdict.ADMITTED
