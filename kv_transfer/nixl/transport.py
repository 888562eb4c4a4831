"""Moves blocks and messages with NIXL over UCX: host or GPU memory, within a host or between hosts.

One descriptor per block is prepared once for our region, and once for each peer's region. A read then names blocks by
index. (Merging adjacent blocks into new descriptors for each read was measured to be no faster: NIXL merges them
itself.) Only the connector's thread calls the agent, so no locks are needed; UCX makes progress in a thread of the
agent. NIXL's listening thread is off, since peers meet by ``Hello``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVRegion, MemoryKind
from kv_transfer.nixl.agent import NIXL_ERRORS, NixlAgent, Prepared, Transfer
from kv_transfer.nixl.ucx_access import describe_local_ucx, shared_memory_lack, ucx_environment
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.transport import Read, ReadState, TransportError

logger = logging.getLogger(f"baton.{__name__}")


class NixlRead:
    """Implements ``Read``."""

    __slots__ = ("_agent", "_open_reads", "_state", "_transfer")

    def __init__(self, *, agent: NixlAgent, transfer: Transfer, state: ReadState, open_reads: set[NixlRead]) -> None:
        self._agent = agent
        self._transfer = transfer
        self._state = state
        self._open_reads = open_reads
        open_reads.add(self)

    def poll(self) -> ReadState:
        """The state now; a broken connection is FAILED."""
        if self._state is ReadState.ACTIVE:
            try:
                self._state = self._agent.state(self._transfer)
            except NIXL_ERRORS as error:
                logger.info("read failed: %r", error)
                self._state = ReadState.FAILED
        return self._state

    def close(self) -> None:
        """Free the transfer."""
        if self not in self._open_reads:
            return
        self._open_reads.remove(self)
        if self._state is ReadState.ACTIVE:
            self._state = ReadState.FAILED
        try:
            self._agent.release(self._transfer)
        except NIXL_ERRORS as error:
            logger.info("transfer not released: %r", error)


class NixlTransport:
    """Implements ``Transport``. With ``is_local`` it reaches processes of this user on this machine, and no others.

    Raises:
        KVTransferError: The UCX plugin is missing, or the region cannot be registered.
    """

    needs_polling = True

    def __init__(self, *, identity: PeerIdentity, region: KVRegion, is_local: bool = False) -> None:
        self.on_event: Callable[[], None] | None = None
        self._region = region
        self._is_local = is_local
        self._thread_in_device: int | None = None
        self._enter_device()
        if lack := shared_memory_lack() if is_local else "":
            logger.warning("other workers cannot connect to this one: %s", lack)
        name = f"{identity.engine_id}/{identity.incarnation}"
        agent = NixlAgent(name, memory=region.memory, is_local=is_local)
        try:
            agent.register(
                address=region.base_address,
                num_bytes=region.total_bytes,
                device_index=region.device_index,
                memory=region.memory,
            )
            self._local = agent.prepare(
                None,
                address=region.base_address,
                block_bytes=region.block_bytes,
                num_blocks=region.num_blocks,
                device_index=region.device_index,
                memory=region.memory,
            )
        except NIXL_ERRORS as error:
            raise KVTransferError(f"NIXL cannot register the KV region {region}: {error!r}") from error
        self._agent: NixlAgent | None = agent
        self._remote: dict[str, Prepared] = {}
        self._reads: set[NixlRead] = set()
        self._has_receive_failed = False
        self._metadata = agent.metadata
        logger.info(
            "NIXL agent ready: name=%s backend=UCX %s memory=%s region_bytes=%d",
            name,
            describe_local_ucx(region.memory) if is_local else ucx_environment(),
            region.memory.value,
            region.total_bytes,
        )

    @property
    def metadata(self) -> bytes:
        """NIXL's description of this agent, its addresses and its registered memory."""
        return self._metadata

    def add_peer(self, hello: Hello) -> str:
        """Load a peer's metadata and prepare its blocks.

        Raises:
            TransportError: NIXL cannot use its metadata, or this transport is closed.
        """
        engine_id = hello.identity.engine_id
        agent = self._open_agent(engine_id)
        try:
            name = agent.add_remote(hello.agent_metadata)
            self._remote[name] = agent.prepare(
                name,
                address=hello.base_address,
                block_bytes=hello.block_bytes,
                num_blocks=hello.num_blocks,
                device_index=hello.device_index,
                memory=MemoryKind(hello.memory),
            )
        except NIXL_ERRORS as error:
            raise TransportError(
                peer=engine_id,
                reason=f"its NIXL metadata cannot be used ({error!r}): either {self._why_unreachable()} (/status says "
                "what the peer uses), or their NIXL versions differ",
            ) from error
        return name

    def _why_unreachable(self) -> str:
        if self._is_local:
            if lack := shared_memory_lack():
                return lack
            return (
                "it is on another machine, in another container or another user's, or uses the network, and "
                "kv_transfer.transport is 'local' here"
            )
        return f"UCX reaches no network device of the peer from here, where it uses {ucx_environment()}"

    def remove_peer(self, peer: str) -> None:
        """Release what was prepared for a peer and disconnect."""
        remote = self._remote.pop(peer, None)
        if remote is None or self._agent is None:
            return
        try:
            self._agent.release_prepared(remote)
            self._agent.remove_remote(peer)
        except NIXL_ERRORS as error:
            logger.info("peer not removed cleanly: peer=%s error=%r", peer, error)

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Post a READ. On host memory within one host NIXL copies before it returns."""
        agent = self._open_agent(peer)
        remote = self._remote.get(peer)
        if remote is None:
            raise TransportError(peer=peer, reason="it was never met")
        try:
            transfer = agent.make_read(
                local=self._local,
                local_indices=np.asarray(block_ids, dtype=np.int32),
                remote=remote,
                remote_indices=np.asarray(source_block_ids, dtype=np.int32),
            )
        except NIXL_ERRORS as error:
            raise TransportError(peer=peer, reason=repr(error)) from error
        try:
            state = agent.post(transfer)
        except NIXL_ERRORS as error:
            logger.info("read not posted: peer=%s error=%r", peer, error)
            state = ReadState.FAILED
        return NixlRead(agent=agent, transfer=transfer, state=state, open_reads=self._reads)

    def send(self, peer: str, message: bytes) -> None:
        """Send a NIXL notification."""
        agent = self._open_agent(peer)
        try:
            agent.send(peer, message)
        except NIXL_ERRORS as error:
            raise TransportError(peer=peer, reason=repr(error)) from error

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """The NIXL notifications that arrived. An error, such as a broken connection to one peer, is only logged."""
        if self._agent is None:
            return ()
        self._enter_device()
        try:
            return self._agent.receive()
        except NIXL_ERRORS as error:
            if not self._has_receive_failed:
                self._has_receive_failed = True
                logger.warning("notifications not received (logged once): %r", error)
            return ()

    def close(self) -> None:
        """Deregister the region and destroy the agent, which ends active reads."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for read in tuple(self._reads):
            read.close()
        try:
            for peer, remote in self._remote.items():
                agent.release_prepared(remote)
                agent.remove_remote(peer)
            agent.release_prepared(self._local)
            agent.close()
        except NIXL_ERRORS as error:
            logger.info("NIXL agent not closed cleanly: %r", error)
        self._remote.clear()

    def _enter_device(self) -> None:
        """Give the calling thread a CUDA context: UCX uses it to copy from and to a GPU, and fails without one.

        The connector's thread calls ``receive`` before anything else.
        """
        thread = threading.get_ident()
        if self._region.memory is MemoryKind.VRAM and self._thread_in_device != thread:
            from kv_transfer.memory.device_memory import enter_device  # imported late: it loads torch

            enter_device(self._region.device_index)
            self._thread_in_device = thread

    def _open_agent(self, peer: str) -> NixlAgent:
        if self._agent is None:
            raise TransportError(peer=peer, reason="this connector is closed")
        return self._agent
