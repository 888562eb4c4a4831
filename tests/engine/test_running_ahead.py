"""F5: a step is scheduled and launched while another one runs; only the clock shows a difference.

The engines here have no model, and a device that computes as late as it may (``ChainRunner``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from engine.contract.token_ids import TokenIds
from engine.frontend.async_engine import AsyncEngine
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate
from kv_transfer.connector import ConnectorBuilder
from tests.support.engine.chain_engine import DEFAULT_SCHEDULER, chain_engine
from tests.support.engine.chain_runner import ChainRunner, expected_tokens
from tests.support.engine.disaggregated import joined_cores
from tests.support.engine.local_client import generate as stream
from tests.support.engine.local_client import run_to_end
from tests.support.engine.requests import greedy_request
from tests.support.engine.stepwise_runner import StepwiseRunner
from tests.support.router.router_rig import until

AHEAD = replace(DEFAULT_SCHEDULER, async_scheduling=True)
MAX_STEPS = 1000


def num_computed(core: EngineCore) -> int:
    assert isinstance(core.runner, ChainRunner)
    return core.runner.num_computed_positions


def stopping_request(request_id: str, prompt: Sequence[int], *, max_tokens: int, stop_at: int) -> GenerateRequest:
    """Its output ends with its ``stop_at``-th token, or earlier if that token occurs before; 0: by length only."""
    tokens = expected_tokens(prompt, max_tokens)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(tokens[:stop_at][-1:]))
    return GenerateRequest(request_id=request_id, prompt_token_ids=TokenIds.of(prompt), sampling=sampling)


def undisturbed(request: GenerateRequest) -> list[int]:
    tokens = expected_tokens(request.prompt_token_ids, request.sampling.max_tokens)
    stops = [index for index, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.mark.behaviour("F5")
def test_f5_who_runs_ahead() -> None:
    assert [SchedulerConfig().runs_ahead(device) for device in ("cpu", "cuda")] == [False, True]
    for is_on in (False, True):
        config = SchedulerConfig(async_scheduling=is_on)
        assert [config.runs_ahead(device) for device in ("cpu", "cuda")] == [is_on, is_on]


@pytest.mark.behaviour("F5")
def test_f5_result_of_a_step_comes_after_the_launch_of_the_next() -> None:
    core = chain_engine(scheduler=AHEAD)
    core.add_request(greedy_request("a", [1, 2, 3], max_tokens=2))

    results = [core.step() for _ in range(3)]

    first, second = expected_tokens([1, 2, 3], 2)
    said = [[delta.token_ids for delta in result.deltas()] for result in results]
    assert said == [[], [(first,)], [(second,)]]
    assert not core.has_unfinished()


@pytest.mark.behaviour("F5")
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_f5_nothing_is_computed_past_max_tokens(max_tokens: int) -> None:
    core = chain_engine(scheduler=AHEAD)

    generate(core, [greedy_request("a", [1, 2, 3], max_tokens=max_tokens)])

    assert num_computed(core) == 3 + max_tokens - 1


@pytest.mark.behaviour("F5")
def test_f5_what_was_computed_past_a_stop_is_dropped_and_its_blocks_come_back() -> None:
    core = chain_engine(scheduler=AHEAD)
    request = stopping_request("a", [1, 2, 3], max_tokens=40, stop_at=6)

    outputs = generate(core, [request])

    assert outputs["a"] == undisturbed(request)
    assert num_computed(core) == 3 + len(outputs["a"])
    load = core.load_report()
    assert load.num_free_blocks == load.num_blocks


@pytest.mark.behaviour("F5")
def test_f5_abort_with_a_step_in_flight_ends_at_once_and_frees_when_the_step_returned() -> None:
    core = chain_engine(scheduler=AHEAD)
    core.add_request(greedy_request("a", [1] * 9, max_tokens=40))
    core.step()
    core.step()

    core.abort(["a"])

    (delta,) = core.step().deltas()
    assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.ABORT)
    assert not core.has_unfinished()
    assert core.load_report().num_free_blocks == core.load_report().num_blocks


@pytest.mark.behaviour("F5")
@pytest.mark.known_failure(19)
def test_f5_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens() -> None:
    scheduler = replace(AHEAD, max_num_seqs=4)
    core = chain_engine(num_blocks=12, scheduler=scheduler)
    requests = [greedy_request(str(n), [n] * 10, max_tokens=20) for n in range(4)]

    outputs = generate(core, requests)

    assert outputs == {request.request_id: undisturbed(request) for request in requests}
    assert core.stats().scheduler.num_preemptions > 0


# ---- random lives


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes ``after`` so many steps, and is aborted so many steps later, or not."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_at: int
    after: int
    abort_after: int | None


ARRIVALS = st.builds(
    Arrival,
    prompt=st.builds(
        lambda stem, num, tail: (stem,) * num + tuple(tail),
        st.integers(0, 1),
        st.integers(1, 24),
        st.lists(st.integers(0, 3), max_size=2),
    ),
    max_tokens=st.integers(1, 12),
    stop_at=st.integers(0, 12),
    after=st.integers(0, 6),
    abort_after=st.sampled_from([None, None, 0, 1, 2, 5]),
)


@dataclass
class Life:
    """Everything that an engine returned for some arrivals."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, TokenDelta] = field(default_factory=dict)

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "said something after its end (I4)"
            self.tokens[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta


def live(core: EngineCore, arrivals: Sequence[Arrival], requests: Sequence[GenerateRequest]) -> Life:
    """Let requests come and go while the engine steps, until all have ended and it is at rest."""
    life = Life()
    times, now = [], 0
    for arrival in arrivals:
        now += arrival.after
        times.append(now)
    for step in range(MAX_STEPS):
        for arrival, request, comes_at in zip(arrivals, requests, times, strict=True):
            if comes_at == step:
                life.tokens[request.request_id] = []
                core.add_request(request)
            if arrival.abort_after is not None and comes_at + arrival.abort_after == step:
                core.abort([request.request_id])
        if core.has_work():
            life.take(core.step().deltas())
            assert not core.is_stuck()
        elif step > now + 5 and not core.has_unfinished():
            core.rest()
            return life
    raise AssertionError("the engine does not come to rest")


@pytest.mark.behaviour("F5")
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=7),
    num_blocks=st.sampled_from([12, 14, 40]),
    max_num_batched_tokens=st.sampled_from([8, 16, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
)
@pytest.mark.known_failure(19)
@pytest.mark.behaviour("F5")
def test_f5_nobody_can_tell_who_runs_ahead(
    arrivals: list[Arrival], num_blocks: int, max_num_batched_tokens: int, max_num_seqs: int
) -> None:
    requests = [
        stopping_request(str(n), one.prompt, max_tokens=one.max_tokens, stop_at=min(one.stop_at, one.max_tokens))
        for n, one in enumerate(arrivals)
    ]
    for async_scheduling in (False, True):
        scheduler = SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, async_scheduling=async_scheduling
        )
        core = chain_engine(num_blocks=num_blocks, max_model_len=40, scheduler=scheduler)

        life = live(core, arrivals, requests)

        for arrival, request in zip(arrivals, requests, strict=True):
            tokens, reason = life.tokens[request.request_id], life.ends[request.request_id].finish_reason
            expected = undisturbed(request)
            if reason is FinishReason.ABORT:
                assert arrival.abort_after is not None
                assert tokens == expected[: len(tokens)]
            else:
                assert tokens == expected
                assert reason is (
                    FinishReason.STOP if tokens[-1] in request.sampling.stop_token_ids else FinishReason.LENGTH
                )
        stats = core.stats()
        assert stats.num_integrity_failures == 0
        assert stats.scheduler.num_free_blocks == num_blocks


# ---- drain


@pytest.mark.behaviour("F5")
async def test_f5_drain_with_a_step_in_flight_moves_requests_that_lose_nothing() -> None:
    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(scheduler=AHEAD, build_connector=build_connector)

    with joined_cores(build, build) as (source, target):
        source.runner = steps = StepwiseRunner(source.runner)
        steps.allow(10)  # the next one is asked for while the tenth is in flight
        engine, other = AsyncEngine(lambda: source), AsyncEngine(lambda: target)
        await engine.start()
        await other.start()
        request = greedy_request("a", [4, 5, 6], max_tokens=120)
        tokens: list[int] = []
        draining: asyncio.Task[bool] | None = None
        params = None
        async for delta in stream(engine, request):
            tokens.extend(delta.token_ids)
            params = delta.kv_transfer
            if draining is None:
                draining = asyncio.create_task(engine.drain(moves_out=True, timeout_s=60))
                await until(lambda: engine.is_draining)
                steps.open()
        assert delta.finish_reason is FinishReason.HANDED_OVER
        rest = await run_to_end(other, replace(request, output_token_ids=tuple(tokens), kv_transfer=params))
        assert draining is not None
        assert await draining

        assert [*tokens, *rest.token_ids] == expected_tokens([4, 5, 6], 120)
        assert target.stats().scheduler.recomputed_tokens == 0
        assert engine.load.is_empty
        await engine.close()
        await other.close()
