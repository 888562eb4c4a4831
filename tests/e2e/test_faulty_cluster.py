"""A whole cluster whose hand-overs go wrong, with a host tier behind a small cache: the same tokens, and a status."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.cluster.cluster import running_cluster
from tests.support.cluster.http_completions import assert_at_rest, complete_all, wait_for_rest
from tests.support.engine.oracle_cases import NUM_TOKENS, OracleCase

FAULTS = {
    "seed": 3,
    "late_s": 0.02,
    "read_fails": 0.1,
    "read_late": 0.1,
    "bit_flips": 0.2,
    "handshake_refused": 0.1,
    "notification_lost": 0.05,
    "notification_late": 0.1,
    "notification_twice": 0.1,
    "lease_expired": 0.2,
    "peer_replaced": 0.05,
}


async def test_faults_and_evictions_change_no_token_and_are_shown(oracle_case: Callable[[str], OracleCase]) -> None:
    case = oracle_case("llama")
    with running_cluster(
        model=str(case.path),
        dtype="float32",
        cache={"num_blocks": 96},
        scheduler={"max_num_seqs": 16},
        kv_transfer={
            "connector": "chain",
            "chain": ["host", "nixl"],
            "host_bytes": 64 << 20,
            "lease_ttl_s": 3.0,
            "allow_faults": True,
            "faults": FAULTS,
        },
    ) as cluster:
        for _ in range(3):
            tokens = await complete_all(cluster.url, case.prompts, max_tokens=[NUM_TOKENS] * len(case.prompts))
            assert tuple(tokens) == case.expected

        # A hand-over whose release was lost ends with its lease.
        status = wait_for_rest(cluster.url)
        totals, counters = status["totals"], status["totals"]["counters"]
        assert totals["failed_loads"] > 0
        assert totals["failed_blocks"] > 0
        assert totals["recomputed_tokens"] > 0
        assert counters["num_injected_faults"] > totals["failed_loads"]
        assert counters["num_host_stored_blocks"] > 0
        assert counters["num_host_loaded_blocks"] > 0
        assert (totals["failed"], totals["finished"]) == (0, 3 * len(case.prompts))
        assert_at_rest(status)
