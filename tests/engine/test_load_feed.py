"""When an engine reports its load again."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel
from engine.frontend.engine_core import EngineCore
from engine.frontend.feeds import LOAD_PERIOD_S, LoadFeed
from kv_transfer.connector import ConnectorBuilder
from tests.support.clock import ManualClock
from tests.support.engine.chain_engine import DEFAULT_SCHEDULER, chain_engine
from tests.support.engine.disaggregated import joined_cores
from tests.support.engine.requests import greedy_request


def start(core: EngineCore, *names: str) -> None:
    for name in names:
        core.add_request(greedy_request(name, [1, 2, 3], max_tokens=4))
    core.step()


def test_steps_in_which_requests_only_grow_share_a_report_until_it_is_old(core: EngineCore) -> None:
    clock = ManualClock()
    feed = LoadFeed(core, clock=clock)
    start(core, "a")
    first = feed.after_step()

    core.step()
    second = feed.after_step()
    clock.advance(LOAD_PERIOD_S)
    core.step()
    third = feed.after_step()

    assert second is first
    assert third.counters["num_generated_tokens"] == 3


def test_what_comes_starts_or_ends_is_told_at_once(core: EngineCore) -> None:
    feed = LoadFeed(core, clock=ManualClock())
    start(core, "a")
    assert feed.after_step().num_running == 1

    core.add_request(greedy_request("b", [1, 2, 3], max_tokens=4))
    assert feed.after_step().num_waiting == 1
    core.step()
    assert feed.after_step().num_running == 2
    core.abort(["b"])
    assert feed.after_step().num_running == 1
    while core.has_unfinished():
        core.step()
    assert feed.after_step().is_empty


def test_a_preempted_request_is_told_at_once() -> None:
    core = chain_engine(num_blocks=6, scheduler=replace(DEFAULT_SCHEDULER, max_num_seqs=2))
    feed = LoadFeed(core, clock=ManualClock())
    for name in "ab":
        core.add_request(greedy_request(name, [1] * 4, max_tokens=20))
    while not core.stats().scheduler.num_preemptions:
        core.step()
        report = feed.after_step()
        assert report.num_running == core.stats().scheduler.num_running


def test_a_load_is_told_when_it_begins_and_when_it_ends() -> None:
    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(build_connector=build_connector)

    request = greedy_request("a", range(20), max_tokens=4)
    with joined_cores(build, build) as (prefill, decode):
        prefill.add_request(replace(request, hand_over=True))
        deltas = [delta for _ in range(4) for delta in prefill.step().deltas()]
        (handed_over,) = (delta for delta in deltas if delta.kv_transfer is not None)
        feed = LoadFeed(decode, clock=ManualClock())
        decode.add_request(replace(request, kv_transfer=handed_over.kv_transfer))
        assert feed.after_step().num_waiting == 1

        while not decode.stats().scheduler.num_loading:
            decode.step()
        assert feed.after_step().num_loading == 1
        while decode.stats().scheduler.num_loading:
            decode.step()
        assert feed.after_step().num_loading == 0


def test_what_steps_take_is_told_once_it_is_known(core: EngineCore) -> None:
    model = StepTimeModel(base_s=0.5, num_steps=3)

    assert core.load_report().step_time == UNKNOWN_STEP_TIME
    core.scheduler._timer._fit.model = model

    assert core.load_report().step_time == model
