"""I1: the same greedy tokens as transformers, from one engine and from prefill + decode in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from engine.build import build_engine
from engine.contract.messages import GenerateRequest
from engine.frontend.offline import generate
from tests.support.engine.checkpoints import ARCHITECTURES
from tests.support.engine.disaggregated import generate_disaggregated, inproc_pair
from tests.support.engine.engine_config import small_engine_config
from tests.support.engine.oracle_cases import NUM_TOKENS, OracleCase
from tests.support.engine.requests import greedy_request

CaseOf = Callable[[str], OracleCase]


def as_requests(prompts: Sequence[Sequence[int]]) -> list[GenerateRequest]:
    return [greedy_request(str(number), prompt, max_tokens=NUM_TOKENS) for number, prompt in enumerate(prompts)]


def in_order(outputs: dict[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(outputs[str(number)]) for number in range(len(outputs)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_engine_says_what_transformers_says(architecture: str, oracle_case: CaseOf) -> None:
    case = oracle_case(architecture)
    core = build_engine(small_engine_config(case.path)).core

    assert in_order(generate(core, as_requests(case.prompts))) == case.expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_and_decode_say_what_transformers_says(architecture: str, oracle_case: CaseOf) -> None:
    case = oracle_case(architecture)
    with inproc_pair(small_engine_config(case.path)) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, as_requests(case.prompts))

        assert in_order(outputs) == case.expected
        assert decode.stats().scheduler.remote_hit_tokens > 0


@pytest.mark.parametrize("max_num_batched_tokens", (16, 37, 64, 2048))
def test_the_chunk_budget_does_not_change_tokens(max_num_batched_tokens: int, oracle_case: CaseOf) -> None:
    case = oracle_case("llama")
    config = small_engine_config(case.path, max_num_batched_tokens=max_num_batched_tokens)
    with inproc_pair(config) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, as_requests(case.prompts))

    assert in_order(outputs) == case.expected


@pytest.mark.parametrize("block_size", (1, 8, 32))
def test_the_block_size_does_not_change_tokens(block_size: int, oracle_case: CaseOf) -> None:
    case = oracle_case("qwen3")
    with inproc_pair(small_engine_config(case.path, block_size=block_size)) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, as_requests(case.prompts))

    assert in_order(outputs) == case.expected


def test_prompts_that_are_cached_give_the_same_tokens_again(oracle_case: CaseOf) -> None:
    case = oracle_case("mistral")
    with inproc_pair(small_engine_config(case.path)) as (prefill, decode):
        first = generate_disaggregated(prefill, decode, as_requests(case.prompts))
        hits_before = decode.stats().scheduler.prefix_hit_tokens
        second = generate_disaggregated(prefill, decode, as_requests(case.prompts))

        assert in_order(first) == in_order(second) == case.expected
        assert decode.stats().scheduler.prefix_hit_tokens > hits_before


def test_a_cache_too_small_for_all_preempts_and_gives_the_same_tokens(oracle_case: CaseOf) -> None:
    case = oracle_case("llama")
    core = build_engine(small_engine_config(case.path, num_blocks=68, max_num_batched_tokens=256)).core

    assert in_order(generate(core, as_requests(case.prompts))) == case.expected


def test_nothing_is_held_at_rest(oracle_case: CaseOf) -> None:
    case = oracle_case("llama")
    with inproc_pair(small_engine_config(case.path)) as (prefill, decode):
        generate_disaggregated(prefill, decode, as_requests(case.prompts))
        for core in (prefill, decode):
            core.collect()
            core.scheduler.check_integrity()
            load = core.load_report()
            assert (load.num_running, load.num_waiting, load.num_loading) == (0, 0, 0)
            assert (load.num_leased_blocks, load.num_held_blocks) == (0, 0)
            assert load.num_free_blocks == load.num_blocks
