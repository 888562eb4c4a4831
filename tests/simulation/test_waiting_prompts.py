"""More than can be served: prompts that wait go to workers that have become idle, and the load ends sooner."""

from __future__ import annotations

from dataclasses import replace

from engine.contract.promise import Promise
from simulation.cluster import simulate
from simulation.layout import elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.outcome import figures

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)


def test_no_worker_is_idle_while_prompts_wait_at_others() -> None:
    spec = LoadSpec(mix="prompt_heavy", shape="bursts", rates={"prompt_heavy": 11.0}, seconds=12.0)
    load, warm_up = make_load(spec), make_load(replace(spec, rates={"prompt_heavy": 3.0}, seconds=6.0, seed=1))
    layout = elastic(8, CPU_CORE, PROMISE)
    stays = replace(layout, settings=replace(layout.settings, move_waiting_prompts=False))

    moving, staying = (
        figures(run.outcomes, PROMISE, busy_s=run.busy_s)
        for run in (simulate(which, load, warm_up=warm_up) for which in (layout, stays))
    )

    assert moving.num_failed == staying.num_failed == 0
    assert moving.seconds < 0.85 * staying.seconds
    assert moving.utilisation > 90.0 > staying.utilisation
    assert moving.ttft_p99_ms < 0.85 * staying.ttft_p99_ms
