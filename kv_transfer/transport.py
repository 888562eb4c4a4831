"""The seam below the hand-over protocol: what moves bytes and messages, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from kv_transfer.errors import KVTransferError
from kv_transfer.params import Hello


class TransportError(KVTransferError):
    """The connection to a peer broke; nothing more can be sent to it or read from it before it is met again."""

    def __init__(self, *, peer: str, reason: str) -> None:
        super().__init__(f"connection to {peer} broke: {reason}")
        self.peer = peer
        self.reason = reason


class ReadState(StrEnum):
    """What is known of a read."""

    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


class Read(Protocol):
    """One posted read of some blocks."""

    def poll(self) -> ReadState:
        """The state now. After DONE and FAILED nothing writes the destination any more."""

    def close(self) -> None:
        """Free what the read held. Only after DONE or FAILED: closing an active read would not stop it."""


class Transport(Protocol):
    """Moves blocks and messages between engines.

    All calls come from one thread, the connector's, except ``metadata``. Peers are named by what ``add_peer``
    returned. ``needs_polling`` says whether messages and ends of reads must be asked for; otherwise the transport
    calls ``on_event`` (from any thread) when there is something.
    """

    needs_polling: bool
    on_event: Callable[[], None] | None

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach us, opaque to all but the transport."""

    def add_peer(self, hello: Hello) -> str:
        """Get ready to talk to a peer, and return the name under which its messages arrive.

        Raises:
            TransportError: Its metadata cannot be used.
        """

    def remove_peer(self, peer: str) -> None:
        """Forget a peer and free what was prepared for it. Unknown names are ignored."""

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Begin to copy a peer's blocks into ours, pairwise. May copy before it returns.

        Raises:
            TransportError: Nothing was started.
        """

    def send(self, peer: str, message: bytes) -> None:
        """Send a message; delivery is not confirmed.

        Raises:
            TransportError: The connection is known to be broken.
        """

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """The messages that arrived since the last call, with the names of their senders."""

    def close(self) -> None:
        """Deregister the memory and free everything. Idempotent."""
