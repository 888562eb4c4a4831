"""Replicas whose time is simulated and whose block pools are real."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.contract.block_hash import NO_KEYS_ROOT, BlockHash
from engine.contract.messages import CacheChanges, LoadReport
from engine.scheduler.blocks.cache_events import CacheEventLog, cache_changes
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request on one replica: the addresses of its prompt's blocks, and its other properties."""

    hashes: Sequence[BlockHash]
    num_output_tokens: int
    on_done: Callable[[], None]
    sent_at_s: float


class Events:
    """Simulated time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule a call."""
        self._order += 1
        heapq.heappush(self._queue, (time_s, self._order, action))

    def run(self) -> None:
        """Run all calls in order of time."""
        while self._queue:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()


class SimulatedReplica:
    """A first-come first-served worker over a real block pool.

    Prefill computes one prompt after the other, the uncached part of it, at a fixed rate; decode runs all requests that
    fit into its memory side by side.
    """

    def __init__(
        self, name: str, events: Events, *, num_blocks: int, block_size: int, report: Callable[[SimulatedReplica], None]
    ) -> None:
        self.name = name
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks, block_size=block_size, events=(log := CacheEventLog(1 << 20))
        )
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self.waits_s: list[float] = []
        self._log = log
        self._events = events
        self._block_size = block_size
        self._report = report
        self._waiting: deque[Job] = deque()
        self._num_running = 0
        self._next_sequence = 0

    def submit(self, job: Job) -> None:
        """Accept a request."""
        self._waiting.append(job)
        self._start()

    def load(self) -> LoadReport:
        """The load report of a real worker in the same state."""
        return LoadReport(
            num_blocks=self.kv_cache.num_blocks,
            num_free_blocks=self.kv_cache.num_free,
            num_running=self._num_running,
            num_waiting=len(self._waiting),
            queued_prefill_tokens=sum(len(job.hashes) for job in self._waiting) * self._block_size,
        )

    def changes(self) -> CacheChanges:
        """The changes of the prefix cache since the last call."""
        changes = cache_changes(self._log.since(self._next_sequence))
        self._next_sequence = changes.next_sequence
        return changes

    def _start(self) -> None:
        raise NotImplementedError

    def _take_blocks(self, job: Job, num_more: int) -> tuple[list[int], int] | None:
        """The request's block table and the number of its cached blocks, or None if it does not fit now."""
        cached = self.kv_cache.prefix(job.hashes[:-1]).tables[0]
        num_new = len(job.hashes) + num_more - len(cached)
        if num_new > self.kv_cache.num_free_without(cached):
            return None
        self.kv_cache.hold(cached)
        return cached + self.kv_cache.allocate(num_new), len(cached)

    def _begin(self, job: Job, num_cached: int) -> None:
        self._num_running += 1
        self.waits_s.append(self._events.now_s - job.sent_at_s)
        self.num_prompt_tokens += len(job.hashes) * self._block_size
        self.num_hit_tokens += num_cached * self._block_size

    def _finish(self, job: Job, table: list[int]) -> None:
        self.kv_cache.publish([table[: len(job.hashes)]], job.hashes, NO_KEYS_ROOT, b"")
        self.kv_cache.release(table)
        self._num_running -= 1
        self._report(self)
        job.on_done()
        self._start()


class SimulatedPrefill(SimulatedReplica):
    """Computes one prompt after the other."""

    tokens_per_s = 8000.0

    def _start(self) -> None:
        if self._num_running or not self._waiting:
            self._report(self)
            return
        job = self._waiting.popleft()
        taken = self._take_blocks(job, 0)
        if taken is None:
            raise ValueError(f"a prompt of {len(job.hashes)} blocks does not fit; raise --prefill-blocks")
        table, num_cached = taken
        self._begin(job, num_cached)
        seconds = (len(job.hashes) - num_cached) * self._block_size / self.tokens_per_s
        self._events.at(self._events.now_s + seconds, lambda: self._finish(job, table))
        self._report(self)


class SimulatedDecode(SimulatedReplica):
    """Decodes all requests that fit."""

    seconds_per_token = 0.1

    def _start(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            taken = self._take_blocks(job, 1 + job.num_output_tokens // self._block_size)
            if taken is None:
                break
            self._waiting.popleft()
            table, num_cached = taken
            self._begin(job, num_cached)
            self._end_later(job, table)
        self._report(self)

    def _end_later(self, job: Job, table: list[int]) -> None:
        seconds = job.num_output_tokens * self.seconds_per_token
        self._events.at(self._events.now_s + seconds, lambda: self._finish(job, table))
