"""Builds the connector that a configuration names."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.block_memory import BlockMemory, open_block_memory
from kv_transfer.chain.scheduler_connector import ChainSchedulerConnector
from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import Connector, Rendezvous, WakeCallback
from kv_transfer.errors import KVTransferError, UnknownConnectorError
from kv_transfer.fault_options import FaultOptions
from kv_transfer.faults import FaultPlan, FaultyRendezvous, FaultyTransport
from kv_transfer.host.arena import build_arena
from kv_transfer.host.scheduler_connector import HostSchedulerConnector
from kv_transfer.host.transport import HostRendezvous, HostTransport
from kv_transfer.host.worker_connector import HostWorker
from kv_transfer.inproc import InProcessFabric, InProcessTransport
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind
from kv_transfer.options import HOST, LENDERS, ConnectorOptions
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.announcements import Announcements
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.peer.scheduler_connector import PeerSchedulerConnector
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.transport import Transport

_HOST_ANNOUNCE_PERIOD_S = 0.05
"""An announcement, and the reads that follow it, take about 1 ms of the cores that compute the prompt."""


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
    """Build both halves; the worker's threads run from now until its ``close``.

    ``inproc`` needs the ``fabric`` that joins the engines of this process, and meets peers there; ``nixl`` meets them
    over ``rendezvous``. ``wake`` is called from the worker's threads, and from the thread of whoever closes it.

    Raises:
        UnknownConnectorError: There is no such source.
        KVTransferError: The connector cannot use this region.
        InvalidOptionError: The host tier has no room for a block.
    """
    if region.block_bytes != layout.block_bytes:
        raise KVTransferError(f"the region has blocks of {region.block_bytes} bytes, the layout {layout.block_bytes}")
    site = _Site(options=options, identity=identity, layout=layout, region=region, wake=wake, clock=clock)
    if options.connector != "chain":
        return _build_peers(site, options.connector, rendezvous, fabric)
    parts: list[Connector] = []
    try:
        parts.extend(
            _build_host(site) if source == HOST else _build_peers(site, source, rendezvous, fabric)
            for source in options.sources
        )
    except KVTransferError:
        for part in parts:
            part.worker.close()
        raise
    peer_source = options.sources.index(options.peer_source)
    return Connector(
        scheduler=ChainSchedulerConnector(
            [part.scheduler for part in parts],
            block_size=layout.block_size,
            peer_source=peer_source,
            tier=options.sources.index(HOST) if HOST in options.sources else None,
        ),
        worker=ChainWorker([part.worker for part in parts], peer_source=peer_source),
        peers=parts[peer_source].peers,
        faults=parts[peer_source].faults,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """The engine that a connector is for."""

    options: ConnectorOptions
    identity: PeerIdentity
    layout: KVLayout
    region: KVRegion
    wake: WakeCallback
    clock: Callable[[], float]

    def checked_memory(self) -> BlockMemory | None:
        """The engine's blocks, where they are to be compared with checksums."""
        options = self.options
        has_checksums = self.region.memory is MemoryKind.DRAM if options.checksums is None else options.checksums
        return open_block_memory(self.region) if has_checksums else None

    def build_worker(
        self,
        *,
        identity: PeerIdentity,
        transport: Transport,
        rendezvous: Rendezvous,
        leases: LeaseTable,
        announcements: Announcements,
    ) -> tuple[TransferWorker, FaultPlan | None]:
        """A worker that reads into the engine's blocks, and suffers the faults of the plan."""
        counters = TransferCounters()
        plan: FaultPlan | None = None
        if self.options.allow_faults:
            plan = FaultPlan(self.options.faults or FaultOptions(), counters)
            memory = open_block_memory(self.region)
            faulty = FaultyTransport(transport, plan=plan, memory=memory, leases=leases, clock=self.clock)
            transport, rendezvous = faulty, FaultyRendezvous(rendezvous, plan=plan, transport=faulty)
        worker = TransferWorker(
            options=self.options,
            identity=identity,
            layout=self.layout,
            region=self.region,
            transport=transport,
            rendezvous=rendezvous,
            leases=leases,
            announcements=announcements,
            wake=self.wake,
            clock=self.clock,
            counters=counters,
            memory=self.checked_memory(),
        )
        return worker, plan


def _build_peers(site: _Site, source: str, rendezvous: Rendezvous, fabric: InProcessFabric | None) -> Connector:
    """What moves blocks between engines."""
    transport = _build_transport(site, source, fabric)
    leases = LeaseTable(ttl_s=site.options.lease_ttl_s, clock=site.clock)
    memory = site.checked_memory()
    is_paced = site.options.streamed == "auto" and site.region.memory is MemoryKind.DRAM
    announcements = Announcements(
        ttl_s=site.options.lease_ttl_s,
        clock=site.clock,
        memory=memory,
        period_s=_HOST_ANNOUNCE_PERIOD_S if is_paced else 0.0,
    )
    is_local = isinstance(transport, InProcessTransport) and fabric is not None
    worker, plan = site.build_worker(
        identity=site.identity,
        transport=transport,
        rendezvous=fabric if is_local and fabric is not None else rendezvous,
        leases=leases,
        announcements=announcements,
    )
    if isinstance(transport, InProcessTransport) and fabric is not None:
        fabric.introduce(site.identity.engine_id, transport, worker.accept)
    books = PeerSchedulerConnector(
        identity=site.identity,
        layout=site.layout,
        leases=leases,
        memory=memory,
        announcements=announcements if site.options.streamed else None,
    )
    return Connector(scheduler=books, worker=worker, peers=worker.peers, faults=plan)


def _build_host(site: _Site) -> Connector:
    """What keeps evicted blocks in main memory."""
    arena = build_arena(site.region, host_bytes=site.options.host_bytes)
    identity = PeerIdentity(engine_id=f"{site.identity.engine_id}/host", incarnation=site.identity.incarnation)
    leases = LeaseTable(ttl_s=site.options.lease_ttl_s, clock=site.clock)
    books = HostSchedulerConnector(
        identity=identity, layout=site.layout, leases=leases, num_slots=arena.region.num_blocks
    )
    reader, _ = site.build_worker(
        identity=identity,
        transport=HostTransport(arena),
        rendezvous=HostRendezvous(arena),
        leases=leases,
        announcements=Announcements(ttl_s=site.options.lease_ttl_s, clock=site.clock),
    )
    memory = open_block_memory(arena.region) if site.checked_memory() is not None else None
    return Connector(scheduler=books, worker=HostWorker(reader=reader, books=books, arena=arena, memory=memory))


def _build_transport(site: _Site, source: str, fabric: InProcessFabric | None) -> Transport:
    if source == "inproc":
        if fabric is None:
            raise KVTransferError("the connector 'inproc' needs the fabric that joins the engines of this process")
        return InProcessTransport(fabric=fabric, identity=site.identity, region=site.region)
    if source == "nixl":
        from kv_transfer.nixl.transport import NixlTransport  # imported late: it loads UCX

        is_local = site.options.transport == "local"
        return NixlTransport(identity=site.identity, region=site.region, is_local=is_local)
    raise UnknownConnectorError(name=source, known=LENDERS)
