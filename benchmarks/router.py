"""The router and its output path, with workers that produce tokens without computing.

    python -m benchmarks.router --json benchmarks/results/router.json

Beside it, in the same run, a plain Ray Serve application (an ingress, and a deployment that streams one item a token)
with Serve's defaults and with its fast settings, and one hop of Serve alone. Client, proxy, router and workers share
the machine's cores, so ratios tell more than figures. Rows: ``<metric>/<who>/streams=<n>/tokens=<n>``, and
``ttft/<who>/idle`` of requests one by one. ``memory/growth`` leaves out the first tenth of ``--memory-requests``.
``path_cpu_us_per_token`` is what router and workers took together, less what they take idle: with steps as long as a
real engine's (``--step-ms 8``) it is the cost of a token's way.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from benchmarks.arguments import at_least, count, positive
from benchmarks.report import Row, add_json_option, publish
from benchmarks.serve_stage import STEP_VARIABLE
from benchmarks.served import free_port, served_stage
from benchmarks.sse_load import StreamLoad, StreamResult, run_streams

WHO = {
    "baton_direct": ("baton", "direct"),
    "baton_haproxy": ("baton", "haproxy"),
    "one_hop_optimized": ("one_hop", "haproxy"),
    "plain_optimized": ("two_hops", "haproxy"),
    "plain_default": ("two_hops", "default"),
    "baton_serve_proxy": ("baton", "optimized"),
}
START_TIMEOUT_S = 60.0
SETTLE_S = 4.0
IDLE_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A running application: its address and its processes."""

    url: str
    process: psutil.Process

    def front(self) -> psutil.Process:
        """The process that answers HTTP: the router, or the plain application's ingress."""
        found = self._named("Replica:baton:router", "PlainTwoHops", "PlainOneHop")
        if not found:
            raise RuntimeError("no process of the front end found")
        return found[0]

    def path(self) -> list[psutil.Process]:
        """The processes that a token passes through: the front end, and the processes behind it."""
        return [self.front(), *self._named("Replica:baton:prefill", "Replica:baton:decode", "PlainGenerator")]

    def _named(self, *names: str) -> list[psutil.Process]:
        """The application's processes whose titles contain one of the names."""
        titles = {process: " ".join(process.cmdline()) for process in self.process.children(recursive=True)}
        return [process for process, title in titles.items() if any(name in title for name in names)]


@contextmanager
def stage(kind: str, mode: str, *, step_ms: float = 1.0) -> Iterator[Stage]:
    """Start one application; it is stopped afterwards."""
    port, environment = free_port(), {STEP_VARIABLE: str(step_ms)}
    with served_stage("benchmarks.serve_stage", kind, mode, str(port), environment=environment) as pid:
        target = Stage(url=f"http://127.0.0.1:{port}", process=psutil.Process(pid))
        wait_until_it_answers(target)
        yield target


def wait_until_it_answers(target: Stage) -> None:
    """Return once requests have been answered for a while.

    When Serve says that everything runs, a proxy may not know of the replicas yet, and HAProxy is about to be started
    again with what it learned.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    settled_s = math.inf
    while time.monotonic() < settled_s:
        try:
            run(target, 4, 8, 2)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            settled_s = math.inf
        else:
            settled_s = min(settled_s, time.monotonic() + SETTLE_S)
        time.sleep(0.2)


def cpu_s(*processes: psutil.Process) -> float:
    """CPU seconds of some processes so far."""
    times = [process.cpu_times() for process in processes]
    return float(sum(item.user + item.system for item in times))


def idle_share(target: Stage) -> float:
    """CPU use of the processes of the path without any requests, in cores."""
    path = target.path()
    before = cpu_s(*path)
    time.sleep(IDLE_S)
    return (cpu_s(*path) - before) / IDLE_S


def run(target: Stage, num_streams: int, num_requests: int, num_tokens: int) -> tuple[StreamResult, float, float]:
    """Run one load, and return the CPU seconds meanwhile of the front process and of all processes on a token's
    path."""
    front, path = target.front(), target.path()
    before, before_path = cpu_s(front), cpu_s(*path)
    load = StreamLoad(num_streams=num_streams, num_requests=num_requests, num_tokens=num_tokens)
    result = asyncio.run(run_streams(target.url, load))
    return result, cpu_s(front) - before, cpu_s(*path) - before_path


def measure(who: str, target: Stage, args: argparse.Namespace) -> list[Row]:
    """Measure one application."""
    rows: list[Row] = []
    run(target, 8, 64, 16)
    idle = idle_share(target)
    alone, *_ = run(target, 1, args.idle_requests, 1)
    rows.append(Row(name=f"ttft/{who}/idle", value=alone.ttft_ms, unit="ms"))
    for num_streams, num_requests, num_tokens in args.loads:
        result, cpu, path_cpu = run(target, num_streams, num_requests, num_tokens)
        name = f"{who}/streams={num_streams}/tokens={num_tokens}"
        rows += [
            Row(
                name=f"tokens_per_s/{name}",
                value=result.tokens_per_s,
                unit="tokens/s",
                detail={
                    "requests_per_s": result.requests_per_s,
                    "front_cpu_us_per_token": cpu * 1e6 / result.num_tokens,
                    "front_cpu_us_per_request": cpu * 1e6 / result.num_requests,
                    "path_cpu_us_per_token": (path_cpu - idle * result.seconds) * 1e6 / result.num_tokens,
                    "tokens_per_event": result.num_tokens / result.num_events,
                    "ttft_ms": result.ttft_ms,
                    "num_requests": num_requests,
                },
            )
        ]
    return rows


def ratios(rows: list[Row]) -> list[Row]:
    """Ratios of Baton's throughput to the others', load by load, and its idle TTFT minus that of one hop."""
    by_name = {row.name: row.value for row in rows}
    out: list[Row] = []
    hop_ms = by_name.get("ttft/one_hop_optimized/idle")
    for who in ("baton_direct", "baton_serve_proxy", "baton_haproxy"):
        own_ms = by_name.get(f"ttft/{who}/idle")
        if own_ms is not None and hop_ms is not None:
            out.append(Row(name=f"added_ttft/{who}/idle", value=own_ms - hop_ms, unit="ms"))
    for name, value in by_name.items():
        metric, who, *load = name.split("/")
        if metric != "tokens_per_s" or not who.startswith("baton"):
            continue
        peers = ("plain_default", "plain_optimized", "one_hop_optimized")
        others = {peer: by_name.get("/".join((metric, peer, *load))) for peer in peers}
        out += [
            Row(name="/".join((f"ratio_to_{peer}", who, *load)), value=value / other, unit="x")
            for peer, other in others.items()
            if other is not None
        ]
    return out


def memory(target: Stage, num_requests: int) -> list[Row]:
    """Resident memory of the router while many short requests pass, sampled ten times."""
    front = target.front()
    run(target, 64, num_requests // 10, 4)
    samples = [front.memory_info().rss]
    for _ in range(9):
        run(target, 64, num_requests // 10, 4)
        samples.append(front.memory_info().rss)
    growth = {f"mb_after_{(place + 1) * num_requests // 10}": rss / 2**20 for place, rss in enumerate(samples)}
    return [Row(name="memory/growth", value=(samples[-1] - samples[0]) / 2**20, unit="MiB", detail={**growth})]


def parsed_load(text: str) -> tuple[int, int, int]:
    """Parse ``STREAMSxREQUESTSxTOKENS``."""
    num_streams, num_requests, num_tokens = (count(part) for part in text.split("x"))
    return num_streams, num_requests, num_tokens


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", nargs="+", choices=tuple(WHO), default=tuple(WHO))
    parser.add_argument(
        "--loads",
        type=parsed_load,
        nargs="+",
        default=[(1, 2, 512), (64, 64, 512), (64, 512, 64), (512, 512, 64)],
        metavar="STREAMSxREQUESTSxTOKENS",
    )
    parser.add_argument(
        "--idle-requests", type=count, default=100, help="number of single requests for the TTFT at idle"
    )
    parser.add_argument("--step-ms", type=positive, default=1.0, help="duration of a simulated engine's step")
    parser.add_argument(
        "--memory-requests", type=at_least(0), default=0, help="also watch the router's memory over this many requests"
    )
    add_json_option(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    try:
        for who in args.who:
            kind, mode = WHO[who]
            with stage(kind, mode, step_ms=args.step_ms) as target:
                rows += measure(who, target, args)
                if args.memory_requests and who == "baton_haproxy":
                    rows += memory(target, args.memory_requests)
    finally:
        # Keep the rows measured so far, even if a later stage fails.
        publish(
            rows + ratios(rows),
            packages=("ray", "fastapi", "uvicorn"),
            json_file=args.json,
            title="Router and output path",
        )


if __name__ == "__main__":
    main()
