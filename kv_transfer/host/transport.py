"""The way from the host tier into the KV cache, as a transport: reads copy, and messages come back to ourselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.errors import PeerUnreachableError
from kv_transfer.host.arena import HostArena
from kv_transfer.inproc import InProcessRead
from kv_transfer.params import Hello
from kv_transfer.transport import Read, TransportError


class HostTransport:
    """Implements ``Transport``. Its one peer is the tier of the same engine, which answers to the same protocol:

    so what holds for blocks of a peer holds for blocks of the tier (nothing counts before it is confirmed, a copy that
    is late finds its lease gone, faults can be injected), and it is the same code that sees to it.
    """

    needs_polling = False

    def __init__(self, arena: HostArena) -> None:
        self.on_news: Callable[[], None] | None = None
        self._arena = arena
        self._messages: deque[tuple[str, bytes]] = deque()
        self._is_closed = False

    @property
    def metadata(self) -> bytes:
        """Nothing: nobody else can reach the tier."""
        return b""

    def add_peer(self, hello: Hello) -> str:
        """The tier's name."""
        return hello.identity.engine_id

    def remove_peer(self, peer: str) -> None:
        """Nothing was prepared."""

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Copy now, in this thread."""
        self._refuse_closed(peer)
        self._arena.load(source_block_ids, block_ids)
        return InProcessRead()

    def send(self, peer: str, message: bytes) -> None:
        """Put a message into our own mailbox."""
        self._refuse_closed(peer)
        self._messages.append((peer, message))
        if self.on_news is not None:
            self.on_news()

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Empty the mailbox. Answers to what is in it come with the next call."""
        return tuple(self._messages.popleft() for _ in range(len(self._messages)))

    def close(self) -> None:
        """Refuse reads and messages from now on."""
        self._is_closed = True

    def _refuse_closed(self, peer: str) -> None:
        if self._is_closed:
            raise TransportError(peer=peer, reason="this connector is closed")


@dataclass(frozen=True, slots=True)
class HostRendezvous:
    """Implements ``Rendezvous``: the tier introduces itself with its own memory."""

    arena: HostArena

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002  (the Protocol's)
        """The tier's hello.

        Raises:
            PeerUnreachableError: Somebody else is meant.
        """
        if engine_id != hello.identity.engine_id:
            raise PeerUnreachableError(engine_id=engine_id, reason="the host tier knows only itself")
        region = self.arena.region
        return replace(
            hello,
            base_address=region.base_address,
            num_blocks=region.num_blocks,
            memory=region.memory.value,
            device_index=region.device_index,
        )
