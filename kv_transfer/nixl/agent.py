"""One NIXL agent with the UCX backend, typed; the only file that imports NIXL.

The agent uses NIXL's bindings instead of its Python class. That class sets the delay of UCX's progress thread to 0, so
that the thread of an idle agent takes 40 to 100 % of a core. With a delay the thread sleeps, wakes at once when there
is traffic, and polls as often as the delay says.
"""

from __future__ import annotations

import logging
import logging.config
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NewType

import numpy as np
import numpy.typing as npt


@contextmanager
def _own_logging() -> Iterator[None]:
    """Keep the process's logging unchanged while NIXL is imported: the import reconfigures it, and closes all existing
    handlers. Serve kills a replica with a closed log handler when a new controller asks it where it logs."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda _: None  # type: ignore[assignment]
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raises


with _own_logging():
    from nixl import _bindings as bindings

from kv_transfer.errors import KVTransferError  # noqa: E402
from kv_transfer.layout import MemoryKind  # noqa: E402
from kv_transfer.nixl.ucx_access import local_ucx, network_ucx  # noqa: E402
from kv_transfer.nixl.wakeup_sockets import drop_empty_wakeups  # noqa: E402
from kv_transfer.transport import ReadState  # noqa: E402

if "NIXL_LOG_LEVEL" not in os.environ:
    logging.getLogger("nixl").setLevel(logging.WARNING)

_PROGRESS_DELAY_US = {MemoryKind.DRAM: 100_000, MemoryKind.VRAM: 10_000}
"""Every transport between hosts' memories wakes the thread: reads take no longer with a delay of a second. Polling a
hundred times a second takes 0.3 % of a core (benchmarks/at_rest.py). UCX cannot wait for what a GPU copies."""

NIXL_ERRORS: tuple[type[Exception], ...] = (
    bindings.nixlBackendError,
    bindings.nixlCancelledError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlNotAllowedError,
    bindings.nixlNotFoundError,
    bindings.nixlNotPostedError,
    bindings.nixlNotSupportedError,
    bindings.nixlRemoteDisconnectError,
    bindings.nixlRepostActiveError,
    bindings.nixlUnknownError,
)

Prepared = NewType("Prepared", int)
"""A list of block descriptors that the agent holds ready."""

Transfer = NewType("Transfer", int)
"""A transfer that the agent holds, posted or ended."""

_MEMORY = {MemoryKind.DRAM: bindings.DRAM_SEG, MemoryKind.VRAM: bindings.VRAM_SEG}
_STATES = {bindings.NIXL_SUCCESS: ReadState.DONE, bindings.NIXL_IN_PROG: ReadState.ACTIVE}


class NixlAgent:
    """An agent and the memory it registered. To be called from one thread at a time: it has no locks.

    Methods raise one of ``NIXL_ERRORS`` when NIXL refuses, and when a connection is broken.
    """

    def __init__(self, name: str, *, memory: MemoryKind, is_local: bool = False) -> None:
        """memory: the kind that will be registered. is_local: reach only processes of this user on this machine."""
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = _PROGRESS_DELAY_US[memory]
        self._agent: Any = bindings.nixlAgent(name, config)
        plugins = self._agent.getAvailPlugins()
        if "UCX" not in plugins:
            raise KVTransferError(f"NIXL has no UCX plugin here; it has {', '.join(plugins)}")
        if is_local:
            # UCX makes no connection over shared memory alone if it has to report that a peer died.
            with local_ucx(memory):
                self._agent.createBackend("UCX", {"ucx_error_handling_mode": "none"})
        else:
            with network_ucx(memory):
                self._agent.createBackend("UCX", {})
        drop_empty_wakeups()
        self._registered: list[Any] = []

    def register(self, *, address: int, num_bytes: int, device_index: int, memory: MemoryKind) -> None:
        """Register memory until ``close``: peers may read it, and our reads may write it."""
        descriptors = bindings.nixlRegDList(_MEMORY[memory], [(address, num_bytes, device_index, "")])
        self._agent.registerMem(descriptors, [])
        self._registered.append(descriptors)

    @property
    def metadata(self) -> bytes:
        """The data that a peer needs to reach this agent and its currently registered memory."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_remote(self, metadata: bytes) -> str:
        """Load a peer's metadata; returns the peer's name."""
        name: bytes | str = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove_remote(self, name: str) -> None:
        """Forget a peer and disconnect. This ends no transfer."""
        self._agent.invalidateRemoteMD(name)

    def prepare(
        self,
        name: str | None,
        *,
        address: int,
        block_bytes: int,
        num_blocks: int,
        device_index: int,
        memory: MemoryKind,
    ) -> Prepared:
        """One descriptor per block of a contiguous region, as one strided entry. ``name`` None: our own region."""
        blocks = np.array([[address, block_bytes, device_index, block_bytes, num_blocks]], dtype=np.uint64)
        owner = bindings.NIXL_INIT_AGENT if name is None else name
        return Prepared(int(self._agent.prepXferDlist(owner, _MEMORY[memory], blocks, [])))

    def release_prepared(self, prepared: Prepared) -> None:
        """Free a list of descriptors."""
        self._agent.releasedDlistH(prepared)

    def make_read(
        self,
        *,
        local: Prepared,
        local_indices: npt.NDArray[np.int32],
        remote: Prepared,
        remote_indices: npt.NDArray[np.int32],
    ) -> Transfer:
        """Make a READ of blocks by index. NIXL itself merges adjacent blocks."""
        handle = self._agent.makeXferReq(
            bindings.NIXL_READ, local, local_indices, remote, remote_indices, b"", [], False
        )
        return Transfer(int(handle))

    def post(self, transfer: Transfer) -> ReadState:
        """Start a transfer. On host memory within one host it is over when this returns."""
        return _STATES.get(self._agent.postXferReq(transfer, b""), ReadState.FAILED)

    def state(self, transfer: Transfer) -> ReadState:
        """The state of a posted transfer."""
        return _STATES.get(self._agent.getXferStatus(transfer), ReadState.FAILED)

    def release(self, transfer: Transfer) -> None:
        """Free a transfer. An active transfer goes on writing."""
        self._agent.releaseXferReq(transfer)

    def send(self, name: str, message: bytes) -> None:
        """Send a notification."""
        self._agent.genNotif(name, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """The notifications that arrived, with the names of their senders."""
        arrived: dict[str, list[bytes]] = self._agent.getNotifs({}, [])
        return [(sender, message) for sender, messages in arrived.items() for message in messages]

    def close(self) -> None:
        """Deregister the memory and destroy the agent: transfers that are still active end here."""
        try:
            while self._registered:
                self._agent.deregisterMem(self._registered.pop(), [])
        finally:
            self._agent = None
