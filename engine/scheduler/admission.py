"""Admission of waiting requests: which may start now, with which blocks, and from which position. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from engine.contract.block_hash import BlockHash
from engine.contract.config import SchedulerConfig
from engine.contract.stats import Counters
from engine.scheduler.blocks.block_need import BlockNeed, CachedPrefix, Start
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.policy.gates import AdmissionGate, Verdict
from engine.scheduler.policy.headroom import Headroom
from engine.scheduler.remote.announcer import Announcer
from engine.scheduler.remote.early_loads import EarlyLoad, EarlyLoads
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.remote.prefix_search import PrefixSearch
from engine.scheduler.remote.shared_repair import adopt_published_blocks, first_missing_block
from engine.scheduler.requests.request import Request, RequestState
from engine.scheduler.requests.request_queue import RequestQueue
from engine.scheduler.requests.row_table import RowTable
from engine.scheduler.step_draft import StepDraft

MAX_PASSED_OVER: Final = 64
"""How many blocked requests a step looks past: the cost of a step must not grow with the number of blocked ones."""

MAX_ASKED_AGAIN: Final = 16
"""How many undecided requests a step asks about again."""


class Admission:
    """Starts waiting and loaded requests while token budget, rows and blocks last. Loads use none of the token budget.

    A request is admitted only when blocks for *all* its known tokens are free, and it takes them at once. So every
    admitted request can compute its prompt, and every load has its destination, whatever comes after
    (known-failures 7). In a KV cache group with a window, these are the blocks that the request holds at one time; from
    then on it gives back as many as it takes. In addition, admission leaves free a watermark, and one block in each
    group for each admitted request that will grow. A request whose next block another one is computing now is passed
    over: it will find that block in the cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: RowTable,
        kv_cache: KVCacheManager,
        live_requests: LiveRequests,
        remote: RemoteKV,
        search: PrefixSearch,
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
        self._live_requests = live_requests
        self._remote = remote
        self._search = search
        self._pending = pending
        self._early = early
        self._announcer = announcer
        self._counters = counters
        self._gates = gates
        self._clock = clock
        self.headroom = Headroom(
            config.watermark, table=table, kv_cache=kv_cache, live_requests=live_requests, remote=remote
        )
        self._ask_again_at_s = 0.0

    @property
    def ask_again_at_s(self) -> float | None:
        """When the connector is to be asked again about undecided requests; None when there are none."""
        return self._ask_again_at_s if len(self._live_requests.undecided) else None

    def run(self, draft: StepDraft) -> None:
        """Add the requests that start to the step. Loaded ones come first: they hold their blocks already."""
        if len(self._live_requests.live) == self._table.num_requests and not self._early.by_request:
            return  # every live request runs
        self._ask_again()
        if draft.favoured is not None:
            self._let_in_first(draft.favoured, draft)
        self._serve(self._live_requests.ready, self._start, draft)
        if not draft.is_blocked and (draft.token_budget > 0 or self._remote.can_load):
            admit = self._admit_hand_over if draft.is_under_way else self._admit
            self._serve(self._live_requests.waiting, admit, draft)
            if self._early.by_request and not self._live_requests.num_startable:
                self._begin_early()

    def _let_in_first(self, request: Request, draft: StepDraft) -> None:
        """Admit the favoured request before all others. If it loads, it needs no row yet."""
        if request in self._live_requests.waiting:
            if not draft.is_blocked:
                self._admit(request, draft)
        elif request in self._live_requests.ready:
            self._start(request, draft)

    def _serve(self, queue: RequestQueue, admit: Callable[[Request, StepDraft], Verdict], draft: StepDraft) -> None:
        """Admit requests from the head of a queue up to the first barrier; those passed over keep their places."""
        passed_over: list[Request] = []
        while self._table.num_free_rows and len(passed_over) < MAX_PASSED_OVER:
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

    def _admit_hand_over(self, request: Request, draft: StepDraft) -> Verdict:
        return self._admit(request, draft) if request.kv_transfer is not None else Verdict.BARRIER

    def _admit(self, request: Request, draft: StepDraft) -> Verdict:
        local = self._search.local(request)
        num_local_tokens = local.num_blocks * self._kv_cache.block_size
        if self._gates and (verdict := self._ask_gates(request, local, draft)) is not Verdict.ADMITTED:
            return verdict
        early = self._early.find(request)
        if early is not None and self._take_over(request, early):
            return Verdict.ADMITTED
        if self._is_brought_by_other(request, local.num_blocks):
            return Verdict.PASSED_OVER
        need = self._search.need(request, local, start=num_local_tokens)
        has_windows = self._kv_cache.has_windows  # then the blocks needed depend on how much is loaded
        if not has_windows and not self._has_room(request, need, draft):
            return Verdict.BARRIER
        match = self._search.match(request, local)
        if match is None:
            self._set_undecided(request)
            return Verdict.ADMITTED
        num_known_tokens = min(num_local_tokens + match.num_tokens, request.num_tokens)
        if match.num_tokens:
            need = self._search.need(request, local, start=min(num_known_tokens, request.num_tokens - 1))
        elif not self._can_compute(request, request.num_tokens - num_local_tokens, draft):
            return Verdict.BARRIER
        if has_windows and not self._has_room(request, need, draft):
            return Verdict.BARRIER
        self._live_requests.leave_waiting(request)
        request.block_tables = self._kv_cache.take(need)
        request.num_published_blocks = local.num_blocks
        request.num_computed_tokens = num_local_tokens
        self._count_hits(request, num_local_tokens)
        if match.num_tokens:
            shared = frozenset(need.held(local.num_blocks)) if has_windows else frozenset()
            self._load(request, num_local_blocks=local.num_blocks, num_tokens=num_known_tokens, shared=shared)
        else:
            self._remote.release(request)
            self._run(request, draft)
        return Verdict.ADMITTED

    def _ask_gates(self, request: Request, local: CachedPrefix, draft: StepDraft) -> Verdict:
        """Ask the gates about a waiting request; ADMITTED while the source does not know yet what it can load."""
        match = self._search.match(request, local)
        if match is None:
            return Verdict.ADMITTED
        num_known_tokens = local.num_blocks * self._kv_cache.block_size + match.num_tokens
        return self.ask_gates(request, draft, request.num_tokens - num_known_tokens)

    def ask_gates(self, request: Request, draft: StepDraft, num_tokens: int) -> Verdict:
        """The first verdict other than ADMITTED on a request of which this engine would compute ``num_tokens``."""
        for gate in self._gates:
            verdict = gate.ask(request, draft, max(num_tokens, 1))
            if verdict is not Verdict.ADMITTED:
                return verdict
        return Verdict.ADMITTED

    def _set_undecided(self, request: Request) -> None:
        if not len(self._live_requests.undecided):
            self._ask_again_at_s = self._clock() + self._config.ask_again_s
        self._live_requests.set_undecided(request)

    def _load(
        self,
        request: Request,
        *,
        num_local_blocks: int,
        num_tokens: int,
        stream_id: str | None = None,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        """Load the KV of known tokens up to ``num_tokens``; other requests for the same KV wait for this load."""
        block_size = self._kv_cache.block_size
        self._remote.begin(
            request,
            num_local_blocks=num_local_blocks,
            num_tokens=num_tokens,
            block_size=block_size,
            stream_id=stream_id,
            shared=shared,
        )
        if self._kv_cache.enable_prefix_caching:
            request.hashes(block_size)
            self._pending.claim(request, block_size)

    def _take_over(self, request: Request, early: EarlyLoad) -> bool:
        """Take over this request's early load, with its blocks; False, and it is dropped, when it is of no use."""
        num_matched = self._match_early(request, early)
        if not num_matched:
            return False
        num_local_tokens = early.num_local_blocks * self._kv_cache.block_size
        self._early.take(early)
        self._live_requests.leave_waiting(request)
        request.block_hashes = early.request.block_hashes
        request.block_tables = early.block_tables
        request.num_published_blocks = early.num_local_blocks
        request.num_computed_tokens = num_local_tokens
        self._count_hits(request, num_local_tokens)
        self._load(
            request,
            num_local_blocks=early.num_local_blocks,
            num_tokens=min(num_local_tokens + num_matched, request.num_tokens),
            stream_id=early.stream_id,
        )
        return True

    def _match_early(self, request: Request, early: EarlyLoad) -> int:
        """Tokens that the hand-over supplies beyond the early load's local blocks; 0 drops the early load."""
        match = self._remote.match(request, early.num_local_blocks * self._kv_cache.block_size)
        if match is None or not match.num_tokens:
            self._early.drop(request.request_id)
            return 0
        return match.num_tokens

    def _begin_early(self) -> None:
        """Begin early loads while blocks are to spare, with room for a first token: most will have one by then."""
        for early in self._early.pending():
            request = early.request
            local = self._search.local(request)
            num_tokens = request.num_tokens + (request.beams is None)
            need = self._kv_cache.needs.need(local, start=request.num_tokens - 1, num_tokens=num_tokens)
            if need.num_blocks + self.headroom.of(request) > self._kv_cache.num_free_beside(need):
                return
            if local.num_blocks >= self._kv_cache.num_blocks_for(request.num_tokens):
                self._early.drop(request.request_id)
            else:
                self._early.begin(early, need, num_local_blocks=local.num_blocks)

    def _start(self, request: Request, draft: StepDraft) -> Verdict:
        """Give a loaded request its row, unless the rows left are kept for a request of higher priority."""
        if draft.token_budget <= 0:
            return Verdict.BARRIER
        if self.waits_on_others(request):
            return Verdict.PASSED_OVER
        num_tokens = request.num_tokens - request.num_computed_tokens
        if not self._can_compute(request, num_tokens, draft) or self._is_row_kept_from(request, draft):
            return Verdict.BARRIER
        self._live_requests.ready.remove(request)
        self._run(request, draft)
        return Verdict.ADMITTED

    def waits_on_others(self, request: Request) -> bool:
        """Adopt published blocks for a loaded request; True when another request computes its next missing one."""
        if not self._kv_cache.enable_prefix_caching:
            return False
        self._counters.num_adopted_blocks += adopt_published_blocks(request, self._kv_cache, self._pending)
        return self._is_computed_by_other(request, first_missing_block(request, self._kv_cache.block_size))

    def _is_row_kept_from(self, request: Request, draft: StepDraft) -> bool:
        favoured = draft.favoured
        if favoured is None or not favoured.is_waiting or favoured.message.priority >= request.message.priority:
            return False
        return self._table.num_free_rows < request.num_rows + favoured.num_rows

    def _run(self, request: Request, draft: StepDraft) -> None:
        table = self._table
        tables, request.block_tables = request.block_tables, []
        request.state = RequestState.RUNNING
        row = table.place(request, tables, publishes=self._kv_cache.enable_prefix_caching)
        if self._kv_cache.enable_prefix_caching:
            self._pending.claim(request, self._kv_cache.block_size)
        end = min(table.num_expected.item(row), table.ceiling.item(row), table.capacity.item(row))
        num_tokens = min(end - table.num_computed.item(row), draft.token_budget, max(draft.prompt_budget, 1))
        for cap in (self._config.long_prefill_token_threshold, draft.prefill_share):
            num_tokens = min(num_tokens, cap or num_tokens)
        draft.start(table, request, num_tokens)
        if request.message.hand_over:
            is_complete = int(table.num_computed[row]) >= request.num_prompt_tokens
            self._announcer.started(request, is_complete=is_complete)

    def _can_compute(self, request: Request, num_tokens: int, draft: StepDraft) -> bool:
        """True when there are rows and token budget; without chunked prefill, budget for the whole prompt."""
        has_tokens = draft.has_tokens(num_tokens, is_chunked=self._config.enable_chunked_prefill)
        return has_tokens and self._table.num_free_rows >= request.num_rows

    def prospect(self, request: Request) -> Start | None:
        """What a waiting request would begin with if there were room for it.

        Returns:
            None when room alone would not let it start: another request is bringing its next block, or it is undecided.
        """
        local = self._search.local(request)
        num_local_tokens = local.num_blocks * self._kv_cache.block_size
        need = self._search.need(request, local, start=num_local_tokens)
        early = self._early.find(request)
        if early is not None and self._match_early(request, early):
            return Start(need, 1, is_load=True, holds_blocks=True)
        if self._is_brought_by_other(request, local.num_blocks):
            return None
        match = self._search.match(request, local)
        if match is None:
            self._set_undecided(request)
            return None
        num_tokens = max(request.num_tokens - num_local_tokens - match.num_tokens, 1)
        if match.num_tokens:
            need = self._search.need(request, local, start=request.num_tokens - num_tokens)
        return Start(need, num_tokens, is_load=match.num_tokens > 0)

    def num_missing_blocks(self, request: Request, start: Start) -> int:
        """Blocks that must become free before a waiting request could start; drops early loads to make room first."""
        return 0 if start.holds_blocks else self._make_room(request, start.need)

    def _has_room(self, request: Request, need: BlockNeed, draft: StepDraft) -> bool:
        """True when ``request`` has its blocks, if need be after early loads were dropped."""
        if need.most_blocks + self.headroom.most(request) <= self._kv_cache.num_free:
            return True
        # What is given up within a step becomes free only after it.
        missing = self._num_missing_blocks if draft.is_under_way else self._make_room
        return missing(request, need) <= 0

    def _make_room(self, request: Request, need: BlockNeed) -> int:
        """Drop early loads until ``request`` has its blocks; returns how many it still lacks."""
        num_missing = self._num_missing_blocks(request, need)
        while num_missing > self._kv_cache.num_fenced and self._early.drop_newest():
            num_missing = self._num_missing_blocks(request, need)
        return num_missing

    def _num_missing_blocks(self, request: Request, need: BlockNeed) -> int:
        return need.num_blocks + self.headroom.of(request) - self._kv_cache.num_free_beside(need)

    def _is_brought_by_other(self, request: Request, block_index: int) -> bool:
        """True when a waiting request should wait longer, because another request is already bringing its next block.

        A request that can load waits only for another load of the same KV, one that must compute only for computing.
        """
        if request.kv_transfer is None:
            return self._is_computed_by_other(request, block_index)
        block_hash = self._next_shareable(request, block_index)
        return block_hash is not None and self._pending.is_loaded_by_other(block_hash, request)

    def _is_computed_by_other(self, request: Request, block_index: int) -> bool:
        """True when the next block that this request needs is full, and another request is computing it."""
        block_hash = self._next_shareable(request, block_index)
        return block_hash is not None and self._pending.is_computed_by_other(block_hash, request)

    def _next_shareable(self, request: Request, block_index: int) -> BlockHash | None:
        last_shareable = (request.num_tokens - 1) // self._kv_cache.block_size
        if not len(self._pending) or block_index >= last_shareable or request.num_prompt_logprobs is not None:
            return None
        return request.block_hashes[block_index]

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
        """When they are due, put undecided requests back at the head of the queue, oldest first."""
        undecided = self._live_requests.undecided
        if not len(undecided) or self._clock() < self._ask_again_at_s:
            return
        self._ask_again_at_s = self._clock() + self._config.ask_again_s
        due = [undecided.pop() for _ in range(min(len(undecided), MAX_ASKED_AGAIN))]
        for request in reversed(due):
            self._live_requests.waiting.push_front(request)
