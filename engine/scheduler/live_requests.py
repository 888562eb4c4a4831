"""Every live request and its state; moving a request out of a state frees what it held there. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from engine.contract.config import QueuePolicy
from engine.contract.messages import BeamResult, FinishReason, RequestError, TokenDelta
from engine.contract.promise import NO_PROMISE
from engine.contract.stats import Counters
from engine.contract.step import EMPTY_INTS, IntArray
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from engine.scheduler.blocks.pending_prefixes import PendingPrefixes
from engine.scheduler.remote.announcer import Announcer
from engine.scheduler.remote.leases import BlockLeases
from engine.scheduler.remote.loads import RemoteKV
from engine.scheduler.requests.request import Request, RequestState
from engine.scheduler.requests.request_queue import DeferringQueue, RequestQueue, make_queue
from engine.scheduler.requests.row_table import RowTable
from kv_transfer.cache_groups import BlockTables, held_blocks
from kv_transfer.params import KVTransferParams


class Reports(NamedTuple):
    """What the runner has to be told: rows that were given up, and requests that ended."""

    released_rows: IntArray
    finished_request_ids: tuple[str, ...]


NOTHING_TO_REPORT = Reports(EMPTY_INTS, ())


class LiveRequests:
    """Live requests by id: waiting, undecided, compiling, loading, ready or running.

    ``undecided`` requests are set aside until the connector, which does not know yet, is asked about them again.
    ``compiling`` ones wait for their grammar. ``ready`` ones were loaded, hold their blocks and need only a row. The
    end of each request is reported once: in a step's result, or in ``finished`` if it ended between steps.
    """

    def __init__(
        self,
        *,
        policy: QueuePolicy,
        table: RowTable,
        kv_cache: KVCacheManager,
        remote: RemoteKV,
        leases: BlockLeases,
        pending: PendingPrefixes,
        announcer: Announcer,
        counters: Counters,
    ) -> None:
        self.live: dict[str, Request] = {}
        self.waiting = DeferringQueue(policy)
        self.ready: RequestQueue = make_queue(policy)
        self.undecided: RequestQueue = make_queue("fcfs")
        self.compiling: dict[str, Request] = {}
        self.on_compiling_left: Callable[[Request], None] = lambda _: None
        """Called when a request ends whose grammar is being compiled."""
        self.queued_prefill_tokens = 0
        self.num_promised = 0
        """Live requests that were promised a TTFT, or a gap between tokens."""
        self._table = table
        self._kv_cache = kv_cache
        self._remote = remote
        self._leases = leases
        self._pending = pending
        self._announcer = announcer
        self._counters = counters
        self._finished: list[tuple[str, TokenDelta]] = []
        self._finished_ids: list[str] = []
        self._released_rows: list[int] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self.waiting) + len(self.undecided) + len(self.compiling)

    @property
    def num_startable(self) -> int:
        """Waiting requests that would start if there were room."""
        return len(self.waiting) + len(self.undecided)

    @property
    def has_reports(self) -> bool:
        """True when the runner has not been told of released rows or finished requests."""
        return bool(self._released_rows or self._finished_ids)

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self._enter(request)
        self.waiting.push(request)
        self.queued_prefill_tokens += request.num_tokens

    def add_compiling(self, request: Request) -> None:
        """Take in a new request whose grammar is being compiled; until that is done, it is in no queue."""
        self._enter(request)
        self.compiling[request.request_id] = request
        self.queued_prefill_tokens += request.num_tokens

    def _enter(self, request: Request) -> None:
        self.live[request.request_id] = request
        self.num_promised += request.message.promise != NO_PROMISE

    def end_compiling(self, request: Request) -> None:
        """Queue a request whose grammar is compiled."""
        del self.compiling[request.request_id]
        self.waiting.push(request)

    def leave_waiting(self, request: Request) -> None:
        """Take a request out of the waiting queue because it is admitted."""
        self.waiting.remove(request)
        self.queued_prefill_tokens -= request.num_tokens

    def set_undecided(self, request: Request) -> None:
        """Set a waiting request aside until it is asked again."""
        self.waiting.remove(request)
        self.undecided.push(request)

    def block_ids(self, request: Request) -> list[int]:
        """The blocks that a running or ready request holds, of all groups, in the order of its tokens."""
        tables = [self._table.block_tables(row) for row in request.rows] or [request.block_tables]
        return [block_id for of_row in tables for block_id in held_blocks(of_row)]

    def preempt(self, request: Request) -> None:
        """Take a running or ready request's blocks, put it at the head of the queue, and count the preemption."""
        row = request.row
        num_computed = request.num_computed_tokens if row is None else int(self._table.num_computed[row])
        self.put_back(request)
        request.num_preempted_tokens = num_computed
        request.num_preemptions += 1
        self._counters.num_preemptions += 1

    def put_back(self, request: Request) -> None:
        """Take a request's blocks or its load, and put it at the head of the queue; its KV is computed here."""
        self._kv_cache.release_tables(self._take_tables(request))
        request.state = RequestState.WAITING
        request.num_computed_tokens = request.num_preempted_tokens = 0
        request.num_published_blocks = 0
        request.invalid_spans = []
        request.confirmed_blocks = set()
        self.waiting.push_front(request)
        self.queued_prefill_tokens += request.num_tokens

    def finish(self, request: Request) -> None:
        """End a request in any state and free all that it held; the caller reports the end."""
        self._kv_cache.release_tables(self._retire(request))

    def hand_over(self, request: Request, *, num_tokens: int) -> KVTransferParams:
        """End a running request, and keep the computed KV of its first ``num_tokens`` tokens under a lease.

        In a group with a window, only the blocks that the last of these tokens sees are kept: the reader needs no more.
        """
        self._announcer.finish(request)
        tables = self._retire(request)
        groups, end = self._kv_cache.groups, self._kv_cache.num_blocks_for(num_tokens)
        kept: BlockTables = []
        left: BlockTables = []
        for group, table in enumerate(tables):
            first = groups.first_block(group, num_tokens - 1)
            kept.append(table[first:end])
            left.append(table[:first] + table[end:])
        self._kv_cache.release_tables(left)
        return self._leases.grant(request, kept, num_tokens=num_tokens)

    def check_integrity(self) -> None:
        """Compare the count of promises with the live requests.

        Raises:
            AssertionError: It is wrong.
        """
        num_promised = sum(request.message.promise != NO_PROMISE for request in self.live.values())
        assert self.num_promised == num_promised, f"{num_promised} requests have a promise, not {self.num_promised}"

    def report(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: RequestError | None = None,
        stop_token_id: int | None = None,
        kv_transfer: KVTransferParams | None = None,
        beams: tuple[BeamResult, ...] = (),
    ) -> None:
        """Queue the end of a request that has no new tokens in a step's result."""
        delta = TokenDelta(
            request_id=request.request_id,
            token_ids=(),
            finish_reason=reason,
            error=error,
            stop_token_id=stop_token_id,
            kv_transfer=kv_transfer,
            num_cached_tokens=request.num_cached_tokens if request.is_unanswered else None,
            num_remote_tokens=request.num_remote_tokens if request.is_unanswered else None,
            queue_s=request.queue_s if beams else None,
            beams=beams,
        )
        self._finished.append((request.client_id, delta))

    @property
    def has_finished(self) -> bool:
        """True when requests ended between steps and ``take_finished`` has not been called since."""
        return bool(self._finished)

    def take_finished(self) -> list[tuple[str, TokenDelta]]:
        """The ends that happened between steps, with the client of each; each is returned once."""
        finished, self._finished = self._finished, []
        return finished

    def take_reports(self) -> Reports:
        """What the runner has not been told yet; each report is returned once."""
        if not (self._released_rows or self._finished_ids):  # as in most steps
            return NOTHING_TO_REPORT
        reports = Reports(np.array(self._released_rows, np.int32), tuple(self._finished_ids))
        self._released_rows, self._finished_ids = [], []
        return reports

    def give_up_row(self, row: int) -> None:
        """Take one of several rows from a request and free its blocks, because its beam is dropped."""
        self._kv_cache.release_tables(self._table.release_one(row))
        self._released_rows.append(row)

    def _retire(self, request: Request) -> BlockTables:
        tables = self._take_tables(request)
        self._remote.release(request)
        request.state = RequestState.FINISHED
        del self.live[request.request_id]
        self.num_promised -= request.message.promise != NO_PROMISE
        self._finished_ids.append(request.request_id)
        self._counters.num_finished += 1
        return tables

    def _take_tables(self, request: Request) -> BlockTables:
        """Take a request out of its present state; returns the block tables that the caller must free."""
        tables: BlockTables = []
        self._pending.withdraw(request)
        if request.state is RequestState.RUNNING:
            assert request.row is not None
            for extra_row in request.more_rows:
                self.give_up_row(extra_row)
            row = request.row
            self._announcer.give_up(request)
            tables = self._table.release(row)
            self._released_rows.append(row)
        elif request.state is RequestState.READY:
            self.ready.remove(request)
            tables = request.block_tables
        elif request.state is RequestState.LOADING:
            self._remote.abandon(request)
        elif request in self.undecided:
            self.undecided.remove(request)
            self.queued_prefill_tokens -= request.num_tokens
        elif request.request_id in self.compiling:
            del self.compiling[request.request_id]
            self.queued_prefill_tokens -= request.num_tokens
            self.on_compiling_left(request)
        else:
            self.leave_waiting(request)
        request.block_tables = []
        if request.beams is not None:
            request.beams.give_up_rows()
        return tables
