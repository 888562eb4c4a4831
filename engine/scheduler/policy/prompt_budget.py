"""How many prompt tokens a step may compute, alongside requests with a promised inter-token gap and other prompts.
Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, islice
from typing import Final, NamedTuple

from engine.contract.config import SchedulerConfig
from engine.contract.step_time import StepTimeModel, StepWork, aim_share, calm_room_s, prompt_reads
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.lost_promises import LostPromises, Pace, first_token_left_s
from engine.scheduler.policy.step_timer import StepTimer
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.remote.prefix_search import PrefixSearch
from engine.scheduler.requests import row_passes
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import NEVER, RowTable
from engine.scheduler.step_draft import StepDraft

FIRST_PROMPT_SHARE: Final = 0.25
"""The least time for prompts that have none to spare, as a share of the step's time without them, whatever was
promised: otherwise they might never finish. It holds until the engine leans to a role, which has a share of its own.
"""

MAX_BASE_SHARE: Final = 0.1
"""Prompts share a step until its fixed cost is only this share of its time; more would gain too little."""

LOOKED_AT: Final = 8
"""At most so many running prompts, and so many waiting ones, are asked how much time they have."""

REMEMBERED_S: Final = 1.0
"""How long a gap holds after the last request with that promise: where there are streams, more come soon."""


MOST_GROWTH: Final = 2.0
UNSEEN_BLOCKS: Final = 4
"""Beside streams with a promised gap, a step takes at most so many times as many prompt tokens as the largest step so
far, or so many blocks: a new worker has computed prompts of a few lengths, and what much longer ones take is a guess.
What they read, behind a cached beginning for example, is not looked at.
"""


class Head(NamedTuple):
    """The prompt served first: its tokens left and computed, its request, and the tokens left of all prompts."""

    num_left: int
    num_computed: int
    request: Request
    num_waiting: int


class Decoding(NamedTuple):
    """The rows that need at most one token: how many, the tokens that they read, and their tightest promised gap.

    first_other: index of the first other running row.
    """

    num_rows: int
    num_context_tokens: int
    gap_us: int
    first_other: int


class PromptBudget:
    """Answers one question: how many prompt tokens may this step compute?

    The limit keeps the step's predicted time, with a margin for prediction errors, within the tightest promised gap.
    Gaps count of requests that decode, that are about to, or that did a moment ago. The rules in detail:

    - At least one block is computed, and ``prompt_share`` is used, even where decoding alone takes longer than the gap.
    - While the first prompt has a TTFT promise and all waiting prompts have enough time, steps are shorter, whatever
      the engine leans to: see ``calm_room_s``.
    - Of a new worker's steps none is much larger than those before it: see ``MOST_GROWTH``.
    - Where no request decodes, the first prompt is computed whole. Others may join it within its own promised gap or,
      if it has none, until ``MAX_BASE_SHARE`` is reached, so that it does not wait for theirs.
    - There is no limit before steps can be predicted, or where requests decode and none was promised a gap.

    Before it answers, waiting prompts whose promise is lost at this pace are deferred.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        live_requests: LiveRequests,
        remote: RemoteKV,
        search: PrefixSearch,
        timer: StepTimer,
        clock: Callable[[], float],
    ) -> None:
        self._cap = config.long_prefill_token_threshold
        self._table = table
        self._live_requests = live_requests
        self._remote = remote
        self._timer = timer
        self._clock = clock
        self._lost_promises = LostPromises(live_requests, search=search, clock=clock)
        self.prompt_share = FIRST_PROMPT_SHARE
        """The least share for prompts of a step's time without them; the role that the engine leans to sets it."""
        self._last_gap_us, self._holds_until_s = NEVER, 0.0
        self._calm_head, self._calm_s = -1, 0.0
        self._decoding_spans = -1
        """The table's ``num_spans`` when all rows were found to decode; without a new span they still do."""

    def prepare(self, draft: StepDraft) -> None:
        """Limit the prompt tokens of a step, before it is put together."""
        table, live_requests = self._table, self._live_requests
        all_run = len(live_requests.live) == table.num_requests
        has_promises = live_requests.num_promised or self._holds_until_s
        if self._decoding_spans == table.num_spans and (all_run or (table.num_requests and not has_promises)):
            return  # all rows still decode, and no prompt waits, or no gap was promised
        rows = table.order_int32
        decoding = Decoding(*row_passes.decoding(table.columns, rows, self._cap))
        if decoding.first_other == rows.size:
            self._decoding_spans = table.num_spans
            if all_run:
                return
        if (has_promises or not decoding.num_rows) and (model := self._timer.model_now).num_steps:
            self._limit(draft, model, decoding)

    def _limit(self, draft: StepDraft, model: StepTimeModel, decoding: Decoding) -> None:
        num_rows, first = decoding.num_rows, decoding.first_other
        gap_us = min(decoding.gap_us, self._gap_of_coming())
        decode_s = model.seconds(StepWork(num_rows=num_rows, num_context_tokens=decoding.num_context_tokens))
        if self._lost_promises.may_be_any:
            pace = self._pace(model, decode_s, gap_us if num_rows else NEVER)
            self._lost_promises.defer(pace, num_ahead=self._num_started(first))
        if num_rows and gap_us == NEVER and not self._holds_until_s:  # no gap was ever promised
            return
        if (head := self._head(first)) is None:
            return
        gap_us = self._remembered(gap_us)
        if gap_us != NEVER:
            room_s = self._room_s(model, gap_us / 1e6, decode_s)
            if num_rows:
                room_s = min(room_s, self._calm_room_s(model, decode_s, gap_us / 1e6, head, first))
            num_tokens = model.prompt_tokens_within(room_s, after=head.num_computed)
            if num_rows:
                num_tokens = min(num_tokens, self._most_known())
        elif not num_rows:
            num_tokens = max(self._tokens_beside_none(model, decode_s, head), head.num_left)
        else:
            return
        if num_tokens < draft.token_budget - num_rows:
            draft.prompt_budget = max(int(num_tokens), self._table.block_size)
        draft.prompt_budget = min(draft.prompt_budget, draft.token_budget - num_rows)

    def _most_known(self) -> float:
        return max(MOST_GROWTH * self._timer.most_prompt_tokens, UNSEEN_BLOCKS * self._table.block_size)

    def _pace(self, model: StepTimeModel, decode_s: float, gap_us: int) -> Pace:
        """The pace of prompts alongside streams with a promised gap; without such streams, of prompts alone."""

        def seconds(num_tokens: float, after: float) -> float:
            if gap_us == NEVER:
                return (1.0 + model.error) * model.prompt_seconds(num_tokens, after=after)
            gap_s = gap_us / 1e6
            return gap_s * num_tokens / max(self._tokens_within(model, gap_s, decode_s, after), 1.0)

        return seconds

    def _remembered(self, gap_us: int) -> int:
        """The gap that holds now; for a while after no request needs one, that is the last gap."""
        now_s = self._clock()
        if gap_us != NEVER:
            self._last_gap_us, self._holds_until_s = gap_us, now_s + REMEMBERED_S
        return self._last_gap_us if now_s < self._holds_until_s else NEVER

    def _gap_of_coming(self) -> int:
        """The tightest gap of requests that will decode as soon as their KV has arrived."""
        waiting = self._live_requests.waiting.peek()
        gap_us = NEVER if waiting is None or waiting.kv_transfer is None else waiting.promised_gap
        return min(gap_us, self._remote.tightest_gap)

    def _head(self, first: int) -> Head | None:
        """The first running prompt, otherwise the first waiting one; None when there is no prompt."""
        table, queued = self._table, self._live_requests.queued_prefill_tokens
        if first < table.order.size:
            row = int(table.order[first])
            num_computed = int(table.num_computed[row])
            num_left = int(table.num_expected[row]) - num_computed
            return Head(num_left, num_computed, table.owner(row), self._num_started(first) + queued)
        ready, waiting = self._live_requests.ready.peek(), self._live_requests.waiting.peek()
        has_prompt = ready is not None and (waiting is None or ready.num_tokens - ready.num_computed_tokens > 1)
        request = ready if has_prompt else waiting
        if request is None:
            return None
        num_computed = request.num_computed_tokens
        return Head(request.num_tokens - num_computed, num_computed, request, queued)

    def _num_started(self, first: int) -> int:
        """Tokens left of the running prompts."""
        table = self._table
        rows = table.order[first:]
        return int((table.num_expected[rows] - table.num_computed[rows]).sum())

    def _calm_room_s(self, model: StepTimeModel, decode_s: float, gap_s: float, head: Head, first: int) -> float:
        """What prompts may take of a step while they have time, at least what they took before for the same head: so
        they end when ``calm_room_s`` says; infinity where they have none.
        """
        left_s = self._least_left_s(head, first)
        if left_s is None:
            return math.inf
        num_left = max(head.num_left, 1)
        read = prompt_reads(num_left, after=head.num_computed)
        work_s = model.prompt_token_s * num_left + model.prompt_read_s * read
        work_s *= max(head.num_waiting / num_left, 1.0)
        if head.request.arrival_index != self._calm_head:
            self._calm_head, self._calm_s = head.request.arrival_index, 0.0
        self._calm_s = max(self._calm_s, calm_room_s(work_s, decode_s, gap_s, left_s))
        return self._calm_s

    def _least_left_s(self, head: Head, first: int) -> float | None:
        """Seconds until the next promised first token is due; None if the head's is late, or was not promised."""
        table, now_s = self._table, self._clock()
        left_s = first_token_left_s(head.request, now_s)
        if left_s is None or left_s <= 0.0:
            return None
        running = (table.owner(row) for row in table.order[first : first + LOOKED_AT].tolist())
        for other in chain(running, islice(self._live_requests.waiting, LOOKED_AT)):
            other_s = first_token_left_s(other, now_s)
            if other_s is not None and 0.0 < other_s < left_s:
                left_s = other_s
        return left_s

    def _tokens_beside_none(self, model: StepTimeModel, base_s: float, head: Head) -> float:
        if (own_us := head.request.promised_gap) != NEVER:
            return self._tokens_within(model, own_us / 1e6, base_s, head.num_computed)
        return model.prompt_tokens_within(base_s / MAX_BASE_SHARE - base_s, after=head.num_computed)

    def _tokens_within(self, model: StepTimeModel, step_s: float, decode_s: float, after: float) -> float:
        return model.prompt_tokens_within(self._room_s(model, step_s, decode_s), after=after)

    def _room_s(self, model: StepTimeModel, step_s: float, decode_s: float) -> float:
        """What prompts may take of a step of ``step_s`` at most."""
        return max(aim_share(model.error) * step_s - decode_s, self.prompt_share * decode_s)
