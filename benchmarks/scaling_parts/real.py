"""A real cluster of paced workers, of constant size or following the promise, serves a load; measures the cost."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.disagg_parts.cells import outcome_of, over_http
from benchmarks.load import send_all
from benchmarks.scaling_parts.paced_worker import MACHINE_VARIABLE
from benchmarks.served import free_port, served_stage
from cluster.chaos.live_cluster import LiveCluster, members
from engine.contract.promise import Promise
from router.scaling_rules import ScalingRules
from simulation.layout import EVERY_PROMPT
from simulation.loads import Arrival
from simulation.machine import Machine
from simulation.outcome import Outcome

ROLE = "decode"
"""The role of the counted workers: they compute all prompts themselves."""

WATCH_PERIOD_S = 0.25
SETTLE_S = 2.0
"""Workers report new prices of steps once per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """What clients measured; seconds of workers from the first request until the last token; the changes of size, as
    text.
    """

    outcomes: Sequence[Outcome]
    worker_s: float
    changes: Sequence[str]


def settings(
    model: Path, machine: Machine, promise: Promise, *, num_workers: int, rules: ScalingRules | None
) -> dict[str, Any]:
    """The configuration. The prefill worker gets no request, so it sleeps."""
    scaling = None
    if rules is not None:
        bounds = rules.pools[ROLE]
        scaling = {
            "by": "promise",
            "min_replicas": bounds.least,
            "max_replicas": bounds.most,
            "target": rules.target,
            "window_s": rules.window_s,
            "down_delay_s": rules.hold_s,
            "start_s": rules.start_s,
        }
    return {
        "model": str(model),
        "port": free_port(),
        "max_model_len": machine.max_model_len,
        "roles": "fixed",
        "borrow_idle_cores": False,
        "slo": {"ttft_ms": promise.ttft_ms, "itl_ms": promise.itl_ms},
        "router": {"local_prefill_tokens": EVERY_PROMPT},
        "prefill": {"num_threads": 1},
        "decode": {"num_threads": 1, **({} if scaling is None else {"scaling": scaling})},
        "decode_replicas": num_workers,
    }


class SizeWatch:
    """Sums the time of workers that run or were ordered, until they are gone."""

    def __init__(self, cluster: LiveCluster) -> None:
        self.worker_s = 0.0
        self.changes: list[str] = []
        self._cluster = cluster
        self._began_s = self._last_s = time.monotonic()
        self._seen_s = 0.0
        """When the last known change was ordered, in seconds since 1970: only the last few changes are reported."""

    async def keep_looking(self, *, first: int) -> None:
        """Sample until cancelled. ``first`` is the number of workers before any change."""
        wanted = first
        await self._new_changes()
        while True:
            status, notes = await self._new_changes()
            for note in notes:
                seconds = time.monotonic() - self._began_s
                self.changes.append(
                    f"{seconds:.0f} s: {note['role']} {note['before']} -> {note['wanted']}, {note['reason']}"
                )
                wanted = note["wanted"]
            now_s = time.monotonic()
            self.worker_s += (now_s - self._last_s) * max(len(members(status, ROLE)), wanted)
            self._last_s = now_s
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _new_changes(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        status = await self._cluster.status()
        notes = (status["scaling"] or {}).get("last_changes", [])
        new = [note for note in notes if note["changed_at_s"] > self._seen_s]
        self._seen_s = max((note["changed_at_s"] for note in notes), default=self._seen_s)
        return status, new


def serve(
    model: Path,
    machine: Machine,
    promise: Promise,
    load: Sequence[Arrival],
    *,
    num_workers: int,
    rules: ScalingRules | None,
    warm_up: Sequence[Arrival],
) -> RealRun:
    """Serve a load, after requests that do not count, from which the workers learn how long steps take.

    Raises:
        RuntimeError: The cluster did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        config = settings(model, machine, promise, num_workers=num_workers, rules=rules)
        file.write_text(yaml.safe_dump(config))
        environment = {MACHINE_VARIABLE: machine.name}
        with served_stage("benchmarks.scaling_parts.stage", str(file), environment=environment):
            return asyncio.run(
                _send(f"http://127.0.0.1:{config['port']}", load, num_workers=num_workers, warm_up=warm_up)
            )


async def _send(url: str, load: Sequence[Arrival], *, num_workers: int, warm_up: Sequence[Arrival]) -> RealRun:
    await send_all(url, over_http(warm_up))
    await asyncio.sleep(SETTLE_S)
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        watch = SizeWatch(LiveCluster(client, seed=0))
        watching = asyncio.create_task(watch.keep_looking(first=num_workers))
        timings = await send_all(url, over_http(load))
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return RealRun(
        outcomes=[outcome_of(timing) for timing in timings], worker_s=watch.worker_s, changes=tuple(watch.changes)
    )
