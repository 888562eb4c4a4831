"""200 requests over NIXL between two processes, with every kind of fault: each is answered right and once, and nothing
stays held.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.contract.config import LoadFailurePolicy, SchedulerConfig
from engine.contract.messages import GenerateRequest
from kv_transfer.fault_options import Fault, FaultOptions, ScheduledFault
from kv_transfer.options import ConnectorOptions
from tests.support.engine.chain_runner import VOCAB_SIZE, expected_tokens
from tests.support.engine.requests import greedy_request
from tests.support.kv.faulty_pair import PUNCTUAL_FAULTS, Answers, FaultyPair
from tests.support.kv.prefill_process import NixlEngineSpec, PrefillProcess, RemoteEngine
from tests.support.kv.ucx import confined_ucx

NUM_REQUESTS = 200
NUM_TOKENS = 4
BLOCK_SIZE = 4
READER_FAULTS = tuple(fault for fault in Fault if fault is not Fault.LEASE_EXPIRED)


@pytest.fixture(scope="module", params=("network", "local"))
def process(request: pytest.FixtureRequest) -> Iterator[PrefillProcess]:
    with confined_ucx():
        process = PrefillProcess(transport=request.param)
        yield process
        process.close()


@contextmanager
def _pair(
    process: PrefillProcess, faults: FaultOptions, *, policy: LoadFailurePolicy = "recompute", is_fast: bool = True
) -> Iterator[FaultyPair[RemoteEngine]]:
    options = ConnectorOptions(connector="nixl", transport=process.transport, faults=faults, allow_faults=True)
    scheduler = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16, load_failure_policy=policy)
    prefill, decode = (
        NixlEngineSpec(engine_id=engine_id, options=options, scheduler=scheduler, is_fast=is_fast)
        for engine_id in ("prefill", "decode")
    )
    pair = FaultyPair(process.build(prefill), decode.build(process))
    try:
        yield pair
    finally:
        pair.close()


def _requests(num_requests: int = NUM_REQUESTS) -> list[GenerateRequest]:
    rng = random.Random(7)
    return [
        greedy_request(
            f"request-{number}",
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))],
            max_tokens=NUM_TOKENS,
        )
        for number in range(num_requests)
    ]


def _assert_right(answers: Answers, requests: list[GenerateRequest]) -> None:
    for request in requests:
        if request.request_id not in answers.errors:
            assert answers.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, NUM_TOKENS)
    assert answers.num_ends == {request.request_id: 1 for request in requests}


def _assert_nothing_is_held(pair: FaultyPair[RemoteEngine]) -> None:
    pair.prefill.check_integrity()
    pair.decode.scheduler.check_integrity()
    for load in pair.reports():
        assert (load.num_running, load.num_waiting, load.num_loading) == (0, 0, 0)
        assert (load.num_leased_blocks, load.num_held_blocks) == (0, 0)
        assert load.num_free_blocks == load.num_blocks


@pytest.mark.parametrize(
    ("fault", "rate"),
    [(fault, rate) for fault in Fault for rate in (0.1, 1.0) if (fault, rate) != (Fault.READ_HANGS, 0.1)],
)
def test_any_fault_between_processes_leaves_the_answers_right(
    process: PrefillProcess, fault: Fault, rate: float
) -> None:
    requests = _requests()
    faults = FaultOptions(seed=5, **{fault.value: rate})  # type: ignore[arg-type]
    with _pair(process, faults, is_fast=fault not in PUNCTUAL_FAULTS) as pair:
        answers = pair.run(requests)
        if fault is Fault.READ_HANGS:
            assert pair.reports()[1].counters["num_stalled_loads"] > 0
            pair.close()
        else:
            pair.wait_for_rest()

        assert answers.errors == {}
        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)
        prefill, decode = (report.counters for report in pair.reports())
        if rate == 1.0:
            assert (decode if fault in READER_FAULTS else prefill)["num_injected_faults"] > 0
        assert prefill["num_leases_granted"] == NUM_REQUESTS
        ends = ("num_leases_done", "num_leases_expired", "num_leases_aborted")
        assert sum(prefill[end] for end in ends) == NUM_REQUESTS
        assert (decode["failed_blocks"] > 0) == (decode["recomputed_tokens"] > 0)
        if fault is Fault.BIT_FLIPS:
            assert decode["num_corrupt_blocks"] == decode["failed_blocks"] == decode["num_injected_faults"]
            assert decode["recomputed_tokens"] <= BLOCK_SIZE * decode["failed_blocks"]


def test_all_faults_together_between_processes_leave_the_answers_right(process: PrefillProcess) -> None:
    requests = _requests()
    rates = {fault.value: 0.05 for fault in Fault if fault is not Fault.READ_HANGS}
    with _pair(process, FaultOptions(seed=11, **rates)) as pair:  # type: ignore[arg-type]
        answers = pair.run(requests)
        pair.wait_for_rest()

        assert answers.errors == {}
        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)


@pytest.mark.parametrize(
    ("fault", "cause"), [(Fault.BIT_FLIPS, "checksums"), (Fault.LEASE_EXPIRED, "the lease ended before")]
)
def test_with_policy_fail_exactly_the_requests_concerned_end_with_the_cause(
    process: PrefillProcess, fault: Fault, cause: str
) -> None:
    requests = _requests()
    occasions = (3, 50, 51, 199)
    faults = FaultOptions(schedule=tuple(ScheduledFault(fault=fault, nth=nth) for nth in occasions))
    with _pair(process, faults, policy="fail", is_fast=False) as pair:
        answers = pair.run(requests)
        pair.wait_for_rest()

        assert len(answers.errors) == len(occasions)
        assert {error.code for error in answers.errors.values()} == {"kv_load_failed"}
        assert all(cause in error.message for error in answers.errors.values())
        _assert_right(answers, requests)
        _assert_nothing_is_held(pair)
