"""A disk tier under a real scheduler and a runner that shows wrong KV: hits, restarts, damage, a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contract.config import SchedulerConfig
from engine.contract.messages import GenerateRequest
from kv_transfer.fault_options import Fault, FaultOptions
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.requests import greedy_request
from tests.support.engine.tiered_engine import BLOCK_BYTES, TieredEngine, tiered_engine
from tests.support.scheduler.cache_mirror import mirrored
from tests.support.waiting import wait_until

NUM_TOKENS = 4
BOTH = ("host", "disk", "inproc")
ONLY_DISK = ("disk", "inproc")


def _request(name: str, *, start: int, num_tokens: int = 41) -> GenerateRequest:
    return greedy_request(name, range(start, start + num_tokens), max_tokens=NUM_TOKENS)


def _assert_right(engine: TieredEngine, request: GenerateRequest) -> None:
    assert engine.run(request)[request.request_id] == expected_tokens(request.prompt_token_ids, NUM_TOKENS)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("worker-*/*.kv"))


@pytest.mark.behaviour("K9")
def test_k9_what_left_the_cache_and_the_host_tier_comes_back_from_disk(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_host_blocks=9, num_disk_blocks=64, disk_path=tmp_path, order=BOTH) as engine:
        for start in (0, 100, 200, 300):
            _assert_right(engine, _request(f"from-{start}", start=start))
        before = engine.stats()

        num_computed = engine.num_computed_by(_request("again", start=0))

        after = engine.stats()
        assert num_computed == 41 - 40 + NUM_TOKENS - 1, "the last token of the prompt, and what is generated"
        assert after.tiers["host"]["loaded_blocks"] == before.tiers["host"]["loaded_blocks"]
        assert after.tiers["disk"]["hit_blocks"] - before.tiers["disk"]["hit_blocks"] == 10
        assert after.tiers["disk"]["loaded_bytes"] - before.tiers["disk"]["loaded_bytes"] == 10 * BLOCK_BYTES
        _assert_right(engine, _request("and again", start=0))
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_host_and_disk_may_each_supply_a_part(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_host_blocks=14, num_disk_blocks=64, disk_path=tmp_path, order=BOTH) as engine:
        for start in (0, 100, 200, 0, 300, 100, 0, 200):
            _assert_right(engine, _request(f"from-{start}", start=start))

        stats = engine.stats()
        assert stats.tiers["host"]["loaded_blocks"] > 0
        assert stats.tiers["disk"]["loaded_blocks"] > 0
        assert stats.num_blocks == stats.tiers["host"]["loaded_blocks"] + stats.tiers["disk"]["loaded_blocks"]
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_a_restart_finds_what_the_disk_kept(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        for start in (0, 100, 200):
            _assert_right(engine, _request(f"from-{start}", start=start))
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        assert engine.num_computed_by(_request("again", start=0)) == 41 - 40 + NUM_TOKENS - 1
        _assert_right(engine, _request("and again", start=0))
        assert engine.stats().tiers["disk"]["loaded_blocks"] >= 10
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_i1_damaged_files_change_no_token_and_are_offered_no_more(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        for start in (0, 100):
            _assert_right(engine, _request(f"from-{start}", start=start))
    files = _files(tmp_path)
    assert len(files) >= 10
    for number, file in enumerate(files):
        content = file.read_bytes()
        damaged = (content[:-1] + bytes([content[-1] ^ 1]), content[:7], None)[number % 3]
        if damaged is None:
            file.unlink()
        else:
            file.write_bytes(damaged)
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        for number, start in enumerate((0, 100, 0, 100)):
            _assert_right(engine, _request(f"r{number}", start=start))

        assert engine.stats().tiers["disk"]["lost_blocks"] > 0
        assert engine.stats().tiers["disk"]["loaded_blocks"] > 0, "what was computed anew is kept again"
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_a_folder_that_cannot_be_written_costs_nothing_but_the_tier(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        (folder,) = tmp_path.glob("worker-*")
        folder.rename(tmp_path / "taken-away")
        for number, start in enumerate((0, 100, 0)):
            _assert_right(engine, _request(f"r{number}", start=start))

        wait_until(lambda: engine.stats().tiers["disk"]["lost_blocks"] > 0)
        stats = engine.stats()
        assert stats.num_failed_loads == stats.num_transfers, "what was not written was not loaded either"
        engine.assert_rests()


@pytest.mark.behaviour("K9")
def test_k9_a_reset_of_the_prefix_cache_deletes_the_files(tmp_path: Path) -> None:
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK) as engine:
        for start in (0, 100):
            engine.run(_request(f"from-{start}", start=start))
        wait_until(lambda: len(_files(tmp_path)) == len(engine.tier.slots))

        dropped = engine.core.reset_prefix_cache(preempt_running=False)

        assert dropped is not None
        assert dropped.num_host_blocks > 0
        assert engine.num_computed_by(_request("again", start=0)) == 41 + NUM_TOKENS - 1
        engine.assert_rests()
    assert _files(tmp_path) == []


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.READ_HANGS])
@pytest.mark.behaviour("K9")
def test_k9_i1_loads_from_disk_that_go_wrong_change_no_token(tmp_path: Path, fault: Fault) -> None:
    faults = FaultOptions(seed=3, **{fault.value: 0.5})  # type: ignore[arg-type]
    with tiered_engine(num_blocks=12, num_disk_blocks=64, disk_path=tmp_path, order=ONLY_DISK, faults=faults) as engine:
        for number, start in enumerate((0, 100, 0, 200, 0, 100)):
            _assert_right(engine, _request(f"r{number}", start=start))
        engine.assert_rests()


@pytest.mark.behaviour("K9", "B4")
def test_k9_b4_a_mirror_follows_the_cache_though_the_disk_kept_more_than_it_saw(tmp_path: Path) -> None:
    """Blocks that an earlier worker left were never announced, so their removal is not announced either."""
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8, enable_cache_events=True)
    with tiered_engine(num_blocks=12, num_disk_blocks=24, disk_path=tmp_path, order=ONLY_DISK) as engine:
        for start in (0, 100, 200):
            engine.run(_request(f"from-{start}", start=start))
    with tiered_engine(
        num_blocks=12, num_disk_blocks=24, disk_path=tmp_path, order=ONLY_DISK, scheduler=scheduler
    ) as engine:
        for number, start in enumerate((300, 400, 0, 500, 300, 600)):
            engine.run(_request(f"r{number}", start=start))
            mirror = mirrored(engine.core.scheduler.cache_events_since(0))
            found = set(engine.core.scheduler._kv_cache._index._block_of) | set(engine.tier.slots._slot_of)
            assert mirror <= found
        assert engine.stats().tiers["disk"]["evicted_blocks"] > 24
        assert mirror == found, "nothing of the earlier worker is left"
