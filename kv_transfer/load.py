"""One load on its way: what was ordered, what is being read, and how far it got."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from kv_transfer.connector import LoadEnded, LoadOrder
from kv_transfer.peers import Handshake, Peer
from kv_transfer.transport import Read


class LoadPhase(Enum):
    """Where a load stands. Only in READING and STOPPING may anything write its destination."""

    MEETING = auto()
    READING = auto()
    CONFIRMING = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a load's blocks, read as one."""

    number: int
    source_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_bytes: int
    checksums: tuple[int, ...] | None = None


def split_order(order: LoadOrder, *, block_bytes: int, part_bytes: int) -> Iterator[Part]:
    """Cut an order into parts of at most ``part_bytes``, and at least one block each."""
    blocks_per_part = max(1, part_bytes // block_bytes)
    for number, start in enumerate(range(0, len(order.block_ids), blocks_per_part)):
        end = start + blocks_per_part
        block_ids = order.block_ids[start:end]
        yield Part(
            number=number,
            source_block_ids=order.source_block_ids[start:end],
            block_ids=block_ids,
            num_bytes=len(block_ids) * block_bytes,
            checksums=order.checksums[start:end] if order.checksums is not None else None,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """A load and its state, owned by the reader. ``reader_id`` names it to the source.

    ``unread`` are the parts, by number, whose bytes are not all here. ``damage`` says why the load may end well for
    some blocks only: parts that stay unread, or ``corrupt_block_ids``. An ``error`` is for all of them.
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
    reads: list[tuple[Read, Part]] = field(default_factory=list)
    next_done_s: float = 0.0
    num_dones: int = 0
    corrupt_block_ids: set[int] = field(default_factory=set)
    damage: str | None = None
    is_salvage: bool = False
    quiet_at_s: float = 0.0
    num_bytes: int = 0
    num_retries: int = 0
    is_cancelled: bool = False
    has_stalled: bool = False
    error: str | None = None

    def ended(self, *, now_s: float) -> LoadEnded:
        """The event that reports this load; without an error or damage all its blocks are good."""
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
        )
