"""The registry of connectors and tiers that ``kv_transfer.connector`` and ``kv_transfer.chain`` may name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.errors import KVTransferError
from kv_transfer.inproc import InProcessFabric, InProcessTransport
from kv_transfer.layout import KVRegion
from kv_transfer.params import PeerIdentity
from kv_transfer.tier.disk.tier import DiskTierOptions, open_disk_storage
from kv_transfer.tier.host.tier import HostTierOptions, open_host_storage
from kv_transfer.tier.options import TierOptions
from kv_transfer.tier.storage import TierStorage
from kv_transfer.transfer_options import TransferOptions
from kv_transfer.transport import Transport

CHAIN: Final = "chain"
"""The connector that asks several sources in order."""


class TransportOpener(Protocol):
    """Makes the transport of one engine."""

    def __call__(
        self, options: TransferOptions, *, identity: PeerIdentity, region: KVRegion, fabric: InProcessFabric | None
    ) -> Transport:
        """Open a transport that peers can reach. The region must stay in place until the transport is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """A connector that moves blocks between engines. Its settings are ``TransferOptions``.

    in_cluster: it also moves blocks between processes, as the workers of a cluster need.
    """

    name: str
    open_transport: TransportOpener
    in_cluster: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier that keeps blocks which the prefix cache evicts.

    name: its name in the chain; ``<name>_bytes`` is one of its options, ``num_<name>_*`` are its counters.
    place: where it keeps blocks, as in "1 GiB of main memory".
    options: the class of its settings, a base class of ``ConnectorOptions``.
    open_storage: called with these options, and ``layout``, ``region`` and ``has_checksums``.
    """

    name: str
    place: str
    options: type[TierOptions]
    open_storage: Callable[..., TierStorage]

    @property
    def size_key(self) -> str:
        """The name of the option that limits its size."""
        return f"{self.name}_bytes"

    def num_bytes(self, options: TierOptions) -> int:
        """How many bytes it may keep."""
        return int(getattr(options, self.size_key))

    def main_memory_bytes(self, options: TierOptions) -> int:
        """How many bytes of each worker's main memory it takes."""
        return self.options.main_memory_bytes(options)

    def check(self, options: TierOptions) -> None:
        """Refuse settings of this tier that contradict each other.

        Raises:
            InvalidOptionError: Names the options and their values.
        """
        self.options.check(options)


def _open_nixl(
    options: TransferOptions,
    *,
    identity: PeerIdentity,
    region: KVRegion,
    fabric: InProcessFabric | None,  # noqa: ARG001
) -> Transport:
    from kv_transfer.nixl.transport import NixlTransport  # imported late: it loads UCX

    return NixlTransport(identity=identity, region=region, is_local=options.transport == "local")


def _open_inproc(
    options: TransferOptions,  # noqa: ARG001
    *,
    identity: PeerIdentity,
    region: KVRegion,
    fabric: InProcessFabric | None,
) -> Transport:
    if fabric is None:
        raise KVTransferError("the connector 'inproc' needs the fabric that joins the engines of this process")
    return InProcessTransport(fabric=fabric, identity=identity, region=region)


PEER_SOURCES: Final = {
    entry.name: entry
    for entry in (
        PeerSource(name="nixl", open_transport=_open_nixl),
        PeerSource(name="inproc", open_transport=_open_inproc, in_cluster=False),
    )
}
"""The connectors that move blocks between engines. The first one is the default."""

TIERS: Final = {
    entry.name: entry
    for entry in (
        Tier(name="host", place="main memory", options=HostTierOptions, open_storage=open_host_storage),
        Tier(name="disk", place="disk space", options=DiskTierOptions, open_storage=open_disk_storage),
    )
}
"""To add a tier: a folder in ``kv_transfer/tier`` with its options and its storage, an entry here, and a base class of
``ConnectorOptions``.
"""

CONNECTORS: Final = (*PEER_SOURCES, CHAIN)
"""What ``connector`` may name."""

CLUSTER_PEER_SOURCES: Final = tuple(name for name, source in PEER_SOURCES.items() if source.in_cluster)
"""The connectors that error messages suggest. The others join engines of one process, and are not configured."""

SOURCES: Final = (*PEER_SOURCES, *TIERS)
"""What ``chain`` may name."""
