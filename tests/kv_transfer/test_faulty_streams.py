"""Streamed hand-overs that go wrong: right answers, each once, and nothing held afterwards (I1, I2, I3)."""

from __future__ import annotations

import random

import pytest

from engine.contract.messages import GenerateRequest
from engine.frontend.engine_core import EngineCore
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.engine.chain_runner import VOCAB_SIZE, expected_tokens
from tests.support.engine.requests import greedy_request
from tests.support.kv.faulty_pair import Answers, FaultyPair, faulty_pair
from tests.support.kv.streamed_pair import run_streamed, until_read_early

CHUNK_TOKENS = 16
NUM_REQUESTS = 60
NUM_TOKENS = 4
NO_FAULTS = FaultOptions()


def _requests(num_requests: int = NUM_REQUESTS) -> list[GenerateRequest]:
    rng = random.Random(7)
    return [
        greedy_request(
            f"request-{number}",
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 100))],
            max_tokens=NUM_TOKENS,
        )
        for number in range(num_requests)
    ]


def _assert_right(answers: Answers, requests: list[GenerateRequest], aborted: set[str]) -> None:
    assert answers.errors == {}
    for request in requests:
        if request.request_id not in aborted:
            assert answers.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, NUM_TOKENS)
            assert answers.num_ends[request.request_id] == 1


def _assert_nothing_is_held(pair: FaultyPair[EngineCore]) -> None:
    for core in (pair.prefill, pair.decode):
        core.scheduler.check_integrity()
        load = core.load_report()
        assert (load.num_running, load.num_waiting, load.num_loading, load.num_early_blocks) == (0, 0, 0, 0)
        assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize("async_scheduling", (False, True))
def test_undisturbed_most_blocks_are_read_early_and_none_twice(async_scheduling: bool) -> None:
    requests = _requests()
    with faulty_pair(NO_FAULTS, chunk_tokens=CHUNK_TOKENS, is_fast=False, async_scheduling=async_scheduling) as pair:
        answers, aborted = run_streamed(pair, requests, may_prefill=until_read_early(pair))
        pair.wait_for_rest()

        _assert_right(answers, requests, aborted)
        _assert_nothing_is_held(pair)
        prefill, decode = pair.reports()
        num_prompt_blocks = sum(-(-len(request.prompt_token_ids) // 4) for request in requests)
        assert decode.counters["num_blocks"] == num_prompt_blocks
        assert 0 < decode.counters["num_streamed_blocks"] <= prefill.counters["num_announced_blocks"]
        assert decode.counters["recomputed_tokens"] == 0


@pytest.mark.parametrize("rate", (0.1, 1.0))
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.READ_HANGS])
def test_any_fault_during_the_early_read_leaves_the_answers_right(fault: Fault, rate: float) -> None:
    requests = _requests()
    with faulty_pair(FaultOptions(seed=5, **{fault.value: rate}), chunk_tokens=CHUNK_TOKENS) as pair:  # type: ignore[arg-type]
        answers, aborted = run_streamed(pair, requests)
        pair.wait_for_rest()

        _assert_right(answers, requests, aborted)
        _assert_nothing_is_held(pair)
        if rate == 1.0:
            assert sum(report.counters["num_injected_faults"] for report in pair.reports()) > 0


@pytest.mark.known_failure(4, 5)
def test_early_reads_that_never_end_hold_their_destination_until_the_transport_is_closed() -> None:
    requests = _requests()
    with faulty_pair(FaultOptions(seed=5, read_hangs=0.02), chunk_tokens=CHUNK_TOKENS) as pair:
        answers, aborted = run_streamed(pair, requests)

        _assert_right(answers, requests, aborted)
        assert pair.reports()[1].num_held_blocks > 0
        pair.close()
        _assert_nothing_is_held(pair)


@pytest.mark.parametrize("checksums", (True, False))
@pytest.mark.parametrize(
    "rates", [{}, {"lease_expired": 0.2}, {"notification_lost": 0.2, "read_late": 0.3, "late_s": 0.5}]
)
def test_blocks_that_are_reused_under_the_early_read_are_never_believed(
    rates: dict[str, float], checksums: bool
) -> None:
    """Prefill is preempted again and again, requests are aborted on both sides, and memory is short on both."""
    requests = _requests()
    with faulty_pair(
        FaultOptions(seed=3, **rates),  # type: ignore[arg-type]
        checksums=checksums,
        chunk_tokens=CHUNK_TOKENS,
        num_blocks=80,
        preemption_probability=0.2,
    ) as pair:
        answers, aborted = run_streamed(pair, requests, abort_probability=0.02)
        pair.wait_for_rest()

        _assert_right(answers, requests, aborted)
        _assert_nothing_is_held(pair)
        assert pair.reports()[0].counters["num_preemptions"] > 0
        assert pair.reports()[1].counters["num_streamed_blocks"] > 0


def test_damaged_early_block_is_read_again_and_nothing_is_recomputed() -> None:
    """An early read with wrong content costs another read; prefill waits here until the damage is noticed."""
    requests = [greedy_request("request", range(64), max_tokens=NUM_TOKENS)]
    faults = FaultOptions(schedule=(ScheduledFault(fault=Fault.BIT_FLIPS, nth=1),))
    with faulty_pair(faults, chunk_tokens=CHUNK_TOKENS, is_fast=False) as pair:
        answers, aborted = run_streamed(pair, requests, may_prefill=until_read_early(pair, "num_corrupt_blocks"))
        pair.wait_for_rest()

        _assert_right(answers, requests, aborted)
        counters = pair.reports()[1].counters
        assert (counters["num_corrupt_blocks"], counters["recomputed_tokens"]) == (1, 0)
