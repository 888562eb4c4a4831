"""The contract of connectors: blocks arrive exactly or are reported as invalid, and leases end once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.connector import LeaseEnd
from kv_transfer.params import KVTransferParams
from kv_transfer.protocols import RemoteMatch
from tests.support.engine.kv_engine import KVEngine
from tests.support.kv.kv_world import KVWorld


@pytest.mark.parametrize(
    "source_block_ids, block_ids",
    [
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((9, 3, 40, 12, 13), (1, 60, 7, 8, 2)),
        ((63,), (0,)),
        (tuple(range(64)), tuple(reversed(range(64)))),
    ],
)
def test_blocks_arrive_bit_exact(
    world: KVWorld,
    source: Any,
    reader: KVEngine,
    request_id: str,
    source_block_ids: tuple[int, ...],
    block_ids: tuple[int, ...],
) -> None:
    source.fill(source_block_ids, world.seed())
    params = source.grant(request_id, source_block_ids)

    ended = reader.load(request_id, params, block_ids)

    assert ended.error is None
    assert ended.failed_block_ids == ()
    assert ended.num_bytes == len(block_ids) * reader.spec.layout.block_bytes
    assert reader.content(block_ids) == source.content(source_block_ids)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.DONE


def test_partial_pull_reads_only_the_blocks_asked_for(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    source.fill((1, 2, 3, 4), world.seed())
    reader.fill((10, 11, 12, 13), world.seed())
    untouched = reader.content((10, 13))
    params = source.grant(request_id, (1, 2, 3, 4))

    ended = reader.load(request_id, params, (11, 12), first_block=2)

    assert ended.error is None
    assert reader.content((11, 12)) == source.content((3, 4))
    assert reader.content((10, 13)) == untouched


def test_match_offers_what_lies_beyond_the_local_prefix(source: Any, reader: KVEngine, request_id: str) -> None:
    params = source.grant(request_id, (1, 2, 3), 10)

    assert reader.match(params, 10, 4) == RemoteMatch(num_tokens=6)
    assert reader.match(params, 10, 12) == RemoteMatch(num_tokens=0)
    assert reader.match(None, 10, 0) == RemoteMatch(num_tokens=0)
    source.abort_lease(request_id)


def test_many_loads_at_once_all_arrive(world: KVWorld, source: Any, reader: KVEngine) -> None:
    source.fill(tuple(range(32)), world.seed())
    request_ids = [world.unique("request") for _ in range(16)]
    granted = [source.grant(request_id, (2 * number, 2 * number + 1)) for number, request_id in enumerate(request_ids)]
    for number, (request_id, params) in enumerate(zip(request_ids, granted, strict=True)):
        reader.begin(request_id, params, (32 + 2 * number, 33 + 2 * number))

    assert [reader.wait_load(request_id).error for request_id in request_ids] == [None] * 16
    assert reader.content(tuple(range(32, 64))) == source.content(tuple(range(32)))


def test_lease_ends_once_whatever_follows(source: Any, reader: KVEngine, request_id: str) -> None:
    params = source.grant(request_id, (5,))
    assert reader.load(request_id, params, (5,)).error is None
    source.wait_lease(params.lease_id)
    num_done = source.stats().num_leases_done

    reader.release(params)
    again = reader.load(f"{request_id}-again", params, (6,))
    source.abort_lease(request_id)

    assert again.failed_block_ids == (6,)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.DONE
    assert source.stats().num_leases_done == num_done
    assert source.stats().num_leases_aborted + num_done <= source.stats().num_leases_granted


@pytest.mark.known_failure(8)
def test_the_engine_is_woken_when_a_load_ended(source: Any, reader: KVEngine, request_id: str) -> None:
    """A load that ends makes work schedulable, and an idle engine must learn of it."""
    num_wakes = reader.num_wakes
    params = source.grant(request_id, (5,))

    reader.load(request_id, params, (5,))

    assert reader.num_wakes > num_wakes


def test_connector_is_alive_until_it_is_closed(world: KVWorld) -> None:
    worker = world.make_reader(world.spec("leaving")).connector.worker
    assert worker.is_alive

    worker.close()

    assert not worker.is_alive


@pytest.mark.known_failure(1)
def test_read_under_an_expired_lease_is_never_good(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    """The blocks move, but they may be another request's by now."""
    params = source.grant(request_id, (7, 8))
    source.advance_clock(source.spec.lease_ttl_s + 1)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.EXPIRED
    source.fill((7, 8), world.seed())

    ended = reader.load(request_id, params, (20, 21))

    assert ended.num_bytes == 2 * reader.spec.layout.block_bytes
    assert ended.failed_block_ids == (20, 21)
    assert ended.error is not None
    assert "lease" in ended.error


def test_read_under_an_aborted_lease_is_never_good(source: Any, reader: KVEngine, request_id: str) -> None:
    params = source.grant(request_id, (7, 8))
    source.abort_lease(request_id)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED

    assert reader.load(request_id, params, (20, 21)).failed_block_ids == (20, 21)


@pytest.mark.known_failure(4, 5)
def test_cancelled_load_still_ends_and_its_lease_with_it(source: Any, reader: KVEngine, request_id: str) -> None:
    """The destination is held until the load is reported, and it is reported."""
    params = source.grant(request_id, (1, 2))
    num_cancelled = reader.stats().num_cancelled_loads
    reader.connector.scheduler.source.begin_load(
        request_id=request_id, params=params, first_block=0, block_ids=((3, 4),)
    )
    reader.cancel(request_id)

    assert reader.wait_load(request_id).failed_block_ids == (3, 4)
    assert source.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED
    assert reader.stats().num_cancelled_loads == num_cancelled + 1


def test_cancel_of_an_unknown_load_is_ignored(source: Any, reader: KVEngine, request_id: str) -> None:
    reader.cancel("never-heard-of")

    assert reader.load(request_id, source.grant(request_id, (1,)), (3,)).error is None


@pytest.mark.known_failure(6)
def test_late_cancel_does_not_hit_the_next_load_of_its_request(source: Any, reader: KVEngine, request_id: str) -> None:
    """The abort and the request that comes back under the same id may be ordered in one step."""
    assert reader.load(request_id, source.grant(request_id, (1,)), (3,)).error is None
    reader.loads.clear()
    reader.connector.scheduler.source.cancel_load(request_id)

    assert reader.load(request_id, source.grant(request_id, (2,)), (4,)).error is None


@pytest.mark.known_failure(3)
def test_release_ends_the_lease_of_a_hand_over_that_is_not_read(
    world: KVWorld, source: Any, reader: KVEngine, request_id: str
) -> None:
    """For a peer that was met and for one that was not."""
    stranger = world.make_source(world.spec("stranger"))
    for engine in (source, stranger):
        params = engine.grant(request_id, (1, 2))
        reader.release(params)
        assert engine.wait_lease(params.lease_id).reason is LeaseEnd.ABORTED


@pytest.mark.known_failure(1)
def test_lease_of_a_waiting_request_is_kept_alive(world: KVWorld, source: Any, reader: KVEngine) -> None:
    """A long queue on decode must not cost the blocks on prefill."""
    waiting, other = world.unique("request"), world.unique("request")
    source.fill((1,), world.seed())
    params = source.grant(waiting, (1,))
    reader.expect(params)
    source.advance_clock(source.spec.lease_ttl_s * 0.8)
    reader.advance_clock(reader.spec.lease_ttl_s / 3)
    # Messages of one reader arrive in order: when this load is confirmed, the renewal has arrived.
    assert reader.load(other, source.grant(other, (2,)), (2,)).error is None
    source.advance_clock(source.spec.lease_ttl_s * 0.8)

    assert reader.load(waiting, params, (9,)).error is None
    assert reader.content((9,)) == source.content((1,))


def test_lease_of_a_request_that_goes_on_elsewhere_is_kept_for_one_more_time_to_live(
    world: KVWorld, source: Any, reader: KVEngine
) -> None:
    """A drained worker may live for another minute, and must not hold for that long what may never be read."""
    ttl_s = source.spec.lease_ttl_s
    met, read, unread, renewed, later = (world.unique("request") for _ in range(5))
    assert reader.load(met, source.grant(met, (3,)), (3,)).error is None
    passed_on = [source.grant(name, (block_id,)) for name, block_id in ((read, 1), (unread, 2))]
    for params in passed_on:
        reader.expect(params)
    source.advance_clock(ttl_s * 0.8)

    for params in passed_on:
        reader.pass_on(params)

    # Messages of one reader arrive in order: when this load is confirmed, the last renewals have arrived.
    assert reader.load(renewed, source.grant(renewed, (3,)), (3,)).error is None
    source.advance_clock(ttl_s * 0.8)
    heir = world.make_reader(world.spec("heir"))
    assert heir.load(read, passed_on[0], (1,)).error is None
    reader.advance_clock(reader.spec.lease_ttl_s / 3)
    assert reader.load(later, source.grant(later, (3,)), (3,)).error is None
    source.advance_clock(ttl_s * 0.3)
    assert source.wait_lease(passed_on[1].lease_id).reason is LeaseEnd.EXPIRED


def _beyond_the_end(source: Any, params: KVTransferParams) -> KVTransferParams:
    """The hand-over as one of a block that its source does not have."""
    return replace(params, block_ids=((source.spec.num_blocks,),))


def test_blocks_that_do_not_exist_fail_the_load(source: Any, reader: KVEngine, request_id: str) -> None:
    params = _beyond_the_end(source, source.grant(request_id, (1,)))

    ended = reader.load(request_id, params, (3,))

    assert ended.failed_block_ids == (3,)
    assert "64 blocks" in str(ended.error)
    source.abort_lease(request_id)


def test_counters_add_up(source: Any, reader: KVEngine, request_id: str) -> None:
    before = reader.stats()
    good = reader.load(request_id, source.grant(request_id, (1, 2, 3)), (1, 2, 3))
    failed = reader.load(f"{request_id}-again", _beyond_the_end(source, source.grant(request_id, (1,))), (3,))
    after = reader.stats()
    source.abort_lease(request_id)

    assert (good.error is None, failed.error is None) == (True, False)
    assert after.num_transfers - before.num_transfers == 2
    assert after.num_blocks - before.num_blocks == 3
    assert after.num_bytes - before.num_bytes == 3 * reader.spec.layout.block_bytes
    assert after.num_failed_loads - before.num_failed_loads == 1
    assert after.num_failed_blocks - before.num_failed_blocks == 1
    assert after.transfer_s > before.transfer_s
