"""K9: what the prefix cache evicts is found in host memory and loaded back, and nothing changes but the time."""

from __future__ import annotations

import pytest

from engine.contract.block_hash import hash_chain, root_hash
from engine.contract.config import SchedulerConfig
from engine.contract.messages import GenerateRequest
from engine.contract.token_ids import TokenIds
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.engine.chain_runner import expected_kv, expected_tokens
from tests.support.engine.requests import greedy_request
from tests.support.engine.tiered_engine import BLOCK_BYTES, BLOCK_SIZE, TieredEngine, tiered_engine
from tests.support.scheduler.cache_mirror import mirrored

NUM_TOKENS = 4


def _request(name: str, *, start: int, num_tokens: int = 41) -> GenerateRequest:
    return greedy_request(name, range(start, start + num_tokens), max_tokens=NUM_TOKENS)


def _assert_right(engine: TieredEngine, request: GenerateRequest) -> None:
    assert engine.run(request)[request.request_id] == expected_tokens(request.prompt_token_ids, NUM_TOKENS)


@pytest.mark.behaviour("K9")
def test_k9_a_second_request_after_eviction_computes_nothing_that_the_tier_holds() -> None:
    with tiered_engine(num_blocks=16) as engine:
        first, other = _request("first", start=0), _request("other", start=100)
        _assert_right(engine, first)
        _assert_right(engine, other)
        assert engine.core.stats().scheduler.num_evicted_blocks >= 6

        num_computed = engine.num_computed_by(_request("again", start=0))

        assert num_computed == 41 - 40 + NUM_TOKENS - 1, "the last token of the prompt, and what is generated"
        _assert_right(engine, _request("and again", start=0))
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_counters_say_what_was_stored_found_loaded_and_evicted() -> None:
    with tiered_engine(num_blocks=12, num_host_blocks=9) as engine:
        for start in (0, 100):
            engine.run(_request(f"from-{start}", start=start))
        stored = engine.stats().tiers["host"]
        assert (stored["stored_blocks"], stored["evicted_blocks"]) == (10, 1)
        assert (stored["stored_bytes"], stored["evicted_bytes"]) == (10 * BLOCK_BYTES, BLOCK_BYTES)

        _assert_right(engine, _request("again", start=0))

        stats, of_tier = engine.stats(), engine.stats().tiers["host"]
        assert of_tier["hit_blocks"] == of_tier["loaded_blocks"] == stats.num_blocks == 9
        assert of_tier["loaded_bytes"] == stats.num_bytes == 9 * BLOCK_BYTES
        assert of_tier["refused_blocks"] == 10, "every slot was being read when room was made for the load"
        assert (of_tier["stored_blocks"], of_tier["evicted_blocks"]) == (10, 1)
        assert (stats.num_leases_granted, stats.num_failed_loads) == (0, 0)
        assert engine.core.stats().scheduler.remote_hit_tokens == 9 * BLOCK_SIZE
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_loaded_tokens_are_reported_as_cached() -> None:
    with tiered_engine(num_blocks=12) as engine:
        engine.run(_request("first", start=0))
        engine.run(_request("other", start=100))
        engine.core.add_request(_request("again", start=0))
        deltas = []
        while engine.core.has_unfinished():
            deltas += engine.core.step().deltas()
            engine.core.wake.wait(0.001)

        assert (deltas[0].num_cached_tokens, deltas[0].num_remote_tokens) == (40, 36)


@pytest.mark.behaviour("K9")
def test_k9_the_tier_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    with tiered_engine(num_blocks=12, num_host_blocks=24) as engine:
        for start in (0, 100, 200, 0, 300, 400):
            _assert_right(engine, _request(f"from-{start}", start=start))
        assert len(engine.tier.slots) <= 24

        assert engine.num_computed_by(_request("recent", start=0)) < 41
        assert engine.num_computed_by(_request("old", start=200)) >= 41
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_a_preempted_request_finds_its_own_output_in_the_tier() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, watermark=0.0)
    requests = [
        greedy_request(f"r{number}", range(50 * number, 50 * number + 12), max_tokens=40) for number in range(4)
    ]
    with tiered_engine(num_blocks=24, num_host_blocks=64, scheduler=scheduler) as engine:
        outputs = engine.run(*requests)

        for request in requests:
            assert outputs[request.request_id] == expected_tokens(request.prompt_token_ids, 40)
        assert engine.core.stats().scheduler.num_preemptions > 0
        assert engine.stats().tiers["host"]["loaded_blocks"] > 0
        engine.assert_rests()


@pytest.mark.behaviour("K9")
@pytest.mark.known_failure(20)
def test_k9_what_a_preempted_request_leaves_is_kept_under_the_address_of_its_tokens() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4, watermark=0.0)
    requests = [
        greedy_request(f"r{number}", range(50 * number, 50 * number + 12), max_tokens=40) for number in range(4)
    ]
    with tiered_engine(num_blocks=24, num_host_blocks=64, scheduler=scheduler) as engine:
        outputs = engine.run(*requests)
        assert engine.core.stats().scheduler.num_preemptions > 0

        num_kept = 0
        for request in requests:
            tokens = [*request.prompt_token_ids, *outputs[request.request_id]]
            kv = expected_kv(tokens).reshape(-1, BLOCK_SIZE)
            for block, block_hash in zip(
                kv, hash_chain(root_hash(), TokenIds.of(tuple(tokens)).array, BLOCK_SIZE), strict=True
            ):
                content = engine.kept_content(block_hash)
                assert content in (None, block.tobytes())
                num_kept += content is not None
        assert num_kept == len(engine.tier.slots) > 0, "nothing else is kept"


@pytest.mark.behaviour("K9")
def test_k9_a_reset_of_the_prefix_cache_empties_the_tier() -> None:
    with tiered_engine(num_blocks=12) as engine:
        engine.run(_request("first", start=0))
        engine.run(_request("other", start=100))

        num_kept = len(engine.tier.slots)
        dropped = engine.core.reset_prefix_cache(preempt_running=False)

        assert dropped is not None
        assert (dropped.num_blocks > 0, dropped.num_host_blocks) == (True, num_kept)
        assert num_kept > 0
        assert len(engine.tier.slots) == 0
        assert engine.num_computed_by(_request("again", start=0)) == 41 + NUM_TOKENS - 1
        engine.assert_rests()


@pytest.mark.behaviour("K9", "B4")
def test_k9_b4_a_mirror_of_the_cache_follows_the_tier() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, enable_cache_events=True)
    with tiered_engine(num_blocks=12, num_host_blocks=24, scheduler=scheduler) as engine:
        for number, start in enumerate((0, 100, 0, 200, 300, 0, 400, 100)):
            engine.run(_request(f"r{number}", start=start))
            if number == 5:
                engine.core.scheduler.reset_prefix_cache()
            mirror = mirrored(engine.core.scheduler.cache_events_since(0))
            assert mirror == set(engine.core.scheduler._kv_cache._index._block_of) | set(engine.tier.slots._slot_of)
        assert engine.stats().tiers["host"]["loaded_blocks"] > 0
        assert engine.stats().tiers["host"]["evicted_blocks"] > 0


@pytest.mark.behaviour("K9", "I1")
@pytest.mark.parametrize("rate", (0.1, 1.0))
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.READ_HANGS])
def test_k9_i1_loads_from_the_tier_that_go_wrong_change_no_token(fault: Fault, rate: float) -> None:
    faults = FaultOptions(seed=3, **{fault.value: rate})  # type: ignore[arg-type]
    with tiered_engine(num_blocks=12, faults=faults) as engine:
        for number, start in enumerate((0, 100, 0, 200, 0, 100, 200, 0)):
            _assert_right(engine, _request(f"r{number}", start=start))
        engine.assert_rests()
        if rate == 1.0 and fault is not Fault.PEER_REPLACED:
            assert engine.stats().num_injected_faults > 0


@pytest.mark.behaviour("K9")
def test_k9_one_flipped_bit_costs_one_block() -> None:
    faults = FaultOptions(schedule=(ScheduledFault(fault=Fault.BIT_FLIPS, nth=1),))
    with tiered_engine(num_blocks=12, faults=faults) as engine:
        engine.run(_request("first", start=0))
        engine.run(_request("other", start=100))
        again = _request("again", start=0)
        before = engine.runner.num_computed_positions
        _assert_right(engine, again)

        assert engine.stats().num_corrupt_blocks == 1
        assert engine.runner.num_computed_positions - before <= 1 + NUM_TOKENS - 1 + 2 * BLOCK_SIZE
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_a_load_that_hangs_is_computed_here_and_its_destination_stays_held() -> None:
    with tiered_engine(num_blocks=48, faults=FaultOptions(read_hangs=1.0)) as engine:
        for number in range(5):
            _assert_right(engine, _request(f"r{number}", start=100 * number))
        _assert_right(engine, _request("again", start=0))

        assert engine.stats().num_stalled_loads == 1
        assert engine.core.load_report().num_held_blocks > 0
        engine.core.close()
        engine.core.collect()
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_an_aborted_load_frees_everything() -> None:
    with tiered_engine(num_blocks=12) as engine:
        engine.run(_request("first", start=0))
        engine.run(_request("other", start=100))
        engine.core.add_request(_request("again", start=0))
        engine.core.step()
        engine.core.abort(["again"])
        while engine.core.scheduler.stats().num_free_blocks < 12:
            engine.core.step()
            engine.core.wake.wait(0.01)
            engine.core.wake.clear()

        engine.assert_rests()
        _assert_right(engine, _request("and again", start=0))
