"""What a tier offers: what its storage had before, what it could take, and nothing that was lost."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.chain.source import ChainTier
from kv_transfer.connector import StoreOrder
from kv_transfer.params import PeerIdentity
from kv_transfer.peer.lease import LeaseTable
from kv_transfer.tier.scheduler_connector import TierSchedulerConnector
from kv_transfer.tier.storage import LostSlot
from tests.support.engine.kv_engine import KVEngineSpec
from tests.support.kv.listed_storage import ListedStorage

LAYOUT = KVEngineSpec(engine_id="any").layout
A, B, C = b"a", b"b", b"c"


def _tier(num_slots: int = 4, *, kept: Sequence[bytes] = (), num_ways: int | None = None) -> TierSchedulerConnector:
    return TierSchedulerConnector(
        identity=PeerIdentity(engine_id="engine/tier", incarnation="1"),
        layout=LAYOUT,
        leases=LeaseTable(ttl_s=1.0, clock=lambda: 0.0),
        storage=ListedStorage(num_slots, kept=kept, num_ways=num_ways),
    )


def _offered(tier: TierSchedulerConnector, *hashes: bytes) -> int:
    match = tier.match(request_id="r", params=None, num_prompt_tokens=99, num_local_tokens=0, block_hashes=(hashes,))
    assert match is not None
    return match.num_tokens // LAYOUT.block_size


def test_what_the_storage_kept_is_offered_and_goes_in_the_order_of_its_last_use() -> None:
    tier = _tier(2, kept=(A, B))

    assert _offered(tier, A, B) == 2
    assert _offered(tier) == 0
    assert tier.keep_evicted((7,), (C,)) == (B,), "of the chain A, B the tail was used longest ago"
    tier.check_integrity()


def test_what_finds_no_way_to_the_storage_is_lost_and_what_is_kept_needs_none() -> None:
    tier = _tier(kept=(A,), num_ways=1)

    assert tier.keep_evicted((1, 2, 3), (A, B, C)) == (C,)
    assert tier.take_orders().stores == (StoreOrder(block_ids=(2,), slots=(1,), block_hashes=(B,)),)
    assert tier.num_refused_blocks == 1


def test_a_full_tier_takes_no_way_for_what_has_no_slot() -> None:
    tier = _tier(1, kept=(A,), num_ways=1)
    assert _offered(tier, A) == 1

    assert tier.keep_evicted((1,), (B,)) == (B,), "the only slot is about to be read"
    assert _offered(tier) == 0
    assert tier.keep_evicted((1,), (B,)) == (A,)


def test_lost_content_is_offered_no_more_and_reported_once() -> None:
    tier = _tier(kept=(A, B))
    tier.slots_lost([LostSlot(slot=0, block_hash=A), LostSlot(slot=1, block_hash=A)])

    assert (_offered(tier, A), _offered(tier, B)) == (0, 1)
    assert tier.keep_evicted((7,), (C,)) == (A,)
    assert tier.keep_evicted((7,), (C,)) == ()
    tier.check_integrity()


def test_content_that_is_read_while_the_cache_is_reset_is_dropped_after_its_load() -> None:
    tier = _tier(kept=(A, B))
    assert _offered(tier, A) == 1
    tier.begin_load(request_id="r", params=None, first_block=0, block_ids=((5,),))

    assert tier.forget_evicted() == 2

    assert tier.take_orders().stores == (StoreOrder(dropped_slots=(1,)),)
    lease_ids = list(tier._leased)
    tier._leases.abort(lease_ids[0])
    tier.leases_ended(tier._leases.take_ended())
    assert tier.take_orders().stores == (StoreOrder(dropped_slots=(0,)),)
    assert not tier.keeps(A)
    tier.check_integrity()


def test_what_one_of_several_tiers_keeps_is_not_lost() -> None:
    small, large = _tier(1), _tier(3)
    tiers = ChainTier([small, large])

    assert tiers.keep_evicted((1, 2), (A, B)) == ()
    assert (small.keeps(A), large.keeps(A), tiers.keeps(A)) == (False, True, True)
    assert tiers.keep_evicted((3, 4), (C, b"d")) == (A,)
    assert tiers.forget_evicted() == 4
    assert not tiers.keeps(C)
