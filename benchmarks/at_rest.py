"""What a cluster takes while nobody asks, beside Serve with as many deployments that do nothing.

    python -m benchmarks.at_rest --json benchmarks/results/at_rest.json

Three sides, each measured alone and in turn: ``baton``, the default configuration with the built-in model; ``serve``,
three deployments of a class that does nothing, on a Ray with the same settings and without a proxy; and
``serve_defaults``, the same with Serve's own settings and its proxy. Rows ``<side>/cpu`` are the CPU time of all
processes in percent of a core, medians over the rounds, and each process's beside it; ``baton/own`` is what ``baton``
takes more than ``serve``. ``--beside`` names a checkout of another version, started in turn as ``beside``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks.arguments import count, positive
from benchmarks.cpu_watch import MARK, CpuWatch, spent
from benchmarks.report import Row, add_json_option, publish
from benchmarks.served import free_port, served_cluster, served_stage

BATON, SERVE, SERVE_DEFAULTS, BESIDE = "baton", "serve", "serve_defaults", "beside"
HERE = Path(__file__).parents[1]
SETTLE_S = 10.0
"""Pause after a start, in which kernels are loaded and everybody finds everybody."""

Side = Callable[[Mapping[str, str]], AbstractContextManager[object]]


@contextlib.contextmanager
def nothing_served(mode: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Three deployments that do nothing; ``mode`` is one of ``benchmarks.serve_stage``."""
    with served_stage("benchmarks.serve_stage", "nothing", mode, str(free_port()), environment=environment):
        yield


def cluster_of(checkout: Path, environment: Mapping[str, str]) -> AbstractContextManager[str]:
    """The cluster of this version or another one."""
    return served_cluster([], environment={**environment, "PYTHONPATH": str(checkout)})


def at_rest(side: Side, seconds: float) -> dict[str, float]:
    """CPU seconds of a second of rest, by process."""
    mark = uuid.uuid4().hex
    watch = CpuWatch(mark)
    with side({MARK: mark, "PYTHONDONTWRITEBYTECODE": ""}):
        time.sleep(SETTLE_S)
        before = watch.take()
        time.sleep(seconds)
        return {process: cpu_s / seconds for process, cpu_s in spent(before, watch.take()).items()}


def rows_of(side: str, seen: Sequence[Mapping[str, float]]) -> Row:
    """The median of all processes together, and of each."""
    processes = sorted({process for round_ in seen for process in round_})
    detail = {process: 100 * statistics.median(round_.get(process, 0.0) for round_ in seen) for process in processes}
    value = 100 * statistics.median(sum(round_.values()) for round_ in seen)
    return Row(name=f"{side}/cpu", value=value, unit="% of a core", detail=dict(detail))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=count, default=2, help="number of rounds")
    parser.add_argument("--seconds", type=positive, default=30.0, help="seconds for which a side is measured")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="checkout of another version to compare with")
    add_json_option(parser)
    args = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)
    sides: dict[str, Side] = {
        BATON: partial(cluster_of, HERE),
        SERVE: partial(nothing_served, "direct"),
        SERVE_DEFAULTS: partial(nothing_served, "default"),
    }
    if args.beside is not None:
        sides[BESIDE] = partial(cluster_of, args.beside.resolve())
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(args.repeats):
        for name, side in sides.items():
            seen[name].append(at_rest(side, args.seconds))
            print(f"round {number + 1}, {name}: {sum(seen[name][-1].values()):.1%} of a core", flush=True)
    rows = [rows_of(name, of_side) for name, of_side in seen.items()]
    by_name = {row.name: float(row.value) for row in rows}
    rows.append(Row(name="baton/own", value=by_name["baton/cpu"] - by_name["serve/cpu"], unit="% of a core"))
    publish(rows, packages=("ray", "torch", "nixl"), json_file=args.json, title="A cluster at rest")


if __name__ == "__main__":
    main()
