"""More load than can be served: waiting prompts move to workers that have become idle, and the load ends sooner."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from engine.contract.promise import Promise
from simulation.cluster import simulate
from simulation.layout import elastic
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.outcome import Figures, figures

PROMISE = Promise(ttft_ms=2000.0, itl_ms=100.0)


def test_no_worker_is_idle_while_prompts_wait_at_others() -> None:
    """In four draws together: where the last prompts of one wait decides how long it takes."""
    moving, staying = [], []
    for seed in (20, 22, 24, 26):
        spec = LoadSpec(mix="prompt_heavy", shape="bursts", rates={"prompt_heavy": 11.0}, seconds=12.0, seed=seed)
        warm_up = make_load(replace(spec, rates={"prompt_heavy": 3.0}, seconds=6.0, seed=seed + 1))
        layout = elastic(8, CPU_CORE, PROMISE)
        stays = replace(layout, settings=replace(layout.settings, move_waiting_prompts=False))
        for served, found in ((layout, moving), (stays, staying)):
            run = simulate(served, make_load(spec), warm_up=warm_up)
            found.append(figures(run.outcomes, PROMISE, busy_s=run.busy_s))

    def mean(found: list[Figures], name: str) -> float:
        return fmean(draw.values()[name] for draw in found)

    assert mean(moving, "num_failed") == mean(staying, "num_failed") == 0
    assert mean(moving, "seconds") < 0.9 * mean(staying, "seconds")
    assert mean(moving, "utilisation") > 85.0 > 80.0 > mean(staying, "utilisation")
    assert mean(moving, "ttft_p99_ms") < 0.9 * mean(staying, "ttft_p99_ms")
