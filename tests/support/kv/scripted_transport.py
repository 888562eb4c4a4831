"""A transport whose reads end, and whose messages arrive, when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_transfer.params import Hello
from kv_transfer.peer.notifications import Notification, decode_notification
from kv_transfer.transport import ReadState, TransportError


class ScriptedRead:
    """A read in the state that the test set last."""

    def __init__(self, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self.source_block_ids = tuple(source_block_ids)
        self.block_ids = tuple(block_ids)
        self.state = ReadState.ACTIVE
        self.is_closed = False

    def poll(self) -> ReadState:
        """The state."""
        return self.state

    def close(self) -> None:
        """Note that it is closed; an active read must not be closed."""
        assert self.state is not ReadState.ACTIVE
        self.is_closed = True


class ScriptedTransport:
    """Implements ``Transport``. ``broken`` peers can neither be read from nor be sent messages."""

    needs_polling = False

    def __init__(self) -> None:
        self.on_event: Callable[[], None] | None = None
        self.metadata = b"scripted"
        self.peers: list[str] = []
        self.broken: set[str] = set()
        self.reads: list[ScriptedRead] = []
        self.sent: list[tuple[str, Notification]] = []
        self.arrived: list[tuple[str, bytes]] = []
        self.is_closed = False

    def add_peer(self, hello: Hello) -> str:
        """Take any peer."""
        name = f"{hello.identity.engine_id}/{hello.identity.incarnation}"
        self.peers.append(name)
        return name

    def remove_peer(self, peer: str) -> None:
        """Forget a peer."""
        self.peers.remove(peer)

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> ScriptedRead:
        """A read that stays active until the test changes its state."""
        if peer in self.broken:
            raise TransportError(peer=peer, reason="broken")
        self.reads.append(ScriptedRead(source_block_ids, block_ids))
        return self.reads[-1]

    def send(self, peer: str, message: bytes) -> None:
        """Keep a message."""
        if peer in self.broken:
            raise TransportError(peer=peer, reason="broken")
        self.sent.append((peer, decode_notification(message)))

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """The messages that the test let arrive."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        """Note that it is closed."""
        self.is_closed = True
