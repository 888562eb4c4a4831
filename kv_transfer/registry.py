"""What ``kv_transfer.connector`` and ``kv_transfer.chain`` may name: one entry each, from which all else derives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kv_transfer.disk.tier import DiskTierOptions, open_disk_storage
from kv_transfer.errors import KVTransferError
from kv_transfer.host.tier import HostTierOptions, open_host_storage
from kv_transfer.inproc import InProcessFabric, InProcessTransport
from kv_transfer.layout import KVRegion
from kv_transfer.params import PeerIdentity
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
        """Get ready to be met; the region stays where it is until the transport is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """What moves blocks between engines. Its settings are ``TransferOptions``.

    in_cluster: it moves them between processes, too, as the workers of a cluster need it.
    """

    name: str
    open_transport: TransportOpener
    in_cluster: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What keeps blocks that the prefix cache evicts.

    name: as the chain names it; ``<name>_bytes`` is among its options, ``num_<name>_*`` are its counters.
    place: where it keeps them, as in "1 GiB of main memory".
    options: its settings, which are a base of ``ConnectorOptions``.
    open_storage: called with these options, and ``layout``, ``region`` and ``has_checksums``.
    """

    name: str
    place: str
    options: type[TierOptions]
    open_storage: Callable[..., TierStorage]

    @property
    def size_key(self) -> str:
        """The option that says how much it may keep."""
        return f"{self.name}_bytes"

    def num_bytes(self, options: TierOptions) -> int:
        """How much it may keep."""
        return int(getattr(options, self.size_key))

    def main_memory_bytes(self, options: TierOptions) -> int:
        """What it takes of the main memory of each worker."""
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
"""The first one is meant where none is named."""

TIERS: Final = {
    entry.name: entry
    for entry in (
        Tier(name="host", place="main memory", options=HostTierOptions, open_storage=open_host_storage),
        Tier(name="disk", place="disk space", options=DiskTierOptions, open_storage=open_disk_storage),
    )
}
"""A new tier is a folder with its options and its storage, an entry here, and a base of ``ConnectorOptions``."""

CONNECTORS: Final = (*PEER_SOURCES, CHAIN)
"""What ``connector`` may name."""

CLUSTER_PEER_SOURCES: Final = tuple(name for name, source in PEER_SOURCES.items() if source.in_cluster)
"""Those that messages offer: others are for engines of one process, which nobody configures."""

SOURCES: Final = (*PEER_SOURCES, *TIERS)
"""What ``chain`` may name."""
