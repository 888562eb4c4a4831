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

    source_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_bytes: int


def split_order(order: LoadOrder, *, block_bytes: int, part_bytes: int) -> Iterator[Part]:
    """Cut an order into parts of at most ``part_bytes``, and at least one block each."""
    blocks_per_part = max(1, part_bytes // block_bytes)
    for start in range(0, len(order.block_ids), blocks_per_part):
        block_ids = order.block_ids[start : start + blocks_per_part]
        yield Part(
            source_block_ids=order.source_block_ids[start : start + blocks_per_part],
            block_ids=block_ids,
            num_bytes=len(block_ids) * block_bytes,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Load:
    """A load and its state, owned by the reader. ``reader_id`` names it to the source."""

    order: LoadOrder
    reader_id: str
    started_s: float
    deadline_s: float
    phase: LoadPhase = LoadPhase.MEETING
    handshake: Handshake | None = None
    peer: Peer | None = None
    waiting: deque[Part] = field(default_factory=deque)
    reads: list[tuple[Read, Part]] = field(default_factory=list)
    next_done_s: float = 0.0
    num_dones: int = 0
    is_read: bool = False
    quiet_at_s: float = 0.0
    num_bytes: int = 0
    num_retries: int = 0
    is_cancelled: bool = False
    has_stalled: bool = False
    error: str | None = None

    def ended(self, *, now_s: float) -> LoadEnded:
        """The event that reports this load; without an error all its blocks are good."""
        return LoadEnded(
            request_id=self.order.request_id,
            failed_block_ids=self.order.block_ids if self.error is not None else (),
            num_bytes=self.num_bytes,
            duration_s=now_s - self.started_s,
            error=self.error,
        )
