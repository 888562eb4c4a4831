"""Builds the connector that a configuration names."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.chain.source import ChainSource, ChainTier, chain_orders
from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import (
    Connector,
    Rendezvous,
    SchedulerConnector,
    WakeCallback,
    WorkerConnector,
)
from kv_transfer.errors import KVTransferError
from kv_transfer.fault_options import FaultOptions
from kv_transfer.faults import FaultPlan, FaultyRendezvous, FaultyTransport
from kv_transfer.inproc import InProcessFabric, InProcessTransport
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind
from kv_transfer.memory.block_memory import BlockChecksums, BlockMemory, open_block_memory
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.announcements import Announcements
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.peer.scheduler_connector import PeerSchedulerConnector
from kv_transfer.peer.worker_connector import TransferWorker
from kv_transfer.registry import CHAIN, PEER_SOURCES, Tier
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from kv_transfer.tier.transport import TierRendezvous, TierTransport
from kv_transfer.tier.worker_connector import TierWorker
from kv_transfer.transport import Transport

_HOST_ANNOUNCE_PERIOD_S = 0.05
"""Pause between announcements where they are paced. One announcement and the reads that follow it take about 1 ms of
the cores that compute the prompt."""


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
    """Build both halves of the connector. The worker's threads run from now until its ``close``.

    ``inproc`` needs the ``fabric`` that joins the engines of this process, and meets peers there; ``nixl`` meets them
    over ``rendezvous``. ``wake`` is called from the worker's threads, and from the thread that calls ``close``.

    Raises:
        KVTransferError: The connector cannot use this region.
        InvalidOptionError: A tier has no room for a block, or no place to keep blocks.
    """
    if region.block_bytes != layout.block_bytes:
        raise KVTransferError(f"the region has blocks of {region.block_bytes} bytes, the layout {layout.block_bytes}")
    site = _Site(options=options, identity=identity, layout=layout, region=region, wake=wake, clock=clock)
    tiers: list[_BuiltTier] = []
    try:
        tiers.extend(_build_tier(site, tier) for tier in options.tiers)
        peers = _build_peers(site, options.peer_source, rendezvous, fabric)
    except KVTransferError:
        for built in tiers:
            built.worker.close()
        raise
    return _chain(options, layout, tiers, peers) if options.connector == CHAIN else peers.connector


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
        """The engine's blocks if their checksums are verified, else None."""
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
        memory: BlockChecksums | None,
    ) -> tuple[TransferWorker, FaultPlan | None]:
        """A worker that reads into the engine's blocks, with the faults of the plan injected.

        ``memory`` is used to compare the blocks that arrive with their checksums.
        """
        counters = TransferCounters()
        plan: FaultPlan | None = None
        if self.options.allow_faults:
            plan = FaultPlan(self.options.faults or FaultOptions(), counters)
            blocks = open_block_memory(self.region)
            faulty = FaultyTransport(transport, plan=plan, memory=blocks, leases=leases, clock=self.clock)
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
            memory=memory,
        )
        return worker, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltTier:
    """Both halves of a tier."""

    name: str
    scheduler: TierSchedulerConnector
    worker: TierWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltPeers:
    """What moves blocks between engines: a connector of its own, without a tier, so evicted blocks are lost."""

    scheduler: PeerSchedulerConnector
    connector: Connector


def _build_peers(site: _Site, name: str, rendezvous: Rendezvous, fabric: InProcessFabric | None) -> _BuiltPeers:
    transport = PEER_SOURCES[name].open_transport(
        site.options, identity=site.identity, region=site.region, fabric=fabric
    )
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
        memory=memory,
    )
    if isinstance(transport, InProcessTransport) and fabric is not None:
        fabric.introduce(site.identity.engine_id, transport, worker.accept)
    scheduler = PeerSchedulerConnector(
        identity=site.identity,
        layout=site.layout,
        leases=leases,
        memory=memory,
        announcements=announcements if site.options.streamed else None,
    )
    questions = SchedulerConnector(
        source=scheduler, producer=scheduler, consumer=scheduler, take_orders=scheduler.take_orders
    )
    return _BuiltPeers(
        scheduler=scheduler,
        connector=Connector(scheduler=questions, worker=worker, peers=worker.peers, faults=plan),
    )


def _build_tier(site: _Site, tier: Tier) -> _BuiltTier:
    """Build a tier, which keeps evicted blocks."""
    memory = site.checked_memory()
    storage = tier.open_storage(site.options, layout=site.layout, region=site.region, has_checksums=memory is not None)
    identity = PeerIdentity(engine_id=f"{site.identity.engine_id}/{tier.name}", incarnation=site.identity.incarnation)
    leases = LeaseTable(ttl_s=site.options.lease_ttl_s, clock=site.clock)
    scheduler = TierSchedulerConnector(identity=identity, layout=site.layout, leases=leases, storage=storage)
    reader, _ = site.build_worker(
        identity=identity,
        transport=TierTransport(storage),
        rendezvous=TierRendezvous(storage.num_slots),
        leases=leases,
        announcements=Announcements(ttl_s=site.options.lease_ttl_s, clock=site.clock),
        memory=memory or storage.arrived,
    )
    worker = TierWorker(name=tier.name, reader=reader, scheduler=scheduler, storage=storage)
    return _BuiltTier(name=tier.name, scheduler=scheduler, worker=worker)


def _chain(options: ConnectorOptions, layout: KVLayout, tiers: list[_BuiltTier], peers: _BuiltPeers) -> Connector:
    """Join tiers and peers into one connector that asks them in the order of the configuration."""
    schedulers: dict[str, TierSchedulerConnector | PeerSchedulerConnector] = {
        options.peer_source: peers.scheduler,
        **{tier.name: tier.scheduler for tier in tiers},
    }
    workers: dict[str, WorkerConnector] = {
        options.peer_source: peers.connector.worker,
        **{tier.name: tier.worker for tier in tiers},
    }
    in_order = [schedulers[name] for name in options.sources]
    return Connector(
        scheduler=SchedulerConnector(
            source=ChainSource(
                in_order,
                peer_source=options.sources.index(options.peer_source),
                consumer=peers.scheduler,
                block_size=layout.block_size,
            ),
            producer=peers.scheduler,
            consumer=peers.scheduler,
            tier=ChainTier([tier.scheduler for tier in tiers]) if tiers else None,
            take_orders=chain_orders([scheduler.take_orders for scheduler in in_order]),
        ),
        worker=ChainWorker([workers[name] for name in options.sources], peers=peers.connector.worker),
        peers=peers.connector.peers,
        faults=peers.connector.faults,
    )
