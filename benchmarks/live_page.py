"""The cost for a router of clients that watch its live page.

`python -m benchmarks.live_page --json FILE`: the CPU time of a router's process, as a share of one core, with nobody
who reads GET /admin/events and with some who do, in turns. Workers do not compute, but report twice a second, and
all numbers of a report are others each time, so that each change tells of every worker. What a reader costs is the
difference. The page promises at most 1 % of a core at 64 workers; more ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import uvicorn

from benchmarks.arguments import at_least, count, positive
from benchmarks.report import Row, add_json_option, publish
from engine.contract.messages import LoadReport, StepMessage, WorkerInfo
from engine.model.builtin import builtin_model_dir
from router.api.app import build_app
from router.api.http.http_protocol import HttpProtocol
from router.pool.workers import ReplicaStatus
from router.service import RouterService
from router.settings import RouterSettings

NUM_READERS = (0, 1, 8)
MOST_OF_A_CORE = 0.01
"""The limit for one reader at ``PROMISED_WORKERS``."""

PROMISED_WORKERS = 64
SETTLE_S = 3.0


class ReportingPool:
    """Implements the workers of one role: they introduce themselves and report."""

    def __init__(self, role: str, num_workers: int, *, report_period_s: float) -> None:
        self._role = role
        self._names = [f"{role}-{number:08x}" for number in range(num_workers)]
        self._period_s = report_period_s
        self._num_reports = 0

    def replica_ids(self) -> Sequence[str]:
        """All workers."""
        return self._names

    def has_link(self, replica_id: str) -> bool:
        """True, as in a cluster of one host."""
        return replica_id in self._names

    async def status(self, replica_id: str, *, timeout_s: float) -> ReplicaStatus:  # noqa: ARG002 (Protocol)
        """Report constants and the load."""
        info = WorkerInfo(
            role=self._role,
            engine_id=replica_id,
            incarnation="1",
            node_ip="127.0.0.1",
            pid=1,
            model_name="baton-tiny",
            block_size=16,
            num_blocks=10_000,
            block_bytes=4096,
            max_model_len=2048,
            vocab_size=512,
            device="cpu",
            dtype="float32",
        )
        return ReplicaStatus(
            replica_id=replica_id, node_ip="127.0.0.1", pid=1, state="running", info=info, load=self._load()
        )

    async def outputs(
        self,
        replica_id: str,
        client_id: str,  # noqa: ARG002 (Protocol)
        *,
        mirrors_cache: bool = False,  # noqa: ARG002 (Protocol)
    ) -> AsyncIterator[StepMessage]:
        """Report once per period, each worker at another moment."""
        await asyncio.sleep(self._period_s * self._names.index(replica_id) / len(self._names))
        while True:
            yield StepMessage(deltas=(), load=self._load())
            await asyncio.sleep(self._period_s)

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        """There are none."""

    def _load(self) -> LoadReport:
        self._num_reports += 1
        number = self._num_reports
        counted = ("num_generated_tokens", "num_scheduled_tokens", "num_transfers", "num_bytes", "num_blocks")
        return LoadReport(
            num_blocks=10_000,
            num_free_blocks=5_000 + number % 997,
            num_cached_blocks=1_000 + number % 499,
            num_leased_blocks=number % 101,
            num_running=number % 61,
            num_decoding=number % 59,
            num_waiting=number % 7,
            num_loading=number % 5,
            queued_prefill_tokens=number % 4001,
            num_peers=1,
            counters={name: float(number * place) for place, name in enumerate(counted, start=1)},
        )


def serve(num_workers: int, told: Connection) -> None:
    """A router over workers that report, half of them of each role; sends its port when it serves."""
    asyncio.run(_serve(num_workers, told))


async def _serve(num_workers: int, told: Connection) -> None:
    settings = RouterSettings()
    sizes = {"prefill": num_workers // 2, "decode": num_workers - num_workers // 2}
    pools = {role: ReportingPool(role, size, report_period_s=settings.report_period_s) for role, size in sizes.items()}
    service = RouterService(builtin_model_dir(), "baton-tiny", pools, settings)  # type: ignore[arg-type]  # orders never come
    await service.start()
    config = uvicorn.Config(
        build_app(service), http=HttpProtocol, port=0, lifespan="off", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
        await asyncio.sleep(0.01)
    told.send(server.servers[0].sockets[0].getsockname()[1])
    await asyncio.to_thread(told.recv)
    service.live.close()
    server.should_exit = True
    await serving
    await service.close()


class Reader:
    """One open page: reads the stream, and counts."""

    def __init__(self, url: str) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    def _read(self, url: str) -> None:
        with httpx.stream("GET", f"{url}/admin/events", timeout=30.0, trust_env=False) as response:
            response.raise_for_status()
            for part in response.iter_raw():
                self.num_bytes += len(part)
                if self._is_over.is_set():
                    return

    def close(self) -> None:
        """Stop at the next event."""
        self._is_over.set()
        self._thread.join()


@contextmanager
def reading(url: str, number: int) -> Iterator[list[Reader]]:
    """Start this many readers, and wait until they have read their first events."""
    with ExitStack() as stack:
        readers = [Reader(url) for _ in range(number)]
        for reader in readers:
            stack.callback(reader.close)
        time.sleep(SETTLE_S)
        yield readers


def used_s(pid: int) -> float:
    """CPU seconds of a process so far, to the nanosecond: the share is so small that clock ticks would hide it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def measure(num_workers: int, *, seconds: float, repeats: int) -> list[Row]:
    """The shares of a core that the router uses, and what a reader receives."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    router = context.Process(target=serve, args=(num_workers, theirs))
    router.start()
    try:
        url, pid = f"http://127.0.0.1:{ours.recv()}", int(router.pid or 0)
        state = httpx.get(f"{url}/status", timeout=30.0, trust_env=False).json()
        num_seen = sum(map(len, state["pools"].values()))
        if num_seen != num_workers:
            raise SystemExit(f"the router knows {num_seen} workers instead of {num_workers}")
        shares: dict[int, list[float]] = {number: [] for number in NUM_READERS}
        bytes_per_s: list[float] = []
        for _ in range(repeats):
            for number in NUM_READERS:
                with reading(url, number) as readers:
                    num_bytes = sum(reader.num_bytes for reader in readers)
                    before_s, started_s = used_s(pid), time.monotonic()
                    time.sleep(seconds)
                    passed_s = time.monotonic() - started_s
                    shares[number].append((used_s(pid) - before_s) / passed_s)
                    if number == 1:
                        bytes_per_s.append((readers[0].num_bytes - num_bytes) / passed_s)
        ours.send("done")
        router.join(30)
    finally:
        router.kill()
        router.join()
    return _rows(shares, bytes_per_s, num_workers=num_workers)


def _rows(shares: dict[int, list[float]], bytes_per_s: list[float], *, num_workers: int) -> list[Row]:
    """What readers add. Windows are compared turn by turn, since the machine's speed changes."""
    none, one, many = (shares[number] for number in NUM_READERS)
    detail: dict[str, float | str] = {"num_workers": num_workers, "repeats": len(none)}

    def row(name: str, values: Sequence[float]) -> Row:
        spread = {"least": 100 * min(values), "most": 100 * max(values)}
        return Row(name=name, value=100 * statistics.median(values), unit="% of a core", detail={**detail, **spread})

    num_further = NUM_READERS[2] - NUM_READERS[1]
    return [
        row("router, nobody watches", none),
        row("one reader adds", [with_one - with_none for with_one, with_none in zip(one, none, strict=True)]),
        row(
            "each further reader adds",
            [(with_many - with_one) / num_further for with_many, with_one in zip(many, one, strict=True)],
        ),
        Row(name="a reader gets", value=statistics.median(bytes_per_s) / 1e3, unit="kB/s", detail=detail),
    ]


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=at_least(2), default=PROMISED_WORKERS, help="number of workers that report")
    parser.add_argument("--seconds", type=positive, default=15.0, help="length of each window in seconds")
    parser.add_argument("--repeats", type=count, default=4, help="number of windows of each kind")
    add_json_option(parser)
    options = parser.parse_args()
    rows = measure(options.workers, seconds=options.seconds, repeats=options.repeats)
    publish(
        rows,
        packages=("uvicorn", "starlette", "httpx"),
        json_file=options.json,
        title="What the live page costs its router",
    )
    if options.workers <= PROMISED_WORKERS and rows[1].value > 100 * MOST_OF_A_CORE:
        sys.exit(f"one reader costs {rows[1].value:.2f} % of a core, more than {100 * MOST_OF_A_CORE:g} %")


if __name__ == "__main__":
    main()
