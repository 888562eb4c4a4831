"""Preemption by priority: a waiting request takes the place of running ones of lower priority. Free of torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np

from engine.contract.config import SchedulerConfig
from engine.scheduler.admission import Admission
from engine.scheduler.blocks.block_need import Start
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.gates import PartialPrefills, Verdict
from engine.scheduler.policy.preemption import PreemptionPolicy
from engine.scheduler.requests.request import Request
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.step_draft import StepDraft

MAX_ASKED: Final = 16
"""How many undecided requests a step looks past."""


class PriorityPreemption:
    """Preempts for the first waiting or loaded request if that lets it start, and has it admitted before all others.

    A request that computes needs blocks and a row, one that loads only blocks, a loaded one only a row. Steps in flight
    may still write the blocks of preempted requests. Until those steps return, the place is kept for the request, and
    no other one is preempted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        admission: Admission,
        preemption: PreemptionPolicy,
        partial_prefills: PartialPrefills | None,
    ) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._is_chunked = config.enable_chunked_prefill
        self._table = table
        self._kv_cache = kv_cache
        self._live_requests = live_requests
        self._admission = admission
        self._preemption = preemption
        self._partial_prefills = partial_prefills

    def prepare(self, draft: StepDraft) -> None:
        """Make room, before the step is put together."""
        if draft.is_blocked:
            return
        loaded = self._live_requests.ready.peek()
        is_first = loaded is not None and self._goes_before_waiting(loaded)
        if loaded is not None and is_first:
            self._favour_loaded(loaded, draft)
        for _ in range(MAX_ASKED):
            head = self._live_requests.waiting.peek()
            if head is None or draft.favoured is not None:
                break
            self._favour_waiting(head, draft)
            if self._live_requests.waiting.peek() is head:
                break  # otherwise it became undecided, and was set aside
        if loaded is not None and not is_first and draft.favoured is None:
            self._favour_loaded(loaded, draft)

    def _goes_before_waiting(self, loaded: Request) -> bool:
        head = self._live_requests.waiting.peek()
        return head is None or loaded.message.priority <= head.message.priority

    def _favour_loaded(self, request: Request, draft: StepDraft) -> None:
        """Give a loaded request the row of the running request that is served last."""
        victims: list[Request] = []
        num_missing = request.num_rows - self._table.num_free_rows
        if num_missing <= 0:
            return
        for victim in sorted(self._lower_than(request), key=self._preemption.key, reverse=True):
            if num_missing > 0 and victim.row is not None:
                victims.append(victim)
                num_missing -= victim.num_rows
        if num_missing > 0 or self._admission.waits_on_others(request):
            return
        num_tokens = request.num_tokens - request.num_computed_tokens
        if self._after(draft, victims).has_tokens(num_tokens, is_chunked=self._is_chunked):
            self._let_in(request, draft, victims)

    def _favour_waiting(self, request: Request, draft: StepDraft) -> None:
        """Get a waiting request what it lacks, or keep for it what others would take first."""
        lower = self._lower_than(request)
        if not lower:
            return
        start = self._admission.prospect(request)
        if start is None or not self._would_start(request, start, self._after(draft, lower)):
            return
        num_before = sum(
            other.num_rows * (not self._admission.waits_on_others(other))
            for other in list(self._live_requests.ready)
            if other.message.priority <= request.message.priority
        )
        num_rows = self._table.num_free_rows - num_before
        room = Room(request, start, num_rows=num_rows, kv_cache=self._kv_cache, admission=self._admission)
        num_rows_of_ready = sum(other.num_rows for other in self._live_requests.ready)
        if num_rows - request.num_rows >= num_rows_of_ready - num_before and room.num_missing_blocks <= 0:
            return  # it starts without help
        if self._kv_cache.num_fenced:
            if room.num_missing_blocks <= self._kv_cache.num_fenced:
                draft.favoured = request
            return
        victims = self._fewest(lower, room)
        if victims is not None and self._would_start(request, start, self._after(draft, victims)):
            self._let_in(request, draft, victims)

    def _fewest(self, lower: list[Request], room: Room) -> list[Request] | None:
        """The fewest victims that make enough room, last served first; None when all of them are not enough."""
        victims: list[Request] = []
        for victim in sorted(lower, key=self._preemption.key, reverse=True):
            if room.is_enough():
                break
            room.take_out(victim, self._live_requests.block_ids(victim))
            victims.append(victim)
        if not room.is_enough():
            return None
        for victim in tuple(reversed(victims)):
            room.put_back(victim, self._live_requests.block_ids(victim))
            if room.is_enough():
                victims.remove(victim)
            else:
                room.take_out(victim, self._live_requests.block_ids(victim))
        return victims

    def _lower_than(self, request: Request) -> list[Request]:
        priority = request.message.priority
        return [
            other for other in (*self._table.running(), *self._live_requests.ready) if other.message.priority > priority
        ]

    def _let_in(self, request: Request, draft: StepDraft, victims: list[Request]) -> None:
        draft.favoured = request
        for victim in victims:
            self._live_requests.preempt(victim)
            draft.has_preempted = True

    def _would_start(self, request: Request, start: Start, draft: StepDraft) -> bool:
        """True when nothing but missing room keeps the request out of the step."""
        if self._admission.ask_gates(request, draft, start.num_tokens) is not Verdict.ADMITTED:
            return False
        return start.is_load or draft.has_tokens(start.num_tokens, is_chunked=self._is_chunked)

    def _after(self, draft: StepDraft, victims: list[Request]) -> StepDraft:
        """The step without these victims. Its budget is at least what is left once all others have their share."""
        after = replace(draft, leaving_rows=tuple(row for victim in victims for row in victim.rows))
        if self._partial_prefills is not None:
            self._partial_prefills.prepare(after)
        table, rows = self._table, self._table.order_without(after.leaving_rows)
        need = np.minimum(table.num_expected[rows], table.ceiling[rows]) - table.num_computed[rows]
        for cap in (self._threshold, after.prefill_share):
            if cap:
                need = np.minimum(need, np.int32(cap))
        num_prompt_tokens = min(int(need[need > 1].sum()), after.prompt_budget)
        after.token_budget -= num_prompt_tokens + int((need == 1).sum())
        after.prompt_budget -= num_prompt_tokens
        return after


class Room:
    """What a waiting request still lacks, while candidates for preemption are taken out on trial."""

    def __init__(
        self, request: Request, start: Start, *, num_rows: int, kv_cache: KVCacheManager, admission: Admission
    ) -> None:
        self._num_refs = kv_cache.pool.num_refs
        self._admission = admission
        self._num_rows_needed = 0 if start.is_load else request.num_rows
        self._num_rows = num_rows
        self._growing: set[int] = set() if start.holds_blocks else admission.headroom.rows_that_grow_now()
        self._growth = kv_cache.groups.num_groups  # a growing request takes one block in each group
        self._num_missing = admission.num_missing_blocks(request, start) + len(self._growing) * self._growth
        self._headroom = 0 if start.holds_blocks else admission.headroom.of(request)
        self._num_others = admission.headroom.num_admitted
        self._num_kept_for_others = 0
        self._kept = frozenset(start.need.held())
        self._num_released: Counter[int] = Counter()

    @property
    def num_missing_blocks(self) -> int:
        """Blocks still missing. Headroom that admission keeps for the candidates taken out no longer counts."""
        not_kept = self._num_kept_for_others if self._num_others else self._headroom
        return self._num_missing - not_kept

    def is_enough(self) -> bool:
        """True when nothing is missing."""
        return self.num_missing_blocks <= 0 and (self._num_rows >= self._num_rows_needed or not self._num_rows_needed)

    def take_out(self, victim: Request, block_ids: list[int]) -> None:
        """Assume that ``victim`` gave up its row and these blocks; a shared block is free with its last holder."""
        self._num_released.update(block_ids)
        self._num_missing -= self._num_last_held(block_ids)
        self._move(victim, 1)

    def put_back(self, victim: Request, block_ids: list[int]) -> None:
        """Undo ``take_out``."""
        self._num_missing += self._num_last_held(block_ids)
        self._num_released.subtract(block_ids)
        self._move(victim, -1)

    def _num_last_held(self, block_ids: list[int]) -> int:
        released, kept = self._num_released, self._kept
        distinct = set(block_ids) - kept  # beams of one request share blocks
        return sum(released[block_id] == self._num_refs(block_id) for block_id in distinct)

    def _move(self, victim: Request, sign: int) -> None:
        self._num_rows += sign * (victim.num_rows if victim.row is not None else 0)
        self._num_missing -= sign * len(self._growing.intersection(victim.rows)) * self._growth
        self._num_others -= sign
        self._num_kept_for_others += sign * self._admission.headroom.num_rows_counted(victim) * self._growth
