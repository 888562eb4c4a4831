"""The settings of connectors: checked when built, never changed."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.errors import InvalidOptionError, UnknownConnectorError
from kv_transfer.registry import CHAIN, CLUSTER_PEER_SOURCES, CONNECTORS, PEER_SOURCES, SOURCES, TIERS, Tier
from kv_transfer.tier.disk.tier import DiskTierOptions
from kv_transfer.tier.host.tier import HostTierOptions
from kv_transfer.transfer_options import TransferOptions


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Which source supplies KV. ``chain`` lists the sources of the connector ``chain``, in the order they are asked."""

    connector: str = next(iter(PEER_SOURCES))
    chain: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions(TransferOptions, DiskTierOptions, HostTierOptions, SourceOptions):
    """All settings of a connector: how blocks move between engines, and the settings of each tier.

    The fields of the last base class come first, in docs/configuration.md too.

    Raises:
        UnknownConnectorError: ``connector`` is not a known connector.
        InvalidOptionError: Options contradict each other, a time is not above 0, or ``faults`` are not allowed.
    """

    def __post_init__(self) -> None:
        """Check all options."""
        if self.connector not in CONNECTORS:
            raise UnknownConnectorError(name=self.connector, known=(*CLUSTER_PEER_SOURCES, CHAIN))
        self.check_transfer()
        if self.connector == CHAIN:
            self._check_chain()
        elif self.chain:
            raise InvalidOptionError(
                f"chain: {list(self.chain)} is given, but connector is {self.connector!r}; set connector: {CHAIN}"
            )
        for tier in TIERS.values():
            self._check_tier(tier)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources that supply KV, in the order in which they are asked."""
        return self.chain or (self.connector,)

    @property
    def peer_source(self) -> str:
        """The source that moves blocks between engines."""
        return next((source for source in self.sources if source in PEER_SOURCES), next(iter(PEER_SOURCES)))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers of the chain, in its order."""
        return tuple(TIERS[source] for source in self.chain if source in TIERS)

    def main_memory_bytes(self) -> int:
        """Bytes of a worker's main memory that all tiers together take."""
        return sum(tier.main_memory_bytes(self) for tier in self.tiers)

    def _check_chain(self) -> None:
        sources = list(self.chain)
        for source in sources:
            if source not in SOURCES:
                known = ", ".join((*CLUSTER_PEER_SOURCES, *TIERS))
                raise InvalidOptionError(f"chain: unknown source {source!r}; known sources: {known}")
        if len(set(sources)) < len(sources):
            raise InvalidOptionError(f"chain: {sources} names a source twice")
        if sum(source in PEER_SOURCES for source in sources) != 1:
            raise InvalidOptionError(
                f"chain: {sources} needs exactly one source that moves blocks between workers: "
                f"{' or '.join(CLUSTER_PEER_SOURCES)}"
            )

    def _check_tier(self, tier: Tier) -> None:
        key, num_bytes, is_used = tier.size_key, tier.num_bytes(self), tier.name in self.chain
        if num_bytes < 0:
            raise InvalidOptionError(f"{key} must be >= 0, got {num_bytes}")
        if num_bytes and not is_used:
            raise InvalidOptionError(
                f"{key} is {num_bytes}, but no {tier.name} tier is used; set connector: {CHAIN}, chain: "
                f"[{tier.name}, {self.peer_source}]"
            )
        if is_used and not num_bytes:
            raise InvalidOptionError(
                f"chain: {list(self.chain)} has a {tier.name} tier, but {key} is 0: set it to the tier's size in bytes"
            )
        tier.check(self)
