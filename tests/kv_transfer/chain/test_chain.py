"""K9: sources are asked in order, and each supplies a part; a part that fails only costs that part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kv_transfer.chain.worker_connector import ChainWorker
from kv_transfer.connector import (
    NO_EVENTS,
    ConnectorEvents,
    ConnectorOrders,
    LeaseEnd,
    LoadEnded,
    LoadOrder,
)
from kv_transfer.params import KVTransferParams
from kv_transfer.peer.counters import TransferCounters
from kv_transfer.peer.lease import LeaseCounts
from kv_transfer.protocols import RemoteMatch
from kv_transfer.stats import TransferStats
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld

BLOCK_SIZE = 4
PROMPT = tuple(b"hash-%d" % index for index in range(5))


@pytest.fixture
def world() -> Iterator[KVWorld]:
    world = KVWorld("inproc", tiers=("host",))
    yield world
    world.close()


@pytest.fixture
def source(world: KVWorld) -> Any:
    source = world.make_source(world.spec("source"))
    source.fill((10, 11, 12, 13, 14), world.seed())
    return source


def _reader(world: KVWorld, source: KVEngine, *chain: str, num_kept: int = 2) -> KVEngine:
    """An engine whose tier keeps the first blocks of the prompt that the source has."""
    reader = world.make_reader(world.spec("reader", chain=chain))
    reader.memory[:num_kept] = source.memory[10 : 10 + num_kept]
    tier = reader.connector.scheduler.tier
    assert tier is not None
    tier.keep_evicted(range(num_kept), PROMPT[:num_kept])
    reader.step()
    reader.memory[:num_kept] = 0
    return reader


def _load(reader: KVEngine, source: KVEngine, world: KVWorld, block_ids: tuple[int, ...]) -> Any:
    request_id = world.unique("request")
    params = source.grant(request_id, (10, 11, 12, 13, 14))
    num_tokens = len(block_ids) * BLOCK_SIZE
    assert reader.match(params, 20, 0, (PROMPT,)) == RemoteMatch(num_tokens=num_tokens)
    reader.begin(request_id, params, block_ids)
    return reader.wait_load(request_id), params


@pytest.mark.behaviour("K9")
def test_k9_each_source_supplies_its_part_in_order(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "host", "inproc")

    ended, params = _load(reader, source, world, (20, 21, 22, 23, 24))

    assert (ended.error, ended.failed_block_ids) == (None, ())
    assert reader.content((20, 21, 22, 23, 24)) == source.content((10, 11, 12, 13, 14))
    stats = reader.stats()
    assert (stats.num_blocks, stats.tiers["host"]["loaded_blocks"]) == (5, 2)
    assert ended.num_bytes == stats.num_bytes
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.DONE


@pytest.mark.behaviour("K8")
def test_k8_a_load_in_two_parts_counts_once(world: KVWorld, source: KVEngine) -> None:
    """Routers divide by it: two parallel parts would halve the apparent duration of a load."""
    reader = _reader(world, source, "host", "inproc")

    good, _ = _load(reader, source, world, (20, 21, 22, 23, 24))

    stats = reader.stats()
    assert (stats.num_transfers, stats.transfer_s) == (1, good.duration_s)


@pytest.mark.behaviour("K8")
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_k8_a_load_whose_parts_both_fail_counts_once(world: KVWorld, source: KVEngine, is_cancelled: bool) -> None:
    sources: list[Any] = [_OneEnd(), _OneEnd()]
    worker = ChainWorker(sources, peers=sources[1])
    worker.execute(_two_parts(source.grant("request", (10, 11))))
    for place in (0, 1):
        sources[place].happen(stalled="r")
    worker.collect()
    for place in (0, 1):
        sources[place].happen(_part_end(place, is_cancelled=is_cancelled))
    worker.collect()

    stats = worker.stats()
    assert (stats.num_transfers, stats.num_stalled_loads, stats.transfer_s) == (1, 1, 2.0)
    assert (stats.num_cancelled_loads, stats.num_failed_loads) == ((1, 0) if is_cancelled else (0, 1))
    assert stats.num_failed_blocks == (0 if is_cancelled else 2)


@pytest.mark.behaviour("K9")
def test_k9_the_first_source_in_order_is_asked_first(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "inproc", "host")

    ended, _ = _load(reader, source, world, (20, 21, 22, 23, 24))

    assert ended.error is None
    assert (reader.stats().num_blocks, reader.stats().tiers["host"]["loaded_blocks"]) == (5, 0)


@pytest.mark.behaviour("K9")
def test_k9_a_hand_over_that_the_tier_makes_needless_is_released(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "host", "inproc", num_kept=5)

    ended, params = _load(reader, source, world, (20, 21, 22, 23, 24))

    assert ended.error is None
    assert reader.stats().tiers["host"]["loaded_blocks"] == reader.stats().num_blocks == 5
    assert reader.content((20, 21, 22, 23, 24)) == source.content((10, 11, 12, 13, 14))
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED


@pytest.mark.behaviour("K9")
def test_k9_a_part_that_fails_costs_no_more_than_itself(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "host", "inproc")
    params = source.grant("request", (10, 11, 12, 13, 14))
    assert reader.match(params, 20, 0, (PROMPT,)).num_tokens == 20
    source.advance_clock(source.spec.lease_ttl_s + 1)
    source.wait_lease(params.lease_id)

    reader.begin("request", params, (20, 21, 22, 23, 24))
    ended = reader.wait_load("request")

    assert ended.failed_block_ids == (22, 23, 24)
    assert "lease" in str(ended.error)
    assert reader.content((20, 21)) == source.content((10, 11))


@pytest.mark.behaviour("K9")
def test_k9_a_cancelled_load_ends_once_with_its_last_part(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "host", "inproc")
    params = source.grant("request", (10, 11, 12, 13, 14))
    reader.match(params, 20, 0, (PROMPT,))
    reader.connector.scheduler.source.begin_load(
        request_id="request", params=params, first_block=0, block_ids=((20, 21, 22, 23, 24),)
    )
    reader.cancel("request")

    assert reader.wait_load("request").failed_block_ids == (20, 21, 22, 23, 24)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED
    ended, _ = _load(reader, source, world, (20, 21, 22, 23, 24))
    assert ended.error is None


class _OneEnd:
    """A source all of whose news is what the test has happen to one part. It counts as readers do."""

    def __init__(self) -> None:
        self.events = NO_EVENTS
        self.counters = TransferCounters()

    def happen(self, ended: LoadEnded | None = None, *, stalled: str | None = None) -> None:
        """The part ends, or runs out of time."""
        if ended is not None:
            self.counters.add_load(ended)
        self.counters.num_stalled_loads += stalled is not None
        self.events = ConnectorEvents(
            loads=() if ended is None else (ended,), stalled=() if stalled is None else (stalled,)
        )

    def execute(self, orders: ConnectorOrders) -> None:
        """Take a part on."""

    def collect(self) -> ConnectorEvents:
        """The events, once."""
        events, self.events = self.events, NO_EVENTS
        return events

    def stats(self) -> TransferStats:
        """Counters since the start."""
        return self.counters.snapshot(LeaseCounts())


def _two_parts(params: KVTransferParams) -> ConnectorOrders:
    return ConnectorOrders(
        parts=tuple(
            ConnectorOrders(
                loads=(LoadOrder(request_id="r", params=params, source_block_ids=(block_id,), block_ids=(block_id,)),)
            )
            for block_id in (20, 21)
        )
    )


def _part_end(place: int, *, is_cancelled: bool = False) -> LoadEnded:
    return LoadEnded(
        request_id="r",
        failed_block_ids=(20 + place,),
        num_bytes=0,
        duration_s=1.0 + place,
        error=f"source {place}",
        is_cancelled=is_cancelled,
    )


@pytest.mark.behaviour("K9")
@pytest.mark.parametrize("order_of_ends", [(0, 1), (1, 0)])
def test_k9_parts_are_joined_in_the_order_of_their_blocks_however_they_end(
    world: KVWorld, source: KVEngine, order_of_ends: tuple[int, int]
) -> None:
    sources: list[Any] = [_OneEnd(), _OneEnd()]
    worker = ChainWorker(sources, peers=sources[1])
    worker.execute(_two_parts(source.grant("request", (10, 11))))

    loads: list[LoadEnded] = []
    for place in order_of_ends:
        sources[place].happen(_part_end(place))
        loads.extend(worker.collect().loads)

    assert [(ended.failed_block_ids, ended.error) for ended in loads] == [((20, 21), "source 0; source 1")]


@pytest.mark.behaviour("K9")
def test_k9_what_lies_behind_a_local_prefix_is_found(world: KVWorld, source: KVEngine) -> None:
    reader = _reader(world, source, "host", "inproc")

    assert reader.match(None, 20, BLOCK_SIZE, (PROMPT,)).num_tokens == BLOCK_SIZE
    assert reader.match(None, 20, 2 * BLOCK_SIZE, (PROMPT,)).num_tokens == 0
    assert reader.match(None, 20, 0, (PROMPT[1:],)).num_tokens == BLOCK_SIZE, "content is found by its address alone"
    assert reader.match(None, 20, 0, ()).num_tokens == 0


@pytest.mark.known_failure(6)
def test_late_cancel_does_not_hit_the_next_load_from_the_tier(world: KVWorld, source: KVEngine) -> None:
    """A load from a peer stalls and its request is put back; as that load ends, the request loads from the tier."""
    reader = _reader(world, source, "host", "inproc")
    scheduler = reader.connector.scheduler.source
    scheduler.cancel_load("request")
    assert reader.match(None, 20, 0, (PROMPT,)).num_tokens == 2 * BLOCK_SIZE
    scheduler.begin_load(request_id="request", params=None, first_block=0, block_ids=((20, 21),))
    reader.step()

    assert reader.wait_load("request").error is None
