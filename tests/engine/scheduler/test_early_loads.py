"""Loads that begin before their prompt is computed: the blocks held for them, their order, and when they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.errors import RequestRefusedError
from engine.contract.messages import GenerateRequest
from kv_transfer.params import PROTOCOL_VERSION, KVStreamParams, PeerIdentity
from tests.support.router.decode_world import decode_world, first_token
from tests.support.scheduler.scheduler_requests import fresh_prompt, make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld
from tests.support.scheduler.scripted_connector import PEER

TIMEOUT_S = 30.0


def announce(world: SchedulerWorld, request_id: str, prompt: tuple[int, ...], *, client_id: str = "") -> str:
    """Tell the scheduler of a request that is to come; returns the id of its stream."""
    stream = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=PEER, timeout_s=TIMEOUT_S)
    before = set(world.connector.open_streams)
    world.announce(replace(make_request(request_id, prompt), kv_stream=stream, client_id=client_id))
    world.run()
    (stream_id,) = set(world.connector.open_streams) - before
    return stream_id


def come(world: SchedulerWorld, request_id: str, prompt: tuple[int, ...], **changes: object) -> GenerateRequest:
    """The request itself comes."""
    request = make_request(
        request_id, prompt, max_tokens=4, output=first_token(prompt), kv_transfer=world.connector.offer(prompt)
    )
    request = replace(request, **changes)  # type: ignore[arg-type]
    world.add(request)
    world.step()
    return request


def test_request_takes_over_the_blocks_and_the_stream_that_were_begun_for_it() -> None:
    world = decode_world()
    prompt = fresh_prompt(20)
    stream_id = announce(world, "a", prompt)
    stream = world.connector.open_streams[stream_id]
    num_allocated = world.scheduler.stats().num_allocated_blocks

    come(world, "a", prompt)

    load = world.connector.open_loads["a"]
    assert (load.stream_id, load.block_ids) == (stream_id, stream.block_ids)
    assert world.scheduler.stats().num_allocated_blocks == num_allocated
    world.end_load("a")
    world.run()
    world.check_output("a")
    assert world.scheduler.stats().num_free_blocks == world.scheduler.stats().num_blocks


def test_announced_request_says_nothing_and_counts_as_no_request() -> None:
    world = decode_world()
    announce(world, "a", fresh_prompt(20))

    stats = world.scheduler.stats()
    assert (stats.num_requests, stats.num_waiting, stats.num_loading) == (0, 0, 0)
    assert stats.num_early_blocks == stats.num_held_blocks > 0
    assert not world.scheduler.has_unfinished()
    assert not world.scheduler.has_work()


def test_only_what_is_not_held_locally_is_streamed() -> None:
    world = decode_world()
    prompt = fresh_prompt(16)
    world.add(make_request("earlier", prompt[:9], max_tokens=1))
    world.run()

    stream = world.connector.open_streams[announce(world, "a", prompt)]

    assert (stream.first_block, len(stream.block_ids)) == (2, 2)


@pytest.mark.known_failure(5)
def test_request_that_does_not_come_in_time_is_forgotten() -> None:
    """Every hold has a deadline, and an idle engine keeps it."""
    world = decode_world()
    announce(world, "a", fresh_prompt(20))
    assert world.scheduler.idle_timeout_s() == TIMEOUT_S

    world.now_s += TIMEOUT_S
    assert world.scheduler.has_work()
    world.run()

    stats = world.scheduler.stats()
    assert (stats.num_free_blocks, stats.num_early_blocks) == (stats.num_blocks, 0)
    assert not world.connector.open_streams
    assert world.scheduler.idle_timeout_s() is None


@pytest.mark.parametrize("how", ["abort", "front end gone", "reset", "drain"])
def test_nothing_is_held_for_a_request_that_will_not_come(how: str) -> None:
    world = decode_world()
    announce(world, "a", fresh_prompt(20), client_id="router")

    if how == "abort":
        assert world.scheduler.abort("a")
    elif how == "reset":
        assert world.scheduler.reset_prefix_cache()
    elif how == "drain":
        assert world.scheduler.move_out() == 0
    else:
        world.scheduler.forget_client("router")
    world.run()

    assert world.scheduler.stats().num_free_blocks == world.scheduler.stats().num_blocks
    assert not world.connector.open_streams


@pytest.mark.known_failure(4)
def test_blocks_under_an_early_read_come_back_when_it_ended() -> None:
    """The read writes wherever its destination went meanwhile."""
    world = decode_world()
    stream_id = announce(world, "a", fresh_prompt(20))
    world.begin_early_read(stream_id)

    world.scheduler.abort("a")
    world.run()
    assert world.scheduler.stats().num_early_blocks == 0
    assert world.scheduler.stats().num_held_blocks > 0

    world.end_early_read(stream_id)
    assert world.scheduler.stats().num_held_blocks == 0


def test_request_that_waits_for_blocks_under_an_early_read_is_not_stuck() -> None:
    """Whoever watches the engine must not replace it: the read will end."""
    world = decode_world(num_blocks=8)
    stream_id = announce(world, "a", fresh_prompt(24))
    world.begin_early_read(stream_id)
    world.add(make_request("here", 20, max_tokens=4))
    world.run()
    assert world.scheduler.stats().num_waiting == 1

    assert not world.scheduler.is_stuck()

    world.end_early_read(stream_id)
    world.run()
    world.check_output("here")


@pytest.mark.known_failure(7)
def test_early_load_gives_way_to_a_request_that_lacks_its_blocks() -> None:
    """Its prefill may itself wait for blocks that are leased to that very request."""
    world = decode_world(num_blocks=10)
    announce(world, "early", fresh_prompt(24))

    world.add(make_request("here", 20, max_tokens=4))
    world.run()

    world.check_output("here")
    stats = world.scheduler.stats()
    assert (stats.num_dropped_early_loads, stats.num_preemptions) == (1, 0)


def test_running_request_that_grows_takes_the_blocks_of_an_early_load_and_preempts_nobody() -> None:
    world = decode_world(num_blocks=10)
    world.add(make_request("grows", 8, max_tokens=28))
    world.step()
    announced = replace(
        make_request("early", 16), kv_stream=KVStreamParams(protocol_version=PROTOCOL_VERSION, source=PEER, timeout_s=9)
    )
    world.announce(announced)
    world.step()
    assert world.connector.open_streams

    world.run()

    world.check_output("grows")
    stats = world.scheduler.stats()
    assert (stats.num_dropped_early_loads, stats.num_preemptions) == (1, 0)


def test_early_load_waits_while_there_is_no_room_to_spare() -> None:
    world = decode_world(num_blocks=10)
    world.add(make_request("here", 24, max_tokens=8))
    world.step()
    stream = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=PEER, timeout_s=TIMEOUT_S)
    world.announce(replace(make_request("early", 20), kv_stream=stream))
    world.step()
    assert not world.connector.open_streams

    world.run()
    assert world.connector.open_streams


def test_request_that_comes_before_its_early_load_got_room_is_loaded_plainly() -> None:
    world = decode_world(num_blocks=10)
    world.add(make_request("here", 20, max_tokens=8))
    world.step()
    prompt = fresh_prompt(20)
    stream = KVStreamParams(protocol_version=PROTOCOL_VERSION, source=PEER, timeout_s=TIMEOUT_S)
    world.announce(replace(make_request("a", prompt), kv_stream=stream))
    world.step()
    world.abort("here")

    come(world, "a", prompt)

    assert world.connector.open_loads["a"].stream_id is None
    assert world.scheduler.idle_timeout_s() is None


@pytest.mark.parametrize("difference", ["source", "prompt", "salt"])
def test_early_load_of_something_else_is_dropped_and_the_request_loaded_plainly(difference: str) -> None:
    world = decode_world()
    prompt = fresh_prompt(20)
    stream_id = announce(world, "a", prompt)
    world.begin_early_read(stream_id)

    other = (*prompt[:19], 7) if difference == "prompt" else prompt
    offer = world.connector.offer(other)
    if difference == "source":
        offer = replace(offer, source=PeerIdentity(engine_id="another", incarnation="1"))
    salt = "pepper" if difference == "salt" else None
    come(world, "a", other, kv_transfer=offer, cache_salt=salt)

    load = world.connector.open_loads["a"]
    assert load.stream_id is None
    assert not set(load.block_ids) & set(world.connector.open_streams[stream_id].block_ids)
    world.end_load("a")
    world.end_early_read(stream_id)
    world.run()
    world.check_output("a")


def test_request_that_is_complete_on_arrival_leaves_nothing_of_its_early_load() -> None:
    world = decode_world()
    prompt = fresh_prompt(20)
    announce(world, "a", prompt)
    request = make_request(
        "a", prompt, max_tokens=1, output=first_token(prompt), kv_transfer=world.connector.offer(prompt)
    )

    world.add(request)

    assert not world.connector.open_streams
    assert world.scheduler.stats().num_free_blocks == world.scheduler.stats().num_blocks


def test_second_announcement_replaces_the_first() -> None:
    """The prefill failed and is tried elsewhere."""
    world = decode_world()
    prompt = fresh_prompt(20)
    first = announce(world, "a", prompt)

    second = announce(world, "a", prompt)

    assert list(world.connector.open_streams) == [second] != [first]


def test_announcements_are_bounded_and_refused_where_nothing_can_be_streamed() -> None:
    world = decode_world(seqs=1)
    announce(world, "a", fresh_prompt(8))
    with pytest.raises(RequestRefusedError) as refusal:
        announce(world, "b", fresh_prompt(8))
    assert refusal.value.code == "queue_full"

    world.connector.can_stream = False
    with pytest.raises(RequestRefusedError) as refusal:
        announce(world, "a", fresh_prompt(8))
    assert refusal.value.code == "cannot_stream"


# ---- the prefill side


def test_blocks_of_a_prompt_are_announced_chunk_by_chunk() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=16)
    world.add(make_request("a", 22, max_tokens=9, hand_over=True))
    announced = []
    for _ in range(2):
        world.step()
        announced.append(len(world.connector.announced["a"][0]))
    world.run()

    assert announced == [2, 4]
    assert world.connector.announced == {}
    assert world.connector.withdrawn == []
    (lease_id,) = world.connector.open_leases
    world.end_lease(lease_id)


def test_preempted_prefill_withdraws_what_it_announced() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=16, enable_prefix_caching=False)
    world.add(make_request("a", 22, max_tokens=9, hand_over=True))
    world.step()
    assert world.connector.announced["a"]

    world.scheduler.reset_prefix_cache(preempt_running=True)
    assert world.connector.withdrawn == ["a"]
    world.run()

    world.check_output("a")


def test_aborted_prefill_withdraws_what_it_announced() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=16)
    world.add(make_request("a", 22, max_tokens=9, hand_over=True))
    world.step()

    world.abort("a")

    assert (world.connector.announced, world.connector.withdrawn) == ({}, ["a"])


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_early_loads_do_not_give_way_within_a_step(is_handed_over: bool) -> None:
    """The room would be free only after the step, when the request can begin in any case."""
    world = SchedulerWorld(make_config(), num_blocks=16)
    announce(world, "early", fresh_prompt(32))
    num_early = world.scheduler.stats().num_early_blocks
    assert num_early
    world.add(make_request("busy", fresh_prompt(20), max_tokens=1))
    world.schedule()
    prompt = fresh_prompt(32)
    offer = world.connector.offer(prompt) if is_handed_over else None
    output = first_token(prompt) if is_handed_over else ()
    world.add(make_request("other", prompt, max_tokens=4, output=output, kv_transfer=offer))

    world.begin_loads()
    assert world.scheduler.stats().num_early_blocks == num_early
    assert not world.loads()

    world.complete_step()
    world.schedule()
    assert not world.scheduler.stats().num_early_blocks
    assert ("other" in world.loads()) == is_handed_over
