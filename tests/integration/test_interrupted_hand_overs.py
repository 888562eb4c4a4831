"""Abort, preemption and expiry, before, during and after the transfer, on both sides of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import Connector, WakeCallback
from kv_transfer.factory import build_connector
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import KVTransferParams, PeerIdentity
from kv_transfer.peer.worker_connector import TransferWorker
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.kv_engine import OffsetClock
from tests.support.engine.requests import greedy_request
from tests.support.waiting import wait_until

NUM_TOKENS = 6
NUM_BLOCKS = 48
PROMPT = tuple(range(200, 250))
LATE_S = 5.0
LEASE_TTL_S = 30.0
LOAD_TIMEOUT_S = 60.0
OPTIONS = ConnectorOptions(
    connector="inproc",
    lease_ttl_s=LEASE_TTL_S,
    load_timeout_s=LOAD_TIMEOUT_S,
    allow_faults=True,
    faults=FaultOptions(late_s=LATE_S, schedule=(ScheduledFault(fault=Fault.READ_LATE, nth=1),)),
)


@dataclass
class Side:
    """One engine, its clock, and what it said."""

    core: EngineCore
    clock: OffsetClock
    deltas: list[TokenDelta] = field(default_factory=list)

    def step(self) -> None:
        """A step, if there is anything to do."""
        self.core.collect()
        if self.core.has_work():
            self.deltas += self.core.step().deltas()

    @property
    def ends(self) -> list[TokenDelta]:
        """The deltas that end a request."""
        return [delta for delta in self.deltas if delta.finish_reason is not None]

    def run(self) -> None:
        """Until no request is left."""

        def is_over() -> bool:
            self.step()
            return not self.core.has_unfinished() and not self.core.has_work()

        wait_until(is_over)

    def has_reads(self) -> bool:
        """True while a read may write this engine's blocks."""
        assert isinstance(self.core.connector, TransferWorker)
        return self.core.connector.has_reads

    def is_at_rest(self) -> bool:
        """True when no block is held by anybody."""
        self.step()
        return self.core.load_report().num_free_blocks == NUM_BLOCKS


@dataclass
class HandOver:
    """One request between two engines, driven to a point of the tests' choice."""

    prefill: Side
    decode: Side

    def compute_prompt(self) -> None:
        """Prefill from beginning to end."""
        self.prefill.core.add_request(self._request(None))
        self.prefill.run()

    def compute_half_of_the_prompt(self) -> None:
        """The first of several chunks."""
        self.prefill.core.add_request(self._request(None))
        self.prefill.step()
        assert self.prefill.core.load_report().num_running == 1

    def bring_to_decode(self) -> None:
        """The request waits at decode; nothing was read."""
        (first,) = self.prefill.deltas
        assert first.finish_reason is FinishReason.HANDED_OVER
        self.decode.core.add_request(
            dataclasses.replace(self._request(first.kv_transfer), output_token_ids=first.token_ids, hand_over=False)
        )

    def begin_transfer(self) -> None:
        """A read is under way that writes nothing before ``end_transfer``."""
        self.decode.step()
        wait_until(self.decode.has_reads)

    def end_transfer(self) -> None:
        """Let the read write, and decode begin."""
        self.decode.clock.offset_s += LATE_S + 1

        def is_running() -> bool:
            self.decode.step()
            return self.decode.core.load_report().num_running == 1

        wait_until(is_running)

    def finish(self) -> None:
        """Let everything end."""

        def is_over() -> bool:
            if self.decode.has_reads():
                self.decode.clock.offset_s += LATE_S + 1
            return self.decode.is_at_rest() and not self.decode.core.has_unfinished()

        wait_until(is_over)
        if not self.prefill.is_at_rest():
            self.prefill.clock.offset_s += LEASE_TTL_S + 1
        wait_until(self.prefill.is_at_rest)

    @staticmethod
    def _request(params: KVTransferParams | None) -> GenerateRequest:
        request = greedy_request("request", PROMPT, max_tokens=NUM_TOKENS)
        return dataclasses.replace(request, hand_over=params is None, kv_transfer=params)


@pytest.fixture(params=[False, True], ids=["in step", "running ahead"])
def hand_over(request: pytest.FixtureRequest) -> Iterator[HandOver]:
    fabric = InProcessFabric()

    def side(engine_id: str) -> Side:
        clock = OffsetClock()

        def connect(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
            return build_connector(
                OPTIONS,
                identity=PeerIdentity(engine_id=engine_id, incarnation="1"),
                layout=layout,
                region=region,
                rendezvous=fabric,
                wake=wake,
                clock=clock,
                fabric=fabric,
            )

        scheduler = SchedulerConfig(max_num_batched_tokens=20, max_num_seqs=4, async_scheduling=request.param)
        return Side(chain_engine(num_blocks=NUM_BLOCKS, scheduler=scheduler, build_connector=connect), clock)

    pair = HandOver(side("prefill"), side("decode"))
    yield pair
    for engine in (pair.decode, pair.prefill):
        engine.core.close()


def _abort(side: Side) -> None:
    side.core.abort(["request"])


def _preempt(side: Side) -> None:
    assert side.core.scheduler.reset_prefix_cache(preempt_running=True)


def _expire(side: Side) -> None:
    """On prefill the lease, on decode the time that the load may take."""
    side.clock.offset_s += max(LEASE_TTL_S, LOAD_TIMEOUT_S) + 1
    side.step()


@pytest.mark.parametrize("moment", ("before", "during", "after"))
@pytest.mark.parametrize("role", ("prefill", "decode"))
@pytest.mark.parametrize("interrupt", (_abort, _preempt, _expire))
def test_an_interrupted_hand_over_loses_no_block_and_changes_no_token(
    hand_over: HandOver, interrupt: Callable[[Side], None], role: str, moment: str
) -> None:
    side = hand_over.prefill if role == "prefill" else hand_over.decode
    if (interrupt, role, moment) == (_preempt, "prefill", "before"):
        hand_over.compute_half_of_the_prompt()
        interrupt(side)
        hand_over.prefill.run()
        hand_over.bring_to_decode()
    else:
        hand_over.compute_prompt()
        hand_over.bring_to_decode()
        for name, reach in (("during", hand_over.begin_transfer), ("after", hand_over.end_transfer)):
            if moment in (name, "after"):
                reach()
        interrupt(side)

    hand_over.finish()

    (end,) = hand_over.decode.ends
    tokens = [token for side in (hand_over.prefill, hand_over.decode) for d in side.deltas for token in d.token_ids]
    expected = expected_tokens(PROMPT, NUM_TOKENS)
    if (interrupt, role) == (_abort, "decode"):
        assert end.finish_reason is FinishReason.ABORT
        assert tokens == expected[: len(tokens)]
    else:
        assert end.finish_reason is FinishReason.LENGTH
        assert tokens == expected
    assert [len(side.ends) for side in (hand_over.prefill, hand_over.decode)] == [1, 1]
    for engine in (hand_over.prefill, hand_over.decode):
        engine.core.scheduler.check_integrity()
        assert engine.core.load_report().num_held_blocks == engine.core.load_report().num_leased_blocks == 0
