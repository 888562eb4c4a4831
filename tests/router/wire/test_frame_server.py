"""Frames over a socket: they arrive once, at whoever has the key, and calls are answered until either side leaves."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from router.wire.frame_connection import FrameConnection
from router.wire.frame_link import MAX_WAITING_BYTES, FrameLink, LinkBrokenError, open_link
from router.wire.frame_server import FrameOffer, FrameServer
from router.wire.frames import LINK_VERSION, FrameParser, FrameTooLongError, framed


class Frames:
    """The frames that a worker sends; notes whether it was closed."""

    def __init__(self, *frames: bytes, goes_on: bool = False) -> None:
        self._frames = frames
        self._goes_on = goes_on
        self.num_taken = 0
        self.closed = asyncio.Event()

    async def write(self, connection: FrameConnection) -> None:
        """Send the frames; with ``goes_on`` it then waits for ever."""
        try:
            for frame in self._frames:
                self.num_taken += 1
                connection.send(frame)
                await connection.drained()
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


async def echo(call: bytes) -> bytes:
    return b"answer to " + call


def offered(server: FrameServer, frames: Frames, answer: Callable[[bytes], Awaitable[bytes]] = echo) -> FrameOffer:
    offer = server.offer(frames.write, answer)
    assert offer is not None
    return offer


async def fetched(offer: FrameOffer) -> FrameLink:
    link = await open_link(offer)
    assert link is not None
    return link


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

    async with asyncio.timeout(60):
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
    async def fail(connection: FrameConnection) -> None:
        connection.send(b"a")
        raise RuntimeError("the engine is gone")

    offer = server.offer(fail, echo)
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
    assert await open_link(FrameOffer("baton-frames-nobody", b"0" * 16)) is None


async def test_a_worker_that_speaks_another_version_is_not_asked(server: FrameServer) -> None:
    offer = offered(server, Frames())

    assert await open_link(replace(offer, version=LINK_VERSION + 1)) is None


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=20), st.integers(1, 60))
def test_frames_cut_anywhere_come_out_whole(frames: list[tuple[int, bytes]], size: int) -> None:
    data = b"".join(framed(frame, number) for number, frame in frames)
    parser = FrameParser()

    assert [found for start in range(0, len(data), size) for found in parser.feed(data[start : start + size])] == frames


def test_what_claims_to_be_longer_than_any_frame_is_none() -> None:
    with pytest.raises(FrameTooLongError):
        FrameParser().feed(b"\xff" * 8)


async def test_calls_are_begun_in_their_order_and_each_gets_its_own_answer(server: FrameServer) -> None:
    begun: list[bytes] = []
    may_answer = {name: asyncio.Event() for name in (b"a", b"b", b"c")}

    async def answer(call: bytes) -> bytes:
        begun.append(call)
        await may_answer[call].wait()
        return call.upper()

    link = await fetched(offered(server, Frames(b"hello", goes_on=True), answer))
    assert await anext(link) == b"hello"
    calls = {name: asyncio.ensure_future(link.call(name)) for name in may_answer}
    for name in reversed(may_answer):
        may_answer[name].set()
        assert await calls[name] == name.upper()
    await link.aclose()

    assert begun == [b"a", b"b", b"c"]


async def test_a_call_waits_for_no_frame_and_no_frame_for_a_call(server: FrameServer) -> None:
    may_answer = asyncio.Event()

    async def answer(call: bytes) -> bytes:
        await may_answer.wait()
        return call

    sent = [bytes([number]) * 100_000 for number in range(50)]
    link = await fetched(offered(server, Frames(*sent, goes_on=True), answer))
    call = asyncio.ensure_future(link.call(b"x" * 500_000))

    assert [await anext(link) for _ in sent] == sent
    assert not call.done()
    may_answer.set()
    assert await call == b"x" * 500_000
    await link.aclose()


async def test_a_call_that_nobody_answers_any_more_fails_and_so_does_the_next_one(server: FrameServer) -> None:
    begun = asyncio.Event()

    async def answer(_: bytes) -> bytes:
        begun.set()
        return await asyncio.Event().wait() and b""

    link = await fetched(offered(server, Frames(b"hello", goes_on=True), answer))
    call = asyncio.ensure_future(link.call(b"a"))
    await begun.wait()

    await server.close()

    with pytest.raises(LinkBrokenError):
        await call
    with pytest.raises(LinkBrokenError):
        await link.call(b"b")


async def test_a_call_that_came_before_the_last_frame_is_answered(server: FrameServer) -> None:
    may_answer = asyncio.Event()

    async def answer(call: bytes) -> bytes:
        may_end.set()
        await may_answer.wait()
        return call

    may_end = asyncio.Event()

    async def write(connection: FrameConnection) -> None:
        connection.send(b"first")
        await may_end.wait()
        connection.send(b"last")

    offer = server.offer(write, answer)
    assert offer is not None
    link = await fetched(offer)
    call = asyncio.ensure_future(link.call(b"a"))
    assert [await anext(link), await anext(link)] == [b"first", b"last"]
    may_answer.set()

    assert await call == b"a"
    assert [frame async for frame in link] == []


async def test_what_was_asked_is_done_though_the_router_left(server: FrameServer) -> None:
    begun, may_answer, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(call: bytes) -> bytes:
        begun.set()
        await may_answer.wait()
        done.set()
        return call

    frames = Frames(b"hello", goes_on=True)
    link = await fetched(offered(server, frames, answer))
    call = asyncio.ensure_future(link.call(b"a"))
    await begun.wait()
    await link.aclose()
    with pytest.raises(LinkBrokenError):
        await call
    await frames.closed.wait()
    may_answer.set()

    async with asyncio.timeout(60):
        await done.wait()


async def test_other_threads_send_what_comes_out_whole_and_in_their_order() -> None:
    """A reader that does not read makes no thread wait."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    connection = FrameConnection(ours)
    num_frames, num_threads = 200, 4

    def send(thread: int) -> None:
        for number in range(num_frames):
            connection.send(bytes([thread]) * 3000 + struct.pack("<I", number))

    await asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(num_threads)))
    assert connection.is_behind
    parser, received = FrameParser(), list[bytes]()
    while len(received) < num_threads * num_frames:
        received += [frame for _, frame in parser.feed(await asyncio.get_running_loop().sock_recv(theirs, 1 << 16))]
    await connection.drained()
    connection.close()
    theirs.close()

    for thread in range(num_threads):
        numbers = [struct.unpack("<I", frame[3000:])[0] for frame in received if frame[0] == thread]
        assert numbers == list(range(num_frames))


async def test_sending_to_a_reader_that_left_does_nothing_but_end_the_connection() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = FrameConnection(ours)
    theirs.close()

    await asyncio.to_thread(connection.send, b"a")

    async with asyncio.timeout(60):
        await connection.ended
    connection.close()
    connection.send(b"b")
