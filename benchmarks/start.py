"""How long `baton serve` takes from the command to a first answer, what that costs, and how long it takes to end.

    python -m benchmarks.start --beside ../before --json benchmarks/results/start.json

The built-in model and the default configuration. ``first/...``: no kernel is compiled yet; ``later/...``: all are.
``.../answer`` ends with the answer to a first request of one token, ``.../cpu`` is what all processes used until then
(each beside it), ``.../end`` is from Ctrl-C to the command's end. ``--beside`` names a checkout of another version,
which is started in turn with the same environment: its figures stand beside, with this one's as a share of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.arguments import count
from benchmarks.cpu_watch import MARK, CpuWatch
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import START_TIMEOUT_S, STOP_TIMEOUT_S, free_port, wait_until_ready

HERE = Path(__file__).parents[1]
POLL_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start and stop. ``cpu_s`` is by process."""

    answer_s: float
    cpu_s: Mapping[str, float]
    end_s: float


def start(checkout: Path, kernels: Path) -> Start:
    """Start a version that stores its compiled kernels in a folder, ask for a token, and stop it.

    Raises:
        RuntimeError: It ended by itself, or did not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "",
        "NUMBA_CACHE_DIR": str(kernels),
        MARK: str(port),
    }
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("baton")), "serve", "--port", str(port)],
            cwd=checkout,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_ready(f"{url}/ready", process, START_TIMEOUT_S, poll_period_s=POLL_PERIOD_S)
            ask = {"prompt": "Once", "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=ask, timeout=START_TIMEOUT_S, trust_env=False).raise_for_status()
            answer_s = time.monotonic() - began_s
            cpu_s = CpuWatch(str(port)).take()
        except RuntimeError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            ended_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
    return Start(answer_s=answer_s, cpu_s=cpu_s, end_s=time.monotonic() - ended_s)


def measure(checkouts: Sequence[Path], *, repeats: int) -> dict[Path, dict[str, list[Start]]]:
    """Measure first and later starts of each version, in turn; one start before that, for the byte code, does not
    count.
    """
    starts: dict[Path, dict[str, list[Start]]] = {checkout: defaultdict(list) for checkout in checkouts}
    for repeat in range(-1, repeats):
        for checkout in checkouts:
            with tempfile.TemporaryDirectory() as kernels:
                both = [start(checkout, Path(kernels)) for _ in range(2)]
            if repeat >= 0:
                for name, one in zip(("first", "later"), both, strict=True):
                    starts[checkout][name].append(one)
    return starts


def rows_of(name: str, own: Sequence[Start], beside: Sequence[Start]) -> list[Row]:
    """Median rows, with those of the other version if there is one."""

    def row(figure: str, unit: str, values: list[float], others: list[float], **detail: float | str) -> Row:
        value = statistics.median(values)
        if others:
            before = statistics.median(others)
            detail = {"beside": before, "ratio": value / before, **detail}
        return Row(name=f"{name}/{figure}", value=value, unit=unit, detail=detail)

    processes = sorted({process for one in own for process in one.cpu_s})
    by_process = {process: statistics.median(one.cpu_s.get(process, 0.0) for one in own) for process in processes}
    return [
        row("answer", "s", [one.answer_s for one in own], [one.answer_s for one in beside]),
        row(
            "cpu",
            "s of a core",
            [sum(one.cpu_s.values()) for one in own],
            [sum(one.cpu_s.values()) for one in beside],
            **by_process,
        ),
        row("end", "s", [one.end_s for one in own], [one.end_s for one in beside]),
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="checkout of another version to compare with")
    parser.add_argument("--repeats", type=count, default=3)
    add_json_option(parser)
    arguments = parser.parse_args()
    beside = arguments.beside.resolve() if arguments.beside is not None else None
    starts = measure([HERE] if beside is None else [HERE, beside], repeats=arguments.repeats)
    rows = [
        row
        for name, own in starts[HERE].items()
        for row in rows_of(name, own, starts[beside][name] if beside is not None else ())
    ]
    publish(rows, packages=("ray", "torch", "numba"), json_file=arguments.json, title="Starting and ending a cluster")


if __name__ == "__main__":
    main()
