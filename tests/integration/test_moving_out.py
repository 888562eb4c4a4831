"""Drain: running requests leave an engine with their KV, and continue elsewhere with nothing computed twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, GenerateRequest, TokenDelta
from engine.frontend.engine_core import EngineCore
from kv_transfer.connector import ConnectorBuilder
from tests.support.engine.chain_engine import DEFAULT_SCHEDULER, chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.disaggregated import inproc_pair, joined_cores
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.oracle_cases import NUM_TOKENS, OracleCase
from tests.support.engine.requests import greedy_request

MAX_STEPS = 2000
Ends = dict[str, TokenDelta]


@pytest.fixture(params=[False, True], ids=["in step", "running ahead"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EngineCore, EngineCore]]:
    scheduler = replace(DEFAULT_SCHEDULER, async_scheduling=request.param)

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(scheduler=scheduler, build_connector=build_connector)

    with joined_cores(build, build) as cores:
        yield cores


def turn(core: EngineCore, tokens: dict[str, list[int]], ends: Ends) -> None:
    core.collect()
    for delta in core.step().deltas():
        tokens[delta.request_id].extend(delta.token_ids)
        if delta.finish_reason is not None:
            assert delta.request_id not in ends, "ended twice"
            ends[delta.request_id] = delta


def settle(core: EngineCore, tokens: dict[str, list[int]], ends: Ends) -> None:
    for _ in range(MAX_STEPS):
        core.wake.clear()
        core.collect()
        if core.has_work():
            turn(core, tokens, ends)
        elif core.has_unfinished() or core.load_report().num_leased_blocks:
            assert core.wake.wait(120), "nothing happens"
        else:
            return
    raise AssertionError("the engine does not come to rest")


def move(
    source: EngineCore, target: EngineCore, requests: Sequence[GenerateRequest], *, num_steps: int
) -> tuple[dict[str, list[int]], Ends]:
    """Start everything on one engine, and let the other one finish it."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first: Ends = {}
    for request in requests:
        source.add_request(request)
    for _ in range(num_steps):
        turn(source, tokens, first)
    source.move_out()
    while source.has_unfinished() or source.has_work():
        turn(source, tokens, first)
        source.move_out()
    final: Ends = {}
    for request in requests:
        end = first[request.request_id]
        if end.finish_reason is not FinishReason.HANDED_OVER:
            final[request.request_id] = end
            continue
        so_far = tuple(tokens[request.request_id])
        target.add_request(replace(request, output_token_ids=so_far, kv_transfer=end.kv_transfer))
    settle(target, tokens, final)
    settle(source, tokens, first)
    return tokens, final


def test_some_leave_and_the_others_go_on_where_they_are(pair: tuple[EngineCore, EngineCore]) -> None:
    """The order comes while a step is in flight, where engines run ahead."""
    source, target = pair
    prompts = {str(n): [n] * (5 + 4 * n) for n in range(6)}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    first: Ends = {}
    for name, prompt in prompts.items():
        source.add_request(greedy_request(name, prompt, max_tokens=20))
    for _ in range(6):
        turn(source, tokens, first)

    source.order_out(["1", "4", "nobody"])
    while not {"1", "4"} <= set(first):
        turn(source, tokens, first)
    assert {end.finish_reason for end in first.values()} == {FinishReason.HANDED_OVER}
    final: Ends = {}
    for name in list(first):
        request = greedy_request(name, prompts[name], max_tokens=20)
        target.add_request(
            replace(request, output_token_ids=tuple(tokens[name]), kv_transfer=first.pop(name).kv_transfer)
        )
    settle(target, tokens, final)
    settle(source, tokens, final)

    assert tokens == {name: expected_tokens(prompt, 20) for name, prompt in prompts.items()}
    assert {end.finish_reason for end in final.values()} == {FinishReason.LENGTH}
    assert source.stats().scheduler.num_moved_out == 2
    assert target.stats().scheduler.recomputed_tokens == 0
    assert_at_rest(source, target)


def assert_at_rest(*cores: EngineCore) -> None:
    for core in cores:
        core.scheduler.check_integrity()
        load = core.load_report()
        assert load.is_empty
        assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9, 14])
def test_moved_requests_go_on_where_they_were(pair: tuple[EngineCore, EngineCore], num_steps: int) -> None:
    source, target = pair
    draw = random.Random(num_steps)
    prompts = {str(n): [draw.randrange(900) for _ in range(draw.randrange(1, 40))] for n in range(6)}
    requests = [greedy_request(name, prompt, max_tokens=16) for name, prompt in prompts.items()]

    tokens, ends = move(source, target, requests, num_steps=num_steps)

    assert tokens == {name: expected_tokens(prompt, 16) for name, prompt in prompts.items()}
    assert {end.finish_reason for end in ends.values()} == {FinishReason.LENGTH}
    assert_at_rest(source, target)


def test_a_move_computes_nothing_twice(pair: tuple[EngineCore, EngineCore]) -> None:
    source, target = pair
    requests = [greedy_request(str(n), [n] * 21, max_tokens=20) for n in range(4)]

    move(source, target, requests, num_steps=8)

    computed = [core.stats().scheduler.num_scheduled_tokens for core in pair]
    alone = chain_engine()
    for request in requests:
        alone.add_request(request)
    settle(alone, {request.request_id: [] for request in requests}, {})
    assert sum(computed) == alone.stats().scheduler.num_scheduled_tokens
    assert computed[1] > 0
    assert source.stats().scheduler.num_moved_out == 4
    assert target.stats().scheduler.recomputed_tokens == 0


def test_what_a_preempted_request_had_is_counted_as_computed_again() -> None:
    def build_small(build_connector: ConnectorBuilder) -> EngineCore:
        scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4)
        return chain_engine(num_blocks=12, scheduler=scheduler, build_connector=build_connector)

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(build_connector=build_connector)

    requests = [greedy_request(str(n), [n] * 10, max_tokens=20) for n in range(3)]
    alone = chain_engine()
    for request in requests:
        alone.add_request(request)
    settle(alone, {request.request_id: [] for request in requests}, {})
    with joined_cores(build_small, build) as (source, target):
        move(source, target, requests, num_steps=9)

        num_again = source.stats().scheduler.recomputed_tokens
        computed = [core.stats().scheduler.num_scheduled_tokens for core in (source, target)]
        assert source.stats().scheduler.num_preemptions == 1
        assert num_again > 0
        assert sum(computed) == alone.stats().scheduler.num_scheduled_tokens + num_again
        assert_at_rest(source, target)


def test_prompt_whose_logprobs_are_wanted_is_computed_by_one_engine_alone(
    pair: tuple[EngineCore, EngineCore],
) -> None:
    source, _ = pair
    prompt = greedy_request("a", [7] * 100, max_tokens=8)
    sampling = replace(prompt.sampling, num_prompt_logprobs=1)
    source.add_request(replace(prompt, sampling=sampling))
    ends: Ends = {}
    turn(source, {"a": []}, ends)
    source.move_out()
    while source.has_work():
        turn(source, {"a": []}, ends)
        source.move_out()

    assert ends["a"].finish_reason is FinishReason.HANDED_OVER
    assert ends["a"].kv_transfer is None
    assert source.stats().scheduler.recomputed_tokens == 64  # the first chunk
    assert_at_rest(source)


def test_waiting_request_passes_its_hand_over_on(pair: tuple[EngineCore, EngineCore]) -> None:
    source, target = pair
    tokens: dict[str, list[int]] = {"a": []}
    ends: Ends = {}
    prompt = greedy_request("a", [7] * 9, max_tokens=8)
    source.add_request(replace(prompt, hand_over=True))
    while "a" not in ends:
        turn(source, tokens, ends)
    handed_over = ends.pop("a").kv_transfer
    request = replace(prompt, output_token_ids=tuple(tokens["a"]), kv_transfer=handed_over)
    target.add_request(request)
    target.move_out()
    turn(target, tokens, ends)

    assert ends["a"].finish_reason is FinishReason.HANDED_OVER
    assert ends["a"].kv_transfer == handed_over
    target.add_request(request)
    settle(target, tokens, {})
    settle(source, tokens, {})
    assert tokens["a"] == expected_tokens([7] * 9, 8)
    assert_at_rest(source, target)


@pytest.mark.parametrize("architecture", ("mistral", "qwen2"))
def test_move_in_the_middle_of_a_model_gives_the_same_tokens(
    architecture: str, oracle_case: Callable[[str], OracleCase]
) -> None:
    """Models with windows in all or some layers: a move takes from these what the next token sees."""
    case = oracle_case(architecture)
    requests = [greedy_request(str(n), prompt, max_tokens=NUM_TOKENS) for n, prompt in enumerate(case.prompts)]
    with inproc_pair(small_engine_config(case.path)) as (source, target):
        tokens, _ = move(source, target, requests, num_steps=5)

        assert tuple(tuple(tokens[str(n)]) for n in range(len(requests))) == case.expected
        assert target.stats().scheduler.remote_hit_tokens > 0
        assert_at_rest(source, target)
