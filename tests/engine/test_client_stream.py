"""Messages that wait for one client are taken together, and not more often than pays off."""

from __future__ import annotations

import asyncio

import pytest

from engine.contract.messages import FinishReason, TokenDelta
from engine.frontend.client_stream import ClientStream

FOR_EVER_S = 3600.0


def delta(token: int, *, is_first: bool = False, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("a", (token,), reason, num_cached_tokens=0 if is_first else None)


async def taken(stream: ClientStream) -> list[int]:
    async with asyncio.timeout(60):
        return [item.token_ids[0] for item in await stream.take()]


@pytest.fixture
async def stream() -> ClientStream:
    """One whose last message was just now."""
    stream = ClientStream(min_gap_s=FOR_EVER_S)
    stream.put([delta(0)])
    assert await taken(stream) == [0]
    return stream


async def test_steps_that_follow_at_once_share_a_message(stream: ClientStream) -> None:
    stream.put([delta(1)])
    taking = asyncio.create_task(taken(stream))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not taking.done()

    stream.put([delta(2), delta(3, is_first=True)])

    assert await taking == [1, 2, 3]


async def test_first_tokens_do_not_wait(stream: ClientStream) -> None:
    stream.put([delta(1, is_first=True)])

    assert await taken(stream) == [1]


async def test_closed_stream_gives_at_once_what_is_left(stream: ClientStream) -> None:
    stream.put([delta(1, reason=FinishReason.LENGTH)])
    stream.close()

    assert await taken(stream) == [1]
    assert stream.is_closed


async def test_gap_ends_by_itself() -> None:
    stream = ClientStream(min_gap_s=0.01)
    for token in range(3):
        stream.put([delta(token)])
        assert await taken(stream) == [token]
