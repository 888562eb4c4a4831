"""A waiting request of higher priority takes the place of running ones of lower priority (O2). Free of torch."""

from __future__ import annotations

from engine.core.admission import Admission
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.preemption import PreemptionPolicy
from engine.core.request import Request
from engine.core.request_book import RequestBook
from engine.core.row_table import RowTable
from engine.core.step_draft import StepDraft


class PriorityPreemption:
    """Preempts at the door, last served first, and only if that makes the head of the queue fit."""

    def __init__(
        self,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        book: RequestBook,
        admission: Admission,
        preemption: PreemptionPolicy,
    ) -> None:
        self._table = table
        self._kv_cache = kv_cache
        self._book = book
        self._admission = admission
        self._preemption = preemption

    def prepare(self, draft: StepDraft) -> None:
        """Make room for the head of the queue, before the step is put together."""
        head = self._book.waiting.peek()
        if head is None or draft.is_blocked or self._kv_cache.num_fenced:
            return
        if self._admission.will_wait_on(head):
            return  # whoever lost their place to it would be back in it in the same step, and lose it in the next again
        for victim in self._victims_for(head):
            self._book.preempt(victim)
            draft.has_preempted = True

    def _victims_for(self, head: Request) -> list[Request]:
        """The fewest requests whose places are enough; none when even all of lower priority are not."""
        num_missing = self._admission.num_missing_blocks(head)
        needs_row = self._table.num_free_rows == 0
        if num_missing <= 0 and not needs_row:
            return []
        lower = [
            request
            for request in (*self._table.running(), *self._book.ready)
            if request.message.priority > head.message.priority
        ]
        shared = set(self._admission.local_prefix(head))
        victims: list[Request] = []
        for victim in sorted(lower, key=self._preemption.key, reverse=True):
            victims.append(victim)
            block_ids = [block_id for block_id in self._book.block_ids(victim) if block_id not in shared]
            num_missing -= self._kv_cache.num_held_once(block_ids)
            needs_row = needs_row and victim.row is None
            if num_missing <= 0 and not needs_row:
                return victims
        return []
