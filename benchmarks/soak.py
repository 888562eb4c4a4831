"""Every kind of fault, over and over, in an order drawn from a seed: nothing lost, nothing wrong, nothing leaked.

Runs `baton chaos` scenarios in rounds against a cluster of its own, deployed on two Ray nodes: each round has every
kind of fault once, some on top of one another, under a load that never stops, and ends with the checks. It goes on
until time is over and every kind was there often enough. A last round breaks nothing: prompts of all lengths, for as
long as it takes to see whether a worker, a router or a proxy keeps growing, which `memory_watch.py` judges throughout.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.arguments import count, positive
from benchmarks.memory_watch import (
    MIB,
    MemoryWatch,
    Sample,
    WatchedProcess,
    growth_problems,
    proxies_of,
    quarters,
)
from benchmarks.process_group import end_on_sigterm
from benchmarks.report import Row, add_json_option, publish
from benchmarks.two_nodes import SECOND_NODE_IP, TwoNodes, two_nodes
from cluster.chaos.live_cluster import LiveCluster, is_whole, members
from cluster.chaos.report import ChaosReport
from cluster.chaos.runner import ChaosRunner
from cluster.chaos.scenario import MEMBERS, Scenario, parse_scenario

RECOVERY_S = 180
POLL_PERIOD_S = 0.2
CLUSTER = {
    "roles": "fixed",  # so that every request is handed over
    "prefill_replicas": 2,
    "decode_replicas": 2,
    "router_per_node": True,
    "decode": {"max_per_node": 1},
    "dtype": "float32",
    "kv_transfer": {"allow_faults": True, "lease_ttl_s": 10},
}
FAULTS_AT_20_PERCENT = dict.fromkeys(
    (
        "read_fails",
        "read_late",
        "bit_flips",
        "handshake_refused",
        "notification_lost",
        "notification_late",
        "notification_twice",
        "lease_expired",
    ),
    0.2,
)
NUM_WANTED = {"prefill": 2, "decode": 2, "router": 2}
ALL_ROLES = "prefill decode router transfer"
UPDATE_S = 400
STEADY_STEP_S = 30.0
STATUS_TIMEOUT_S = 10.0
BUSY_DECODE = {"role": "decode", "choose": "random", "min_running": 1}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, and the roles that it affects. Two kinds without a common role can happen at the same time."""

    roles: frozenset[str]
    steps: tuple[Mapping[str, Any], ...]


def _kind(roles: str, *steps: Mapping[str, Any]) -> Kind:
    return Kind(frozenset(roles.split()), steps)


KINDS: dict[str, Kind] = {
    "prefill killed": _kind("prefill", {"kill": {"role": "prefill", "choose": "random"}}),
    "decode killed": _kind("decode", {"kill": BUSY_DECODE}),
    "both killed": _kind("prefill decode", {"kill": {"role": "prefill"}}, {"kill": {"role": "decode"}}),
    "router killed": _kind("router", {"kill": {"role": "router"}}),
    "proxy killed": _kind("router", {"kill_proxy": 60}),
    "decode paused": _kind("decode", {"pause": {**BUSY_DECODE, "seconds": 30}}, {"sleep": 31}),
    "prefill paused": _kind("prefill", {"pause": {"role": "prefill", "seconds": 15}}, {"sleep": 16}),
    "decode drained": _kind("decode", {"drain": BUSY_DECODE}),
    "prefill drained": _kind("prefill", {"drain": {"role": "prefill"}}),
    "all replaced": _kind(ALL_ROLES, {"replace": RECOVERY_S}),
    "updated": _kind(ALL_ROLES, {"run": {"command": ["baton", "deploy"], "seconds": UPDATE_S}}),
    "node killed": _kind(ALL_ROLES, {"kill_node": {"role": "router", "node_ip": SECOND_NODE_IP}}),
    "connector faults": _kind("transfer", {"faults": FAULTS_AT_20_PERCENT}, {"wait_for_tokens": 3000}, {"heal": "all"}),
    "partition": _kind("transfer", {"partition": "workers"}, {"wait_for_tokens": 1500}, {"heal": "all"}),
}


def make_round(
    number: int, *, draw: random.Random, kinds: Sequence[str], update: Sequence[str]
) -> tuple[Scenario, list[str]]:
    """A scenario with every kind of fault once, and the kinds in order. If two consecutive kinds have no role in
    common, the second comes before the cluster has recovered from the first. ``update`` is the command of the rolling
    update.
    """
    order = list(kinds)
    draw.shuffle(order)
    steps: list[Mapping[str, Any]] = []
    touched: frozenset[str] = frozenset()
    for kind in order:
        if touched & KINDS[kind].roles:
            steps.append({"wait_for_recovery": RECOVERY_S})
            touched = frozenset()
        touched |= KINDS[kind].roles
        steps.append({"wait_for_tokens": 600})
        steps += [_with_command(step, update) for step in KINDS[kind].steps]
    steps.append({"wait_for_recovery": RECOVERY_S})
    load = {"streams": 16, "distinct": 24, "output_tokens": [60, 160], "seed": draw.randrange(1 << 30)}
    content = {"name": f"round {number}", "seed": draw.randrange(1 << 30), "load": load, "steps": steps}
    return parse_scenario(content, where="soak"), order


def make_steady_round(*, minutes: float, draw: random.Random) -> Scenario:
    """A scenario without faults: prompts of all lengths, most of them different from each other."""
    load = {
        "streams": 16,
        "distinct": 400,
        "prompt_tokens": [4, 900],
        "output_tokens": [1, 120],
        "seed": draw.randrange(1 << 30),
    }
    steps = [{"sleep": STEADY_STEP_S}] * max(1, round(60.0 * minutes / STEADY_STEP_S))
    return parse_scenario({"name": "steady", "seed": 1, "load": load, "steps": steps}, where="soak")


def _with_command(step: Mapping[str, Any], command: Sequence[str]) -> Mapping[str, Any]:
    return {"run": {**step["run"], "command": list(command)}} if "run" in step else step


async def wait_until_whole(cluster: TwoNodes) -> None:
    """Return when all wanted workers run: a cluster counts as ready once it has one worker of each kind."""
    deadline_s = time.monotonic() + RECOVERY_S
    async with httpx.AsyncClient(
        base_url=cluster.url, headers=cluster.headers, timeout=30.0, trust_env=False
    ) as client:
        live = LiveCluster(client, seed=0)
        while not is_whole(await live.status(), NUM_WANTED):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not all of {NUM_WANTED} workers and routers were running within {RECOVERY_S} s")
            await asyncio.sleep(POLL_PERIOD_S)


def processes_of(cluster: TwoNodes) -> list[tuple[str, int]]:
    """Every worker, router and proxy that runs now, with its role."""
    status = httpx.get(
        f"{cluster.url}/status", headers=cluster.headers, timeout=STATUS_TIMEOUT_S, trust_env=False
    ).json()
    found = [(role, int(row["pid"])) for role in MEMBERS for row in members(status, role)]
    return found + proxies_of(cluster.ray.address)


async def soak(
    cluster: TwoNodes, arguments: argparse.Namespace, watch: MemoryWatch
) -> list[tuple[list[str], ChaosReport]]:
    """Rounds until the time is over, and a steady one; stops at the first that fails. Each is published as it ends."""
    await wait_until_whole(cluster)
    draw = random.Random(arguments.seed)
    rounds: list[tuple[list[str], ChaosReport]] = []
    started_s = time.monotonic()
    while len(rounds) < arguments.each or time.monotonic() - started_s < 60.0 * arguments.minutes:
        number = len(rounds) + 1
        # each update changes something, or nothing would be replaced
        update = cluster.deploy_command("update", scheduler={"max_num_batched_tokens": 1024 + number % 2})
        scenario, order = make_round(number, draw=draw, kinds=arguments.kinds, update=update)
        if not await _run_round(scenario, order, rounds, cluster=cluster, arguments=arguments, watch=watch):
            return rounds
    if arguments.steady_minutes:
        steady = make_steady_round(minutes=arguments.steady_minutes, draw=draw)
        await _run_round(steady, [], rounds, cluster=cluster, arguments=arguments, watch=watch)
    return rounds


async def _run_round(
    scenario: Scenario,
    order: list[str],
    rounds: list[tuple[list[str], ChaosReport]],
    *,
    cluster: TwoNodes,
    arguments: argparse.Namespace,
    watch: MemoryWatch,
) -> bool:
    """Run a scenario and add its report; False when it found a problem."""
    report = await ChaosRunner(scenario, url=cluster.url, headers=cluster.headers, tell=print).run()
    report.problems += growth_problems(watch.series)
    print("\n".join(report.lines()), flush=True)
    rounds.append((order, report))
    publish(
        rows_of(rounds) + pss_rows(watch.series),
        packages=("ray", "nixl", "torch"),
        json_file=arguments.json,
        title="soak so far",
    )
    return not report.problems


def pss_rows(series: Mapping[WatchedProcess, Sequence[Sample]]) -> list[Row]:
    """For each role, the largest process that was seen, and the largest growth of one in the judged time."""
    rows: list[Row] = []
    for role in sorted({process.role for process in series}):
        of_role = [samples for process, samples in series.items() if process.role == role]
        judged = [sizes for samples in of_role if (sizes := quarters(samples))]
        growths = [(sizes[3] - sizes[1]) / MIB for sizes in judged]
        rows.append(
            Row(
                name=f"soak.pss.{role}",
                value=max(sample.pss_bytes for samples in of_role for sample in samples) / MIB,
                unit="MiB",
                detail={"num_judged": float(len(judged)), "largest_growth_mib": max(growths, default=0.0)},
            )
        )
    return rows


def rows_of(rounds: Sequence[tuple[list[str], ChaosReport]]) -> list[Row]:
    """The rows of all rounds."""
    reports = [report for _, report in rounds]
    rows = [
        Row(name="soak.rounds", value=len(reports), unit="rounds"),
        Row(name="soak.duration", value=sum(report.duration_s for report in reports), unit="s"),
        Row(name="soak.requests", value=sum(report.num_requests for report in reports), unit="requests"),
        Row(name="soak.tokens", value=sum(report.num_tokens for report in reports), unit="tokens"),
        Row(name="soak.lost", value=sum(report.num_lost for report in reports), unit="requests"),
        Row(
            name="soak.broken_with_router",
            value=sum(report.num_broken_with_router for report in reports),
            unit="requests",
        ),
        Row(name="soak.wrong", value=sum(report.num_wrong for report in reports), unit="requests"),
        Row(name="soak.leaked", value=sum(len(report.leaks) for report in reports), unit="workers"),
    ]
    return [*rows, *_counter_rows(reports), *_fault_rows(rounds), *_memory_rows(reports)]


def _counter_rows(reports: Sequence[ChaosReport]) -> list[Row]:
    """What the routers counted in all rounds together: moves, retries, failed loads, recomputed tokens."""
    names = sorted({name for report in reports for name in report.counted})
    return [
        Row(name=f"soak.counted.{name}", value=sum(report.counted.get(name, 0.0) for report in reports), unit="count")
        for name in names
    ]


def _fault_rows(rounds: Sequence[tuple[list[str], ChaosReport]]) -> list[Row]:
    pauses: defaultdict[str, list[float]] = defaultdict(list)
    recoveries: defaultdict[str, list[float]] = defaultdict(list)
    for order, report in rounds:
        faults = iter(report.faults)
        for kind in order:
            broken = [step for step in KINDS[kind].steps if not {"sleep", "wait_for_tokens", "heal"} & step.keys()]
            for fault in itertools.islice(faults, len(broken)):
                pauses[kind].append(fault.longest_pause_s)
                if fault.whole_s is not None:
                    recoveries[kind].append(fault.whole_s)
    return [
        Row(
            name=f"soak.{kind.replace(' ', '_')}.longest_pause",
            value=max(values),
            unit="s",
            detail={
                "num": float(len(values)),
                "median_pause_s": statistics.median(values),
                "median_whole_s": statistics.median(recoveries[kind] or [0.0]),
                "max_whole_s": max(recoveries[kind], default=0.0),
            },
        )
        for kind, values in sorted(pauses.items())
    ]


def _memory_rows(reports: Sequence[ChaosReport]) -> list[Row]:
    """How much larger the processes of a role are in the last third of the rounds than in the first."""
    rows: list[Row] = []
    for role in ("prefill", "decode", "router"):
        sizes = [statistics.median(_sizes(report, role)) for report in reports]
        third = max(len(sizes) // 3, 1)
        first, last = statistics.median(sizes[:third]), statistics.median(sizes[-third:])
        detail: dict[str, float | str] = {"first_bytes": float(first)}
        rows.append(Row(name=f"soak.memory_growth.{role}", value=last / first, unit="ratio", detail=detail))
    return rows


def _sizes(report: ChaosReport, role: str) -> list[int]:
    return [size for name, found in report.memory_bytes.items() if name.startswith(role) for size in found]


def main() -> None:
    """Run the rounds, and print the rows. Ends with 1 if anything was lost, wrong or leaked, or kept growing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=positive, default=30.0, help="minimal duration")
    parser.add_argument("--each", type=count, default=10, help="minimal number of faults of each kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument(
        "--steady-minutes", type=float, default=12.0, help="duration of the last round, without faults; 0: none"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    end_on_sigterm()
    with (
        tempfile.TemporaryDirectory() as folder,
        two_nodes(Path(folder), CLUSTER) as cluster,
        MemoryWatch(functools.partial(processes_of, cluster)) as watch,
    ):
        rounds = asyncio.run(soak(cluster, arguments, watch))
    sys.exit(1 if any(report.problems for _, report in rounds) else 0)


if __name__ == "__main__":
    main()
