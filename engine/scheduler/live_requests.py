"""Every live request and where it is; moving it frees what must be freed. Free of torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.contract.config import QueuePolicy
from engine.contract.messages import BeamResult, FinishReason, RequestError, TokenDelta
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
    """Rows that were given up and requests that ended, for the runner."""

    released_rows: IntArray
    finished_request_ids: tuple[str, ...]


NOTHING_TO_REPORT = Reports(EMPTY_INTS, ())


class LiveRequests:
    """Live requests by id: waiting, undecided (a connector does not know yet), loading, ready or running.

    ``ready`` requests were loaded, hold their blocks and need only a row. ``undecided`` ones are set aside until they
    are asked again, ``compiling`` ones until their grammar is there. The end of each is reported once: in a step's
    result, or in ``finished`` if it ended between steps.
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
        self.compiling: RequestQueue = make_queue("fcfs")
        self.queued_prefill_tokens = 0
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
        """Those of them that would start if they had room."""
        return len(self.waiting) + len(self.undecided)

    @property
    def has_reports(self) -> bool:
        """True when the runner has not been told of released rows or finished requests."""
        return bool(self._released_rows or self._finished_ids)

    def add(self, request: Request) -> None:
        """Take in a new request."""
        self.live[request.request_id] = request
        self.waiting.push(request)
        self.queued_prefill_tokens += request.num_tokens

    def add_compiling(self, request: Request) -> None:
        """Take in a new request whose grammar is being compiled; it stays out of the way of the others until then."""
        self.live[request.request_id] = request
        self.compiling.push(request)
        self.queued_prefill_tokens += request.num_tokens

    def end_compiling(self, request: Request) -> None:
        """Queue a request whose grammar is there."""
        self.compiling.remove(request)
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
        """Take a request's blocks; it goes to the head of the queue, and that is counted."""
        row = request.row
        num_computed = request.num_computed_tokens if row is None else int(self._table.num_computed[row])
        self.put_back(request)
        request.num_preempted_tokens = num_computed
        request.num_preemptions += 1
        self._counters.num_preemptions += 1

    def put_back(self, request: Request) -> None:
        """Take a request's blocks, or its load; it goes to the head of the queue and is computed here."""
        self._kv_cache.release_tables(self._take_tables(request))
        request.state = RequestState.WAITING
        request.num_computed_tokens = request.num_preempted_tokens = 0
        request.num_published_blocks = 0
        request.invalid_spans = []
        request.confirmed_blocks = set()
        self.waiting.push_front(request)
        self.queued_prefill_tokens += request.num_tokens

    def finish(self, request: Request) -> None:
        """End a request wherever it is and free all it held; the caller reports the end."""
        self._kv_cache.release_tables(self._retire(request))

    def hand_over(self, request: Request, *, num_tokens: int) -> KVTransferParams:
        """End a running request and keep its first tokens' KV, which is computed, under a lease.

        Of a group with a window that is what the last of these tokens sees: whoever goes on needs no more.
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
        """Queue the end of a request that has no new tokens, or none of its own."""
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
        """True when an end between steps was not taken yet."""
        return bool(self._finished)

    def take_finished(self) -> list[tuple[str, TokenDelta]]:
        """What ended between steps, with the client of each; once."""
        finished, self._finished = self._finished, []
        return finished

    def take_reports(self) -> Reports:
        """What the runner has not been told; each once."""
        if not self.has_reports:
            return NOTHING_TO_REPORT
        reports = Reports(np.array(self._released_rows, np.int32), tuple(self._finished_ids))
        self._released_rows, self._finished_ids = [], []
        return reports

    def give_up_row(self, row: int) -> None:
        """Take one of several rows from a request, and free its blocks: its beam is dropped."""
        self._kv_cache.release_tables(self._table.release_one(row))
        self._released_rows.append(row)

    def _retire(self, request: Request) -> BlockTables:
        tables = self._take_tables(request)
        self._remote.release(request)
        request.state = RequestState.FINISHED
        del self.live[request.request_id]
        self._finished_ids.append(request.request_id)
        self._counters.num_finished += 1
        return tables

    def _take_tables(self, request: Request) -> BlockTables:
        """Take a request out of the place where it is; returns the block tables that are its own to free."""
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
        elif request in self.undecided or request in self.compiling:
            (self.undecided if request in self.undecided else self.compiling).remove(request)
            self.queued_prefill_tokens -= request.num_tokens
        else:
            self.leave_waiting(request)
        request.block_tables = []
        if request.beams is not None:
            request.beams.give_up_rows()
        return tables
