"""How many prompt tokens a step may compute, beside requests that were promised their next token soon and beside other
prompts. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from engine.contract.config import SchedulerConfig
from engine.contract.step_time import StepTimeModel, StepWork
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.step_time_fit import StepTimer
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import NEVER, RowTable
from engine.scheduler.step_draft import StepDraft

FIRST_PROMPT_SHARE: Final = 0.25
"""Prompts get this share of what a step takes without them, whatever was promised: else they might never end. It holds
until the engine leans to a role, which has its own."""

URGENT_GAPS: Final = 2.0
"""A step may take so many gaps for a prompt that keeps its promise by that, and not otherwise."""

CALM_SHARE: Final = 0.7
"""Of the promised gap, what a step is aimed at while prompts have time: streams run more evenly, and nobody is late."""

CALM_TIME_SHARE: Final = 0.4
"""Of the time that the first prompt has left, in which all that wait would end at that pace: others may come."""

ERRORS_KEPT_CLEAR: Final = 5.0
"""Steps are aimed so many mean errors of predictions below the gap. Nine of ten gaps of a request are to keep it, and
short answers have few: with 3 a fifth of those beside long prompts did not (simulated, two workers on two cores)."""

MAX_BASE_SHARE: Final = 0.1
"""Prompts that share a step are worth waiting for each other until what a step costs anyway is so little of it."""

REMEMBERED_S: Final = 1.0
"""So long a gap holds after the last request that was promised it: where streams are sent, the next ones soon come."""


class Head(NamedTuple):
    """The prompt that is served first: how many tokens are left of it, behind how many, and whose it is; and how many
    are left of all prompts."""

    num_left: int
    num_computed: int
    request: Request
    num_waiting: int


class PromptBudget:
    """Answers one question: how many prompt tokens may this step compute?

    As many as keep the step, by its predicted time and the error of late predictions, under the tightest gap that a
    request was promised which decodes, is about to, or did a moment ago. At least a block of them and
    ``prompt_share``, also where the decoding requests alone take longer. Only ``CALM_SHARE`` of the gap while the first
    prompt was promised its first token and all that wait have time enough. More than the gap, up to ``URGENT_GAPS``,
    while the first prompt would miss its own promise at this pace and would keep it at that one. Where nobody decodes,
    the first prompt whole, and others beside it within the gap that it was promised, or, where it was promised none,
    until ``MAX_BASE_SHARE`` is reached: it does not wait for theirs. No limit while nothing is predicted, or where
    somebody decodes and nobody was promised a gap.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        live_requests: LiveRequests,
        remote: RemoteKV,
        timer: StepTimer,
        clock: Callable[[], float],
    ) -> None:
        self._cap = config.long_prefill_token_threshold
        self._table = table
        self._live_requests = live_requests
        self._remote = remote
        self._timer = timer
        self._clock = clock
        self.prompt_share = FIRST_PROMPT_SHARE
        """Of what a step takes without prompts, what it takes for them at least; the role has it that is leant to."""
        self._last_gap_us, self._holds_until_s = NEVER, 0.0

    def prepare(self, draft: StepDraft) -> None:
        """Limit the prompt tokens of a step before it is put together."""
        model, table = self._timer.model_now, self._table
        if not model.num_steps:
            return
        num_rows, num_context, gap_us, first = row_passes.decoding(table.columns, table.order_int32, self._cap)
        gap_us = min(int(gap_us), self._gap_of_coming())
        if num_rows and gap_us == NEVER and not self._holds_until_s:  # nobody was ever promised one
            return
        if (head := self._head(first)) is None:
            return
        gap_us = self._remembered(gap_us)
        decode_s = model.seconds(StepWork(num_rows=num_rows, num_context_tokens=num_context))
        if gap_us != NEVER:
            num_tokens = self._num_tokens(model, decode_s, gap_us / 1e6, head)
        elif not num_rows:
            num_tokens = max(self._tokens_beside_none(model, decode_s, head), head.num_left)
        else:
            return
        if num_tokens < draft.token_budget - num_rows:
            draft.prompt_budget = max(int(num_tokens), table.block_size)
        draft.prompt_budget = min(draft.prompt_budget, draft.token_budget - num_rows)

    def _remembered(self, gap_us: int) -> int:
        """The gap that holds now, which is the last one for a while when nobody needs one any more."""
        now_s = self._clock()
        if gap_us != NEVER:
            self._last_gap_us, self._holds_until_s = gap_us, now_s + REMEMBERED_S
        return self._last_gap_us if now_s < self._holds_until_s else NEVER

    def _gap_of_coming(self) -> int:
        """The tightest gap of those that will decode as soon as their KV is here."""
        waiting = self._live_requests.waiting.peek()
        gap_us = NEVER if waiting is None or waiting.kv_transfer is None else waiting.promised_gap
        return min(gap_us, self._remote.tightest_gap)

    def _head(self, first: int) -> Head | None:
        """The first running prompt, else the first that waits; None when there is no prompt."""
        table, queued = self._table, self._live_requests.queued_prefill_tokens
        if first < table.order.size:
            row = int(table.order[first])
            num_computed = int(table.num_computed[row])
            rows = table.order[first:]
            num_started = int((table.num_expected[rows] - table.num_computed[rows]).sum())
            num_left = int(table.num_expected[row]) - num_computed
            return Head(num_left, num_computed, table.owner(row), num_started + queued)
        request = self._live_requests.ready.peek() or self._live_requests.waiting.peek()
        if request is None:
            return None
        num_computed = request.num_computed_tokens
        return Head(request.num_tokens - num_computed, num_computed, request, queued)

    def _num_tokens(self, model: StepTimeModel, decode_s: float, gap_s: float, head: Head) -> float:
        within_gap = self._tokens_within(model, gap_s, decode_s, head)
        left_s = self._left_s(head.request)
        if left_s is None:
            return within_gap
        calm, calm_s = self._tokens_within(model, CALM_SHARE * gap_s, decode_s, head), CALM_SHARE * gap_s
        if calm * CALM_TIME_SHARE * left_s / calm_s >= head.num_waiting:
            return calm
        urgent = self._tokens_within(model, URGENT_GAPS * gap_s, decode_s, head)
        if within_gap * max(left_s / gap_s, 1.0) >= head.num_left:
            return within_gap
        is_kept = urgent * max(left_s / (URGENT_GAPS * gap_s), 1.0) >= head.num_left
        return urgent if is_kept else within_gap

    def _tokens_beside_none(self, model: StepTimeModel, base_s: float, head: Head) -> float:
        if (own_us := head.request.promised_gap) != NEVER:
            return self._tokens_within(model, own_us / 1e6, base_s, head)
        return model.prompt_tokens_within(base_s / MAX_BASE_SHARE - base_s, after=head.num_computed)

    def _tokens_within(self, model: StepTimeModel, step_s: float, decode_s: float, head: Head) -> float:
        clear_s = step_s / (1.0 + ERRORS_KEPT_CLEAR * min(model.error, 0.5))
        room_s = max(clear_s - decode_s, self.prompt_share * decode_s)
        return model.prompt_tokens_within(room_s, after=head.num_computed)

    def _left_s(self, request: Request) -> float | None:
        """How long a request's first token may still take; None where that was not promised, or it is too late."""
        ttft_ms = request.message.promise.ttft_ms
        if ttft_ms is None or request.num_tokens > request.num_prompt_tokens:
            return None
        left_s = request.queued_at_s + ttft_ms / 1e3 - self._clock()
        return left_s if left_s > 0.0 else None
