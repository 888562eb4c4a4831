"""A world around one scheduler: a cache whose content is checked, a strict runner, and a peer that may fail.

Steps run when they *return*, and loads write when they *end*: a block that was reused
too early is overwritten at the worst moment, and noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from engine.contract.config import CacheConfig, SchedulerConfig
from engine.contract.messages import BeamResult, FinishReason, GenerateRequest, TokenDelta
from engine.contract.step import SchedulerOutput
from engine.drafting.proposer import Drafting
from engine.scheduler.beams.search import BeamSearch
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_result import StepResult
from kv_transfer.cache_groups import ABSENT_BLOCK, CacheGroups
from kv_transfer.chain.source import ChainSource, ChainTier, chain_orders
from kv_transfer.connector import ConnectorEvents, ConnectorOrders, LeaseEnd, LeaseEnded, LoadEnded, SchedulerConnector
from tests.support.engine.proposers import SometimesRight
from tests.support.engine.strict_runner import StrictRunner, kv_values, next_candidates, next_token
from tests.support.scheduler.place_watch import PlaceWatch
from tests.support.scheduler.scripted_connector import ScriptedConnector
from tests.support.scheduler.scripted_tier import ScriptedTier


def undisturbed_output(request: GenerateRequest, max_total_tokens: int) -> list[int]:
    """All output tokens of a request that nothing disturbs, including those that it brought along.

    A beam search has none that come one after the other: see ``undisturbed_beams``.
    """
    sampling = request.sampling
    if sampling.beams is not None:
        return []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
    output = list(request.output_token_ids)
    num_prompt, value = len(request.prompt_token_ids), kv_values([*request.prompt_token_ids, *output])[-1]
    while len(output) < sampling.max_tokens and num_prompt + len(output) < max_total_tokens:
        if output and output[-1] in stops and len(output) >= sampling.min_tokens:
            break
        output.append(next_token(value))
        (value,) = kv_values(output[-1:], value)
    return output


def undisturbed_beams(request: GenerateRequest, max_total_tokens: int) -> tuple[BeamResult, ...]:
    """The result of the beam search of a request that nothing disturbs."""
    sampling, prompt = request.sampling, request.prompt_token_ids.tolist()
    assert sampling.beams is not None
    search = BeamSearch(
        sampling.beams,
        stop_ids=sampling.all_stop_ids,
        min_tokens=sampling.min_tokens,
        max_tokens=min(sampling.max_tokens, max_total_tokens - len(prompt)),
    )
    while not search.is_over:
        values = [kv_values([*prompt, *beam.token_ids])[-1] for beam in search.running]
        told = [next_candidates(value, search.num_candidates) for value in values]
        search.advance(
            [np.array(tokens, np.int32) for tokens, _ in told],
            [np.array(logprobs, np.float32) for _, logprobs in told],
        )
    return search.results


def drafts_for_worlds(max_draft_tokens: int, *, accuracy: float = 0.7, proposes_all: bool = False) -> Drafting | None:
    """Drafts that are right with a given probability; None for a probability of 0."""
    if not max_draft_tokens:
        return None
    proposer = SometimesRight(
        lambda _, tokens: next_token(kv_values(tokens)[-1]), probability=accuracy, proposes_all=proposes_all
    )
    return Drafting(proposer=proposer, max_draft_tokens=max_draft_tokens)


@dataclass(slots=True)
class Ending:
    """The outcome of a request: its tokens here, and its last delta."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenDelta | None = None
    num_cached_tokens: int | None = None
    num_remote_tokens: int | None = None


class SchedulerWorld:
    """One scheduler, its runner and its peer, driven by hand. Every delta is collected, every step checked.

    With ``num_tier_slots`` its connector is a chain: a host tier, then the peer. With ``drafting`` steps verify
    draft tokens. An id may be used again once its
    request has ended; what became of the earlier one is checked then.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int = 4,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        has_connector: bool = True,
        num_tier_slots: int = 0,
        drafting: Drafting | None = None,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.now_s = 0.0
        self.config = config
        self.block_size = block_size
        self.runner = StrictRunner(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=config.max_num_seqs, windows=windows
        )
        self.connector = ScriptedConnector(block_size=block_size, windows=windows)
        self.tier: ScriptedTier | None = None
        connector = self.connector.questions
        if num_tier_slots:
            self.tier = ScriptedTier(self.runner.kv, num_slots=num_tier_slots, block_size=block_size, windows=windows)
            parts = (self.tier.scheduler, self.connector)
            connector = SchedulerConnector(
                source=ChainSource(parts, peer_source=1, consumer=self.connector, block_size=block_size),
                producer=self.connector,
                consumer=self.connector,
                tier=ChainTier([self.tier.scheduler]),
                take_orders=chain_orders([part.take_orders for part in parts]),
            )
        self.scheduler = Scheduler(
            config,
            CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            windows=windows,
            connector=connector if has_connector else None,
            clock=lambda: self.now_s,
            drafting=drafting,
        )
        self.max_model_len = max_model_len
        groups = CacheGroups(tuple(windows), block_size)
        max_kv_tokens = groups.max_tokens(num_blocks, chunk_tokens=config.most_tokens_of_request)
        self.max_total_tokens = max_model_len if max_kv_tokens is None else min(max_model_len, max_kv_tokens + 1)
        self.requests: dict[str, GenerateRequest] = {}
        self._endings: dict[str, Ending] = {}
        self._lent_tokens: dict[str, tuple[int, ...]] = {}
        self.in_flight: deque[SchedulerOutput] = deque()
        self.finished_ids: list[str] = []
        self.last_output: SchedulerOutput | None = None

    @property
    def endings(self) -> MappingProxyType[str, Ending]:
        """The outcome of each request so far."""
        return MappingProxyType(self._endings)

    def is_live(self, request_id: str) -> bool:
        """True for an accepted request that has not ended."""
        ending = self._endings.get(request_id)
        return ending is not None and ending.last is None

    def loads(self) -> dict[str, tuple[int, ...]]:
        """The loads that have not ended: the blocks that each writes, in the order of its prompt."""
        loads = {request_id: load.block_ids for request_id, load in self.connector.open_loads.items()}
        if self.tier is not None:
            for request_id, order in self.tier.open_loads.items():
                loads[request_id] = order.block_ids + loads.get(request_id, ())
        return loads

    def add(self, request: GenerateRequest) -> None:
        """Add a request; refusals are raised."""
        self.scheduler.add_request(request)
        if request.request_id in self.requests:
            self.check_output(request.request_id)
        self.requests[request.request_id] = request
        self._endings[request.request_id] = Ending()
        self.collect(self.scheduler.take_finished())

    def schedule(self) -> SchedulerOutput:
        """Schedule a step; it stays in flight until ``complete_step``, unless it is empty."""
        self._let_go()
        places = PlaceWatch(self.scheduler, self.config, is_at_rest=not self.in_flight)
        output = self.scheduler.schedule()
        places.check()
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert output.rows.size <= self.config.max_num_seqs
        assert self.config.enable_chunked_prefill or output.num_samples.all(), "a prompt was computed in chunks (C3)"
        self._take_in(output.connector_orders)
        self.collect(self.scheduler.take_finished())  # what ended because no room came for it
        self.finished_ids.extend(output.finished_request_ids)
        self.last_output = output
        self.in_flight.append(output)
        return output

    def begin_loads(self) -> None:
        """Begin loads while steps are in flight, as an engine does when requests come within a step."""
        running = self.scheduler._table.running()
        self._take_in(self.scheduler.begin_loads())
        assert self.scheduler._table.running() == running, "only a step starts requests"
        self.collect(self.scheduler.take_finished())

    def complete_step(self, *, cores: float = 1.0) -> StepResult:
        """Run the oldest step in flight, on ``cores`` times the engine's own cores, and give its result back."""
        output = self.in_flight.popleft()
        result = self.scheduler.update(output, self.runner.execute(output), cores=cores)
        self.collect(result)
        return result

    def step(self) -> SchedulerOutput:
        """Schedule a step, run it, update."""
        output = self.schedule()
        while self.in_flight:
            self.complete_step()
        return output

    def run(self, *, max_steps: int = 2000) -> None:
        """Step while there is work."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"still at work after {max_steps} steps")

    def abort(self, request_id: str) -> bool:
        """Abort a request, and collect what that ended."""
        was_known = self.scheduler.abort(request_id)
        self.collect(self.scheduler.take_finished())
        return was_known

    def end_load(self, request_id: str, failed: Sequence[int] = (), *, times: int = 1) -> None:
        """End a load: its content is written now; ``failed`` are offsets into its destination.

        ``times``: how often that is reported.
        """
        block_ids = self.loads()[request_id]
        if self.tier is not None:
            self.tier.end_load(request_id)
        load = self.connector.open_loads.pop(request_id, None)
        if load is not None:
            self.runner.fill(load.tables, load.first_block, kv_values(load.token_ids))
        failed_ids = tuple(block_ids[offset] for offset in failed)
        self.runner.spoil(failed_ids)
        ended = LoadEnded(
            request_id=request_id,
            failed_block_ids=failed_ids,
            num_bytes=len(block_ids),
            duration_s=0.0,
            error="the read failed" if failed_ids else None,
        )
        self.handle(ConnectorEvents(loads=(ended,) * times))

    def stall_load(self, request_id: str) -> None:
        """Report that a load timed out, although it has not ended."""
        self.handle(ConnectorEvents(stalled=(request_id,)))

    def announce(self, request: GenerateRequest) -> None:
        """Announce a future request to the scheduler; refusals are raised."""
        assert request.kv_stream is not None
        self.scheduler.add_request(request)
        assert self.scheduler.take_finished().is_empty

    def begin_early_read(self, stream_id: str) -> None:
        """Begin a read of a stream; it writes when it ends."""
        self.connector.open_streams[stream_id].is_reading = True

    def end_early_read(self, stream_id: str) -> None:
        """End a read of a stream: nothing confirms what it read, so it writes garbage."""
        stream = self.connector.open_streams[stream_id]
        stream.is_reading = False
        self.runner.spoil(stream.block_ids)
        if stream.is_cancelled:
            del self.connector.open_streams[stream_id]
            self.handle(ConnectorEvents(ended_streams=(stream_id,)))

    def end_lease(self, lease_id: str, *reasons: LeaseEnd) -> None:
        """End a lease, after checking that its blocks still have the right content.

        It ends once, however many ``reasons`` are reported at the same time; "done" if none is named.
        """
        lease = self.connector.open_leases.pop(lease_id)
        values = kv_values(self._lent_tokens.pop(lease_id))
        assert len(values) == lease.num_tokens
        end = self.connector.groups.num_blocks_for(lease.num_tokens)
        tables = [[ABSENT_BLOCK] * (end - len(table)) + list(table) for table in lease.tables]
        self.runner.check_window(tables, lease.num_tokens - 1, lease.num_tokens, values)
        ends = [
            LeaseEnded(request_id=lease.request_id, lease_id=lease_id, reason=reason)
            for reason in reasons or (LeaseEnd.DONE,)
        ]
        self.handle(ConnectorEvents(leases=tuple(ends)))

    def move_out(self) -> int:
        """Let all requests continue elsewhere that can, and collect what that ended."""
        num_left = self.scheduler.move_out()
        self.collect(self.scheduler.take_finished())
        return num_left

    def order_out(self, request_ids: Sequence[str], *, only_waiting: bool = False) -> None:
        """Order some requests to continue elsewhere, and let those go that can now; the others go when a step
        begins."""
        self.scheduler.order_out(request_ids, only_waiting=only_waiting)
        self._let_go()

    def live_ids(self) -> list[str]:
        """The accepted requests that have not ended, in the order of their first arrival."""
        return [request_id for request_id in self.requests if self.is_live(request_id)]

    def _let_go(self) -> None:
        self.scheduler.let_go()
        assert self.in_flight or not self.scheduler.has_departures
        self.collect(self.scheduler.take_finished())

    def handle(self, events: ConnectorEvents) -> None:
        """Hand events to the scheduler, and collect what they ended."""
        self.scheduler.handle_connector_events(events)
        self.collect(self.scheduler.take_finished())

    def collect(self, result: StepResult) -> None:
        """Note every delta; no delta may follow the end of a request."""
        for client_id, deltas in result.deltas_by_client().items():
            for delta in deltas:
                assert self.requests[delta.request_id].client_id == client_id
                self._note(delta)

    def _take_in(self, orders: ConnectorOrders) -> None:
        """The worker's half of the connector: copies and loads begin."""
        if self.tier is None:
            self.connector.take_in(orders)
        elif orders.parts:
            self.tier.take_in(orders.parts[0])
            self.connector.take_in(orders.parts[1])

    def _note(self, delta: TokenDelta) -> None:
        ending = self._endings[delta.request_id]
        assert ending.last is None, f"{delta.request_id} said something after its end (I4)"
        if not ending.token_ids and delta.token_ids:
            assert delta.num_cached_tokens is not None
        if delta.num_cached_tokens is not None:
            assert ending.num_cached_tokens is None, "set on the first delta only"
            assert delta.num_remote_tokens is not None
            assert delta.num_remote_tokens <= delta.num_cached_tokens
            ending.num_cached_tokens, ending.num_remote_tokens = delta.num_cached_tokens, delta.num_remote_tokens
        ending.token_ids.extend(delta.token_ids)
        if delta.finish_reason is None:
            return
        ending.last = delta
        params = delta.kv_transfer
        if params is not None and params.lease_id in self.connector.open_leases:
            request = self.requests[delta.request_id]
            known = (*request.prompt_token_ids, *request.output_token_ids, *ending.token_ids)
            self._lent_tokens[params.lease_id] = known[: params.num_tokens]

    def max_tokens_of(self, request: GenerateRequest) -> int:
        """The number of tokens that a request can have here, including its prompt."""
        beams = request.sampling.beams
        if beams is None or request.hand_over:
            return self.max_total_tokens
        num_kv_tokens = self.scheduler._kv_cache.needs.max_beam_tokens(
            num_prompt_tokens=len(request.prompt_token_ids),
            width=beams.width,
            num_blocks=self.scheduler._kv_cache.num_blocks,
            max_tokens=self.max_model_len,
        )
        return min(self.max_model_len, num_kv_tokens + 1)

    def can_serve(self, request: GenerateRequest) -> bool:
        """True if a request is not refused."""
        beams, num_prompt_tokens = request.sampling.beams, len(request.prompt_token_ids)
        if beams is not None and not request.hand_over and beams.width > self.config.max_num_seqs:
            return False
        return num_prompt_tokens < min(self.max_total_tokens, self.max_tokens_of(request))

    def _check_beams(self, request: GenerateRequest, ending: Ending) -> None:
        assert ending.last is not None
        assert not ending.token_ids, "what a search finds comes at its end"
        if ending.last.finish_reason in (FinishReason.HANDED_OVER, FinishReason.ABORT, FinishReason.ERROR):
            assert not ending.last.beams
        else:
            assert ending.last.beams == undisturbed_beams(request, self.max_tokens_of(request))

    def check_output(self, request_id: str) -> None:
        """Compare the output of a request with that of an undisturbed one (I1)."""
        request, ending = self.requests[request_id], self._endings[request_id]
        if request.sampling.beams is not None:
            self._check_beams(request, ending)
            return
        expected = undisturbed_output(request, self.max_total_tokens)[len(request.output_token_ids) :]
        assert ending.last is not None
        if ending.last.finish_reason in (FinishReason.HANDED_OVER, FinishReason.ABORT, FinishReason.ERROR):
            assert ending.token_ids == expected[: len(ending.token_ids)]
            assert len(ending.token_ids) <= 1 or not request.hand_over
        else:
            assert ending.token_ids == expected
