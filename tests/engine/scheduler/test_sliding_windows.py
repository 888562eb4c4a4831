"""KV cache groups with windows: each has its own block table, and frees blocks that have left its window (B7)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.contract.block_hash import NO_KEYS_ROOT, BlockHash, hash_chain, root_hash
from engine.contract.errors import PromptTooLongError
from engine.contract.token_ids import TokenIds
from engine.scheduler.blocks.kv_cache_manager import KVCacheManager
from kv_transfer.cache_groups import ABSENT_BLOCK, CacheGroups
from tests.engine.scheduler.test_early_loads import announce
from tests.support.router.decode_world import first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld

MIXED = (None, 8, 8)
"""One group that sees everything and two with a window of two blocks."""


def windowed_world(
    windows: Sequence[int | None] = MIXED, *, num_blocks: int = 96, budget: int = 8, **options: object
) -> SchedulerWorld:
    """A world whose prompts are computed in chunks as long as a window."""
    num_tier_slots = int(options.pop("num_tier_slots", 0))  # type: ignore[call-overload]
    return SchedulerWorld(
        make_config(budget=budget, **options),
        num_blocks=num_blocks,
        max_model_len=400,
        windows=windows,
        num_tier_slots=num_tier_slots,
    )


def held(world: SchedulerWorld) -> tuple[int, ...]:
    """Blocks held, by group."""
    return world.scheduler.stats().held_blocks_by_group


def add_loaded(world: SchedulerWorld, prompt: tuple[int, ...], *, lent: int | None = None) -> None:
    """A request of whose prompt a peer hands over everything, or the first ``lent`` tokens, and whose load has
    begun.
    """
    offer = world.connector.offer(prompt[:lent])
    world.add(make_request("a", prompt, max_tokens=4, output=first_token(prompt), kv_transfer=offer))
    world.step()


@pytest.mark.behaviour("B7")
def test_b7_a_stream_holds_the_blocks_of_its_window_and_no_more() -> None:
    world = windowed_world()
    world.add(make_request("a", 40, max_tokens=30))
    most = world.scheduler._kv_cache.needs.most_blocks[1]
    assert most == (8 + 8) // 4 + 1

    while world.scheduler.has_work():
        world.step()
        world.scheduler.check_integrity()
        full, *windows = held(world)
        if world.scheduler.stats().num_running:
            num_computed = int(world.scheduler._table.num_computed[0])
            assert full >= num_computed // 4
            assert max(windows) <= most
            if num_computed > 40:
                assert set(windows) <= {2, 3}, "eight tokens lie in two or three blocks of four"

    world.check_output("a")
    assert held(world) == (0, 0, 0)


@pytest.mark.behaviour("B7")
def test_b7_of_a_model_whose_layers_all_have_windows_nothing_grows() -> None:
    world = windowed_world((8,), num_blocks=5)

    world.add(make_request("a", 200, max_tokens=100))
    world.run()

    world.check_output("a")
    assert world.scheduler.stats().num_preemptions == 0
    assert len(world.endings["a"].token_ids) == 100, "a cache of 20 tokens, a stream of 300"


def most_streams_at_once(windows: tuple[int | None, ...]) -> int:
    """Run streams of 16 windows each in the same memory, without a preemption."""
    world = windowed_world(windows, num_blocks=1100, budget=256, seqs=16, long_prefill_token_threshold=16)
    for number in range(10):
        world.add(make_request(f"r{number}", 256, max_tokens=8))
    most = 0
    while world.scheduler.has_work():
        world.step()
        most = max(most, world.scheduler.stats().num_running)
    assert world.scheduler.stats().num_preemptions == 0
    return most


@pytest.mark.behaviour("B7")
def test_b7_four_times_as_many_long_streams_fit_where_most_layers_have_windows() -> None:
    """Of 28 layers 4 have no window and 24 have one: one group in seven has no window."""
    assert most_streams_at_once((None,) * 7) == 2
    assert most_streams_at_once((None, *[16] * 6)) >= 4 * 2


@pytest.mark.behaviour("B7")
def test_b7_status_tells_window_blocks_apart() -> None:
    world = windowed_world()
    world.add(make_request("a", 40))
    for _ in range(6):
        world.step()

    stats = world.scheduler.stats()

    assert stats.held_blocks_by_group == (11, 3, 3)
    assert stats.num_window_blocks == 6
    assert stats.num_held_blocks == 17


@pytest.mark.behaviour("B7")
def test_prompt_that_only_windows_let_fit_is_accepted() -> None:
    """The group without a window has 20 blocks left when the others hold their windows."""
    world = windowed_world((None, 8), num_blocks=25)
    longest = CacheGroups((None, 8), 4).max_tokens(25, chunk_tokens=8)
    assert longest == 80

    world.add(make_request("a", 80, max_tokens=1))
    with pytest.raises(PromptTooLongError):
        world.add(make_request("b", 81, max_tokens=1))

    world.run()
    world.check_output("a")


# ---- the prefix cache


def published(manager: KVCacheManager, hashes: Sequence[BlockHash], indices: Sequence[range]) -> None:
    """Publish and give back some blocks of each group."""
    for group, of_group in enumerate(indices):
        for index in of_group:
            (block_id,) = manager.allocate(1)
            tables = [[ABSENT_BLOCK]] * manager.groups.num_groups
            tables[group] = [block_id]
            manager.publish(tables, [hashes[index]], NO_KEYS_ROOT, b"")
            manager.release([block_id])


@pytest.mark.parametrize(
    "of_full, of_window, num_blocks",
    [
        (range(6), range(4, 6), 6),
        (range(6), range(6), 6),
        (range(6), range(5, 6), 0),
        (range(6), range(2, 5), 5),
        (range(5), range(4, 6), 0),
        (range(3), range(6), 3),
        (range(6), range(2), 2),
        (range(1, 6), range(6), 0),
    ],
)
@pytest.mark.behaviour("B7")
def test_prefix_hit_needs_every_full_block_and_those_that_the_window_behind_it_sees(
    of_full: range, of_window: range, num_blocks: int
) -> None:
    manager = KVCacheManager(num_blocks=32, block_size=4, windows=(None, 9))
    hashes = hash_chain(root_hash(), TokenIds.of(range(24)).array, 4)
    published(manager, hashes, (of_full, of_window))

    prefix = manager.prefix(hashes)

    assert prefix.num_blocks == num_blocks
    assert ABSENT_BLOCK not in prefix.tables[0]
    assert prefix.tables[1].count(ABSENT_BLOCK) == max(num_blocks - 2, 0)


@pytest.mark.behaviour("B7")
def test_hit_holds_of_a_window_only_what_is_seen_from_its_end() -> None:
    world = windowed_world()
    prompt = fresh_prompt(40)
    world.add(make_request("first", prompt, max_tokens=1))
    world.run()

    world.add(make_request("second", prompt, max_tokens=1))
    world.run()

    world.check_output("second")
    assert world.endings["second"].num_cached_tokens == 36
    assert world.runner.num_computed_positions == 40 + 4


@pytest.mark.behaviour("B7")
def test_cache_events_tell_of_the_first_group_alone() -> None:
    world = windowed_world(num_blocks=33, enable_cache_events=True)
    for name in ("a", "b", "c"):
        world.add(make_request(name, 24, max_tokens=1))
        world.run()

    events = world.scheduler.cache_events_since(0).events

    assert {len(event.block_hash) for event in events} == {16}  # type: ignore[union-attr]
    assert len(world.scheduler.cache_snapshot().stored) == 8 * sum(
        block_hash in world.scheduler._kv_cache._index
        for block_hash in list(world.scheduler._kv_cache._index)
        if len(block_hash) == 16
    )


# ---- hand-over


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K7")
def test_k7_the_lease_pins_of_a_window_what_the_last_token_sees() -> None:
    world = windowed_world()

    world.add(make_request("a", 38, hand_over=True))
    world.run()

    last = world.endings["a"].last
    assert last is not None
    assert last.kv_transfer is not None
    assert [len(block_ids) for block_ids in last.kv_transfer.block_ids] == [10, 3, 3]
    assert world.scheduler.stats().num_leased_blocks == 16
    world.end_lease(last.kv_transfer.lease_id)
    assert held(world) == (0, 0, 0)


@pytest.mark.behaviour("B7")
def test_streamed_prompt_announces_only_what_its_lease_will_cover() -> None:
    world = windowed_world((None, 8))

    world.add(make_request("a", 32, hand_over=True))
    told = []
    for _ in range(3):
        world.step()
        told.append([len([each for each in table if each != ABSENT_BLOCK]) for table in world.connector.announced["a"]])

    assert told == [[2, 0], [4, 0], [6, 0]]
    world.run()
    last = world.endings["a"].last
    assert last is not None
    assert last.kv_transfer is not None
    assert [len(block_ids) for block_ids in last.kv_transfer.block_ids] == [8, 2]


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K2")
def test_k2_a_load_brings_of_a_window_what_the_next_token_sees() -> None:
    world = windowed_world()
    add_loaded(world, fresh_prompt(40))

    load = world.connector.open_loads["a"]
    assert [sum(each != ABSENT_BLOCK for each in table) for table in load.tables] == [10, 2, 2]
    world.end_load("a")
    world.run()

    world.check_output("a")
    assert world.runner.num_computed_positions == 3, "nothing of the prompt"


@pytest.mark.behaviour("B7")
def test_hand_over_that_lacks_a_window_of_what_is_known_here_is_not_loaded() -> None:
    """A source that computed more than is known here keeps the window of where it stands."""
    world = windowed_world()
    prompt = fresh_prompt(40)
    offer = world.connector.offer(prompt)
    world.add(make_request("a", prompt[:20], max_tokens=4, kv_transfer=offer))

    world.run()

    world.check_output("a")
    assert world.connector.released == [offer.lease_id]


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K4")
@pytest.mark.parametrize("failed, first_position", [([0], 0), ([13], 0)])
def test_k4_damage_whose_window_was_not_loaded_has_all_computed(failed: list[int], first_position: int) -> None:
    """Block 0 is of the group that sees everything, block 13 the last one of a window."""
    world = windowed_world()
    add_loaded(world, fresh_prompt(40))

    world.end_load("a", failed)
    output = world.step()

    assert output.first_positions.tolist() == [first_position]
    world.run()
    world.check_output("a")
    stats = world.scheduler.stats()
    assert (stats.failed_blocks, stats.recomputed_tokens) == (1, 40)


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K4")
def test_k4_damage_behind_a_local_prefix_is_computed_from_that_prefix_on() -> None:
    world = windowed_world()
    prompt = fresh_prompt(40)
    world.add(make_request("before", prompt[:17], max_tokens=1))
    world.run()
    add_loaded(world, prompt)

    world.end_load("a", [0])
    output = world.step()

    assert output.first_positions.tolist() == [16]
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("B7")
@pytest.mark.behaviour("K4")
def test_k4_damage_within_the_window_costs_no_more_than_itself() -> None:
    world = windowed_world((None, 64), budget=64)
    add_loaded(world, fresh_prompt(24))

    world.end_load("a", [2, 3])
    output = world.step()

    assert (output.first_positions.tolist(), output.num_scheduled_tokens.tolist()) == ([4], [4])
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("B7")
def test_early_load_gives_way_to_a_hand_over_whose_window_begins_before_its_own() -> None:
    world = windowed_world()
    prompt = fresh_prompt(40)
    announce(world, "a", prompt)
    offer = world.connector.offer(prompt[:16])

    world.add(make_request("a", prompt, max_tokens=4, output=first_token(prompt), kv_transfer=offer))
    world.step()

    load = world.connector.open_loads["a"]
    assert load.stream_id is None
    world.end_load("a")
    world.run()
    world.check_output("a")


@pytest.mark.behaviour("B7")
def test_live_request_moves_with_the_blocks_of_its_windows() -> None:
    world = windowed_world()
    prompt = fresh_prompt(40)
    world.add(make_request("a", prompt, max_tokens=20))
    for _ in range(10):
        world.step()

    assert world.move_out() == 1

    ending = world.endings["a"]
    assert ending.last is not None
    params = ending.last.kv_transfer
    assert params is not None
    assert [len(block_ids) for block_ids in params.block_ids] == [-(-params.num_tokens // 4), 3, 3]
    world.end_lease(params.lease_id)
    assert held(world) == (0, 0, 0)


@pytest.mark.behaviour("B7")
def test_preempted_stream_takes_up_its_windows_again() -> None:
    world = windowed_world((None, 8), num_blocks=27)
    for name in ("a", "b"):
        world.add(make_request(name, 24, max_tokens=30))

    world.run()

    assert world.scheduler.stats().num_preemptions > 0
    for name in ("a", "b"):
        world.check_output(name)
