"""The settings of connectors: checked when built, never changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from kv_transfer.errors import InvalidOptionError, UnknownConnectorError
from kv_transfer.fault_options import FaultOptions

KNOWN_CONNECTORS = ("nixl", "inproc", "chain")
LENDERS = ("nixl", "inproc")
HOST = "host"

TransportChoice = Literal["auto", "local", "network"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Settings that every connector understands.

    ``chain`` names the sources that the connector ``chain`` asks, in order: one that lends to peers, and ``host``,
    which keeps evicted blocks in ``host_bytes`` of main memory. ``checksums`` None means: where the KV cache lies in
    host memory. ``streamed``: hand prompts over while they are computed; ``auto`` tells readers of what lies in host
    memory so seldom that it takes next to nothing from a prefill on the same cores. ``transport`` is what ``nixl``
    moves blocks over: ``local`` between processes of one user on one machine, which listen on nothing; ``network``
    between machines; ``auto`` is for whoever knows the cluster to decide, and means ``network`` where nobody did. A
    read that goes on for ``hung_read_timeout_s`` after its load ran out of time counts as hanging for good.

    Raises:
        UnknownConnectorError: ``connector`` is not one of them.
        InvalidOptionError: Options contradict each other, a time is none, or ``faults`` are configured and not allowed.
    """

    connector: str = "nixl"
    chain: tuple[str, ...] = ()
    host_bytes: int = 0
    lease_ttl_s: float = 30.0
    handshake_timeout_s: float = 10.0
    load_timeout_s: float = 30.0
    answer_timeout_s: float = 5.0
    hung_read_timeout_s: float = 30.0
    transport: TransportChoice = "auto"
    streamed: bool | Literal["auto"] = "auto"
    checksums: bool | None = None
    faults: FaultOptions | None = None
    allow_faults: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be, and faults that nobody allowed."""
        if self.transport not in get_args(TransportChoice):
            raise InvalidOptionError(
                f"transport must be one of {', '.join(get_args(TransportChoice))}, got {self.transport!r}"
            )
        if self.connector not in KNOWN_CONNECTORS:
            raise UnknownConnectorError(name=self.connector, known=KNOWN_CONNECTORS)
        self._check_times()
        if self.connector == "chain":
            self._check_chain()
        elif self.chain:
            raise InvalidOptionError(
                f"chain {list(self.chain)} is given, but connector is {self.connector!r}; say connector: chain"
            )
        if self.host_bytes < 0:
            raise InvalidOptionError(f"host_bytes must be >= 0, got {self.host_bytes}")
        if self.host_bytes and HOST not in self.chain:
            raise InvalidOptionError(
                f"host_bytes is {self.host_bytes}, but no host tier is used; say connector: chain, chain: "
                f"[host, {self.peer_source}]"
            )
        if HOST in self.chain and not self.host_bytes:
            raise InvalidOptionError(
                f"chain {list(self.chain)} has a host tier, but host_bytes is 0; say how large it is"
            )
        if self.faults is not None and not self.allow_faults:
            raise InvalidOptionError("faults are configured, but allow_faults is not true")

    @property
    def sources(self) -> tuple[str, ...]:
        """What supplies KV, in the order in which it is asked."""
        return self.chain or (self.connector,)

    @property
    def peer_source(self) -> str:
        """The source that moves blocks between engines."""
        return next((source for source in self.sources if source in LENDERS), LENDERS[0])

    def _check_times(self) -> None:
        times = ("lease_ttl_s", "handshake_timeout_s", "load_timeout_s", "answer_timeout_s", "hung_read_timeout_s")
        for name in times:
            seconds: float = getattr(self, name)
            if not 0.0 < seconds < math.inf:
                raise InvalidOptionError(f"{name} must be a number of seconds above 0, got {seconds:g}")

    def _check_chain(self) -> None:
        sources = list(self.chain)
        known = (*LENDERS, HOST)
        for source in sources:
            if source not in known:
                raise InvalidOptionError(f"chain: unknown source {source!r}; known sources: {', '.join(known)}")
        if len(set(sources)) < len(sources):
            raise InvalidOptionError(f"chain: {sources} names a source twice")
        if sum(source in LENDERS for source in sources) != 1:
            raise InvalidOptionError(
                f"chain: {sources} needs exactly one source that moves blocks between workers: {' or '.join(LENDERS)}"
            )
