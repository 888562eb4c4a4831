"""Reads on their way: posted within bounds, polled, counted and verified, for loads and streams alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kv_transfer.counters import TransferCounters
from kv_transfer.peers import Peer, PeerTable
from kv_transfer.transport import Read, ReadState, Transport, TransportError
from kv_transfer.verifier import Verifier


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
    """A part that is being read over the connection to ``peer``."""

    read: Read
    part: Part
    peer: Peer


class PartReads:
    """Every read that may write into our region. Owned by the connector's thread."""

    def __init__(
        self,
        *,
        transport: Transport,
        peers: PeerTable,
        limits: ReaderLimits,
        counters: TransferCounters,
        verifier: Verifier,
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._limits = limits
        self._counters = counters
        self._verifier = verifier
        self._num_reads = 0
        self._bytes_in_flight = 0

    @property
    def has_any(self) -> bool:
        """True while anything may be written into our region."""
        return self._num_reads > 0

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
        self._num_reads += 1
        self._bytes_in_flight += part.num_bytes
        return PartRead(read=read, part=part, peer=peer)

    def poll(self, part_read: PartRead) -> ReadState:
        """The state now. A read that ended is closed, and must not be polled again."""
        state = part_read.read.poll()
        if state is ReadState.ACTIVE:
            return state
        part, peer = part_read.part, part_read.peer
        part_read.read.close()
        peer.num_reads -= 1
        peer.bytes_in_flight -= part.num_bytes
        self._num_reads -= 1
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
