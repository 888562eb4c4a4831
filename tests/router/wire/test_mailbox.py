"""Tokens on their way to their writer: all of them, in order, at a rate that allows many streams."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.messages import FinishReason, TokenDelta
from router.wire.mailbox import Mailbox, Pacer


def delta(*token_ids: int, reason: FinishReason | None = None, num_cached: int | None = None) -> TokenDelta:
    return TokenDelta("a", token_ids, reason, num_cached_tokens=num_cached)


async def taken(mailbox: Mailbox) -> list[tuple[int, ...]]:
    async with asyncio.timeout(60):
        return [item.token_ids for item in await mailbox.take()]


async def test_what_waits_is_taken_at_once_and_in_order() -> None:
    mailbox = Mailbox()
    mailbox.put(delta(1))
    mailbox.put(delta(2, 3))

    assert await taken(mailbox) == [(1,), (2, 3)]


async def test_what_waits_is_one_delta_for_a_taker_that_wants_it() -> None:
    mailbox = Mailbox()
    mailbox.joins_deltas = True
    mailbox.put(delta(1, num_cached=7))
    mailbox.put(delta(2, 3))
    mailbox.put(delta(4, reason=FinishReason.LENGTH))

    assert await mailbox.take() == [delta(1, 2, 3, 4, reason=FinishReason.LENGTH, num_cached=7)]


async def test_first_and_last_tokens_do_not_wait_for_the_pace() -> None:
    pacer = Pacer(max_delay_s=3600.0)
    mailbox = Mailbox(pacer)
    pacer.num_streams = 10**9
    mailbox.put(delta(1))
    assert await taken(mailbox) == [(1,)]

    waiting = asyncio.create_task(taken(mailbox))
    await asyncio.sleep(0)
    mailbox.put(delta(2))
    await asyncio.sleep(0)
    assert not waiting.done()

    mailbox.put(delta(3, reason=FinishReason.STOP))
    assert await waiting == [(2,), (3,)]


async def test_tokens_of_many_streams_come_together_with_the_next_round() -> None:
    pacer = Pacer(max_delay_s=0.05)
    mailboxes = [Mailbox(pacer) for _ in range(3)]
    pacer.num_streams = 10**6
    for mailbox in mailboxes:
        mailbox.put(delta(0))
        await taken(mailbox)
    waiting = [asyncio.create_task(taken(mailbox)) for mailbox in mailboxes]
    await asyncio.sleep(0)
    for token_id in range(1, 4):
        for mailbox in mailboxes:
            mailbox.put(delta(token_id))

    assert await asyncio.gather(*waiting) == [[(1,), (2,), (3,)]] * 3


async def test_tokens_that_came_while_the_taker_was_busy_are_not_forgotten() -> None:
    pacer = Pacer(max_delay_s=0.05)
    mailbox = Mailbox(pacer)
    pacer.num_streams = 10**6
    mailbox.put(delta(1))
    await taken(mailbox)
    mailbox.put(delta(2))

    assert await taken(mailbox) == [(2,)]


async def test_error_comes_after_everything_before_it() -> None:
    mailbox = Mailbox(Pacer(max_delay_s=0.0))
    mailbox.put(delta(1))
    mailbox.end(ValueError("broken"))
    mailbox.put(delta(2))

    assert await taken(mailbox) == [(1,)]
    with pytest.raises(ValueError, match="broken"):
        await mailbox.take()


async def test_ended_streams_no_longer_slow_the_others() -> None:
    pacer = Pacer(max_delay_s=1.0)
    mailboxes = [Mailbox(pacer) for _ in range(5)]
    for mailbox in mailboxes:
        mailbox.end()
        mailbox.end()

    assert pacer.interval_s == 0.0


async def test_what_is_held_is_taken_with_what_comes_next() -> None:
    shown: list[str] = []
    mailbox = Mailbox()
    mailbox.put(delta(1))
    mailbox.hold(until_s=asyncio.get_running_loop().time() + 3600.0, on_shown=lambda: shown.append("first"))
    waiting = asyncio.create_task(taken(mailbox))
    await asyncio.sleep(0)
    assert (waiting.done(), shown) == (False, [])

    mailbox.put(delta(2))

    assert await waiting == [(1,), (2,)]
    assert shown == ["first"]


async def test_what_is_held_is_taken_when_its_time_is_over() -> None:
    shown: list[str] = []
    loop = asyncio.get_running_loop()
    mailbox = Mailbox()
    mailbox.put(delta(1))
    mailbox.hold(until_s=loop.time() + 0.02, on_shown=lambda: shown.append("first"))
    assert await taken(mailbox) == [(1,)]
    assert shown == ["first"]


async def test_what_is_held_comes_before_an_error() -> None:
    shown: list[str] = []
    mailbox = Mailbox(Pacer(max_delay_s=0.0))
    mailbox.put(delta(1))
    mailbox.hold(until_s=asyncio.get_running_loop().time() + 3600.0, on_shown=lambda: shown.append("first"))
    mailbox.end(ValueError("broken"))

    assert await taken(mailbox) == [(1,)]
    assert shown == ["first"]
    with pytest.raises(ValueError, match="broken"):
        await mailbox.take()
