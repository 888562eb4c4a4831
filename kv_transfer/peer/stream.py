"""One stream: blocks of a prompt that are read while the peer still computes it, and before a lease confirms them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kv_transfer.connector import LoadOrder, StreamOrder
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.notifications import Announce
from kv_transfer.peer.part_reads import Part, PartRead, ReaderLimits, split_blocks
from kv_transfer.peer.peers import Handshake, Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """The source block that a destination block was read from, and its checksum."""

    source_block_id: int
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """What a load takes over from a stream with the same destination.

    ``unread`` are the parts that the load still needs. ``reads`` are in flight: some read such parts, others are stale.
    """

    unread: tuple[Part, ...]
    reads: tuple[PartRead, ...]
    num_held_blocks: int
    quiet_at_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """A stream and its state, owned by the stream reader.

    ``held`` are the destination blocks that were fully read under ``epoch``, with correct checksums if there are any.
    ``is_stopped``: nothing more is read, but held blocks stay good. ``destinations`` are our blocks by their place in
    the prompt.
    """

    order: StreamOrder
    peer: Peer | None = None
    handshake: Handshake | None = None
    next_subscribe_s: float = 0.0
    epoch: int = 0
    announced: set[int] = field(default_factory=set)
    waiting: deque[Part] = field(default_factory=deque)
    reads: list[tuple[PartRead, int]] = field(default_factory=list)
    held: dict[int, HeldBlock] = field(default_factory=dict)
    num_parts: int = 0
    num_failed_reads: int = 0
    oldest_read_s: float = 0.0
    quiet_at_s: float = 0.0
    is_stopped: bool = False
    destinations: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.destinations = dict(zip(self.order.places, self.order.block_ids, strict=True))

    @property
    def source(self) -> PeerIdentity:
        """The engine that computes the prompt."""
        return self.order.params.source

    def begin_epoch(self, epoch: int) -> None:
        """Begin a new epoch, and forget everything of older ones."""
        self.epoch = epoch
        self.announced.clear()
        self.waiting.clear()
        self.held.clear()

    def enqueue(self, announce: Announce, *, block_bytes: int, limits: ReaderLimits) -> None:
        """Queue the announced blocks that have a destination and were not announced before."""
        places = announce.places
        indices = [
            index for index, place in enumerate(places) if place in self.destinations and place not in self.announced
        ]
        checksums = announce.checksums
        parts = split_blocks(
            [announce.block_ids[index] for index in indices],
            [self.destinations[places[index]] for index in indices],
            [checksums[index] for index in indices] if checksums is not None else None,
            block_bytes=block_bytes,
            limits=limits,
            first_number=self.num_parts,
        )
        self.announced.update(places[index] for index in indices)
        new = tuple(parts)
        self.num_parts += len(new)
        self.waiting.extend(new)

    def hold(self, part: Part, corrupt: list[int]) -> None:
        """Note that a part was read under the current epoch; ``corrupt`` are its damaged blocks."""
        checksums = part.checksums or (None,) * len(part.block_ids)
        for source, block_id, checksum in zip(part.source_block_ids, part.block_ids, checksums, strict=True):
            if block_id not in corrupt:
                self.held[block_id] = HeldBlock(source_block_id=source, checksum=checksum)

    def hand_to(self, order: LoadOrder, *, peer: Peer | None, block_bytes: int, limits: ReaderLimits) -> Takeover:
        """Compare what was read with what the lease covers; ``peer`` is the connection to the load's source, if any.

        An equal epoch guarantees that an announced block was neither freed nor written until the lease was granted. The
        lease's acknowledgement will guarantee the same for the time after that.
        """
        wanted = self._wanted(order)
        is_same = order.params.epoch == self.epoch and order.params.source == self.source
        held = {block_id for block_id, block in self.held.items() if is_same and wanted.get(block_id) == block}
        on_their_way = [
            entry.part
            for entry, epoch in self.reads
            if is_same and epoch == self.epoch and entry.peer is peer and _brings(entry.part, wanted)
        ]
        covered = held.union(*(part.block_ids for part in on_their_way))
        missing = [block_id for block_id in order.block_ids if block_id not in covered]
        checksums = [wanted[block_id].checksum for block_id in missing]
        parts = split_blocks(
            [wanted[block_id].source_block_id for block_id in missing],
            missing,
            [checksum for checksum in checksums if checksum is not None] if order.checksums is not None else None,
            block_bytes=block_bytes,
            limits=limits,
            first_number=self.num_parts,
        )
        return Takeover(
            unread=(*on_their_way, *parts),
            reads=tuple(entry for entry, _ in self.reads),
            num_held_blocks=len(held.intersection(order.block_ids)),
            quiet_at_s=self.quiet_at_s,
        )

    @staticmethod
    def _wanted(order: LoadOrder) -> dict[int, HeldBlock]:
        checksums = order.checksums or (None,) * len(order.block_ids)
        return {
            block_id: HeldBlock(source_block_id=source, checksum=checksum)
            for source, block_id, checksum in zip(order.source_block_ids, order.block_ids, checksums, strict=True)
        }


def _brings(part: Part, wanted: dict[int, HeldBlock]) -> bool:
    """True when a part reads wanted source blocks into the wanted destination blocks."""
    checksums = part.checksums or (None,) * len(part.block_ids)
    return all(
        wanted.get(block_id) == HeldBlock(source_block_id=source, checksum=checksum)
        for source, block_id, checksum in zip(part.source_block_ids, part.block_ids, checksums, strict=True)
    )
