"""Admission gates, reasons to keep a request waiting: too many partial prefills, or a batch that should form first."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import numpy as np

from engine.contract.config import SchedulerConfig
from engine.contract.step import IntArray
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.step_draft import StepDraft


class Verdict(Enum):
    """A gate's answer about a request."""

    ADMITTED = auto()
    PASSED_OVER = auto()
    BARRIER = auto()


class AdmissionGate(Protocol):
    """Limits what may start in a step, such as partial prefills, or requests that need a LoRA adapter's room."""

    def ask(self, request: Request, draft: StepDraft, num_tokens: int, /) -> Verdict:
        """ADMITTED: this gate has no objection. PASSED_OVER: not this request. BARRIER: no request from here on.

        ``num_tokens`` of the request would be computed here: those that are neither cached nor loaded.
        """


class PartialPrefills:
    """Shares a step's token budget evenly among prefills, and limits how many may be partial at once.

    A prefill is partial while tokens of it remain after the step. With prefix caching a share is whole blocks, because
    only whole blocks can be published. A prompt of more than ``long_prefill_token_threshold`` tokens is long.
    """

    def __init__(
        self, config: SchedulerConfig, *, table: RowTable, live_requests: LiveRequests, share_in_blocks: bool
    ) -> None:
        self._max_partial = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills or config.max_num_partial_prefills
        self._long_tokens = config.long_prefill_token_threshold
        self._table = table
        self._live_requests = live_requests
        self._granularity = table.block_size if share_in_blocks else 1

    def prepare(self, draft: StepDraft) -> None:
        """Compute the share of a prefill in this step, before the step is put together."""
        rows = self._table.order_without(draft.leaving_rows)
        num_prefilling = int((self._table.num_expected[rows] - self._table.num_computed[rows] > 1).sum())
        has_free_row = rows.size < self._table.max_num_seqs
        num_sharing = num_prefilling + (self._live_requests.num_startable if has_free_row else 0)
        num_sharing = max(min(num_sharing, self._max_partial), 1)
        num_tokens = min(draft.token_budget - rows.size + num_prefilling, draft.prompt_budget)
        num_units = num_tokens // num_sharing // self._granularity
        draft.prefill_share = max(num_units, 1) * self._granularity

    def share(self, need: IntArray, draft: StepDraft) -> IntArray:
        """Tokens for each running request: decodes in full, then prefills evenly, those about to finish first."""
        is_prefill = need > 1
        grants: IntArray = np.where(is_prefill, 0, need).astype(np.int32)
        budget = min(draft.token_budget - int(grants.sum()), draft.prompt_budget)
        prefills = np.flatnonzero(is_prefill)
        for index in prefills[np.argsort(need[prefills], kind="stable")].tolist():
            grant = min(int(need[index]), draft.prefill_share, max(budget, 0))
            grants[index] = grant
            budget -= grant
        return grants

    def ask(self, request: Request, draft: StepDraft, num_tokens: int, /) -> Verdict:
        """Admit prompts that finish within their share; of the others only as many as may be partial at once.

        A single token cannot be computed in part: a request that loads all its other tokens is no prefill.
        """
        if num_tokens <= max(min(draft.prefill_share, draft.token_budget, draft.prompt_budget), 1):
            return Verdict.ADMITTED
        rows = self._table.order_without(draft.leaving_rows)
        partial = rows[self._table.num_computed[rows] < self._table.num_tokens[rows]]
        if partial.size >= self._max_partial:
            return Verdict.PASSED_OVER
        num_long = int((self._table.num_tokens[partial] > self._long_tokens).sum())
        is_long = request.num_tokens > self._long_tokens
        return Verdict.PASSED_OVER if is_long and num_long >= self._max_long else Verdict.ADMITTED


class PromptDelay:
    """Holds new prompts back so that a batch can form; not preempted requests, and none while nothing runs."""

    def __init__(self, delay_factor: float, *, table: RowTable, clock: Callable[[], float]) -> None:
        self._delay_factor = delay_factor
        self._table = table
        self._clock = clock
        self._prompt_step: tuple[int, float] | None = None
        self._last_prompt_latency_s = 0.0

    def ask(self, request: Request, draft: StepDraft, _num_tokens: int, /) -> Verdict:
        """BARRIER until the request has waited long enough."""
        if len(self._table) == len(draft.leaving_rows) or request.num_preemptions:
            return Verdict.ADMITTED
        waited_s = self._clock() - request.queued_at_s
        is_over = waited_s >= self._delay_factor * self._last_prompt_latency_s
        return Verdict.ADMITTED if is_over else Verdict.BARRIER

    def step_scheduled(self, step_id: int, *, has_prompts: bool) -> None:
        """Start timing a step that computes prompts."""
        if has_prompts and self._prompt_step is None:
            self._prompt_step = (step_id, self._clock())

    def step_returned(self, step_id: int) -> None:
        """Note the duration of a step with prompts."""
        if self._prompt_step is not None and self._prompt_step[0] <= step_id:
            self._last_prompt_latency_s = self._clock() - self._prompt_step[1]
            self._prompt_step = None
