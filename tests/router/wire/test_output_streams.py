"""What a router receives from a replica, while it makes other calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import cast

import pytest

from engine.contract.messages import CacheChanges, LoadReport, StepMessage, TokenDelta, Told
from router.pool.pool import ReplicaPool
from router.pool.workers import WorkerPool, WorkerUnavailableError
from router.wire.output_streams import OutputStreams
from tests.support.router.router_rig import FAST, until

CHANGES = CacheChanges(first_sequence=9, next_sequence=10)


class Replica:
    """One that says what the test puts in, and takes its time to tell its cache. Stands for all that a router knows."""

    mirror = object()

    def __init__(self) -> None:
        self.said: asyncio.Queue[StepMessage] = asyncio.Queue()
        self.may_tell = asyncio.Event()
        self.error: WorkerUnavailableError | None = None
        self.num_asked = self.num_told = 0

    async def outputs(self, *_: object, **__: object) -> AsyncIterator[StepMessage]:
        """Its messages."""
        while True:
            yield await self.said.get()

    async def resync_cache(self, *_: object) -> None:
        """Send the whole state of the prefix cache again."""
        self.num_asked += 1
        await self.may_tell.wait()
        if self.error is not None:
            raise self.error
        self.num_told += 1

    def note_cache(self, _: str, changes: Iterable[CacheChanges]) -> bool:
        """Some changes are always missing."""
        return False

    def note_load(self, *_: object) -> None:
        """Not looked at."""

    note_stream_end = note_failure = note_gone = forget_cache = note_load


class Reader:
    """Takes a request's tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def on_told(self, told: Told) -> None:
        """Not looked at."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Keep them."""
        self.token_ids.extend(delta.token_ids)

    def on_lost(self, error: WorkerUnavailableError) -> None:
        """Not looked at."""


def message(token_id: int) -> StepMessage:
    delta = TokenDelta(request_id="a", token_ids=(token_id,))
    return StepMessage(deltas=(delta,), load=LoadReport(), cache=(CHANGES,))


@pytest.mark.parametrize("fails", [False, True])
async def test_tokens_come_while_a_replica_takes_its_time_to_tell_its_cache(fails: bool) -> None:
    replica, reader = Replica(), Reader()
    if fails:
        replica.error = WorkerUnavailableError(replica_id="r", reason="busy")
    streams = OutputStreams(cast("WorkerPool", replica), cast("ReplicaPool", replica), settings=FAST)
    stream = streams.open("r")
    stream.attach("a", reader)

    for token_id in (1, 2, 3):
        replica.said.put_nowait(message(token_id))
    await until(lambda: reader.token_ids == [1, 2, 3])
    assert replica.num_asked == 1, "one call at a time"

    replica.may_tell.set()
    await until(lambda: stream.asking is not None and stream.asking.done())
    replica.said.put_nowait(message(4))
    await until(lambda: reader.token_ids == [1, 2, 3, 4])
    await until(lambda: replica.num_asked == 2)

    assert stream.error is None
    assert replica.num_told == (0 if fails else 2)
    await streams.close()
