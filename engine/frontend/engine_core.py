"""One engine's step: schedule, run, update. Synchronous, and owned by one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.contract.errors import UnknownTokenError
from engine.contract.executor import LONG_STEP_TOKENS, StepRunner, StepThreads
from engine.contract.messages import CacheChanges, CacheReset, GenerateRequest, LoadReport
from engine.contract.stats import GAUGES, EngineStats, StepCounters
from engine.contract.step import PendingStep, SchedulerOutput
from engine.contract.token_ids import TokenIds
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_result import StepResult
from kv_transfer.connector import ConnectorOrders, PeerWorkerConnector
from kv_transfer.stats import TransferStats

logger = logging.getLogger(f"baton.{__name__}")


class EngineCore:
    """Joins the scheduler, the executor and the worker half of the connector.

    With ``runs_ahead`` a step is scheduled and launched before the result of the previous one is taken, so the device
    computes while this thread schedules. One step stays in flight between calls of ``step``, unless the scheduler needs
    its tokens first.

    ``num_load_changes`` counts changes of the load other than more tokens of running requests: if it has not changed,
    there is little to report.

    ``wake`` is set by the connector's threads when there is something to collect, and by other threads that add work.
    The owner of the loop waits for it when there is nothing to do.

    ``take_arrivals`` is called several times while a step computes, on the same thread: for work that need not wait for
    the step's end, and does not use the engine beyond :meth:`add_request` and :meth:`begin_loads`.

    ``on_close`` is called last in ``close``, when nothing uses the KV cache any more. ``clock`` measures steps.
    ``vocab_size`` bounds the token ids of requests, because the model cannot embed others; None: no bound.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: StepRunner,
        connector: PeerWorkerConnector | None = None,
        wake: threading.Event | None = None,
        runs_ahead: bool = False,
        on_close: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector
        self.wake = wake or threading.Event()
        self._num_ahead = 1 if runs_ahead else 0
        self._on_close = on_close
        self._clock = clock
        self._begun_s = clock()
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep, float]] = deque()
        self._launches_nothing = False
        self._threads: StepThreads | None = None
        self._is_long_step = False
        self.take_arrivals: Callable[[], None] | None = None
        self._counters = StepCounters()
        self._next_cache_event = 0
        self.num_load_changes = 0
        self._checked_change = 0

    def share_cores(self, threads: StepThreads) -> None:
        """Let ``threads`` choose the threads of every step, and tell it when there is none; closed with this engine."""
        self._threads = threads

    def between_layers(self) -> None:
        """To be called by the runner, on this engine's thread, for each layer of a step, before its attention."""
        if self._is_long_step and self._threads is not None:
            self._threads.between_layers()
        if self.take_arrivals is not None:
            self.take_arrivals()

    def add_request(self, request: GenerateRequest, *, waited_s: float = 0.0) -> None:
        """Accept a request that came ``waited_s`` ago.

        Raises:
            RequestRefusedError: It can never be served here; nothing was kept.
        """
        self.num_load_changes += 1
        if self._vocab_size is not None:
            _check_tokens(request, self._vocab_size)
        self.scheduler.add_request(request, waited_s=waited_s)

    def begin_loads(self) -> None:
        """Begin hand-overs of waiting requests now, not only with the next step: their KV comes while a step computes.

        The only method beside :meth:`add_request` that may be called within a step.
        """
        self._execute(self.scheduler.begin_loads())

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown ids are ignored and counted."""
        self.num_load_changes += 1
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def move_out(self) -> int:
        """End the requests that can go on elsewhere, with their KV under leases; returns how many.

        With a step in flight no request leaves, and the next ``step`` only takes its result: call this again after
        that.
        """
        self._launches_nothing = bool(self._in_flight)
        self.num_load_changes += 1
        return self.scheduler.move_out()

    def order_out(self, request_ids: Iterable[str], *, only_waiting: bool = False) -> None:
        """Have requests leave for another engine at the next step boundary, with their KV under leases.

        A loading request leaves once it runs. Unknown ids are ignored and counted. With ``only_waiting`` only requests
        leave that wait and hold nothing.
        """
        self.num_load_changes += 1
        self.scheduler.order_out(request_ids, only_waiting=only_waiting)

    def forget_client(self, client_id: str) -> None:
        """A front end is gone: drop what is held for requests that it announced and has not sent."""
        self.num_load_changes += 1
        self.scheduler.forget_client(client_id)

    def reset_prefix_cache(self, *, preempt_running: bool) -> CacheReset | None:
        """Drop the prefix cache; None if requests hold blocks and may not be preempted for it."""
        self.num_load_changes += 1
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def collect(self) -> None:
        """Take in the connector's events: loads that arrived or failed, leases that ended."""
        if self.connector is None:
            return
        events = self.connector.collect()
        if not events.is_empty:
            self.num_load_changes += 1
            self.scheduler.handle_connector_events(events)

    @property
    def has_hung_read(self) -> bool:
        """True while a read of the connector hangs for good. From any thread."""
        return self.connector is not None and self.connector.has_hung_read

    def has_work(self) -> bool:
        """True when a step would do something now."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def is_stuck(self) -> bool:
        """True when requests wait and nothing is under way that could let them start."""
        return self.scheduler.is_stuck()

    def has_unfinished(self) -> bool:
        """True while a request is live or a step is in flight, even if no request needs its tokens any more."""
        return bool(self._in_flight) or self.scheduler.has_unfinished()

    def step(self) -> StepResult:
        """Run one step. When running ahead, the result is that of the step before."""
        started = self._clock()
        self.collect()
        if self.scheduler.has_departures:
            self._let_go()
        has_launched = self._launch() if not self._in_flight or self._may_launch() else False
        is_ahead = has_launched and len(self._in_flight) <= self._num_ahead and not self.scheduler.wants_newest_tokens
        result = self.scheduler.take_finished() if is_ahead else self._next_result()
        if is_ahead and result.finished:
            self.num_load_changes += 1
        self._counters.step_s += self._clock() - started
        return result

    def begin_step(self) -> bool:
        """Launch a step, whose result :meth:`end_step` takes; False when there is nothing to compute.

        For an owner that does other work in between; meanwhile it may only add requests, and begin their loads.
        """
        self._begun_s = self._clock()
        self.collect()
        if self.scheduler.has_departures:
            self._let_go()
        return self._launch()

    def end_step(self) -> StepResult:
        """The result of the oldest step that was begun; if none was, the ends that happened between steps.

        All the time since the last :meth:`begin_step` counts as the step's.
        """
        result = self._next_result()
        self._counters.step_s += self._clock() - self._begun_s
        return result

    def _next_result(self) -> StepResult:
        result = self._take_result() if self._in_flight else self.scheduler.take_finished()
        if result.special or result.finished:
            self.num_load_changes += 1
        return result

    def _let_go(self) -> None:
        """End requests that were ordered to leave; call it only while there are any (``has_departures``).

        None can while a step is in flight, so no other step is launched.
        """
        self._launches_nothing = bool(self._in_flight)
        self.scheduler.let_go()

    def _may_launch(self) -> bool:
        return not (self._launches_nothing or self.scheduler.wants_newest_tokens) and self.scheduler.has_work()

    def _launch(self) -> bool:
        """Schedule a step and begin it; False when there is nothing to compute."""
        output = self.scheduler.schedule()
        self._counters.num_steps += 1
        self._execute(output.connector_orders)
        has_work = output.has_work
        if output.new_rows or output.released_rows.size:
            self.num_load_changes += 1
        if has_work:
            if self._threads is not None:
                self._counters.num_borrowed_steps += self._threads.begin_step()
                self._is_long_step = output.num_tokens // output.num_decode_steps >= LONG_STEP_TOKENS
            pending = self.runner.launch(output)
            cores = 1.0 if self._threads is None else self._threads.step_cores
            self._in_flight.append((output, pending, cores))
        elif output.released_rows.size:
            self.runner.launch(output)
        return has_work

    def _take_result(self) -> StepResult:
        """Take the result of the oldest step in flight."""
        output, pending, cores = self._in_flight.popleft()
        result = pending.result()
        if result.has_waited:
            self._counters.num_waited_steps += 1
        if self._launches_nothing and not self._in_flight:
            self._launches_nothing = False
        cores = cores if result.step_cores is None else result.step_cores
        step_result = self.scheduler.update(output, result, cores=cores)
        if self._num_ahead and self.connector is not None:
            # Peers can read what this step completed now, without waiting until the step after next is scheduled.
            self._execute(self.scheduler.take_orders())
        return step_result

    def _execute(self, orders: ConnectorOrders) -> None:
        if self.connector is not None and not orders.is_empty:
            self.num_load_changes += 1
            self.connector.execute(orders)

    def pause(self) -> None:
        """To be called when there is nothing to compute now, though requests may wait for something."""
        self.scheduler.rest()
        if self._threads is not None:
            self._threads.rest()

    def rest(self) -> None:
        """To be called when there is nothing to do: check that block tables and pool agree, and count when they do not.

        Done once after each change: with a large cache it takes milliseconds, in which no request is served.
        """
        if self._checked_change == self.num_load_changes:
            return
        self._checked_change = self.num_load_changes
        try:
            self.scheduler.check_integrity()
        except AssertionError:
            self._counters.num_integrity_failures += 1
            logger.exception("what the scheduler keeps of blocks and requests does not agree")

    def stats(self) -> EngineStats:
        """A snapshot of the scheduler's and the connector's counters."""
        transfer = self.connector.stats() if self.connector is not None else TransferStats()
        return EngineStats(
            scheduler=self.scheduler.stats(),
            transfer=transfer,
            **self._counters.values(),
        )

    def load_report(self) -> LoadReport:
        """The snapshot as routers get it: gauges as fields, counters by name."""
        stats = self.stats()
        gauges = {name: getattr(stats.scheduler, name) for name in GAUGES}
        return LoadReport(**gauges, counters=stats.counters(), step_time=self.scheduler.step_time)

    def cache_changes(self) -> CacheChanges | None:
        """What changed in the prefix cache since the last call."""
        changes = self.scheduler.cache_changes_since(self._next_cache_event)
        if changes is not None:
            self._next_cache_event = changes.next_sequence
        return changes

    def cache_snapshot(self) -> CacheChanges:
        """All that is cached now."""
        return self.scheduler.cache_snapshot()

    def close(self) -> None:
        """Stop the connector's threads, then close what they read and wrote. Idempotent."""
        if self.connector is not None:
            self.connector.close()
        if self._threads is not None:
            self._threads.close()
        if self._on_close is not None:
            self._on_close()


def _check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    """Refuse token ids that the model lacks: reading their embeddings would end the step, and with it the engine.

    Raises:
        UnknownTokenError: The model has no such token.
    """
    for ids in (request.prompt_token_ids, TokenIds.of(request.output_token_ids)):
        unknown = ids.array[(ids.array < 0) | (ids.array >= vocab_size)]
        if unknown.size:
            raise UnknownTokenError(token_id=int(unknown[0]), vocab_size=vocab_size)
