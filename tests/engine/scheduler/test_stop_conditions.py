"""When a request ends: C9."""

from __future__ import annotations

import pytest

from engine.contract.messages import FinishReason, TokenDelta
from engine.scheduler.requests.row_table import STOP_COLUMNS
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

PROMPT = fresh_prompt(6)


def undisturbed(num_tokens: int) -> list[int]:
    """The tokens after ``PROMPT``."""
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("a", PROMPT, max_tokens=num_tokens))
    world.run()
    return world.endings["a"].token_ids


def last_delta(**options: object) -> tuple[list[int], TokenDelta]:
    """Tokens and last delta of a request for ``PROMPT``."""
    world = SchedulerWorld(make_config(), num_blocks=32, max_model_len=40)
    world.add(make_request("a", PROMPT, **options))  # type: ignore[arg-type]
    world.run()
    last = world.endings["a"].last
    assert last is not None
    return world.endings["a"].token_ids, last


@pytest.mark.behaviour("C9")
def test_c9_max_tokens() -> None:
    tokens, last = last_delta(max_tokens=5)

    assert (len(tokens), last.finish_reason, last.stop_token_id) == (5, FinishReason.LENGTH, None)


@pytest.mark.behaviour("C9")
def test_c9_model_length() -> None:
    tokens, last = last_delta(max_tokens=500)

    assert (len(tokens), last.finish_reason) == (34, FinishReason.LENGTH)


@pytest.mark.behaviour("C9")
@pytest.mark.parametrize("kind", ["stop", "eos"])
def test_c9_a_stop_token_ends_the_output_and_is_part_of_it(kind: str) -> None:
    expected = undisturbed(12)
    token = expected[3]
    first = expected.index(token)

    tokens, last = last_delta(**{kind: (token, 999)})

    assert tokens == expected[: first + 1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, token)


@pytest.mark.behaviour("C9")
def test_c9_ignore_eos_leaves_stop_tokens_alone() -> None:
    expected = undisturbed(12)

    tokens, last = last_delta(eos=tuple(range(5)), ignore_eos=True, max_tokens=12)
    assert (tokens, last.finish_reason) == (expected, FinishReason.LENGTH)

    tokens, last = last_delta(eos=(999,), stop=(expected[0],), ignore_eos=True, max_tokens=12)
    assert (tokens, last.finish_reason) == (expected[:1], FinishReason.STOP)


@pytest.mark.behaviour("C9")
def test_c9_before_min_tokens_nothing_stops() -> None:
    expected = undisturbed(12)
    stops = tuple(range(5))

    tokens, last = last_delta(stop=stops, min_tokens=7)

    assert tokens == expected[:7]
    assert last.finish_reason is FinishReason.STOP


@pytest.mark.behaviour("C9")
def test_c9_a_stop_at_the_length_limit_is_a_stop() -> None:
    expected = undisturbed(1)

    _, last = last_delta(stop=(expected[0],), max_tokens=1)

    assert last.finish_reason is FinishReason.STOP


@pytest.mark.behaviour("C9")
def test_c9_more_stop_ids_than_the_arrays_hold() -> None:
    expected = undisturbed(12)
    token = expected[5]
    many = (*range(100, 100 + STOP_COLUMNS), token)

    tokens, last = last_delta(stop=many)

    assert tokens == expected[: expected.index(token) + 1]
    assert last.stop_token_id == token


@pytest.mark.behaviour("C9")
def test_c9_each_row_has_its_own_stops() -> None:
    expected = undisturbed(12)
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("stops", PROMPT, stop=(expected[0],)))
    world.add(make_request("many", PROMPT, stop=tuple(range(50, 70)), max_tokens=9))
    world.add(make_request("goes on", PROMPT, max_tokens=9))
    world.run()

    assert {name: len(ending.token_ids) for name, ending in world.endings.items()} == {
        "stops": 1,
        "many": 9,
        "goes on": 9,
    }


@pytest.mark.behaviour("C9")
def test_c9_a_hand_over_ends_after_one_token_unless_that_token_ends_it_anyway() -> None:
    expected = undisturbed(1)

    _, handed = last_delta(hand_over=True)
    _, stopped = last_delta(hand_over=True, stop=(expected[0],))
    _, full = last_delta(hand_over=True, max_tokens=1)

    assert handed.finish_reason is FinishReason.HANDED_OVER
    assert handed.kv_transfer is not None
    assert (stopped.finish_reason, stopped.kv_transfer) == (FinishReason.STOP, None)
    assert (full.finish_reason, full.kv_transfer) == (FinishReason.LENGTH, None)
