"""Hand-over between engines of one process by copying memory: the same protocol without a network."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kv_transfer.errors import KVTransferError, PeerUnreachableError
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.transport import Read, ReadState, TransportError


class InProcessFabric:
    """Joins the engines of one process, and is their rendezvous. All engines must be built with the same fabric."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accept: dict[str, tuple[InProcessTransport, Callable[[Hello], Hello]]] = {}
        self._transports: dict[str, InProcessTransport] = {}

    def attach(self, transport: InProcessTransport) -> None:
        """Let a transport be found by its name."""
        with self._lock:
            self._transports[transport.name] = transport

    def introduce(self, engine_id: str, transport: InProcessTransport, accept: Callable[[Hello], Hello]) -> None:
        """Let peers meet an engine. A new incarnation of an engine replaces the old one."""
        with self._lock:
            self._accept[engine_id] = (transport, accept)

    def detach(self, transport: InProcessTransport) -> None:
        """Forget a transport and the engine it belongs to. Unknown ones are ignored."""
        with self._lock:
            self._transports.pop(transport.name, None)
            for engine_id in [key for key, (owner, _) in self._accept.items() if owner is transport]:
                del self._accept[engine_id]

    def find(self, name: str) -> InProcessTransport:
        """The transport with this name.

        Raises:
            TransportError: It was closed, or never existed.
        """
        with self._lock:
            transport = self._transports.get(name)
        if transport is None:
            raise TransportError(peer=name, reason="it was closed")
        return transport

    def meet(self, engine_id: str, hello: Hello, *, timeout_s: float) -> Hello:  # noqa: ARG002
        """Carry a hello to an engine of this process; the engine itself keeps to its handshake timeout.

        Raises:
            PeerUnreachableError: There is no such engine.
            HandshakeRefusedError: The engine refused us.
        """
        with self._lock:
            entry = self._accept.get(engine_id)
        if entry is None:
            raise PeerUnreachableError(engine_id=engine_id, reason="no such engine in this process")
        return entry[1](hello)


@dataclass(frozen=True, slots=True)
class InProcessRead:
    """A copy that had already ended when ``start_read`` returned."""

    def poll(self) -> ReadState:
        """Done."""
        return ReadState.DONE

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Source:
    base_address: int
    block_bytes: int


class InProcessTransport:
    """Implements ``Transport`` by memory copies and by deques. Only the connector's thread calls it."""

    needs_polling = False

    def __init__(self, *, fabric: InProcessFabric, identity: PeerIdentity, region: KVRegion) -> None:
        if region.memory is not MemoryKind.DRAM:
            raise KVTransferError(f"the in-process connector copies DRAM only, the KV cache lies in {region.memory}")
        self.name = f"{identity.engine_id}/{identity.incarnation}"
        self.on_event: Callable[[], None] | None = None
        self._fabric = fabric
        self._region = region
        self._messages: deque[tuple[str, bytes]] = deque()
        self._memory_lock = threading.Lock()
        self._is_closed = False
        self._sources: dict[str, _Source] = {}
        fabric.attach(self)

    @property
    def metadata(self) -> bytes:
        """Our name."""
        return self.name.encode()

    def add_peer(self, hello: Hello) -> str:
        """Remember where a peer's region lies."""
        name = hello.agent_metadata.decode()
        self._sources[name] = _Source(hello.base_address, hello.block_bytes)
        return name

    def remove_peer(self, peer: str) -> None:
        """Forget a peer."""
        self._sources.pop(peer, None)

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Copy now, in this thread."""
        source = self._sources.get(peer)
        if source is None:
            raise TransportError(peer=peer, reason="it was never met")
        num_bytes = source.block_bytes
        with self._fabric.find(peer).open_memory():
            for source_block_id, block_id in zip(source_block_ids, block_ids, strict=True):
                ctypes.memmove(
                    self._region.block_address(block_id), source.base_address + source_block_id * num_bytes, num_bytes
                )
        return InProcessRead()

    def send(self, peer: str, message: bytes) -> None:
        """Put a message into a peer's mailbox."""
        self._fabric.find(peer).deliver(self.name, message)

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Empty our mailbox."""
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def deliver(self, sender: str, message: bytes) -> None:
        """Take a message from a peer's thread."""
        self._messages.append((sender, message))
        if self.on_event is not None:
            self.on_event()

    @contextlib.contextmanager
    def open_memory(self) -> Iterator[None]:
        """Keep our region readable while this context is entered: ``close`` waits for it.

        Raises:
            TransportError: This transport is closed.
        """
        with self._memory_lock:
            if self._is_closed:
                raise TransportError(peer=self.name, reason="it was closed")
            yield

    def close(self) -> None:
        """Leave the fabric as soon as no peer copies from our memory."""
        self._fabric.detach(self)
        with self._memory_lock:
            self._is_closed = True
