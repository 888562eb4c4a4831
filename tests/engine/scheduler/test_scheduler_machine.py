"""The scheduler in a random world: whatever happens, blocks are conserved and every request ends once.

Covers I1-I4, C1-C14, B1-B3, K1-K4, K6, K7, K9, O2, known-failures 3-11, 19, 20, 26. BATON_SCHEDULER_WORLDS are tried.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.contract.config import SchedulerConfig
from engine.contract.errors import PromptTooLongError, RequestRefusedError
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds
from kv_transfer.connector import ConnectorEvents, LeaseEnd, LeaseEnded, LoadEnded
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, PeerIdentity
from tests.support.scheduler.kept_state_check import check_kept_state
from tests.support.scheduler.promising_world import PromisingWorld
from tests.support.scheduler.scheduler_strategies import (
    BLOCK_SIZE,
    CONFIGS,
    FAILED_BLOCKS,
    MAX_MODEL_LEN,
    PRIORITIES,
    PROMPTS,
    RARE_EVENTS,
    SAMPLING,
    SHARES,
    WINDOWS,
)
from tests.support.scheduler.scheduler_world import drafts_for_worlds, undisturbed_output
from tests.support.scheduler.scripted_connector import PEER

NUM_WORLDS = int(os.environ.get("BATON_SCHEDULER_WORLDS", "2000"))
MAX_IN_FLIGHT = 3
ALL = list(HealthCheck)
pytestmark = pytest.mark.timeout(max(1800, NUM_WORLDS))


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, lengths, priorities, aborts, pools, loads, leases, drafts, resets, promises, steps ahead."""

    world: PromisingWorld

    @initialize(
        config=CONFIGS,
        num_blocks=st.integers(6, 16),
        caching=st.sampled_from([True, True, True, False]),
        num_tier_slots=st.sampled_from([0, 0, 3, 12]),
        max_draft_tokens=st.sampled_from([0, 3, 1, 9]),
        windows=WINDOWS,
    )
    def start(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        caching: bool,
        num_tier_slots: int,
        max_draft_tokens: int,
        windows: tuple[int | None, ...],
    ) -> None:
        self.world = PromisingWorld(
            config,
            num_blocks=num_blocks * len(windows),
            windows=windows,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            num_tier_slots=num_tier_slots,
            drafting=drafts_for_worlds(max_draft_tokens),
        )
        self.num_added = 0
        self.ended: list[str] = []
        self.ended_leases: list[tuple[str, str]] = []
        self.announced: dict[str, GenerateRequest] = {}

    # ---- requests come

    def _new_id(self, *, is_used: bool = False) -> str:
        """An id; one that is used again if there is one, of a request whose load has not ended if there is one."""
        ended = [request_id for request_id in self.world.requests if not self.world.is_live(request_id)]
        if is_used and ended:
            return max(ended, key=lambda request_id: (request_id in self.world.loads(), request_id))
        self.num_added += 1
        return f"r{self.num_added - 1}"

    def _add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priority: int,
        *,
        num_output_tokens: int = 0,
        hand_over: bool = False,
        share: float | None = None,
        is_known: bool = True,
        is_used: bool = False,
    ) -> None:
        """Add a request; a peer hands over ``share`` of its computed tokens, if that is not None."""
        request = GenerateRequest(
            request_id=self._new_id(is_used=is_used),
            prompt_token_ids=TokenIds.of(prompt),
            sampling=sampling,
            priority=priority,
            arrival_s=float(self.num_added),
            client_id=f"client-{self.num_added % 2}",
            hand_over=hand_over,
        )
        output = tuple(undisturbed_output(request, self.world.max_total_tokens)[:num_output_tokens])
        request = replace(request, output_token_ids=output)
        if share is not None:
            known = prompt + output[:-1]
            computed = known[: max(int(len(known) * share), 1)]
            request = replace(request, kv_transfer=self.world.connector.offer(computed, is_known=is_known))
        earlier = self.world.requests.get(request.request_id)
        if self.world.can_serve(request):
            self.world.add(request)
            if earlier is not None:
                self.ended.append(request.request_id)
        else:
            error = PromptTooLongError if sampling.beams is None else RequestRefusedError
            with pytest.raises(error):
                self.world.add(request)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        priorities=PRIORITIES,
        num_output_tokens=st.sampled_from([0, 0, 2]),
        hand_over=st.sampled_from([False, False, True]),
        is_used=st.booleans(),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priorities: tuple[int, ...],
        num_output_tokens: int,
        hand_over: bool,
        is_used: bool,
    ) -> None:
        """Add the choices of one prompt, as for ``n``; all of it is computed here."""
        for priority in priorities:
            num_known = 0 if hand_over else num_output_tokens
            self._add(prompt, sampling, priority, num_output_tokens=num_known, hand_over=hand_over, is_used=is_used)

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        priorities=PRIORITIES,
        num_output_tokens=st.sampled_from([1, 0, 1, 2, 9]),
        share=SHARES,
        is_known=st.sampled_from([True, True, True, False]),
        is_used=st.booleans(),
    )
    def add_handed_over(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        priorities: tuple[int, ...],
        num_output_tokens: int,
        share: float,
        is_known: bool,
        is_used: bool,
    ) -> None:
        """The choices of one prompt, whose KV a peer hands over; with many output tokens they moved."""
        for priority in priorities:
            self._add(
                prompt,
                sampling,
                priority,
                num_output_tokens=num_output_tokens,
                share=share,
                is_known=is_known,
                is_used=is_used,
            )

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLING,
        source=st.sampled_from([PEER, PEER, PEER, PeerIdentity(engine_id="died meanwhile", incarnation="1")]),
    )
    def announce(self, prompt: tuple[int, ...], sampling: SamplingParams, source: PeerIdentity) -> None:
        stream = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=source, timeout_s=1.5)
        request = GenerateRequest(
            request_id=self._new_id(),
            prompt_token_ids=TokenIds.of(prompt),
            sampling=sampling,
            client_id="client-0",
            kv_stream=stream,
        )
        with contextlib.suppress(RequestRefusedError):
            self.world.announce(request)
            self.announced[request.request_id] = request
            self.world.step()

    @precondition(lambda self: self.announced)
    @rule(data=st.data(), is_same=st.sampled_from([True, True, True, False]), priority=st.integers(0, 2))
    def announced_request_comes(self, data: st.DataObject, is_same: bool, priority: int) -> None:
        announced = self.announced.pop(data.draw(st.sampled_from(sorted(self.announced))))
        prompt = announced.prompt_token_ids if is_same else TokenIds.of((*announced.prompt_token_ids[1:], 4))
        begun = undisturbed_output(replace(announced, prompt_token_ids=prompt), self.world.max_total_tokens)[:1]
        self.world.add(
            replace(
                announced,
                prompt_token_ids=prompt,
                output_token_ids=tuple(begun),
                priority=priority,
                arrival_s=float(self.num_added),
                kv_stream=None,
                kv_transfer=self.world.connector.offer(prompt),
            )
        )
        self.world.schedule()

    # ---- requests go

    @precondition(lambda self: self.num_added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(0, self.num_added))}"
        was_live = self.world.is_live(request_id)
        was_known = self.world.abort(request_id)
        assert was_known or not was_live
        if was_live:
            last = self.world.endings[request_id].last
            assert last is not None
            assert last.finish_reason is FinishReason.ABORT

    @rule(event=RARE_EVENTS)
    def rare_event(self, event: str) -> None:
        self.world.let_happen(event)

    # ---- steps

    @precondition(lambda self: len(self.world.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def begin_loads(self) -> None:
        self.world.begin_loads()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def complete_step(self) -> None:
        self.world.complete_step()

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    # ---- what the connector reports

    @precondition(lambda self: self.world.loads())
    @rule(data=st.data(), failed=FAILED_BLOCKS, times=st.sampled_from([1, 1, 2]))
    def end_load(self, data: st.DataObject, failed: int, times: int) -> None:
        loads = self.world.loads()
        request_id = data.draw(st.sampled_from(sorted(loads)))
        failed_blocks = [offset for offset in range(len(loads[request_id])) if failed >> offset & 1]
        self.world.end_load(request_id, failed_blocks, times=times)

    @precondition(lambda self: self.world.loads())
    @rule(data=st.data(), times=st.sampled_from([1, 1, 2]))
    def stall_load(self, data: st.DataObject, times: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.world.loads())))
        self.world.handle(ConnectorEvents(stalled=(request_id,) * times))

    @precondition(lambda self: self.world.connector.open_streams)
    @rule(data=st.data())
    def early_read(self, data: st.DataObject) -> None:
        streams = self.world.connector.open_streams
        stream_id = data.draw(st.sampled_from(sorted(streams)))
        if streams[stream_id].is_reading:
            self.world.end_early_read(stream_id)
        else:
            self.world.begin_early_read(stream_id)

    @precondition(lambda self: self.world.connector.open_leases)
    @rule(
        data=st.data(),
        reasons=st.sampled_from(
            [*((reason,) for reason in LeaseEnd), (LeaseEnd.DONE, LeaseEnd.EXPIRED), (LeaseEnd.EXPIRED, LeaseEnd.DONE)]
        ),
    )
    def end_lease(self, data: st.DataObject, reasons: tuple[LeaseEnd, ...]) -> None:
        """A lease ends, at its very expiry perhaps: then both are reported."""
        leases = self.world.connector.open_leases
        lease_id = data.draw(st.sampled_from(sorted(leases)))
        self.ended_leases.append((leases[lease_id].request_id, lease_id))
        self.world.end_lease(lease_id, *reasons)

    @rule(data=st.data(), number=st.integers(0, 9))
    def events_that_nobody_waits_for(self, data: st.DataObject, number: int) -> None:
        """Late ones, doubled ones, and some that never were."""
        loads = self.world.loads()
        unknown = [request_id for request_id in (f"r{number}", "nobody") if request_id not in loads]
        ended = [LoadEnded(request_id=name, failed_block_ids=(0,), num_bytes=0, duration_s=0.0) for name in unknown]
        late = data.draw(st.sampled_from([(f"r{number}", "never granted"), *self.ended_leases]))
        lease = LeaseEnded(request_id=late[0], lease_id=late[1], reason=LeaseEnd.EXPIRED)
        before = self.world.scheduler.stats().num_unknown_ids
        self.world.handle(
            ConnectorEvents(loads=tuple(ended), leases=(lease,), stalled=tuple(unknown), ended_streams=("never begun",))
        )
        assert self.world.scheduler.stats().num_unknown_ids == before + 2 * len(unknown) + 2

    @rule(seconds=st.sampled_from([0.01, 0.001, 1.0]), is_decided=st.booleans())
    def time_passes(self, seconds: float, is_decided: bool) -> None:
        if is_decided:
            self.world.connector.undecided.clear()
        self.world.now_s += seconds

    # ---- what must hold after each of them

    @invariant()
    def books_balance(self) -> None:
        """Blocks are conserved (I2), and only live requests that lack a block have a claim on it."""
        self.world.scheduler.check_integrity()
        if self.world.tier is not None:
            self.world.tier.scheduler.check_integrity()
        stats = self.world.scheduler.stats()
        assert stats.num_free_blocks + stats.num_held_blocks + stats.num_leased_blocks == stats.num_blocks
        live = [request_id for request_id in self.world.requests if self.world.is_live(request_id)]
        assert stats.num_running + stats.num_waiting + stats.num_loading == len(live)
        check_kept_state(self.world.scheduler)
        for request in self.world.scheduler._live_requests.live.values():
            assert 0 <= request.num_remote_tokens <= request.num_cached_tokens <= request.num_prompt_tokens

    @invariant()
    def nothing_is_held_beyond_the_windows(self) -> None:
        """A running request holds of each window what it sees, and what steps in flight compute (B7)."""
        table, is_at_rest = self.world.scheduler._table, not self.world.in_flight
        for group, window in enumerate(table.groups.windows):
            for row in table.order.tolist() if window is not None else ():
                num_held = int(table.num_blocks[group, row] - table.first_blocks[group, row])
                assert num_held <= self.world.scheduler._kv_cache.needs.most_blocks[group] or not is_at_rest
                first = table.groups.first_block(group, int(table.num_computed[row]) - 1)
                is_late = bool(table.first_blocks[group, row] < first)
                assert not is_late or not is_at_rest, "a block that left its window is still held"

    @invariant()
    def never_idle_with_work(self) -> None:
        """Never "nothing runs, something waits, nothing in flight" (known-failures 7, 8)."""
        world = self.world
        assert not world.scheduler.is_stuck()
        is_reading = any(stream.is_reading for stream in world.connector.open_streams.values())
        pending = world.in_flight or world.loads() or world.connector.open_leases or is_reading
        if not pending and not world.scheduler.has_work():
            waits_to_ask = world.scheduler.idle_timeout_s() is not None
            assert waits_to_ask or not world.scheduler.has_unfinished(), "work that nothing will ever wake"

    def teardown(self) -> None:
        """Let everything end: then all requests have ended as they must, and nothing is held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.connector.undecided.clear()
        world.now_s += 2.0
        for _ in range(60 * (10 + self.num_added)):
            while world.in_flight:
                world.complete_step()
            for request_id in list(world.loads()):
                world.end_load(request_id)
            for stream_id, stream in list(world.connector.open_streams.items()):
                if stream.is_reading:
                    world.end_early_read(stream_id)
            for lease_id in list(world.connector.open_leases):
                world.end_lease(lease_id, LeaseEnd.EXPIRED)
            if not world.scheduler.has_work():
                break
            world.step()
        self._check_rest()

    def _check_rest(self) -> None:
        world = self.world
        assert not world.scheduler.has_unfinished()
        for request_id in world.requests:
            world.check_output(request_id)
        stats = world.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert not world.connector.open_streams, "a stream was neither taken over nor cancelled"
        assert not world.connector.announced, "what was announced was neither handed over nor withdrawn"
        assert not world.connector.offers, "a hand-over was neither read nor released"
        assert sorted(world.finished_ids) == sorted([*world.requests, *self.ended])
        world.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=NUM_WORLDS, stateful_step_count=50, derandomize=True, deadline=None, suppress_health_check=ALL
)
