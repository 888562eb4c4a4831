"""The bytes of bodies that are in memory at the same time: bounded, granted in turn, and all given back."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.body_room import BodyRoom
from router.errors import BodiesFullError

PATIENCE_S = 60.0


def make_room(*, max_bytes: int = 100, wait_s: float = PATIENCE_S) -> BodyRoom:
    return BodyRoom(max_bytes=max_bytes, wait_s=wait_s, retry_after_s=1.0)


async def turn() -> None:
    """Let all tasks continue as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_body_that_finds_no_room_waits_for_it() -> None:
    room = make_room()
    await room.take(80)
    waiting = asyncio.create_task(room.take(30))
    await turn()
    assert not waiting.done()

    room.give_back(80)
    await waiting

    assert room.num_taken_bytes == 30


async def test_large_body_is_not_overtaken_by_small_ones() -> None:
    room = make_room()
    await room.take(80)
    large = asyncio.create_task(room.take(90))
    await turn()
    small = asyncio.create_task(room.take(10))
    await turn()
    assert not small.done()

    room.give_back(80)
    await asyncio.gather(large, small)

    assert room.num_taken_bytes == 100


async def test_body_that_waits_too_long_is_turned_away_and_lets_the_next_one_in() -> None:
    room = make_room(wait_s=0.01)
    await room.take(80)
    with pytest.raises(BodiesFullError) as caught:
        await room.take(30)
    await room.take(20)

    assert caught.value.retry_after_s == 1.0
    assert room.num_taken_bytes == 100


async def test_no_patience_means_no_wait() -> None:
    room = make_room(wait_s=0.0)
    await room.take(100)

    with pytest.raises(BodiesFullError):
        await room.take(1)


async def test_so_much_waits_as_there_is_room_and_no_more() -> None:
    room = make_room()
    await room.take(100)
    waiting = [asyncio.create_task(room.take(50)) for _ in range(2)]
    await turn()

    with pytest.raises(BodiesFullError):
        await room.take(1)

    room.give_back(100)
    await asyncio.gather(*waiting)


async def test_body_given_up_while_it_waits_lets_the_next_one_in() -> None:
    room = make_room()
    await room.take(80)
    given_up, next_one = asyncio.create_task(room.take(90)), asyncio.create_task(room.take(10))
    await turn()

    given_up.cancel()
    await next_one

    assert room.num_taken_bytes == 90


async def test_body_given_up_in_the_moment_of_its_turn_takes_nothing() -> None:
    room = make_room()
    await room.take(80)
    given_up = asyncio.create_task(room.take(90))
    await turn()

    room.give_back(80)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)

    assert room.num_taken_bytes == 0


@given(steps=st.lists(st.tuples(st.sampled_from(("take", "give back", "cancel")), st.integers(1, 100)), max_size=40))
def test_room_is_never_exceeded_and_all_of_it_comes_back(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        room = make_room()
        held: deque[int] = deque()
        takers: deque[asyncio.Task[None]] = deque()

        async def take(num_bytes: int) -> None:
            await room.take(num_bytes)
            held.append(num_bytes)

        for what, number in steps:
            if what == "take":
                takers.append(asyncio.create_task(take(number)))
            elif what == "give back" and held:
                room.give_back(held.popleft())
            elif what == "cancel" and takers:
                takers[number % len(takers)].cancel()
            if number % 3:  # not always: several steps at the same moment
                await turn()
            assert room.num_taken_bytes <= 100
        await turn()
        while held:
            room.give_back(held.popleft())
            await turn()
        await asyncio.gather(*takers, return_exceptions=True)
        assert (room.num_taken_bytes, room.num_waiting_bytes) == (0, 0)

    asyncio.run(run())
