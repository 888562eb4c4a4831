"""The layouts that users name, and what is refused as none."""

from __future__ import annotations

import pytest

from engine.contract.promise import NO_PROMISE, Promise
from simulation.cluster import virtual_cluster
from simulation.layout import LayoutError
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.outcome import Outcome
from simulation.virtual_loop import run_virtually
from simulation.whatif.layouts import parse_layouts

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)


def test_layouts_are_read_as_they_are_called() -> None:
    found = parse_layouts("apart:2+6, unified:8,unified:8/128,elastic:8,unified:8", CPU_CORE, PROMISE)

    assert [layout.name for layout in found] == ["apart:2+6", "unified:8", "unified:8/128", "elastic:8"]
    assert [(layout.prefill.num_workers, layout.decode.num_workers) for layout in found] == [
        (2, 6),
        (0, 8),
        (0, 8),
        (4, 4),
    ]
    assert found[2].decode.chunk == 128
    assert [layout.promise for layout in found] == [NO_PROMISE, NO_PROMISE, NO_PROMISE, PROMISE]


def test_mixed_workers_compute_prompts_and_generate_beside_the_others() -> None:
    (layout, plain) = parse_layouts("apart:1+1+2,apart:1+1+0", CPU_CORE, PROMISE)
    load = make_load(LoadSpec(mix="balanced", shape="steady", rates={"balanced": 3.0}, seconds=8.0))

    async def run() -> tuple[list[Outcome], dict[str, tuple[bool, bool]]]:
        """The outcomes; whether the workers of each role computed prompts, and whether they generated."""
        async with virtual_cluster(layout) as cluster:
            outcomes = await cluster.send(load)
            await cluster.rest()
            did = dict.fromkeys(cluster.pools, (False, False))
            for worker in cluster.workers.values():
                counters, (has_prompts, has_tokens) = worker.load.counters, did[worker.spec.role]
                num_tokens = counters["num_generated_tokens"]
                num_prompt_tokens = counters["num_scheduled_tokens"] - num_tokens
                did[worker.spec.role] = (has_prompts or num_prompt_tokens > 500, has_tokens or num_tokens > 100)
            return outcomes, did

    outcomes, did = run_virtually(run())

    assert {role: pool.num_workers for role, pool in layout.pools.items()} == {"prefill": 1, "decode": 1, "mixed": 2}
    assert list(plain.pools) == ["prefill", "decode"]
    assert [outcome.error for outcome in outcomes] == [None] * len(load)
    assert did["mixed"] == (True, True)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no layout is named"),
        ("both:3", "'both:3' is not a layout; layouts are written as apart:2\\+6"),
        ("apart:3", "two or three numbers of workers"),
        ("apart:1+1+1+1", "'apart:1\\+1\\+1\\+1' is not a layout"),
        ("apart:1+1+1/128", "chunks need unified workers"),
        ("apart:1+1+1023", "has 1025 workers, at most 1024"),
        ("unified:3+1", "one number"),
        ("elastic:4/128", "chunks need unified workers"),
        ("unified:0", "unified:0 has 0 workers: a layout needs at least one worker"),
        ("elastic:1", "elastic:1 has 1 worker: .* name elastic:2"),
        ("apart:0+2", "apart:0\\+2 has 0 prefill and 2 decode workers: .* as apart:1\\+1"),
        ("unified:5000", "at most 1024"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_layouts(text, CPU_CORE, PROMISE)


def test_elastic_workers_need_a_promise() -> None:
    with pytest.raises(LayoutError, match=r"elastic:4 needs a promise: give --ttft-ms, --itl-ms or both"):
        parse_layouts("elastic:4", CPU_CORE, NO_PROMISE)
