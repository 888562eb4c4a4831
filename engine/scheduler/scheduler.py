"""The scheduler: which tokens of which requests the next step computes. Free of torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from engine.contract.config import CacheConfig, SchedulerConfig
from engine.contract.grammar import GrammarCompiler
from engine.contract.messages import CacheChanges, CacheReset, FinishReason, GenerateRequest
from engine.contract.stats import SchedulerStats
from engine.contract.step import ModelRunnerOutput, SchedulerOutput
from engine.contract.step_time import StepTimeModel
from engine.drafting.proposer import Drafting
from engine.scheduler.assembly import assemble
from engine.scheduler.blocks.cache_events import CacheEventBatch, cache_changes, cache_snapshot
from engine.scheduler.policy.gates import AdmissionGate
from engine.scheduler.policy.lease_standoff import LeaseStandoff
from engine.scheduler.snapshot import num_common_blocks, take_snapshot
from engine.scheduler.step_draft import Batch, StepDraft, StepInFlight
from engine.scheduler.step_result import StepResult
from kv_transfer.connector import NO_ORDERS, ConnectorEvents, ConnectorOrders, SchedulerConnector


class Scheduler:
    """Hands every request tokens to compute until its computed count has caught up with its known tokens.

    ``schedule`` and ``update`` alternate, or run ahead: a step may be scheduled before the previous one has returned.
    Steps return in the order in which they were scheduled. With ``drafting`` a step also verifies draft tokens of
    running requests; without ``grammars`` no request may have a grammar. Not thread-safe: one thread owns it.
    ``windows`` are those of the model's KV cache groups, in tokens; None for layers that see all earlier tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        windows: Sequence[int | None] = (None,),
        connector: SchedulerConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
        gates: Sequence[AdmissionGate] = (),
        drafting: Drafting | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        config.check_fits(block_size=cache.block_size, num_blocks=num_blocks, max_model_len=max_model_len)
        self._config = config
        self._connector = connector
        self._clock = clock
        parts = assemble(
            config,
            cache,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            windows=windows,
            connector=connector,
            clock=clock,
            gates=gates,
            drafting=drafting,
            grammars=grammars,
        )
        self._counters = parts.state.counters
        self._kv_cache = parts.state.kv_cache
        self._cache_events = parts.state.cache_events
        self._table = parts.state.table
        self._live_requests = parts.state.live_requests
        self._remote = parts.state.remote
        self._leases = parts.state.leases
        self._pending = parts.state.pending
        self._early = parts.state.early
        self._announcer = parts.state.announcer
        self._validator = parts.validator
        self._running = parts.running
        self._admission = parts.admission
        self._speculation = parts.speculation
        self._decode_steps = parts.decode_steps
        self._step_output = parts.step_output
        self._beams = parts.beams
        self._remote_events = parts.remote_events
        self._preparations = parts.preparations
        self._prompt_delay = parts.prompt_delay
        self._migration = parts.migration
        self._grammar_gate = parts.grammar_gate
        self._timer = parts.timer
        self._prompt_budget = parts.prompt_budget
        self._standoff = LeaseStandoff(
            live_requests=self._live_requests, table=self._table, remote=self._remote, leases=self._leases, clock=clock
        )
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step_id = 0
        self._is_quiet, self._is_blocked = True, False

    # ---- requests come and go

    def add_request(self, message: GenerateRequest, *, waited_s: float = 0.0) -> None:
        """Queue a request that came ``waited_s`` ago, or take note of one that is announced.

        Raises:
            PromptTooLongError: It can never fit.
            DuplicateRequestError: A live request has this id.
            RequestRefusedError: The queue is full, or the request asks for what this engine cannot do.
        """
        self._is_quiet = False
        self._validator.enter(message, waited_s=waited_s)
        self._counters.num_requests += message.kv_stream is None

    def forget_client(self, client_id: str) -> None:
        """A front end is gone: drop what is held for requests that it announced and has not sent."""
        self._is_quiet = False
        self._early.drop_client(client_id)

    def abort(self, request_id: str) -> bool:
        """End a request in any state, an announced one too, or the lease of a finished one.

        Its end comes with the next step's result. Unknown ids are counted and ignored.

        Returns:
            False when there was nothing to end.
        """
        self._is_quiet = False
        request = self._live_requests.live.get(request_id)
        is_known = self._leases.abort(request_id)
        is_known |= self._early.drop(request_id)
        if request is not None:
            self._live_requests.finish(request)
            self._live_requests.report(request, FinishReason.ABORT)
            self._counters.num_aborted += 1
        elif not is_known:
            self._counters.num_unknown_ids += 1
        return is_known or request is not None

    def move_out(self) -> int:
        """End the requests that can go on at another engine, each with a hand-over of all KV computed for it.

        Returns how many left: none while a step is in flight, because it is not known yet how far requests come in it.
        Loading ones can leave only later.
        """
        if self._in_flight:
            return 0
        if self._early.by_request:
            self._early.drop_all()
            self._is_quiet = False
        num_left = self._migration.run()
        if num_left:
            self._is_quiet = False
        return num_left

    def order_out(self, request_ids: Iterable[str], *, only_waiting: bool = False) -> None:
        """Have requests leave for another engine, each with a hand-over, as soon as :meth:`let_go` can end them.

        A loading request leaves once it runs; one that hands over anyway just does that. Ids of requests that are not
        here are counted and ignored. With ``only_waiting``, only requests that wait leave.
        """
        self._is_quiet = False
        self._migration.order(request_ids, only_waiting=only_waiting)

    @property
    def has_departures(self) -> bool:
        """True when requests that were ordered to leave can go once no step is in flight."""
        return bool(self._migration.ordered) and self._migration.is_due

    def let_go(self) -> int:
        """End the requests ordered to leave that can go; none while a step is in flight. Returns how many left."""
        if self._in_flight:
            return 0
        self._is_quiet = False
        return self._migration.run_ordered()

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: running requests first, then waiting ones if none was preempted, then drafts."""
        if self._early.by_request:
            self._early.expire()
        if (self._leases.by_id or self._standoff.due_s is not None) and (request := self._standoff.find()):
            self._remote_events.do_without(request)
        draft = StepDraft(token_budget=self._config.max_num_batched_tokens)
        if self._beams.chosen:
            self._beams.lay_out(draft)
        if self._grammar_gate is not None and self._live_requests.compiling:
            self._grammar_gate.let_in()
        for preparation in self._preparations:
            preparation.prepare(draft)
        self._running.run(draft)
        self._admission.run(draft)
        if self._speculation is not None and self._speculation.served_rows:
            self._speculation.run(draft)
        elif self._decode_steps is not None and not self._in_flight:
            self._decode_steps.run(draft)
        return self._seal(draft)

    def begin_loads(self) -> ConnectorOrders:
        """Begin hand-overs while a step computes, as far as there is room; others begin with the next step."""
        if not self._is_blocked:
            self._admission.run(StepDraft(token_budget=0, is_under_way=True))
        return self.take_orders()

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, *, cores: float = 1.0) -> StepResult:
        """Take in the result of the oldest step in flight, computed on ``cores`` times the engine's own cores."""
        if not output.rows.size:
            return self.take_finished()
        self._is_quiet = False
        step = self._in_flight.popleft()
        assert step.step_id == output.step_id, f"step {output.step_id} returned before step {step.step_id}"
        self._kv_cache.step_returned(step.step_id)
        if self._prompt_delay is not None:
            self._prompt_delay.step_returned(step.step_id)
        seconds = self._timer.step_returned(step, cores=cores, ends_s=result.step_ends_s)
        if self._speculation is not None and self._speculation.served_rows:
            self._speculation.step_returned(step, seconds)
        if self._table.unanswered_rows:
            self._step_output.note_times(step.batch, seconds, end_s=self._timer.returned_s)
        if result.has_nan is not None:
            self._counters.num_nan_logits += int(np.count_nonzero(result.has_nan))
        return self._step_output.apply(step, result)

    def lean(self, prompt_share: float) -> None:
        """Set the least share of a step for prompts, relative to the step's time without them; see ``Role``."""
        if self._prompt_budget is not None:
            self._prompt_budget.prompt_share = prompt_share

    def take_orders(self) -> ConnectorOrders:
        """Take the connector's orders now, for its worker half; otherwise they go with the next step."""
        return self._connector.take_orders() if self._connector is not None else NO_ORDERS

    def take_finished(self) -> StepResult:
        """Take the ends that happened between steps and were not reported yet; an idle engine passes them on."""
        return StepResult(finished=self._live_requests.take_finished())

    def _seal(self, draft: StepDraft) -> SchedulerOutput:
        """Turn the draft into the message to the runner, and remember the step until it returns."""
        batch, self._is_blocked = draft.batch(), draft.is_blocked
        reports = self._live_requests.take_reports()
        if self._speculation is not None and reports.finished_request_ids:
            self._speculation.requests_finished(reports.finished_request_ids)
        output = draft.output(
            batch,
            step_id=self._next_step_id,
            reports=self._beams.tell(draft, reports) if draft.forked else reports,
            connector_orders=self.take_orders(),
            num_used_blocks=self._kv_cache.pool.num_used,
        )
        self._next_step_id += 1
        if batch.rows.size:
            self._launch(output, batch)
        else:
            self._is_quiet = not draft.has_preempted
        return output

    def _launch(self, output: SchedulerOutput, batch: Batch) -> None:
        if self._table.damaged_rows:
            self._table.leave_computed_spans()
        self._counters.num_scheduled_tokens += batch.num_tokens
        self._kv_cache.step_scheduled(output.step_id)
        if self._prompt_delay is not None:
            self._prompt_delay.step_scheduled(output.step_id, has_prompts=batch.has_prompts)
        scheduled_s, since_s = self._timer.step_scheduled()
        is_alone, num_releases = not self._in_flight, self._table.num_releases
        self._in_flight.append(StepInFlight(output.step_id, batch, num_releases, scheduled_s, since_s, is_alone))

    # ---- the connector

    def handle_connector_events(self, events: ConnectorEvents) -> None:
        """Bring back requests whose loads ended, and free what leases pinned. Unknown ids are counted and ignored."""
        self._is_quiet = False
        self._remote_events.apply(events)

    # ---- what an engine asks between steps

    def has_work(self) -> bool:
        """True when a step has something to do: compute, or tell the runner or a client something."""
        if not self._is_quiet or self._live_requests.has_reports or self._live_requests.has_finished:
            return True
        if self._grammar_gate is not None and self._grammar_gate.is_due:
            return True
        due = self._next_due_s()
        return due is not None and self._clock() >= due

    def rest(self) -> None:
        """Note that there is nothing to compute now: the next step does not follow at once on the one before."""
        self._timer.rest()

    def is_stuck(self) -> bool:
        """True when requests wait and nothing that could let them start is under way: no step, read, lease or timer.

        This should never happen (known-failures 7). A watchdog must not take such an engine for an idle one.
        """
        if len(self._table) or not self._live_requests.live or self.has_work():
            return False
        has_reads = self._remote.has_loads or self._early.has_ending
        is_under_way = bool(self._in_flight or has_reads or self._leases.by_id)
        return not is_under_way and self._next_due_s() is None

    def idle_timeout_s(self) -> float | None:
        """How long an idle engine may sleep before it asks ``has_work`` again; None: until it is woken."""
        due = self._next_due_s()
        return None if due is None else max(due - self._clock(), 0.0)

    def _next_due_s(self) -> float | None:
        grammar_due = self._grammar_gate.next_deadline_s if self._grammar_gate is not None else None
        dues = (self._admission.ask_again_at_s, self._early.next_deadline_s, grammar_due, self._standoff.due_s)
        return min((due for due in dues if due is not None), default=None)

    @property
    def wants_newest_tokens(self) -> bool:
        """True while the next step should not be scheduled before those in flight have returned."""
        return self._speculation is not None and self._speculation.wants_newest_tokens

    def has_unfinished(self) -> bool:
        """True while a request is live."""
        return bool(self._live_requests.live)

    def stats(self) -> SchedulerStats:
        """Gauges of now and counters since the start."""
        return take_snapshot(
            counters=self._counters,
            table=self._table,
            live_requests=self._live_requests,
            kv_cache=self._kv_cache,
            remote=self._remote,
            leases=self._leases,
            early=self._early,
        )

    @property
    def step_time(self) -> StepTimeModel:
        """The model of step times by what steps compute, as measured here."""
        return self._timer.model

    def num_common_prefix_blocks(self) -> int:
        """Leading blocks that all running requests share, for shared-prefix attention."""
        return num_common_blocks(self._table)

    def cache_events_since(self, sequence: int) -> CacheEventBatch:
        """What changed in the prefix cache from an event number on; empty unless ``enable_cache_events``."""
        if self._cache_events is None:
            return CacheEventBatch(first_sequence=0, events=())
        return self._cache_events.since(sequence)

    def cache_changes_since(self, sequence: int) -> CacheChanges | None:
        """The same changes for routers: a snapshot when events were missed, None when nothing changed."""
        log = self._cache_events
        if log is None or log.next_sequence == sequence:
            return None
        batch = log.since(sequence)
        return cache_changes(batch) if batch.first_sequence == sequence else self.cache_snapshot()

    def cache_snapshot(self) -> CacheChanges:
        """All that is cached now, for routers that know nothing of it yet; empty unless ``enable_cache_events``."""
        log = self._cache_events
        if log is None:
            return cache_snapshot((), next_sequence=0)
        return cache_snapshot(self._kv_cache.published(), next_sequence=log.next_sequence)

    def check_integrity(self) -> None:
        """Compare the owners of every block with the pool, and claims on prefixes and counts with the live requests.

        Raises:
            AssertionError: They disagree.
        """
        tables = self._leases.tables() + self._remote.abandoned_tables() + self._early.tables()
        holders = self._remote.loading() + list(self._live_requests.ready) + self._table.running()
        tables += [self._live_requests.block_ids(request) for request in holders]
        for row in self._table.order.tolist():
            self._table.check_windows(row)
        self._kv_cache.check_integrity(tables)
        self._pending.check_integrity(self._live_requests.live)
        self._live_requests.check_integrity()

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> CacheReset | None:
        """Drop the prefix cache.

        Without ``preempt_running`` this is refused while any request holds blocks. With it, running and loaded requests
        are preempted first, and loads in flight are not used. Early loads are dropped in any case.

        Returns:
            What was dropped; None when it was refused.
        """
        self._is_quiet = False
        self._early.drop_all()
        holders = self._table.running() + list(self._live_requests.ready) + self._remote.loading()
        if holders and not preempt_running:
            return None
        for request in sorted(holders, key=lambda request: request.arrival_index, reverse=True):
            self._live_requests.preempt(request)
        return replace(self._kv_cache.reset(), num_preempted=len(holders))
