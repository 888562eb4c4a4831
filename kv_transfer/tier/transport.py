"""Loads from a tier into the KV cache, as a transport: reads copy slots, and messages are sent to ourselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.errors import PeerUnreachableError
from kv_transfer.params import Hello
from kv_transfer.tier.storage import TierStorage
from kv_transfer.transport import Read, TransportError


class TierTransport:
    """Implements ``Transport``. Its only peer is the tier of the same engine, which uses the hand-over protocol.

    So the same code gives blocks of a tier the same guarantees as blocks of a peer: nothing counts before it is
    confirmed, a late copy finds its lease gone, and faults can be injected.
    """

    needs_polling = False

    def __init__(self, storage: TierStorage) -> None:
        self._storage = storage
        self._messages: deque[tuple[str, bytes]] = deque()
        self._is_closed = False

    @property
    def on_event(self) -> Callable[[], None] | None:
        """Callback for when a message arrived or a read ended."""
        return self._storage.on_event

    @on_event.setter
    def on_event(self, callback: Callable[[], None] | None) -> None:
        self._storage.on_event = callback

    @property
    def metadata(self) -> bytes:
        """Empty: no other engine can reach the tier."""
        return b""

    def add_peer(self, hello: Hello) -> str:
        """The tier's name."""
        return hello.identity.engine_id

    def remove_peer(self, peer: str) -> None:
        """Nothing was prepared."""

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Let the storage copy slots into blocks."""
        self._refuse_closed(peer)
        return self._storage.start_read(source_block_ids, block_ids)

    def send(self, peer: str, message: bytes) -> None:
        """Put a message into our own mailbox."""
        self._refuse_closed(peer)
        self._messages.append((peer, message))
        if self.on_event is not None:
            self.on_event()

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Empty the mailbox. Answers to these messages come with the next call."""
        return tuple(self._messages.popleft() for _ in range(len(self._messages)))

    def close(self) -> None:
        """Refuse reads and messages from now on."""
        self._is_closed = True
        self._storage.close()

    def _refuse_closed(self, peer: str) -> None:
        if self._is_closed:
            raise TransportError(peer=peer, reason="this connector is closed")


@dataclass(frozen=True, slots=True)
class TierRendezvous:
    """Implements ``Rendezvous``: the tier introduces itself with its own slots, ``num_slots`` of them."""

    num_slots: int

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        """The tier's hello: blocks of our layout, without an address that could be read.

        Raises:
            PeerUnreachableError: ``engine_id`` is not the tier's engine.
        """
        if engine_id != hello.identity.engine_id:
            raise PeerUnreachableError(engine_id=engine_id, reason="a tier knows only itself")
        return replace(hello, base_address=0, num_blocks=self.num_slots)
