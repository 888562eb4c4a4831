"""Reads in flight, of loads and streams: posted within limits, polled, counted, and verified."""

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
"""Longest time between two looks that counts as waiting. Beyond it, this process itself was stopped or got no CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """The limits on reads.

    A part is a quarter of what is left to be read, but at least ``part_bytes`` and at most ``max_part_bytes``.
    Parts must not be large, because messages are only answered between two parts. They should not be small either,
    because between two parts the copy stands still for 0.1 to 0.3 ms. The last part should be small enough that
    comparing its checksums takes no longer than the confirmation, which runs at the same time.
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
    """Some blocks of a hand-over that are read together."""

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
    """Split pairs of blocks into parts of the size that ``limits`` gives, with at least one block each."""
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
    """A part that is being read over the connection to ``peer``. ``posted_s`` is on the clock of ``PartReads.look``."""

    read: Read
    part: Part
    peer: Peer
    posted_s: float = 0.0


class PartReads:
    """Every read that may write into our region. Owned by the connector's thread.

    ``has_hung`` is True when the oldest read still goes on long after its load or stream timed out. Nothing here can
    end it, and its destination is held meanwhile. Only time during which ``look`` is called regularly counts. So after
    this worker itself was stopped, it first sees what has arrived.
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
        """Update ``has_hung``. To be called after the reads were polled."""
        now_s = self._clock()
        self._attention_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now_s
        oldest = next(iter(self._open), None)
        limit_s = self._limits.load_timeout_s + self._limits.hung_read_timeout_s
        has_hung = oldest is not None and self._attention_s - oldest.posted_s >= limit_s
        if has_hung and not self.has_hung and oldest is not None:
            logger.error(
                "a read hangs permanently and holds %d blocks: engine_id=%s seconds=%.0f",
                len(oldest.part.block_ids),
                oldest.peer.identity.engine_id,
                self._attention_s - oldest.posted_s,
            )
        self.has_hung = has_hung

    def may_post(self, peer: Peer, part: Part) -> bool:
        """True when the limits on bytes in flight allow one more read.

        From a peer without reads in flight, one part is always allowed, even if the part is larger than a limit or
        reads from other peers, which may hang, use the whole limit. So the total exceeds its limit by at most one
        part per peer.
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
            TransportError: The connection is broken, or was replaced by a new one; nothing was started.
        """
        if self._peers.find(peer.identity) is not peer:
            raise TransportError(peer=peer.name, reason="it was connected again, or removed, meanwhile")
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
        """The blocks of a part whose content does not match the source's checksums. Computed in this thread."""
        corrupt = self._verifier.check(part)
        self._counters.num_corrupt_blocks += len(corrupt)
        return corrupt

    def begin_verifying(self, part: Part) -> Future[list[int]]:
        """Begin the same check while further reads go on. Pass the future to ``end_verifying`` when it is done."""
        return self._verifier.begin(part)

    def end_verifying(self, verified: Future[list[int]]) -> list[int]:
        """Take and count the corrupt blocks that the check found."""
        corrupt = verified.result()
        self._counters.num_corrupt_blocks += len(corrupt)
        return corrupt

    def close(self) -> None:
        """Stop verifying: the memory is not accessed any more."""
        self._verifier.close()


_MIN_BYTES_FOR_THREAD = 1 << 20
"""Below this size, handing the comparison to another thread takes longer than the comparison itself."""


class Verifier:
    """Verifies checksums in a thread of its own. Owned by the connector's thread. Copies and checksums both release
    the GIL, so they overlap where there is a second core. ``on_done`` is called in the verifying thread.
    """

    def __init__(self, memory: BlockChecksums | None, *, name: str, on_done: Callable[[], None]) -> None:
        self._memory = memory
        self._on_done = on_done
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"baton-kv-verify-{name}")

    def begin(self, part: Part) -> Future[list[int]]:
        """Begin to find the blocks of a part with wrong checksums. For a small part the future is already done."""
        if part.num_bytes < _MIN_BYTES_FOR_THREAD or part.checksums is None or self._memory is None:
            verified: Future[list[int]] = Future()
            verified.set_result(self.check(part))
            return verified
        verified = self._pool.submit(self.check, part)
        verified.add_done_callback(lambda _: self._on_done())
        return verified

    def check(self, part: Part) -> list[int]:
        """Find the blocks of a part with wrong checksums, in the calling thread."""
        if part.checksums is None or self._memory is None:
            return []
        found = self._memory.checksums(part.block_ids)
        return [
            block_id
            for block_id, ours, theirs in zip(part.block_ids, found, part.checksums, strict=True)
            if ours != theirs
        ]

    def close(self) -> None:
        """Wait for the comparison that runs: after this nothing accesses the memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
