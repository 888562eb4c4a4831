"""Several routers place requests as one does: workers tell each of them at once what the others sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.contract.promise import Promise
from simulation.cluster import simulate
from simulation.layout import Layout, apart, elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.outcome import figures

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)
SPEC = LoadSpec(mix="prompt_heavy", shape="steady", rates={"prompt_heavy": 6.5}, seconds=15.0, seed=4)


@pytest.mark.parametrize("layout", [apart(7, 1, CPU_CORE), elastic(8, CPU_CORE, PROMISE)], ids=["apart", "elastic"])
def test_routers_do_not_send_all_their_prompts_to_the_same_worker(layout: Layout) -> None:
    load, warm_up = make_load(SPEC), make_load(replace(SPEC, rates={"prompt_heavy": 3.0}, seconds=6.0, seed=5))

    def share_good(num_routers: int) -> float:
        run = simulate(replace(layout, num_routers=num_routers), load, warm_up=warm_up)
        return figures(run.outcomes, PROMISE, busy_s=run.busy_s).share_good

    assert share_good(3) > share_good(1) - 8.0
