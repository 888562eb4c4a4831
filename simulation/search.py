"""Finds the best fixed layout for a load: how many workers should prefill, or whether all should do both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from simulation.layout import LARGE_CHUNK, SMALL_CHUNK, Layout, apart, unified
from simulation.machine import Machine
from simulation.outcome import Figures

MAX_TRIED_RATIOS = 16
"""Up to this many workers, every ratio is tried. With more workers some are tried, then those around the best one."""

FIRST_SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
MIN_STEP_SHARE = 1 / 32
"""Ratios that differ by less than this share of the workers count as equal."""

Judge = Callable[[Layout], Figures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The figures of all tried layouts by name, and the best layout."""

    best: Layout
    tried: Mapping[str, Figures]

    @property
    def figures(self) -> Figures:
        """The figures of the best layout."""
        return self.tried[self.best.name]


def worth(figures: Figures) -> tuple[float, float, float]:
    """The sort key of layouts: goodput, then short gaps, then short TTFT."""
    return (round(figures.goodput, 6), -figures.itl_p99_ms, -figures.ttft_p99_ms)


def best_fixed(num_workers: int, machine: Machine, judge: Judge, *, small_chunk: int = SMALL_CHUNK) -> Search:
    """The best of these layouts: all ratios of prefill to decode workers, and workers that do both, with large and with
    small chunks.

    On machines whose workers share cores, fixed layouts use only their own cores, or one worker per host uses all of
    them. With more than ``MAX_TRIED_RATIOS`` workers the ratio is searched, assuming that goodput has a single peak.
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
