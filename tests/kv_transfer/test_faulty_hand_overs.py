"""200 requests over hand-overs that go wrong: right answers, each once, and nothing held afterwards."""

from __future__ import annotations

import random

import pytest

from engine.contract.messages import GenerateRequest
from engine.frontend.engine_core import EngineCore
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from tests.support.engine.chain_runner import VOCAB_SIZE, expected_tokens
from tests.support.engine.requests import greedy_request
from tests.support.kv.faulty_pair import PUNCTUAL_FAULTS, Answers, FaultyPair, faulty_pair

NUM_REQUESTS = 200
NUM_TOKENS = 4
BLOCK_SIZE = 4
RATES = (0.01, 0.1, 0.5, 1.0)


def _requests(num_requests: int = NUM_REQUESTS, *, num_prompt_tokens: int | None = None) -> list[GenerateRequest]:
    rng = random.Random(7)
    return [
        greedy_request(
            f"request-{number}",
            [rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens or rng.randint(1, 30))],
            max_tokens=NUM_TOKENS,
        )
        for number in range(num_requests)
    ]


def _assert_right(answers: Answers, requests: list[GenerateRequest]) -> None:
    for request in requests:
        if request.request_id not in answers.errors:
            assert answers.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, NUM_TOKENS)
    assert answers.num_ends == {request.request_id: 1 for request in requests}


def _assert_nothing_is_held(pair: FaultyPair[EngineCore]) -> None:
    for core in (pair.prefill, pair.decode):
        core.scheduler.check_integrity()
        load = core.load_report()
        assert (load.num_running, load.num_waiting, load.num_loading) == (0, 0, 0)
        assert (load.num_leased_blocks, load.num_held_blocks) == (0, 0)
        assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.READ_HANGS])
def test_any_fault_at_any_rate_leaves_the_answers_right(fault: Fault, rate: float) -> None:
    requests = _requests()
    faults = FaultOptions(seed=5, **{fault.value: rate})  # type: ignore[arg-type]
    with faulty_pair(faults, is_fast=fault not in PUNCTUAL_FAULTS) as pair:
        answers = pair.run(requests)
        pair.wait_for_rest()

        assert answers.errors == {}
        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)
        prefill, decode = pair.reports()
        if rate == 1.0:
            assert prefill.counters["num_injected_faults"] + decode.counters["num_injected_faults"] > 0


@pytest.mark.known_failure(4, 5)
@pytest.mark.parametrize("rate", (0.01, 1.0))
def test_reads_that_never_end_hold_their_destination_until_the_transport_is_closed(rate: float) -> None:
    requests = _requests()
    with faulty_pair(FaultOptions(seed=5, read_hangs=rate)) as pair:
        answers = pair.run(requests)

        assert answers.errors == {}
        _assert_right(answers, requests)
        assert pair.reports()[1].counters["num_stalled_loads"] > 0
        assert pair.reports()[1].num_held_blocks > 0
        pair.close()
        _assert_nothing_is_held(pair)


def test_all_faults_together_leave_the_answers_right() -> None:
    requests = _requests()
    rates = {fault.value: 0.05 for fault in Fault if fault is not Fault.READ_HANGS}
    with faulty_pair(FaultOptions(seed=11, **rates)) as pair:  # type: ignore[arg-type]
        answers = pair.run(requests)
        pair.wait_for_rest()

        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)


def test_one_bad_block_of_many_costs_no_more_than_two_blocks() -> None:
    requests = _requests(1, num_prompt_tokens=100)
    faults = FaultOptions(schedule=(ScheduledFault(fault=Fault.BIT_FLIPS, nth=1),))
    with faulty_pair(faults, is_fast=False) as pair:
        answers = pair.run(requests)
        pair.wait_for_rest()

        _assert_right(answers, requests)
        counters = pair.reports()[1].counters
        assert (counters["num_corrupt_blocks"], counters["failed_blocks"]) == (1, 1)
        assert 0 < counters["recomputed_tokens"] <= 2 * BLOCK_SIZE
        assert counters["remote_hit_tokens"] >= 100 - 2 * BLOCK_SIZE


def test_every_flipped_bit_is_found() -> None:
    requests = _requests()
    with faulty_pair(FaultOptions(seed=2, bit_flips=1.0), is_fast=False) as pair:
        answers = pair.run(requests)

        _assert_right(answers, requests)
        counters = pair.reports()[1].counters
        assert counters["num_corrupt_blocks"] == counters["num_injected_faults"] == NUM_REQUESTS


def test_without_checksums_flipped_bits_change_answers() -> None:
    """The other tests rely on this: an answer is right only if every block that it was computed from is."""
    requests = _requests(20)
    with faulty_pair(FaultOptions(seed=2, bit_flips=1.0), checksums=False, is_fast=False) as pair:
        answers = pair.run(requests)

    assert any(
        answers.tokens[request.request_id] != expected_tokens(request.prompt_token_ids, NUM_TOKENS)
        for request in requests
    )


@pytest.mark.parametrize(
    "fault, cause", [(Fault.BIT_FLIPS, "checksums"), (Fault.LEASE_EXPIRED, "the lease ended before")]
)
def test_with_policy_fail_exactly_the_requests_concerned_end_with_the_cause(fault: Fault, cause: str) -> None:
    requests = _requests()
    occasions = (3, 50, 51, 199)
    faults = FaultOptions(schedule=tuple(ScheduledFault(fault=fault, nth=nth) for nth in occasions))
    with faulty_pair(faults, load_failure_policy="fail", is_fast=False) as pair:
        answers = pair.run(requests)
        pair.wait_for_rest()

        assert len(answers.errors) == len(occasions)
        assert {error.code for error in answers.errors.values()} == {"kv_load_failed"}
        assert all(cause in error.message for error in answers.errors.values())
        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)


def test_with_policy_fail_refused_handshakes_are_named() -> None:
    requests = _requests(20)
    with faulty_pair(FaultOptions(handshake_refused=1.0), load_failure_policy="fail") as pair:
        answers = pair.run(requests)
        pair.wait_for_rest()

        assert set(answers.errors) == {request.request_id for request in requests}
        assert all("handshake refused" in error.message for error in answers.errors.values())
        _assert_nothing_is_held(pair)
