"""The scheduler: which tokens of which requests the next step computes (C1). Free of torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.config import CacheConfig, SchedulerConfig
from engine.core.admission import Admission, AdmissionGate
from engine.core.counters import Counters
from engine.core.door import Door
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.lease_book import LeaseBook
from engine.core.outcome import Outcome
from engine.core.preemption import PreemptionPolicy
from engine.core.remote_kv import LoadOutcome, RemoteKV, set_computed
from engine.core.request import Request, RequestState
from engine.core.request_book import RequestBook
from engine.core.row_table import RowTable
from engine.core.running_pass import RunningPass
from engine.core.snapshot import take_snapshot
from engine.core.step_draft import StepDraft, StepInFlight
from engine.core.step_result import StepResult
from engine.messages import FinishReason, GenerateRequest, RequestError
from engine.stats import SchedulerStats
from engine.step import ModelRunnerOutput, SchedulerOutput
from kv_transfer.connector import NO_ORDERS, ConnectorEvents, LeaseEnded, LoadEnded, SchedulerConnector


class Scheduler:
    """Hands every request tokens until its computed count has caught up with its known tokens; nothing else.

    ``schedule`` and ``update`` alternate, or run ahead: a step may be scheduled before the previous one returned, and
    steps return in the order in which they were scheduled. Not thread-safe: one thread owns it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        connector: SchedulerConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
        gates: Sequence[AdmissionGate] = (),
    ) -> None:
        config.check_fits(block_size=cache.block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        self._config = config
        self._connector = connector
        self._clock = clock
        self._counters = Counters()
        self._kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            clock=clock,
        )
        self._table = RowTable(
            max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, block_size=cache.block_size
        )
        self._remote = RemoteKV(connector)
        self._leases = LeaseBook(connector)
        self._book = RequestBook(
            policy=config.policy,
            table=self._table,
            kv_cache=self._kv_cache,
            remote=self._remote,
            leases=self._leases,
            counters=self._counters,
        )
        self._door = Door(
            config,
            book=self._book,
            remote=self._remote,
            max_model_len=max_model_len,
            max_kv_tokens=num_blocks * cache.block_size,
            has_connector=connector is not None,
            clock=clock,
        )
        self._running = RunningPass(
            config,
            table=self._table,
            kv_cache=self._kv_cache,
            book=self._book,
            preemption=PreemptionPolicy(config.policy),
        )
        self._admission = Admission(
            config,
            table=self._table,
            kv_cache=self._kv_cache,
            book=self._book,
            remote=self._remote,
            counters=self._counters,
            gates=gates,
            clock=clock,
        )
        self._outcome = Outcome(table=self._table, kv_cache=self._kv_cache, book=self._book, counters=self._counters)
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step_id = 0
        self._is_quiet = True

    # Requests come and go.

    def add_request(self, message: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            PromptTooLongError: It can never fit.
            DuplicateRequestError: A live request has this id.
            RequestRefusedError: The queue is full, or the request asks for what this engine cannot do.
        """
        self._is_quiet = False
        self._door.enter(message)
        self._counters.num_requests += 1

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is, or the lease of a finished one (C10).

        Its end is among the next news. Unknown ids are counted and ignored.

        Returns:
            False when there was nothing to end.
        """
        self._is_quiet = False
        request = self._book.live.get(request_id)
        is_known = self._leases.abort(request_id)
        if request is not None:
            self._book.finish(request)
            self._book.report(request, FinishReason.ABORT)
            self._counters.num_aborted += 1
        elif not is_known:
            self._counters.num_unknown_ids += 1
        return is_known or request is not None

    # A step.

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then waiting ones if none was preempted (C2)."""
        draft = StepDraft(token_budget=self._config.max_num_batched_tokens)
        self._running.run(draft)
        self._admission.run(draft)
        return self._seal(draft)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> StepResult:
        """Take in what the oldest step in flight produced, and the connector's events that came with it."""
        if output.has_work:
            self._is_quiet = False
            step = self._in_flight.popleft()
            assert step.step_id == output.step_id, f"step {output.step_id} returned before step {step.step_id}"
            self._kv_cache.step_returned(step.step_id)
            step_result = self._outcome.apply(step, output, result.sampled_token_ids)
        else:
            step_result = self.take_news()
        if not result.connector_events.is_empty:
            self.handle_connector_events(result.connector_events)
        return step_result

    def take_news(self) -> StepResult:
        """What ended between steps and was not reported yet; an idle engine passes it on."""
        return StepResult(news=self._book.take_news())

    def _seal(self, draft: StepDraft) -> SchedulerOutput:
        """Turn the draft into the message to the runner, and remember the step until it returns."""
        batch = draft.batch()
        step_id = self._next_step_id
        self._next_step_id += 1
        orders = self._connector.take_orders() if self._connector is not None else NO_ORDERS
        output = draft.output(
            batch,
            step_id=step_id,
            released_rows=self._book.take_released_rows(),
            finished_request_ids=self._book.take_finished_ids(),
            connector_orders=orders,
        )
        if not batch.rows.size:
            self._is_quiet = True
            return output
        table = self._table
        for row in tuple(table.holed_rows):
            if table.num_computed[row] >= table.ceiling[row]:
                table.begin_next_span(row)
        self._counters.num_scheduled_tokens += self._config.max_num_batched_tokens - draft.token_budget
        self._kv_cache.step_scheduled(step_id)
        self._in_flight.append(
            StepInFlight(
                step_id=step_id,
                rows=batch.rows,
                epochs=table.epoch[batch.rows],
                num_releases=table.num_releases,
                ends=batch.first_positions + batch.num_scheduled_tokens,
                num_sampling=int(batch.is_sampling.sum()),
            )
        )
        return output

    # The connector's events.

    def handle_connector_events(self, events: ConnectorEvents) -> None:
        """Bring back requests whose loads ended, and free what leases pinned. Unknown ids are counted and ignored."""
        self._is_quiet = False
        for load in events.loads:
            self._end_load(load)
        for lease in events.leases:
            self._end_lease(lease)

    def _end_lease(self, event: LeaseEnded) -> None:
        block_ids = self._leases.end(event)
        if block_ids is None:
            self._counters.num_unknown_ids += 1
        else:
            self._kv_cache.release(block_ids)

    def _end_load(self, event: LoadEnded) -> None:
        ended = self._remote.end(event)
        if ended.load is None:
            self._counters.num_unknown_ids += 1
            return
        if ended.outcome is LoadOutcome.ABANDONED:
            self._kv_cache.release(ended.load.block_ids)
            return
        request = ended.load.request
        request.state = RequestState.READY
        self._book.ready.push(request)
        self._counters.failed_blocks += len(ended.damaged_blocks)
        if ended.damaged_blocks and self._config.load_failure_policy == "fail":
            self._fail(request, event, num_failed=len(ended.damaged_blocks))
            return
        num_recomputed = set_computed(
            request,
            ended.load,
            ended.damaged_blocks,
            block_size=self._kv_cache.block_size,
            only_damaged=self._config.recompute_damaged_only,
        )
        local = ended.load.first_block * self._kv_cache.block_size
        frontier = min(ended.load.num_tokens, request.num_tokens - 1)
        request.num_remote_tokens = max(frontier - local - num_recomputed, 0)
        request.num_cached_tokens += request.num_remote_tokens
        self._counters.remote_hit_tokens += request.num_remote_tokens
        self._counters.recomputed_tokens += num_recomputed
        if self._kv_cache.enable_prefix_caching:
            self._outcome.publish_loaded(request, request.num_computed_tokens)

    def _fail(self, request: Request, event: LoadEnded, *, num_failed: int) -> None:
        message = f"{num_failed} KV blocks of the prompt could not be loaded: {event.error or 'no reason given'}"
        self._book.finish(request)
        self._book.report(request, FinishReason.ERROR, error=RequestError(code="kv_load_failed", message=message))

    # What an engine asks between steps.

    def has_work(self) -> bool:
        """True when a step would do something now: something can compute, or the runner or a client must be told."""
        if self._book.has_reports or self._book.has_news:
            return True
        if not self._is_quiet:
            return True
        due = self._admission.ask_again_at_s
        return due is not None and self._clock() >= due

    def idle_timeout_s(self) -> float | None:
        """How long an idle engine may sleep before it asks ``has_work`` again; None: until something happens."""
        due = self._admission.ask_again_at_s
        return None if due is None else max(due - self._clock(), 0.0)

    def has_unfinished(self) -> bool:
        """True while a request is live."""
        return bool(self._book.live)

    def stats(self) -> SchedulerStats:
        """Gauges of now and counters since the start (C13)."""
        return take_snapshot(
            counters=self._counters,
            table=self._table,
            book=self._book,
            kv_cache=self._kv_cache,
            remote=self._remote,
            leases=self._leases,
        )

    def check_integrity(self) -> None:
        """Compare every block's owners with the pool (I2).

        Raises:
            AssertionError: Books and pool disagree.
        """
        tables = self._leases.tables() + self._remote.abandoned_tables()
        tables += [request.block_ids for request in self._remote.loading()]
        tables += [request.block_ids for request in self._book.ready]
        for row in self._table.order.tolist():
            tables.append(self._table.block_table[row, : self._table.num_blocks[row]].tolist())
        self._kv_cache.check_integrity(tables)

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Drop the prefix cache (B5).

        Without ``preempt_running`` it is refused while any request holds blocks. With it, running and loaded requests
        are preempted first, and what loads still bring is not used.

        Returns:
            False when it was refused.
        """
        self._is_quiet = False
        holders = self._table.running() + list(self._book.ready)
        if (holders or self._remote.num_loading) and not preempt_running:
            return False
        for request in sorted(holders, key=lambda request: request.sequence, reverse=True):
            self._book.preempt(request)
        for request in self._remote.loading():
            self._book.preempt(request)
        self._kv_cache.reset()
        return True
