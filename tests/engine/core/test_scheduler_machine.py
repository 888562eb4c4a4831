"""The scheduler in a random world: whatever happens in whatever order, the books balance and every request ends once.

Covers I1, I2, I3, I4, C1-C14, B1-B3, K1-K4, K6, K7 and known-failures 3-11, 19, 20 together.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import SchedulerConfig
from engine.errors import PromptTooLongError, RequestRefusedError
from engine.messages import FinishReason, GenerateRequest, SamplingParams
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded, LoadEnded
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, KVTransferParams, PeerIdentity
from tests.support.scheduler_world import NUM_VALUES, SchedulerWorld, undisturbed_output
from tests.support.scripted_connector import PEER

pytestmark = pytest.mark.timeout(900)

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
MAX_IN_FLIGHT = 2


def make_config(**options: object) -> SchedulerConfig:
    """A configuration whose options do not contradict each other."""
    if options["policy"] == "fcfs":
        options["enable_priority_preemption"] = False
    return SchedulerConfig(**options)  # type: ignore[arg-type]


CONFIGS = st.builds(
    make_config,
    max_num_batched_tokens=st.sampled_from([8, 16, 48]),
    max_num_seqs=st.sampled_from([1, 2, 5]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
    policy=st.sampled_from(["fcfs", "priority"]),
    load_failure_policy=st.sampled_from(["recompute", "recompute", "recompute", "fail"]),
    recompute_damaged_only=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    enable_priority_preemption=st.booleans(),
    max_num_partial_prefills=st.sampled_from([0, 0, 1, 2]),
    scheduler_delay_factor=st.sampled_from([0.0, 0.0, 1.0]),
    artificial_preemption_probability=st.sampled_from([0.0, 0.0, 0.3]),
    max_num_artificial_preemptions=st.just(3),
    enable_cache_events=st.booleans(),
)
PROMPTS = st.builds(
    lambda stem, num_tokens, tail: tuple([stem] * num_tokens) + tuple(tail),
    st.integers(0, 1),
    st.sampled_from([1, 3, 4, 7, 8, 12, 16, 20]),
    st.lists(st.integers(0, NUM_VALUES - 1), max_size=3),
)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 5, 12, 20]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (1,), (0, 2)]),
    eos_token_ids=st.just((3,)),
    ignore_eos=st.booleans(),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, lengths, priorities, aborts, small pools, loads and leases, resets, overlapped steps."""

    world: SchedulerWorld

    @initialize(config=CONFIGS, num_blocks=st.integers(6, 16), caching=st.sampled_from([True, True, False]))
    def start(self, config: SchedulerConfig, num_blocks: int, caching: bool) -> None:
        self.world = SchedulerWorld(
            config,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
        )
        self.num_added = 0
        self.announced: dict[str, GenerateRequest] = {}

    def _add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        *,
        num_output_tokens: int = 0,
        hand_over: bool = False,
        kv_transfer: KVTransferParams | None = None,
    ) -> None:
        request_id = f"r{self.num_added}"
        self.num_added += 1
        probe = GenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling)
        output = undisturbed_output(probe, self.world.max_total_tokens)[:num_output_tokens]
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            output_token_ids=tuple(output),
            priority=priority,
            arrival_s=float(self.num_added),
            client_id=f"client-{self.num_added % 2}",
            hand_over=hand_over,
            kv_transfer=kv_transfer,
        )
        if len(prompt) <= min(MAX_MODEL_LEN - 1, self.world.max_total_tokens - 1):
            self.world.add(request)
        else:
            with pytest.raises(PromptTooLongError):
                self.world.add(request)

    @rule(prompt=PROMPTS, sampling=SAMPLING, priority=st.integers(0, 2), num_output_tokens=st.sampled_from([0, 0, 2]))
    def add(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int, num_output_tokens: int) -> None:
        self._add(prompt, sampling, priority, num_output_tokens=num_output_tokens)

    @rule(prompt=PROMPTS, sampling=SAMPLING, priority=st.integers(0, 2))
    def add_to_hand_over(self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int) -> None:
        self._add(prompt, sampling, priority, hand_over=True)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        priority=st.integers(0, 2),
        num_output_tokens=st.sampled_from([0, 1, 1, 2]),
        is_known=st.sampled_from([True, True, True, False]),
    )
    def add_handed_over(
        self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int, num_output_tokens: int, is_known: bool
    ) -> None:
        offer = self.world.connector.offer(prompt, is_known=is_known)
        self._add(prompt, sampling, priority, num_output_tokens=num_output_tokens, kv_transfer=offer)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        source=st.sampled_from([PEER, PEER, PEER, PeerIdentity(engine_id="died meanwhile", incarnation="1")]),
    )
    def announce(self, prompt: tuple[int, ...], sampling: SamplingParams, source: PeerIdentity) -> None:
        stream = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=1.5)
        request = GenerateRequest(
            request_id=f"r{self.num_added}",
            prompt_token_ids=prompt,
            sampling=sampling,
            client_id="client-0",
            kv_stream=stream,
        )
        self.num_added += 1
        with contextlib.suppress(RequestRefusedError):
            self.world.announce(request)
            self.announced[request.request_id] = request
            self.world.step()

    @precondition(lambda self: self.announced)
    @rule(data=st.data(), is_same=st.sampled_from([True, True, True, False]), priority=st.integers(0, 2))
    def announced_request_comes(self, data: st.DataObject, is_same: bool, priority: int) -> None:
        announced = self.announced.pop(data.draw(st.sampled_from(sorted(self.announced))))
        prompt = announced.prompt_token_ids if is_same else (*announced.prompt_token_ids[1:], 4)
        first_token = undisturbed_output(replace(announced, prompt_token_ids=prompt), self.world.max_total_tokens)[0]
        self.world.add(
            replace(
                announced,
                prompt_token_ids=prompt,
                output_token_ids=(first_token,),
                priority=priority,
                arrival_s=float(self.num_added),
                kv_stream=None,
                kv_transfer=self.world.connector.offer(prompt),
            )
        )
        self.world.schedule()

    @precondition(lambda self: self.world.connector.open_streams)
    @rule(data=st.data())
    def early_read(self, data: st.DataObject) -> None:
        streams = self.world.connector.open_streams
        stream_id = data.draw(st.sampled_from(sorted(streams)))
        if streams[stream_id].is_reading:
            self.world.end_early_read(stream_id)
        else:
            self.world.begin_early_read(stream_id)

    @rule()
    def front_end_goes(self) -> None:
        self.world.scheduler.forget_client("client-0")

    @precondition(lambda self: self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.num_added))
        was_live = self._is_live(f"r{number}")
        was_known = self.world.abort(f"r{number}")
        assert was_known or not was_live
        if was_live:
            last = self.world.endings[f"r{number}"].last
            assert last is not None
            assert last.finish_reason is FinishReason.ABORT

    @precondition(lambda self: len(self.world.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def complete_step(self) -> None:
        self.world.complete_step()

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @precondition(lambda self: self.world.connector.open_loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.connector.open_loads)))
        num_blocks = len(self.world.connector.open_loads[request_id].block_ids)
        pattern = data.draw(st.sampled_from([0, 0, 1, 2, 3, 5, 9, 10, 63]), label="failed blocks, as bits")
        self.world.end_load(request_id, [offset for offset in range(num_blocks) if pattern >> offset & 1])

    @precondition(lambda self: self.world.connector.open_loads)
    @rule(data=st.data())
    def stall_load(self, data: st.DataObject) -> None:
        self.world.stall_load(data.draw(st.sampled_from(sorted(self.world.connector.open_loads))))

    @precondition(lambda self: self.world.connector.open_leases)
    @rule(data=st.data(), reason=st.sampled_from(list(LeaseEnd)))
    def end_lease(self, data: st.DataObject, reason: LeaseEnd) -> None:
        self.world.end_lease(data.draw(st.sampled_from(sorted(self.world.connector.open_leases))), reason)

    @precondition(lambda self: self.world.connector.undecided)
    @rule(seconds=st.sampled_from([0.001, 0.01]))
    def decide(self, seconds: float) -> None:
        self.world.connector.undecided.clear()
        self.world.now_s += seconds

    @rule(seconds=st.sampled_from([0.01, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(number=st.integers(0, 3))
    def events_that_nobody_waits_for(self, number: int) -> None:
        loads = self.world.connector.open_loads
        unknown = [request_id for request_id in (f"r{number}", "nobody") if request_id not in loads]
        ended = [LoadEnded(request_id=name, failed_block_ids=(), num_bytes=0, duration_s=0.0) for name in unknown]
        lease = LeaseEnded(request_id=f"r{number}", lease_id="never granted", reason=LeaseEnd.EXPIRED)
        before = self.world.scheduler.stats().num_unknown_ids
        self.world.handle(ConnectorEvents(loads=tuple(ended), leases=(lease,), ended_streams=("never begun",)))
        assert self.world.scheduler.stats().num_unknown_ids == before + len(unknown) + 2

    @rule(preempt_running=st.booleans())
    def reset_prefix_cache(self, preempt_running: bool) -> None:
        assert self.world.scheduler.reset_prefix_cache(preempt_running=preempt_running) or not preempt_running

    @invariant()
    def books_balance(self) -> None:
        self.world.scheduler.check_integrity()
        stats = self.world.scheduler.stats()
        assert stats.num_free_blocks + stats.num_held_blocks + stats.num_leased_blocks == stats.num_blocks
        live = [request_id for request_id in self.world.requests if self._is_live(request_id)]
        assert stats.num_running + stats.num_waiting + stats.num_loading == len(live)

    @invariant()
    def never_idle_with_work(self) -> None:
        """Never "nothing runs, something waits, nothing in flight" (known-failures 7, 8)."""
        world = self.world
        connector = world.connector
        is_reading = any(stream.is_reading for stream in connector.open_streams.values())
        pending = world.in_flight or connector.open_loads or connector.open_leases or is_reading
        if not pending and not world.scheduler.has_work():
            waits_to_ask = world.scheduler.idle_timeout_s() is not None
            assert waits_to_ask or not world.scheduler.has_unfinished(), "work that nothing will ever wake"

    def _is_live(self, request_id: str) -> bool:
        ending = self.world.endings.get(request_id)
        return ending is not None and ending.last is None

    def teardown(self) -> None:
        """Let everything end: then all requests have ended as they must, and nothing is held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.connector.undecided.clear()
        world.now_s += 2.0
        for _ in range(400):
            while world.in_flight:
                world.complete_step()
            for request_id in list(world.connector.open_loads):
                world.end_load(request_id)
            for stream_id, stream in list(world.connector.open_streams.items()):
                if stream.is_reading:
                    world.end_early_read(stream_id)
            for lease_id in list(world.connector.open_leases):
                world.end_lease(lease_id, LeaseEnd.EXPIRED)
            if not world.scheduler.has_work():
                break
            world.step()
        assert not world.scheduler.has_unfinished()
        for request_id in world.requests:
            world.check_output(request_id)
        stats = world.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert not world.connector.open_streams, "a stream was neither taken over nor cancelled"
        assert not world.connector.announced, "what was announced was neither handed over nor withdrawn"
        assert not world.connector.offers, "a hand-over was neither read nor released"
        assert sorted(world.finished_ids) == sorted(world.requests)
        world.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
