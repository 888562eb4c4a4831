"""A prefill and a decode engine without a model, with injected transfer faults between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, GenerateRequest, LoadReport, RequestError, TokenDelta
from engine.frontend.engine_core import EngineCore
from engine.scheduler.step_result import StepResult
from kv_transfer.connector import Connector, ConnectorBuilder, WakeCallback
from kv_transfer.factory import build_connector
from kv_transfer.fault_options import Fault, FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity
from tests.support.engine.chain_engine import chain_engine

CLOCK_RATE = 20.0
"""The connectors' clock runs this many times faster, because most faults only end by time limits."""

PUNCTUAL_FAULTS = (Fault.BIT_FLIPS, Fault.LEASE_EXPIRED, Fault.NOTIFICATION_TWICE)
"""Faults that cost no time, so that the clock need not be fast."""

WAIT_TIMEOUT_S = 60.0
MAX_NUM_SEQS = 16


def fast_clock() -> float:
    """The connectors' clock."""
    return CLOCK_RATE * time.monotonic()


@dataclass
class Answers:
    """The outcomes of some requests."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, RequestError] = field(default_factory=dict)
    num_ends: dict[str, int] = field(default_factory=dict)


class PrefillEngine(Protocol):
    """The interface of a prefill engine in this process or in another one."""

    def add_request(self, request: GenerateRequest) -> None:
        """Accept a request."""

    def collect(self) -> None:
        """Collect what ended in the connector."""

    def has_work(self) -> bool:
        """True when ``step`` would do something."""

    def has_unfinished(self) -> bool:
        """True while any request has not ended."""

    def step(self) -> StepResult:
        """Make a step; returns its result."""

    def load_report(self) -> LoadReport:
        """Its load report."""

    def close(self) -> None:
        """Close its connector. Idempotent."""


PrefillT = TypeVar("PrefillT", bound=PrefillEngine)


@dataclass
class FaultyPair(Generic[PrefillT]):
    """Two engines. ``run`` drives both until every request has ended."""

    prefill: PrefillT
    decode: EngineCore

    def run(self, requests: Sequence[GenerateRequest]) -> Answers:
        """Run requests, each prefilled on one engine and decoded on the other."""
        answers = Answers(tokens={request.request_id: [] for request in requests})
        pending = {request.request_id: request for request in requests}
        for request in requests:
            self.prefill.add_request(dataclasses.replace(request, hand_over=True))
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while self.prefill.has_unfinished() or self.decode.has_unfinished():
            deltas = self.step(self.prefill) + self.step(self.decode)
            for delta in deltas:
                self.take(delta, answers, pending)
            if not deltas:
                assert time.monotonic() < deadline_s, f"stuck: {self.reports()}"
                self.decode.wake.wait(0.001)
                self.decode.wake.clear()
        return answers

    def wait_for_rest(self) -> None:
        """Wait until no lease and no load is left."""
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        while any(report.num_free_blocks != report.num_blocks for report in self.reports()):
            assert time.monotonic() < deadline_s, f"something is held: {self.reports()}"
            self.decode.wake.wait(0.001)
            self.step(self.prefill)
            self.step(self.decode)

    def close(self) -> None:
        """Close both connectors, and collect what that ended. Idempotent."""
        for core in (self.decode, self.prefill):
            core.close()
            core.collect()

    def reports(self) -> tuple[LoadReport, LoadReport]:
        """The load reports of both engines, as `/status` shows them."""
        return self.prefill.load_report(), self.decode.load_report()

    @staticmethod
    def step(core: PrefillEngine) -> list[TokenDelta]:
        """One step of an engine, if it has work."""
        core.collect()
        if not core.has_work():
            return []
        return core.step().deltas()

    def take(self, delta: TokenDelta, answers: Answers, pending: dict[str, GenerateRequest]) -> None:
        """Take a delta; what prefill hands over goes to decode."""
        request_id = delta.request_id
        answers.tokens[request_id].extend(delta.token_ids)
        if delta.finish_reason is FinishReason.HANDED_OVER:
            self.decode.add_request(
                dataclasses.replace(
                    pending[request_id],
                    output_token_ids=tuple(answers.tokens[request_id]),
                    kv_transfer=delta.kv_transfer,
                )
            )
        elif delta.finish_reason is not None:
            answers.num_ends[request_id] = answers.num_ends.get(request_id, 0) + 1
            if delta.error is not None:
                answers.errors[request_id] = delta.error


@contextmanager
def faulty_pair(
    faults: FaultOptions,
    *,
    load_failure_policy: str = "recompute",
    checksums: bool | None = None,
    chunk_tokens: int = 256,
    num_blocks: int = 512,
    preemption_probability: float = 0.0,
    async_scheduling: bool = False,
    is_fast: bool = True,
) -> Iterator[FaultyPair[EngineCore]]:
    """An engine pair with these ``faults`` in both connectors, which are closed at the end.

    Prefill computes ``chunk_tokens`` a step, and preempts its requests without need at random. With ``is_fast`` the
    connectors' time limits are a second or two: not for tests that count what may not run out of time.
    """
    fabric = InProcessFabric()
    options = ConnectorOptions(connector="inproc", streamed=True, checksums=checksums, faults=faults, allow_faults=True)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=256,
        max_num_seqs=MAX_NUM_SEQS,
        load_failure_policy=load_failure_policy,
        async_scheduling=async_scheduling,
    )

    prefill_scheduler = dataclasses.replace(
        scheduler,
        max_num_batched_tokens=chunk_tokens,
        artificial_preemption_probability=preemption_probability,
        max_num_artificial_preemptions=1_000_000 if preemption_probability else 0,
    )

    def core(engine_id: str) -> EngineCore:
        return chain_engine(
            num_blocks=num_blocks,
            max_model_len=128,
            scheduler=prefill_scheduler if engine_id == "prefill" else scheduler,
            build_connector=_builder(fabric, engine_id, options, fast_clock if is_fast else time.monotonic),
        )

    pair = FaultyPair(core("prefill"), core("decode"))
    try:
        yield pair
    finally:
        pair.close()


def _builder(
    fabric: InProcessFabric, engine_id: str, options: ConnectorOptions, clock: Callable[[], float]
) -> ConnectorBuilder:
    def build(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        return build_connector(
            options,
            identity=PeerIdentity(engine_id=engine_id, incarnation="1"),
            layout=layout,
            region=region,
            rendezvous=fabric,
            wake=wake,
            clock=clock,
            fabric=fabric,
        )

    return build
