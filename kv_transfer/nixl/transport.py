"""Moves blocks and messages with NIXL over UCX: host or GPU memory, within a host or between hosts.

One descriptor a block is prepared once for our region and once for each peer's, as one strided entry; a read then
names blocks by index, and NIXL merges neighbours. Only the connector's thread calls an agent, so it needs no locks of
its own; UCX makes progress in a thread of the agent. The listening thread of NIXL is off: peers meet by ``Hello``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import numpy as np

from kv_transfer.errors import KVTransferError
from kv_transfer.layout import KVRegion
from kv_transfer.nixl.binding import NIXL_ERRORS, nixl_agent, nixl_agent_config, nixl_xfer_handle
from kv_transfer.params import Hello, PeerIdentity
from kv_transfer.transport import Read, ReadState, TransportError

logger = logging.getLogger(f"baton.{__name__}")

_LOCAL = "NIXL_INIT_AGENT"
_STATES = {"DONE": ReadState.DONE, "PROC": ReadState.ACTIVE, "ERR": ReadState.FAILED}


class NixlRead:
    """Implements ``Read`` over a transfer handle."""

    __slots__ = ("_agent", "_handle", "_open_reads", "_state")

    def __init__(
        self, *, agent: nixl_agent, handle: nixl_xfer_handle, state: ReadState, open_reads: set[NixlRead]
    ) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self._open_reads = open_reads
        open_reads.add(self)

    def poll(self) -> ReadState:
        """The state now; a broken connection is FAILED."""
        if self._state is ReadState.ACTIVE:
            try:
                self._state = _STATES[self._agent.check_xfer_state(self._handle)]
            except NIXL_ERRORS as error:
                logger.info("read failed: %r", error)
                self._state = ReadState.FAILED
        return self._state

    def close(self) -> None:
        """Free the handle."""
        if self in self._open_reads:
            self._open_reads.discard(self)
            try:
                self._handle.release()
            except NIXL_ERRORS as error:
                logger.info("transfer handle not released: %r", error)
            self._agent = self._handle = None
            self._state = ReadState.FAILED if self._state is ReadState.ACTIVE else self._state


class NixlTransport:
    """Implements ``Transport``.

    Raises:
        KVTransferError: The UCX plugin is missing, or the region cannot be registered.
    """

    needs_polling = True

    def __init__(self, *, identity: PeerIdentity, region: KVRegion) -> None:
        self.on_news: Callable[[], None] | None = None
        self._agent: nixl_agent | None = None
        name = f"{identity.engine_id}/{identity.incarnation}"
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        if "UCX" not in agent.backends:
            raise KVTransferError(f"NIXL has no UCX plugin here; it has {', '.join(agent.get_plugin_list())}")
        self._registration = agent.get_reg_descs(
            [(region.base_address, region.total_bytes, region.device_index, "")], region.memory.value
        )
        if self._registration is None:
            raise KVTransferError(f"NIXL accepts no descriptor of the KV region {region}")
        try:
            agent.register_memory(self._registration)
        except NIXL_ERRORS as error:
            raise KVTransferError(f"NIXL cannot register the KV region {region}: {error!r}") from error
        self._agent = agent
        self._local = agent.prep_xfer_dlist(
            _LOCAL,
            _one_descriptor_a_block(region.base_address, region.block_bytes, region.num_blocks, region.device_index),
            region.memory.value,
        )
        self._remote: dict[str, object] = {}
        self._reads: set[NixlRead] = set()
        self._metadata: bytes = agent.get_agent_metadata()
        logger.info(
            "NIXL agent ready: name=%s backend=UCX UCX_TLS=%s memory=%s region_bytes=%d",
            name,
            os.environ.get("UCX_TLS", "(UCX chooses)"),
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
            loaded = agent.add_remote_agent(hello.agent_metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            self._remote[name] = agent.prep_xfer_dlist(
                name,
                _one_descriptor_a_block(hello.base_address, hello.block_bytes, hello.num_blocks, hello.device_index),
                hello.memory,
            )
        except NIXL_ERRORS as error:
            raise TransportError(peer=engine_id, reason=f"its NIXL metadata cannot be used: {error!r}") from error
        return name

    def remove_peer(self, peer: str) -> None:
        """Release what was prepared for a peer and disconnect."""
        remote = self._remote.pop(peer, None)
        if remote is None or self._agent is None:
            return
        try:
            self._agent.release_dlist_handle(remote)
            self._agent.remove_remote_agent(peer)
        except NIXL_ERRORS as error:
            logger.info("peer not removed cleanly: peer=%s error=%r", peer, error)

    def start_read(self, peer: str, source_block_ids: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Post a READ. On host memory within one host NIXL copies before it returns."""
        agent = self._open_agent(peer)
        remote = self._remote.get(peer)
        if remote is None:
            raise TransportError(peer=peer, reason="it was never met")
        try:
            handle = agent.make_prepped_xfer(
                "READ",
                self._local,
                np.asarray(block_ids, dtype=np.int32),
                remote,
                np.asarray(source_block_ids, dtype=np.int32),
            )
            state = _STATES[agent.transfer(handle)]
        except NIXL_ERRORS as error:
            raise TransportError(peer=peer, reason=repr(error)) from error
        return NixlRead(agent=agent, handle=handle, state=state, open_reads=self._reads)

    def send(self, peer: str, message: bytes) -> None:
        """Send a NIXL notification."""
        agent = self._open_agent(peer)
        try:
            agent.send_notif(peer, message)
        except NIXL_ERRORS as error:
            raise TransportError(peer=peer, reason=repr(error)) from error

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """The NIXL notifications that arrived."""
        if self._agent is None:
            return ()
        arrived = self._agent.get_new_notifs()
        return [(sender, message) for sender, messages in arrived.items() for message in messages] if arrived else ()

    def close(self) -> None:
        """Deregister the region and destroy the agent, which is what ends reads that are still active."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for read in tuple(self._reads):
            read.close()
        try:
            for peer, remote in self._remote.items():
                agent.release_dlist_handle(remote)
                agent.remove_remote_agent(peer)
            agent.release_dlist_handle(self._local)
            agent.deregister_memory(self._registration)
        except NIXL_ERRORS as error:
            logger.info("NIXL agent not closed cleanly: %r", error)
        self._remote.clear()
        self._local = self._registration = None

    def _open_agent(self, peer: str) -> nixl_agent:
        if self._agent is None:
            raise TransportError(peer=peer, reason="this connector is closed")
        return self._agent


def _one_descriptor_a_block(base_address: int, block_bytes: int, num_blocks: int, device_index: int) -> object:
    """[1, 5] address, length, device, stride and count: NIXL's compressed form of ``num_blocks`` descriptors."""
    return np.array([[base_address, block_bytes, device_index, block_bytes, num_blocks]], dtype=np.uint64)
