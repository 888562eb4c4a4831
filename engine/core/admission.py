"""Waiting requests: who may start now, with which blocks, from which position on (C2-C4, K1-K3). Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from engine.block_hash import BlockHash
from engine.config import SchedulerConfig
from engine.core.admission_gate import AdmissionGate, Verdict
from engine.core.announcer import Announcer
from engine.core.counters import Counters
from engine.core.early_loads import EarlyLoad, EarlyLoads
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.pending_prefixes import PendingPrefixes
from engine.core.remote_kv import RemoteKV
from engine.core.request import Request, RequestState
from engine.core.request_book import RequestBook
from engine.core.request_queue import RequestQueue
from engine.core.row_table import RowTable
from engine.core.shared_repair import adopt_published_blocks, first_missing_block
from engine.core.step_draft import StepDraft

MAX_PASSED_OVER: Final = 64
"""How many requests a step looks behind: what is blocked must not cost more, however much of it there is."""

MAX_ASKED_AGAIN: Final = 16
"""How many undecided requests a step asks again."""


class Admission:
    """Starts waiting and loaded requests while budget, rows and blocks last.

    A request is admitted only when the blocks of *all* its known tokens are free, and gets them at once: whoever was
    admitted can compute its prompt, and every load has its destination, whatever comes after (known-failures 7).
    Beyond that, admission leaves a block for each admitted request that will grow, and a watermark. A request whose
    next block somebody computes right now is passed over: it will find it in the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        book: RequestBook,
        remote: RemoteKV,
        pending: PendingPrefixes,
        early: EarlyLoads,
        announcer: Announcer,
        counters: Counters,
        gates: Sequence[AdmissionGate] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._table = table
        self._kv_cache = kv_cache
        self._book = book
        self._remote = remote
        self._pending = pending
        self._early = early
        self._announcer = announcer
        self._counters = counters
        self._gates = gates
        self._clock = clock
        self._watermark = int(config.watermark * kv_cache.num_blocks)
        self._ask_again_at_s = 0.0

    @property
    def ask_again_at_s(self) -> float | None:
        """When undecided requests are due; None when there are none."""
        return self._ask_again_at_s if len(self._book.undecided) else None

    def run(self, draft: StepDraft) -> None:
        """Add requests that start to the step: loaded ones first, which hold their blocks and need none."""
        if len(self._book.live) == len(self._table) and not len(self._early):
            return  # everybody runs
        self._ask_again()
        self._serve(self._book.ready, self._start, draft)
        if not draft.is_blocked:
            self._serve(self._book.waiting, self._admit, draft)
            if len(self._early) and not self._book.num_waiting:
                self._begin_early()

    def _serve(self, queue: RequestQueue, admit: Callable[[Request, StepDraft], Verdict], draft: StepDraft) -> None:
        """Let in whoever may start, from the head of a queue up to the first barrier."""
        passed_over: list[Request] = []
        while draft.token_budget > 0 and self._table.num_free_rows and len(passed_over) < MAX_PASSED_OVER:
            request = queue.peek()
            if request is None:
                break
            verdict = admit(request, draft)
            if verdict is Verdict.BARRIER:
                break
            if verdict is Verdict.PASSED_OVER:
                queue.remove(request)
                passed_over.append(request)
        for request in reversed(passed_over):
            queue.push_front(request)

    def _admit(self, request: Request, draft: StepDraft) -> Verdict:
        for gate in self._gates:
            verdict = gate.ask(request, draft)
            if verdict is not Verdict.ADMITTED:
                return verdict
        early = self._early.find(request)
        if early is not None and self._take_over(request, early):
            return Verdict.ADMITTED
        local = self.local_prefix(request)
        if self._is_brought_by_other(request, len(local)):
            return Verdict.PASSED_OVER
        num_local_tokens = len(local) * self._kv_cache.block_size
        num_fresh = self._kv_cache.num_blocks_for(request.num_tokens) - len(local)
        if self._make_room(request, local) > 0:
            return Verdict.BARRIER
        match = self._remote.match(request, num_local_tokens, self._shareable_hashes(request))
        if match is None:
            if not len(self._book.undecided):
                self._ask_again_at_s = self._clock() + self._config.ask_again_s
            self._book.set_undecided(request)
            return Verdict.ADMITTED
        num_known_tokens = min(num_local_tokens + match.num_tokens, request.num_tokens)
        if not match.num_tokens and not self._fits_budget(request.num_tokens - num_local_tokens, draft):
            return Verdict.BARRIER
        self._book.leave_waiting(request)
        self._kv_cache.hold(local)
        request.block_ids = local + self._kv_cache.allocate(num_fresh)
        request.num_published_blocks = len(local)
        request.num_computed_tokens = num_local_tokens
        self._count_hits(request, num_local_tokens)
        if match.num_tokens:
            self._load(request, num_local_blocks=len(local), num_tokens=num_known_tokens)
        else:
            self._run(request, draft)
        return Verdict.ADMITTED

    def _load(self, request: Request, *, num_local_blocks: int, num_tokens: int, stream_id: str | None = None) -> None:
        """Load the KV of known tokens up to ``num_tokens``; who brings the same along waits for it."""
        block_size = self._kv_cache.block_size
        self._remote.begin(
            request,
            num_local_blocks=num_local_blocks,
            num_tokens=num_tokens,
            block_size=block_size,
            stream_id=stream_id,
        )
        if self._kv_cache.enable_prefix_caching:
            request.hashes(block_size)
            self._pending.claim(request, block_size)

    def _take_over(self, request: Request, early: EarlyLoad) -> bool:
        """Go on with what an early load of this very request holds; False, and it is dropped, when that is no use."""
        num_local_tokens = early.num_local_blocks * self._kv_cache.block_size
        match = self._remote.match(request, num_local_tokens)
        if match is None or not match.num_tokens:
            self._early.drop(request.request_id)
            return False
        self._early.take(early)
        self._book.leave_waiting(request)
        request.block_hashes = early.request.block_hashes
        request.block_ids = early.block_ids
        request.num_published_blocks = early.num_local_blocks
        request.num_computed_tokens = num_local_tokens
        self._count_hits(request, num_local_tokens)
        self._load(
            request,
            num_local_blocks=early.num_local_blocks,
            num_tokens=min(num_local_tokens + match.num_tokens, request.num_tokens),
            stream_id=early.stream_id,
        )
        return True

    def _begin_early(self) -> None:
        """Let early loads in while there is room to spare; there will be one more token than is known now."""
        for early in self._early.pending():
            request = early.request
            local = self.local_prefix(request)
            num_blocks = self._kv_cache.num_blocks_for(request.num_tokens + 1)
            if num_blocks - len(local) + self._headroom(request) > self._kv_cache.num_free_without(local):
                return
            if len(local) >= self._kv_cache.num_blocks_for(request.num_tokens):
                self._early.drop(request.request_id)
            else:
                self._early.begin(early, local=local, num_blocks=num_blocks)

    def _start(self, request: Request, draft: StepDraft) -> Verdict:
        """Give a loaded request its row."""
        if self._kv_cache.enable_prefix_caching:
            num_adopted = adopt_published_blocks(request, self._kv_cache)
            self._counters.num_adopted_blocks += num_adopted
            if self._is_computed_by_other(request, first_missing_block(request, self._kv_cache.block_size)):
                return Verdict.PASSED_OVER
        if not self._fits_budget(request.num_tokens - request.num_computed_tokens, draft):
            return Verdict.BARRIER
        self._book.ready.remove(request)
        self._run(request, draft)
        return Verdict.ADMITTED

    def _run(self, request: Request, draft: StepDraft) -> None:
        block_ids, request.block_ids = request.block_ids, []
        request.state = RequestState.RUNNING
        row = self._table.place(request, block_ids, publishes=self._kv_cache.enable_prefix_caching)
        if self._kv_cache.enable_prefix_caching:
            self._pending.claim(request, self._kv_cache.block_size)
        end = min(int(self._table.num_expected[row]), int(self._table.ceiling[row]))
        num_tokens = min(end - int(self._table.num_computed[row]), draft.token_budget)
        for cap in (self._config.long_prefill_token_threshold, draft.prefill_share):
            num_tokens = min(num_tokens, cap or num_tokens)
        draft.start(self._table, request, block_ids, num_tokens)
        if request.message.hand_over:
            is_complete = int(self._table.num_computed[row]) >= request.num_prompt_tokens
            self._announcer.started(request, is_complete=is_complete)

    def _fits_budget(self, num_tokens: int, draft: StepDraft) -> bool:
        """Without chunked prefill a prompt is computed whole or not at all (C3)."""
        return self._config.enable_chunked_prefill or num_tokens <= draft.token_budget

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that would have to become free before a waiting request could start; early loads give way first."""
        return self._make_room(request, self.local_prefix(request))

    def _make_room(self, request: Request, local: list[int]) -> int:
        """Blocks that ``request`` lacks after early loads gave way to it."""
        num_missing = self._num_missing_blocks(request, local)
        while num_missing > self._kv_cache.num_fenced and self._early.drop_newest():
            num_missing = self._num_missing_blocks(request, local)
        return num_missing

    def _num_missing_blocks(self, request: Request, local: list[int]) -> int:
        num_fresh = self._kv_cache.num_blocks_for(request.num_tokens) - len(local)
        return num_fresh + self._headroom(request) - self._kv_cache.num_free_without(local)

    def will_wait_on(self, request: Request) -> bool:
        """True when room would not let a waiting request start: it waits for what somebody else brings."""
        return self._is_brought_by_other(request, len(self.local_prefix(request)))

    def _is_brought_by_other(self, request: Request, block_index: int) -> bool:
        """True when a waiting request should wait on: its next block comes without work of its own.

        What one could load or compute is worth waiting for only while somebody else does the same.
        """
        if request.kv_transfer is None:
            return self._is_computed_by_other(request, block_index)
        block_hash = self._next_shareable(request, block_index)
        return block_hash is not None and self._pending.is_loaded_by_other(block_hash, request)

    def _is_computed_by_other(self, request: Request, block_index: int) -> bool:
        """True when the next block that this request needs is full, and somebody computes it now."""
        block_hash = self._next_shareable(request, block_index)
        return block_hash is not None and self._pending.is_computed_by_other(block_hash, request)

    def _next_shareable(self, request: Request, block_index: int) -> BlockHash | None:
        last_shareable = (request.num_tokens - 1) // self._kv_cache.block_size
        if not len(self._pending) or block_index >= last_shareable or request.num_prompt_logprobs is not None:
            return None
        return request.block_hashes[block_index]

    def local_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix; the last token is always computed (B1)."""
        return self._kv_cache.lookup(self._shareable_hashes(request))

    def _shareable_hashes(self, request: Request) -> list[BlockHash]:
        """Addresses of the full blocks that need no computing if somebody has them."""
        if not self._kv_cache.enable_prefix_caching:
            return []
        block_size = self._kv_cache.block_size
        hashes = request.hashes(block_size)
        if request.num_prompt_logprobs is not None:
            return []
        return hashes[: (request.num_tokens - 1) // block_size]

    def _headroom(self, request: Request) -> int:
        """Blocks that must stay free so that whoever was admitted can go on."""
        table, block_size = self._table, self._kv_cache.block_size
        num_others = len(table) + len(self._book.ready) + self._remote.num_loading
        if num_others == 0:
            return 0
        rows = table.order
        num_growing = int((table.limit[rows] - 1 > table.capacity[rows]).sum())
        grows = request.limit - 1 > self._kv_cache.num_blocks_for(request.num_tokens) * block_size
        return self._watermark + num_growing + len(self._book.ready) + self._remote.num_loading + grows

    def _count_hits(self, request: Request, num_local_tokens: int) -> None:
        counters = self._counters
        if not request.num_preemptions:
            request.num_cached_tokens = min(num_local_tokens, request.num_prompt_tokens)
        if request.queue_s is not None:
            counters.resumed_queried_tokens += request.num_tokens
            counters.resumed_hit_tokens += num_local_tokens
            return
        counters.prefix_queried_tokens += request.num_tokens
        counters.prefix_hit_tokens += num_local_tokens
        request.queue_s = self._clock() - request.queued_at_s

    def _ask_again(self) -> None:
        """Put undecided requests back, oldest first, when they are due."""
        undecided = self._book.undecided
        if not len(undecided) or self._clock() < self._ask_again_at_s:
            return
        self._ask_again_at_s = self._clock() + self._config.ask_again_s
        due = [undecided.pop() for _ in range(min(len(undecided), MAX_ASKED_AGAIN))]
        for request in reversed(due):
            self._book.waiting.push_front(request)
