"""The interface below the hand-over protocol: it moves bytes and messages, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from kv_transfer.errors import KVTransferError
from kv_transfer.params import Hello


class TransportError(KVTransferError):
    """The connection to a peer broke. Nothing can be sent to the peer or read from it before a new handshake."""

    def __init__(self, *, peer: str, reason: str) -> None:
        super().__init__(f"connection to {peer} broke: {reason}")
        self.peer = peer
        self.reason = reason


class ReadState(StrEnum):
    """The state of a read."""

    ACTIVE = "active"
    DONE = "done"
    FAILED = "failed"


class Read(Protocol):
    """A read of some blocks that was posted."""

    def poll(self) -> ReadState:
        """The state now. After DONE and FAILED nothing writes the destination any more."""

    def close(self) -> None:
        """Free what the read held. Only after DONE or FAILED: closing an active read would not stop it."""


class Transport(Protocol):
    """Moves blocks and messages between engines.

    All calls come from the connector's thread, except ``metadata``. The name of a peer is the one that ``add_peer``
    returned. With ``needs_polling`` the caller must poll for messages and ends of reads; otherwise the transport calls
    ``on_event``, from any thread, when there are any.
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
