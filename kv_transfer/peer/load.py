"""One load in progress: its order, its reads, and its state."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.peer.part_reads import Part, PartRead, PartReads
from kv_transfer.peer.peers import Handshake, Peer


class LoadPhase(Enum):
    """The phase of a load. Only in READING and STOPPING, or by reads taken over, may its destination be written."""

    MEETING = auto()
    READING = auto()
    CONFIRMING = auto()
    STOPPING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """A load and its state, owned by the reader. ``reader_id`` names it to the source.

    ``unread`` are the parts, by number, that have not fully arrived. A read of any other part is *stale*: a stream
    began it, and its data is not wanted but may still arrive. ``damage`` says why only some blocks may be good: parts
    stayed unread, or blocks are in ``corrupt_block_ids``. An ``error`` makes all blocks invalid. ``verifying`` are
    parts that have arrived and are being compared with their checksums. ``is_confirmed``: the source has acknowledged
    "done". ``num_streamed_blocks`` blocks had arrived before the load was ordered.
    """

    order: LoadOrder
    reader_id: str
    started_s: float
    deadline_s: float
    unread: dict[int, Part]
    phase: LoadPhase = LoadPhase.MEETING
    handshake: Handshake | None = None
    peer: Peer | None = None
    waiting: deque[Part] = field(default_factory=deque)
    reads: list[PartRead] = field(default_factory=list)
    next_done_s: float = 0.0
    num_dones: int = 0
    corrupt_block_ids: set[int] = field(default_factory=set)
    damage: str | None = None
    verifying: list[Future[list[int]]] = field(default_factory=list)
    is_confirmed: bool = False
    is_salvage: bool = False
    quiet_at_s: float = 0.0
    num_bytes: int = 0
    num_streamed_blocks: int = 0
    num_retries: int = 0
    is_cancelled: bool = False
    has_stalled: bool = False
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """True while the load still needs something from its peer."""
        return self.phase is not LoadPhase.STOPPING and not self.is_confirmed

    @property
    def source_id(self) -> str:
        """The engine that it is read from."""
        return self.order.params.source.engine_id

    @property
    def awaits_source(self) -> bool:
        """True while the load waits for data or a message from its source, or is about to ask again.

        It waits for nothing during the first handshake, which uses another channel and has its own timeout.
        """
        if self.phase is LoadPhase.MEETING and not self.num_retries:
            return False
        return not (self.is_confirmed or (self.phase is LoadPhase.STOPPING and self.reads))

    def misfit(self, *, num_source_blocks: int, num_blocks: int) -> str | None:
        """Why the block ids do not fit a source and a region with this many blocks; None when they fit."""
        if not all(0 <= block_id < num_source_blocks for block_id in self.order.source_block_ids):
            return f"a source block is not among the {num_source_blocks} blocks of the peer"
        if not all(0 <= block_id < num_blocks for block_id in self.order.block_ids):
            return f"a destination block is not among our {num_blocks} blocks"
        return None

    def begin_anew(self) -> None:
        """Forget the broken connection, but keep what was read."""
        self.num_retries += 1
        self.error = None
        self.peer = None
        self.num_dones = 0
        self.next_done_s = 0.0

    def verify(self, part: Part, reads: PartReads) -> None:
        """Begin to compare a part that arrived with the checksums that the source sent with the lease."""
        self.verifying.append(reads.begin_verifying(part))
        self.collect_verified(reads)

    def collect_verified(self, reads: PartReads) -> bool:
        """Collect the results of finished comparisons; True when none is left."""
        for verified in [verified for verified in self.verifying if verified.done()]:
            self.verifying.remove(verified)
            corrupt = reads.end_verifying(verified)
            if corrupt:
                self.corrupt_block_ids.update(corrupt)
                self.damage = "the checksums of some blocks are wrong"
        return not self.verifying

    def has_stale_reads(self) -> bool:
        """True while a stale read may still overwrite wanted data."""
        return any(entry.part.number not in self.unread for entry in self.reads)

    def parts_to_post(self) -> list[Part]:
        """The unread parts for which no read is in flight."""
        under_way = {entry.part.number for entry in self.reads}
        return [part for part in self.unread.values() if part.number not in under_way]

    def ended(self, *, now_s: float) -> LoadEnded:
        """The event that reports this load's end. Without an error or damage all its blocks are good."""
        failed_block_ids: tuple[int, ...] = ()
        if self.error is not None:
            failed_block_ids = self.order.block_ids
        elif self.damage is not None:
            failed = self.corrupt_block_ids.union(*(part.block_ids for part in self.unread.values()))
            failed_block_ids = tuple(block_id for block_id in self.order.block_ids if block_id in failed)
        return LoadEnded(
            request_id=self.order.request_id,
            failed_block_ids=failed_block_ids,
            num_bytes=self.num_bytes,
            duration_s=now_s - self.started_s,
            error=self.error or self.damage,
            is_cancelled=self.is_cancelled,
        )
