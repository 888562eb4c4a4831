"""Requests that are refused immediately, and configurations with contradictions: C11 and bad input."""

from __future__ import annotations

import dataclasses

import pytest

from engine.contract.config import CacheConfig, EngineConfig, ModelConfigSource, SchedulerConfig
from engine.contract.errors import ConfigError, DuplicateRequestError, PromptTooLongError, RequestRefusedError
from engine.scheduler.scheduler import Scheduler
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld, undisturbed_output


@pytest.mark.behaviour("C11")
def test_c11_a_prompt_longer_than_the_model_is_refused_with_the_arithmetic() -> None:
    world = SchedulerWorld(make_config(), num_blocks=64, max_model_len=32)
    world.add(make_request("fits", 31))

    with pytest.raises(PromptTooLongError, match="has 32 tokens, but at most 31 fit: the model's context is 32"):
        world.add(make_request("a", 32))


@pytest.mark.behaviour("C11")
def test_c11_a_prompt_larger_than_the_pool_is_refused_with_the_arithmetic() -> None:
    world = SchedulerWorld(make_config(), num_blocks=4, max_model_len=64)

    with pytest.raises(
        PromptTooLongError, match="has 17 tokens, but at most 16 fit: the whole KV cache has room for 16"
    ):
        world.add(make_request("a", 17))


@pytest.mark.behaviour("C11")
@pytest.mark.parametrize("num_tokens", [1, 3, 15, 16])
def test_c11_what_just_fits_is_served_and_ends_where_the_pool_ends(num_tokens: int) -> None:
    world = SchedulerWorld(make_config(), num_blocks=4, max_model_len=64)
    world.add(make_request("a", num_tokens))
    world.run()

    world.check_output("a")
    assert len(world.endings["a"].token_ids) == 17 - num_tokens


def test_duplicate_ids_are_refused_as_long_as_the_first_lives() -> None:
    world = SchedulerWorld(make_config(), num_blocks=16)
    world.add(make_request("a", 4, max_tokens=1))
    with pytest.raises(DuplicateRequestError, match="'a' is already in use"):
        world.add(make_request("a", 4))
    world.run()

    world.add(make_request("a", 4, max_tokens=1))


@pytest.mark.parametrize(
    ("options", "code"), [({"prompt": ()}, "empty_prompt"), ({"max_tokens": 0}, "invalid_max_tokens")]
)
def test_requests_without_meaning_are_refused(options: dict[str, object], code: str) -> None:
    world = SchedulerWorld(make_config(), num_blocks=16)

    with pytest.raises(RequestRefusedError) as refusal:
        world.add(make_request("a", **({"prompt": 4} | options)))  # type: ignore[arg-type]

    assert refusal.value.code == code
    assert not world.scheduler.has_unfinished()


def test_a_full_queue_refuses() -> None:
    world = SchedulerWorld(make_config(seqs=1, max_num_waiting=2), num_blocks=16)
    world.add(make_request("a", 4))
    world.step()
    world.add(make_request("b", 4))
    world.add(make_request("c", 4))

    with pytest.raises(RequestRefusedError) as refusal:
        world.add(make_request("d", 4))

    assert refusal.value.code == "queue_full"


@pytest.mark.known_failure(37)
def test_a_full_queue_takes_requests_that_go_on_here() -> None:
    """Their first tokens are with the client already; the KV that they bring would be lost with a refusal."""
    world = SchedulerWorld(make_config(seqs=1, max_num_waiting=1), num_blocks=16)
    world.add(make_request("runs", 4, max_tokens=3))
    world.step()
    world.add(make_request("waits", 4, max_tokens=3))
    whole = make_request("moved", 4, max_tokens=6)
    begun = undisturbed_output(whole, world.max_total_tokens)[:2]

    world.add(dataclasses.replace(whole, output_token_ids=tuple(begun)))

    world.run()
    world.check_output("moved")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 2, "max_num_seqs": 4}, "smaller than max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_partial_prefills": -1}, "max_num_partial_prefills must be >= 0"),
        ({"scheduler_delay_factor": -0.5}, "scheduler_delay_factor must be >= 0"),
        ({"watermark": 1.0}, "watermark"),
        ({"ask_again_s": 0.0}, "ask_again_s"),
        ({"artificial_preemption_probability": 1.5}, "artificial_preemption_probability"),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 3}, "which includes them: lower it"),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 1}, "needs long_prefill_token_threshold"),
        ({"max_num_partial_prefills": 2, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
        ({"long_prefill_token_threshold": 64, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
        ({"enable_priority_preemption": True}, "needs policy 'priority'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 4}, "smaller than a block.*lower block_size"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 33}, "larger than the number of KV blocks.*kv_cache_bytes"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 4, "enable_chunked_prefill": False}, "set enable_chunked"),
    ],
)
def test_options_that_contradict_the_cache_are_refused(options: dict[str, object], message: str) -> None:
    config, cache = SchedulerConfig(**options), CacheConfig(block_size=16, num_blocks=32)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        Scheduler(config, cache, num_blocks=32, max_model_len=128)
    with pytest.raises(ConfigError, match=message):
        EngineConfig(
            model=ModelConfigSource(path="."),  # type: ignore[arg-type]
            cache=cache,
            scheduler=SchedulerConfig(max_model_len=128, **options),  # type: ignore[arg-type]
        )
