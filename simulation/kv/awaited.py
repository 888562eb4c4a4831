"""What a virtual worker waits for at its peers: prompts that are streamed, and leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.connector import StreamOrder
from kv_transfer.params import KVTransferParams


@dataclass(slots=True, kw_only=True)
class Stream:
    """A prompt that is read while its source computes it. ``held``: our blocks, and the source's block of each."""

    order: StreamOrder
    epoch: int = 0
    held: dict[int, int] = field(default_factory=dict)
    reading: dict[int, int] = field(default_factory=dict)
    ends_s: float = 0.0
    num_reads: int = 0


@dataclass(slots=True, kw_only=True)
class Renewals:
    """Leases at peers for which requests here wait, or under which they read."""

    awaited: dict[str, KVTransferParams] = field(default_factory=dict)
    next_s: float = 0.0
