"""How each layout serves a load. Several layouts are simulated in parallel processes."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from engine.contract.promise import Promise
from simulation.cluster import Run, simulate
from simulation.layout import Layout, Pool
from simulation.loads import Arrival, LoadError
from simulation.machine import Machine
from simulation.outcome import Figures, figures
from simulation.whatif.series import Series, series_of
from simulation.whatif.source import Source, warm_up_of

MAX_BLOCK_TOKENS = 128
BLOCKS_OF_PROMPT = 64
"""The least number of blocks for a mean prompt, because its cached and its held tokens are rounded to blocks."""

BLOCK_SHARE_OF_GAP = 0.05
"""The largest share of a promised gap that computing one block of a prompt may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A load, the promise to its requests, and the cost of a worker per hour."""

    source: Source
    promise: Promise
    price_per_hour: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a layout serves the load.

    attainment: share of the requests that kept the promise. worker_hours: hours of all workers, from the first request
    to the last token. cost: these hours at the question's price.
    """

    layout: str
    num_workers: int
    figures: Figures
    attainment: float
    worker_hours: float
    cost: float
    took_s: float
    series: Series


Judge = Callable[[Sequence[Layout]], list[Verdict]]


def verdict_of(question: Question, layout: Layout, run: Run) -> Verdict:
    """The verdict on a run."""
    found = figures(run.outcomes, question.promise, busy_s=run.busy_s)
    hours = layout.num_workers * found.seconds / 3600
    return Verdict(
        layout=layout.name,
        num_workers=layout.num_workers,
        figures=found,
        attainment=found.share_good / 100,
        worker_hours=hours,
        cost=hours * question.price_per_hour,
        took_s=run.took_s,
        series=series_of(run),
    )


def load_of(question: Question, machine: Machine) -> list[Arrival]:
    """The question's requests.

    Raises:
        LoadError: There are none, or the machine is too small for one of them. The message says what to do.
    """
    arrivals = question.source.load()
    longest = max(
        len(arrival.prompt) + max(arrival.num_output_tokens, *arrival.other_outputs, 0) for arrival in arrivals
    )
    room = min(machine.max_model_len, machine.num_blocks * machine.block_size)
    if longest > room:
        raise LoadError(
            f"a request has {longest} tokens, prompt and answer together, and a worker of {machine.name} takes {room}: "
            "divide the lengths with --scale, or use the --calibration of a larger machine"
        )
    return arrivals


def judge_one(question: Question, arrivals: Sequence[Arrival], layout: Layout) -> Verdict:
    """The verdict on one layout. Its workers first learn from a warm-up how long steps take."""
    coarse = with_large_blocks(layout, arrivals)
    return verdict_of(question, layout, simulate(coarse, arrivals, seed=question.seed, warm_up=warm_up_of(arrivals)))


@contextlib.contextmanager
def judging(question: Question, machine: Machine, *, num_processes: int = 1) -> Iterator[Judge]:
    """A function that judges layouts by the question's load, in ``num_processes`` processes. Their number does not
    change the verdicts.

    Raises:
        LoadError: The load is invalid.
    """
    arrivals = load_of(question, machine)  # so that errors of the load are raised here, and not in the processes
    if num_processes == 1:
        yield lambda layouts: [judge_one(question, arrivals, layout) for layout in layouts]
        return
    with ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(question, machine),
    ) as executor:
        yield lambda layouts: list(executor.map(_judge_here, layouts))


_prepared: list[Callable[[Layout], Verdict]] = []
"""The judge of a process of ``judging``; filled once when the process starts."""


def _prepare(question: Question, machine: Machine) -> None:
    arrivals = load_of(question, machine)
    _prepared.append(lambda layout: judge_one(question, arrivals, layout))


def _judge_here(layout: Layout) -> Verdict:
    return _prepared[0](layout)


def with_large_blocks(layout: Layout, arrivals: Sequence[Arrival]) -> Layout:
    """The layout with larger blocks, but as many bytes of KV, if prompts are long. A step computes at least one block
    of a prompt. So if gaps are promised, blocks are limited to what takes a small part of a gap.
    """
    longest = min(MAX_BLOCK_TOKENS, fmean(len(arrival.prompt) for arrival in arrivals) / BLOCKS_OF_PROMPT)
    promises = {layout.promise, *(arrival.promise for arrival in arrivals)}
    gap_ms = min((promise.itl_ms for promise in promises if promise.itl_ms is not None), default=None)
    token_s = layout.machine.step_time.prompt_token_s
    if gap_ms is not None and token_s > 0.0:
        longest = min(longest, BLOCK_SHARE_OF_GAP * gap_ms / 1e3 / token_s)
    return layout.with_pools(lambda pool: _with(pool, longest))


def _with(pool: Pool, longest: float) -> Pool:
    machine = pool.machine
    factor = 1
    while 2 * factor * machine.block_size <= longest and machine.num_blocks // (2 * factor) >= pool.most_running:
        factor *= 2
    larger = replace(machine, block_size=factor * machine.block_size, num_blocks=max(machine.num_blocks // factor, 1))
    return replace(pool, machine=larger)
