"""Finds the best fixed layout of a load: how many workers should compute prompts, or whether all should do both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from simulation.layout import LARGE_CHUNK, SMALL_CHUNK, Layout, apart, unified
from simulation.machine import Machine
from simulation.outcome import Figures

MAX_TRIED_RATIOS = 16
"""Up to so many workers every ratio is tried; of more workers some, and then those around the best of them."""

FIRST_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
MIN_STEP_SHARE = 1 / 32
"""Ratios that are nearer to each other than this share of the workers are not told apart."""

Judge = Callable[[Layout], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was tried, by the layout's name, and the best of it."""

    best: Layout
    tried: Mapping[str, Figures]

    @property
    def figures(self) -> Figures:
        """The best layout's."""
        return self.tried[self.best.name]


def worth(figures: Figures) -> tuple[float, float, float]:
    """By what layouts are compared: goodput; where that is alike, short gaps, then early first tokens."""
    return (round(figures.goodput, 6), -figures.itl_p99_ms, -figures.ttft_p99_ms)


def best_fixed(num_workers: int, machine: Machine, judge: Judge, *, small_chunk: int = SMALL_CHUNK) -> Search:
    """The best of: every ratio of prefill to decode workers, all that do both, and the same with small chunks.

    Where a machine's workers share cores, fixed ones keep to their own, or one worker a host has all of them. Of more
    than ``MAX_TRIED_RATIOS`` workers the ratio is searched, which takes goodput to have one peak.
    """
    own, sizes = machine, [(num_workers, machine)]
    if machine.shares_cores and machine.shared_step_time is not None:
        own = replace(machine, step_time=machine.shared_step_time, shared_step_time=None)
        sizes = [(num_workers, own)]
        if num_workers % machine.workers_per_host == 0:
            sizes.append((num_workers // machine.workers_per_host, replace(machine, shared_step_time=None)))
    alike = [unified(*size, chunk=chunk) for size in sizes for chunk in (LARGE_CHUNK, small_chunk)]
    layouts = {layout.name: layout for layout in alike}
    tried = {name: judge(layout) for name, layout in layouts.items()}

    def try_ratio(num_prefill: int) -> tuple[float, float, float]:
        layout = apart(num_prefill, num_workers - num_prefill, own)
        if layout.name not in tried:
            layouts[layout.name], tried[layout.name] = layout, judge(layout)
        return worth(tried[layout.name])

    if num_workers > 1:
        _search_ratios(num_workers, try_ratio)
    best = max(layouts, key=lambda name: worth(tried[name]))
    return Search(best=layouts[best], tried=tried)


def _search_ratios(num_workers: int, try_ratio: Callable[[int], tuple[float, float, float]]) -> None:
    if num_workers <= MAX_TRIED_RATIOS:
        for num_prefill in range(1, num_workers):
            try_ratio(num_prefill)
        return
    points = sorted({max(1, round(share * num_workers)) for share in FIRST_SHARES})
    best = max(points, key=try_ratio)
    step = num_workers // 8
    while step >= max(1, round(MIN_STEP_SHARE * num_workers)):
        step //= 2
        around = {best - step, best, best + step}
        best = max((point for point in sorted(around) if 0 < point < num_workers), key=try_ratio)
