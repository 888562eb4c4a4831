"""Builds the connector that a configuration names."""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_transfer.announcements import Announcements
from kv_transfer.block_memory import HostBlockMemory
from kv_transfer.books import ConnectorBooks
from kv_transfer.connector import Connector, ConnectorOptions, Rendezvous, WakeCallback
from kv_transfer.counters import TransferCounters
from kv_transfer.errors import KVTransferError, UnknownConnectorError
from kv_transfer.faults import FaultPlan, FaultyRendezvous, FaultyTransport
from kv_transfer.inproc import InProcessFabric, InProcessTransport
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind
from kv_transfer.lease import LeaseTable
from kv_transfer.params import PeerIdentity
from kv_transfer.transport import Transport
from kv_transfer.worker import TransferWorker

KNOWN_CONNECTORS = ("nixl", "inproc")


def build_connector(
    options: ConnectorOptions,
    *,
    identity: PeerIdentity,
    layout: KVLayout,
    region: KVRegion,
    rendezvous: Rendezvous,
    wake: WakeCallback,
    clock: Callable[[], float] = time.monotonic,
    fabric: InProcessFabric | None = None,
) -> Connector:
    """Build both halves; the worker's thread runs from now until its ``close``.

    ``inproc`` needs the ``fabric`` that joins the engines of this process, and meets peers there; ``nixl`` meets them
    over ``rendezvous``. ``wake`` is called from the worker's thread, and from the thread of whoever closes it.

    Raises:
        UnknownConnectorError: ``options.connector`` is neither.
        KVTransferError: The connector cannot use this region.
        InvalidOptionError: Checksums or faults are asked for where the bytes of blocks cannot be looked at.
    """
    if region.block_bytes != layout.block_bytes:
        raise KVTransferError(f"the region has blocks of {region.block_bytes} bytes, the layout {layout.block_bytes}")
    has_checksums = region.memory is MemoryKind.DRAM if options.checksums is None else options.checksums
    memory = HostBlockMemory(region) if has_checksums else None
    fault_memory = HostBlockMemory(region) if options.faults is not None else None
    inner = transport = _build_transport(options.connector, identity=identity, region=region, fabric=fabric)
    rendezvous = fabric if fabric is not None and options.connector == "inproc" else rendezvous
    leases = LeaseTable(ttl_s=options.lease_ttl_s, clock=clock)
    announcements = Announcements(ttl_s=options.lease_ttl_s, clock=clock, memory=memory)
    counters = TransferCounters()
    if options.faults is not None and fault_memory is not None:
        plan = FaultPlan(options.faults, counters)
        transport = FaultyTransport(inner, plan=plan, memory=fault_memory, leases=leases, clock=clock)
        rendezvous = FaultyRendezvous(rendezvous, plan=plan, transport=transport)
    worker = TransferWorker(
        options=options,
        identity=identity,
        layout=layout,
        region=region,
        transport=transport,
        rendezvous=rendezvous,
        leases=leases,
        announcements=announcements,
        wake=wake,
        clock=clock,
        counters=counters,
        memory=memory,
    )
    if isinstance(inner, InProcessTransport) and fabric is not None:
        fabric.introduce(identity.engine_id, inner, worker.accept)
    books = ConnectorBooks(
        identity=identity,
        layout=layout,
        leases=leases,
        memory=memory,
        announcements=announcements if options.streamed else None,
    )
    return Connector(scheduler=books, worker=worker)


def _build_transport(
    connector: str, *, identity: PeerIdentity, region: KVRegion, fabric: InProcessFabric | None
) -> Transport:
    if connector == "inproc":
        if fabric is None:
            raise KVTransferError("the connector 'inproc' needs the fabric that joins the engines of this process")
        return InProcessTransport(fabric=fabric, identity=identity, region=region)
    if connector == "nixl":
        from kv_transfer.nixl.transport import NixlTransport  # imported late: it loads UCX

        return NixlTransport(identity=identity, region=region)
    raise UnknownConnectorError(name=connector, known=KNOWN_CONNECTORS)
