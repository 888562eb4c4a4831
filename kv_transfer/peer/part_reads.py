"""Reads on their way: posted within bounds, polled, counted and verified, for loads and streams alike."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kv_transfer.memory.block_memory import BlockChecksums
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.peers import Peer, PeerTable
from kv_transfer.transport import Read, ReadState, Transport, TransportError

logger = logging.getLogger(f"baton.{__name__}")

LONGEST_LOOK_S = 0.5
"""Time beyond this between two looks at the reads was ours, not theirs: we were stopped, or got no processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """What bounds the reads.

    A part has a quarter of what is left to be read, but ``part_bytes`` at least and ``max_part_bytes`` at most.
    Messages are answered between two parts, so that they may not be large; between two parts the copy stands still
    for 0.1 to 0.3 ms, so that they should not be small; and the comparison of the last one with its checksums should
    take no longer than the confirmation, beside which it runs.
    """

    load_timeout_s: float
    renewal_period_s: float
    answer_timeout_s: float = 5.0
    hung_read_timeout_s: float = 30.0
    slowest_bytes_per_s: int = 16 << 20
    done_retry_s: float = 1.0
    part_bytes: int = 8 << 20
    max_part_bytes: int = 32 << 20
    max_bytes_in_flight: int = 1 << 30
    max_bytes_in_flight_per_peer: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some blocks of a hand-over, read as one."""

    number: int
    source_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_bytes: int
    checksums: tuple[int, ...] | None = None


def split_blocks(
    source_block_ids: Sequence[int],
    block_ids: Sequence[int],
    checksums: Sequence[int] | None,
    *,
    block_bytes: int,
    limits: ReaderLimits,
    first_number: int = 0,
) -> Iterator[Part]:
    """Cut pairs of blocks into parts as large as the limits say, of at least one block each."""
    end = 0
    for number in itertools.count(first_number):
        start, left = end, len(block_ids) - end
        if not left:
            return
        num_bytes = min(max(left * block_bytes // 4, limits.part_bytes), limits.max_part_bytes)
        end = min(start + max(1, num_bytes // block_bytes), len(block_ids))
        destinations = tuple(block_ids[start:end])
        yield Part(
            number=number,
            source_block_ids=tuple(source_block_ids[start:end]),
            block_ids=destinations,
            num_bytes=len(destinations) * block_bytes,
            checksums=tuple(checksums[start:end]) if checksums is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRead:
    """A part that is being read over the connection to ``peer``, since ``posted_s`` of attention."""

    read: Read
    part: Part
    peer: Peer
    posted_s: float = 0.0


class PartReads:
    """Every read that may write into our region. Owned by the connector's thread.

    ``has_hung`` says whether the oldest one goes on though its load, or its stream, ran out of time long ago: nothing
    that can be done here ends it, and as long as it goes on its destination is held. What counts is the time in which
    ``look`` was called, so that a worker which was itself stopped first sees what has come meanwhile.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        peers: PeerTable,
        limits: ReaderLimits,
        counters: TransferCounters,
        verifier: Verifier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._attention_s = 0.0
        self._open: dict[PartRead, None] = {}
        self.has_hung = False
        self._transport = transport
        self._peers = peers
        self._limits = limits
        self._counters = counters
        self._verifier = verifier
        self._bytes_in_flight = 0

    @property
    def has_any(self) -> bool:
        """True while anything may be written into our region."""
        return bool(self._open)

    def look(self) -> None:
        """Notice whether a read hangs for good; after the reads were polled."""
        now_s = self._clock()
        self._attention_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        oldest = next(iter(self._open), None)
        limit_s = self._limits.load_timeout_s + self._limits.hung_read_timeout_s
        has_hung = oldest is not None and self._attention_s - oldest.posted_s >= limit_s
        if has_hung and not self.has_hung and oldest is not None:
            logger.error(
                "a read hangs for good, and holds %d blocks: engine_id=%s seconds=%.0f",
                len(oldest.part.block_ids),
                oldest.peer.identity.engine_id,
                self._attention_s - oldest.posted_s,
            )
        self.has_hung = has_hung

    def may_post(self, peer: Peer, part: Part) -> bool:
        """True when the bounds on bytes in flight allow one more read.

        Of a peer of which nothing is on its way one part always may be: it waits neither because that part is larger
        than a bound, nor for reads from others, which may hang. So in all there is a part of each further peer at most
        beyond the bound.
        """
        if not peer.bytes_in_flight:
            return True
        limits, num_bytes = self._limits, part.num_bytes
        return (
            peer.bytes_in_flight + num_bytes <= limits.max_bytes_in_flight_per_peer
            and self._bytes_in_flight + num_bytes <= limits.max_bytes_in_flight
        )

    def post(self, peer: Peer, part: Part) -> PartRead:
        """Begin to read a part.

        Raises:
            TransportError: The connection is broken, or was made anew; nothing was started.
        """
        if self._peers.find(peer.identity) is not peer:
            raise TransportError(peer=peer.name, reason="it was met anew, or forgotten, meanwhile")
        read = self._transport.start_read(peer.name, part.source_block_ids, part.block_ids)
        peer.num_reads += 1
        peer.bytes_in_flight += part.num_bytes
        self._bytes_in_flight += part.num_bytes
        part_read = PartRead(read=read, part=part, peer=peer, posted_s=self._attention_s)
        self._open[part_read] = None
        return part_read

    def poll(self, part_read: PartRead) -> ReadState:
        """The state now. A read that ended is closed, and must not be polled again."""
        state = part_read.read.poll()
        if state is ReadState.ACTIVE:
            return state
        part, peer = part_read.part, part_read.peer
        part_read.read.close()
        peer.num_reads -= 1
        peer.bytes_in_flight -= part.num_bytes
        del self._open[part_read]
        self._bytes_in_flight -= part.num_bytes
        if state is ReadState.DONE:
            self._counters.num_bytes += part.num_bytes
            self._counters.num_blocks += len(part.block_ids)
        if peer.num_reads == 0:
            self._peers.sweep()
        return state

    def corrupt_blocks(self, part: Part) -> list[int]:
        """The blocks of a part that arrived otherwise than the source had them when it made their checksums."""
        corrupt = self._verifier.check(part)
        self._counters.num_corrupt_blocks += len(corrupt)
        return corrupt

    def begin_verifying(self, part: Part) -> Future[list[int]]:
        """The same, beside the reads that follow; to be given to ``end_verifying`` when it is done."""
        return self._verifier.begin(part)

    def end_verifying(self, verified: Future[list[int]]) -> list[int]:
        """The result, counted."""
        corrupt = verified.result()
        self._counters.num_corrupt_blocks += len(corrupt)
        return corrupt

    def close(self) -> None:
        """Look at the memory no more."""
        self._verifier.close()


_MIN_BYTES_FOR_THREAD = 1 << 20
"""Below that the way to another thread takes longer than the comparison."""


class Verifier:
    """Owned by the connector's thread. Copies and checksums both let other threads run, so that the one hides behind
    the other where there is a second core. ``on_done`` is called in the verifying thread.
    """

    def __init__(self, memory: BlockChecksums | None, *, name: str, on_done: Callable[[], None]) -> None:
        self._memory = memory
        self._on_done = on_done
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"baton-kv-verify-{name}")

    def begin(self, part: Part) -> Future[list[int]]:
        """Find the blocks of a part that are not as the source had them. A small part is done when this returns."""
        if part.num_bytes < _MIN_BYTES_FOR_THREAD or part.checksums is None or self._memory is None:
            verified: Future[list[int]] = Future()
            verified.set_result(self.check(part))
            return verified
        verified = self._pool.submit(self.check, part)
        verified.add_done_callback(lambda _: self._on_done())
        return verified

    def check(self, part: Part) -> list[int]:
        """The same, here and now."""
        if part.checksums is None or self._memory is None:
            return []
        found = self._memory.checksums(part.block_ids)
        return [
            block_id
            for block_id, ours, theirs in zip(part.block_ids, found, part.checksums, strict=True)
            if ours != theirs
        ]

    def close(self) -> None:
        """Wait for what is under way: after this nothing looks at the memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
