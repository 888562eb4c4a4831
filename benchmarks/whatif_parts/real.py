"""Real runs: a cluster with a layout, and the requests of cases at their times."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from benchmarks.disagg_parts.cells import outcome_of, over_http
from benchmarks.load import send_all
from benchmarks.served import served_cluster
from benchmarks.whatif_parts.cases import APART, ELASTIC, PROMISE, UNIFIED, Case, Measured
from cluster.commands.clients.recorded import reported_workers
from simulation.layout import EVERY_PROMPT
from simulation.loads import LoadSpec, make_load
from simulation.machine import CPU_CORE
from simulation.whatif.reported import reported_calibration

THREAD = {"num_threads": 1}
SETTINGS: dict[str, dict[str, object]] = {
    APART: {"roles": "fixed", "prefill": THREAD, "decode": THREAD},
    UNIFIED: {
        "roles": "fixed",
        "router": {"local_prefill_tokens": EVERY_PROMPT},
        "prefill": THREAD,
        "decode": THREAD,
        "decode_replicas": 2,
    },
    ELASTIC: {"slo": {"ttft_ms": PROMISE.ttft_ms, "itl_ms": PROMISE.itl_ms}},
}
"""``elastic:2`` is `baton serve` with a promise: its workers use each other's core while that is idle."""

WARM_UP_S = 4.0


def measure(layout: str, cases: Sequence[Case], model: Path, *, seconds: float) -> Iterator[Measured]:
    """Serve loads one after the other with one cluster, after requests that do not count."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"model": str(model), "max_model_len": CPU_CORE.max_model_len, **SETTINGS[layout]}, file)
        file.flush()
        with served_cluster(["--config", file.name]) as url:
            spec = LoadSpec(mix="balanced", shape="steady", rates={"balanced": 2.0}, seconds=WARM_UP_S, seed=500)
            asyncio.run(send_all(url, over_http(make_load(spec))))
            for case in cases:
                began_s = time.perf_counter()
                load = case.load(seconds)
                timings = asyncio.run(send_all(url, over_http(load)))
                outcomes = [
                    replace(outcome_of(timing), num_prompt_tokens=len(arrival.prompt))
                    for timing, arrival in zip(timings, load, strict=True)
                ]
                failed = [outcome.error for outcome in outcomes if outcome.error is not None]
                if failed:
                    raise SystemExit(f"{layout}, {case.name}: {len(failed)} requests failed; the first: {failed[0]}")
                took_s = time.perf_counter() - began_s
                print(f"{layout} {case.name}: {len(outcomes)} requests in {took_s:.1f} s", flush=True)
                reported = reported_calibration(url, reported_workers(url)).machine
                yield Measured(layout=layout, case=case.name, seconds=seconds, outcomes=outcomes, reported=reported)
