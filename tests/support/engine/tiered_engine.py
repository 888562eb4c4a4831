"""An engine without a model whose connector is a chain with a host tier."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.contract.config import SchedulerConfig
from engine.contract.messages import FinishReason, GenerateRequest
from engine.frontend.engine_core import EngineCore
from kv_transfer.chain.source import ChainSource
from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import Connector, ConnectorBuilder, WakeCallback
from kv_transfer.factory import build_connector
from kv_transfer.fault_options import FaultOptions
from kv_transfer.inproc import InProcessFabric
from kv_transfer.layout import KVLayout, KVRegion
from kv_transfer.options import ConnectorOptions
from kv_transfer.params import PeerIdentity
from kv_transfer.stats import TransferStats
from kv_transfer.tier.disk.storage import DiskStorage
from kv_transfer.tier.host.tier import HostStorage
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from kv_transfer.tier.storage import TierStorage
from kv_transfer.tier.worker_connector import TierWorker
from tests.support.engine.chain_engine import chain_engine
from tests.support.engine.chain_runner import ChainRunner
from tests.support.kv.faulty_pair import fast_clock
from tests.support.waiting import wait_until

BLOCK_SIZE = 4
BLOCK_BYTES = 8 * BLOCK_SIZE
FILE_BYTES = 4096


@dataclass
class TieredEngine:
    """``run`` steps it until every request has ended."""

    core: EngineCore
    connector: Connector

    @property
    def runner(self) -> ChainRunner:
        """The runner in place of the model."""
        assert isinstance(self.core.runner, ChainRunner)
        return self.core.runner

    @property
    def tier(self) -> TierSchedulerConnector:
        """The scheduler's half of the only tier."""
        (tier,) = self.tiers
        return tier

    def kept_content(self, block_hash: bytes) -> bytes | None:
        """The bytes that the tier stores under an address."""
        if block_hash not in self.tier.slots:
            return None
        slot = self.tier.slots.slot_of(block_hash)
        host = next(storage for storage in self._storages() if isinstance(storage, HostStorage))
        return ctypes.string_at(host.arena.region.block_address(slot), BLOCK_BYTES)

    def _storages(self) -> list[TierStorage]:
        chain = self.connector.worker
        assert isinstance(chain, ChainWorker)
        return [source.storage for source in chain.sources if isinstance(source, TierWorker)]

    def run(self, *requests: GenerateRequest) -> dict[str, list[int]]:
        """The tokens of each request; one that ends with an error fails the test.

        Returns when what was evicted is in its files too: a disk that is slow takes no more meanwhile.
        """
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.core.add_request(request)
        while self.core.has_unfinished():
            deltas = self.core.step().deltas()
            for delta in deltas:
                assert delta.finish_reason is not FinishReason.ERROR, delta.error
                tokens[delta.request_id].extend(delta.token_ids)
            if not deltas:
                self.core.wake.wait(0.01)
                self.core.wake.clear()
        disks = [storage for storage in self._storages() if isinstance(storage, DiskStorage)]
        wait_until(lambda: not any(disk._unwritten for disk in disks))
        return tokens

    def num_computed_by(self, *requests: GenerateRequest) -> int:
        """Run, and return the number of computed positions."""
        before = self.runner.num_computed_positions
        self.run(*requests)
        return self.runner.num_computed_positions - before

    @property
    def tiers(self) -> list[TierSchedulerConnector]:
        """The scheduler's halves of all tiers, in the order of the chain."""
        chain = self.connector.scheduler.source
        assert isinstance(chain, ChainSource)
        return [source for source in chain.sources if isinstance(source, TierSchedulerConnector)]

    def _tiers_read_nothing(self) -> bool:
        self.core.collect()
        return not any(tier.num_loading for tier in self.tiers)

    def stats(self) -> TransferStats:
        """The connector's counters."""
        return self.core.stats().transfer

    def assert_rests(self) -> None:
        """Check that nothing is held except stored blocks."""
        wait_until(self._tiers_read_nothing)
        self.core.scheduler.check_integrity()
        for tier in self.tiers:
            tier.check_integrity()
        load = self.core.load_report()
        assert (load.num_running, load.num_waiting, load.num_loading, load.num_held_blocks) == (0, 0, 0, 0)


@contextmanager
def tiered_engine(
    *,
    num_blocks: int = 16,
    num_host_blocks: int = 64,
    num_disk_blocks: int = 0,
    disk_path: Path | None = None,
    order: Sequence[str] = ("host", "inproc"),
    fabric: InProcessFabric | None = None,
    engine_id: str = "engine",
    faults: FaultOptions | None = None,
    scheduler: SchedulerConfig | None = None,
) -> Iterator[TieredEngine]:
    """A small device cache before a larger tier; the connector is closed at the end."""
    fabric = fabric or InProcessFabric()
    options = ConnectorOptions(
        connector="chain",
        chain=tuple(order),
        host_bytes=num_host_blocks * BLOCK_BYTES if "host" in order else 0,
        disk_bytes=num_disk_blocks * FILE_BYTES,
        disk_path=str(disk_path) if disk_path is not None else None,
        faults=faults,
        allow_faults=faults is not None,
    )
    built: list[Connector] = []
    core = chain_engine(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        scheduler=scheduler or SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
        build_connector=_builder(fabric, engine_id, options, built),
    )
    try:
        yield TieredEngine(core, built[0])
    finally:
        core.close()
        core.collect()


def _builder(
    fabric: InProcessFabric, engine_id: str, options: ConnectorOptions, built: list[Connector]
) -> ConnectorBuilder:
    def build(layout: KVLayout, region: KVRegion, wake: WakeCallback) -> Connector:
        built.append(
            build_connector(
                options,
                identity=PeerIdentity(engine_id=engine_id, incarnation="1"),
                layout=layout,
                region=region,
                rendezvous=fabric,
                wake=wake,
                clock=fast_clock,
                fabric=fabric,
            )
        )
        return built[-1]

    return build
