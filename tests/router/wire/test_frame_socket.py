"""Frames over a socket: what is written comes out, once, to whoever has the key, until either side leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from router.wire.frame_socket import MAX_WAITING_BYTES, FrameOffer, FrameServer, fetch_frames


class Frames:
    """What a worker has to say; it notes whether it was closed."""

    def __init__(self, *frames: bytes, goes_on: bool = False) -> None:
        self._frames = frames
        self._goes_on = goes_on
        self.num_taken = 0
        self.closed = asyncio.Event()

    async def read(self) -> AsyncGenerator[bytes]:
        """The frames; with ``goes_on`` it then waits for ever."""
        try:
            for frame in self._frames:
                self.num_taken += 1
                yield frame
            if self._goes_on:
                await asyncio.Event().wait()
        finally:
            self.closed.set()


@pytest.fixture
async def server() -> AsyncIterator[FrameServer]:
    server = FrameServer()
    await server.start()
    yield server
    await server.close()


def offered(server: FrameServer, frames: Frames) -> FrameOffer:
    offer = server.offer(frames.read())
    assert offer is not None
    return offer


async def fetched(offer: FrameOffer) -> AsyncGenerator[bytes]:
    frames = await fetch_frames(offer)
    assert frames is not None
    return frames


@given(st.lists(st.binary(max_size=3000), max_size=30))
def test_all_frames_come_out_in_order_and_then_the_end(sent: list[bytes]) -> None:
    async def send_and_receive() -> list[bytes]:
        server = FrameServer()
        await server.start()
        received = [frame async for frame in await fetched(offered(server, Frames(*sent)))]
        await server.close()
        return received

    assert asyncio.run(send_and_receive()) == sent


def test_it_works_on_uvloop_as_well() -> None:
    async def send_and_receive() -> list[bytes]:
        server = FrameServer()
        await server.start()
        received = [frame async for frame in await fetched(offered(server, Frames(b"a", b"b" * 300_000)))]
        await server.close()
        return received

    assert [len(frame) for frame in uvloop.run(send_and_receive())] == [1, 300_000]


async def test_an_offer_stands_once(server: FrameServer) -> None:
    offer = offered(server, Frames(b"a"))

    assert [frame async for frame in await fetched(offer)] == [b"a"]
    assert [frame async for frame in await fetched(offer)] == []


async def test_whoever_has_no_key_gets_nothing(server: FrameServer) -> None:
    frames = Frames(b"secret")
    offer = offered(server, frames)

    assert [frame async for frame in await fetched(FrameOffer(offer.name, b"?" * len(offer.key)))] == []
    assert frames.num_taken == 0


async def test_a_reader_that_leaves_closes_the_frames(server: FrameServer) -> None:
    frames = Frames(b"a", goes_on=True)
    reader = await fetched(offered(server, frames))
    assert await anext(reader) == b"a"

    await reader.aclose()

    async with asyncio.timeout(10):
        await frames.closed.wait()


async def test_a_worker_that_closes_ends_the_stream(server: FrameServer) -> None:
    frames = Frames(b"a", goes_on=True)
    reader = await fetched(offered(server, frames))
    assert await anext(reader) == b"a"

    await server.close()

    assert [frame async for frame in reader] == []
    assert frames.closed.is_set()


async def test_a_worker_whose_frames_fail_ends_the_stream_and_says_why(
    server: FrameServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> AsyncGenerator[bytes]:
        yield b"a"
        raise RuntimeError("the engine is gone")

    offer = server.offer(fail())
    assert offer is not None

    assert [frame async for frame in await fetched(offer)] == [b"a"]
    assert "RuntimeError: the engine is gone" in caplog.text


async def test_what_was_said_before_the_end_arrives_though_the_worker_closes_at_once(server: FrameServer) -> None:
    sent = [bytes([number]) * 100_000 for number in range(20)]
    reader = await fetched(offered(server, Frames(*sent)))
    first = asyncio.ensure_future(anext(reader))
    await first

    closing = asyncio.ensure_future(server.close())

    assert [first.result(), *[frame async for frame in reader]] == sent
    await closing


async def test_a_reader_that_is_behind_lets_the_worker_wait_and_loses_nothing(server: FrameServer) -> None:
    sent = [bytes([number]) * (MAX_WAITING_BYTES // 4) for number in range(100)]
    frames = Frames(*sent)
    reader = await fetched(offered(server, frames))
    first = await anext(reader)
    num_seen = -1
    while frames.num_taken != num_seen:  # until nothing moves any more
        num_seen = frames.num_taken
        for _ in range(100):
            await asyncio.sleep(0)

    assert frames.num_taken < len(sent)
    assert [first, *[frame async for frame in reader]] == sent


async def test_nobody_is_reached_under_an_unknown_name() -> None:
    assert await fetch_frames(FrameOffer("baton-frames-nobody", b"0" * 16)) is None
