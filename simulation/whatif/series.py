"""A run over time: TTFT, gaps and utilisation for each window of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulation.cluster import Run
from simulation.outcome import percentile

MAX_WINDOWS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Figures of consecutive windows of ``window_s``; nan where a window had no values.

    TTFTs belong to the window in which their request was sent, gaps to the one in which they ended. utilisation:
    percent of all workers' time.
    """

    window_s: float
    ttft_p50_ms: Sequence[float]
    ttft_p90_ms: Sequence[float]
    itl_p50_ms: Sequence[float]
    itl_p99_ms: Sequence[float]
    utilisation: Sequence[float]

    @property
    def middles_s(self) -> list[float]:
        """Seconds from the first request to the middle of each window."""
        return [(number + 0.5) * self.window_s for number in range(len(self.utilisation))]


def series_of(run: Run) -> Series:
    """The figures of a run in whole seconds, at most ``MAX_WINDOWS`` of them at a time."""
    good = [outcome for outcome in run.outcomes if outcome.token_times_s]
    end_s = max((outcome.token_times_s[-1] for outcome in good), default=run.started_s) - run.started_s
    window_s = max(1, -(-int(end_s + 1) // MAX_WINDOWS))
    num_windows = int(end_s // window_s) + 1
    ttfts: list[list[float]] = [[] for _ in range(num_windows)]
    gaps: list[list[float]] = [[] for _ in range(num_windows)]
    busy_s = [0.0] * num_windows
    for outcome in good:
        ttfts[int((outcome.sent_s - run.started_s) // window_s)].append(1e3 * outcome.ttft_s)
        for gap_s, at_s in zip(outcome.gaps_s, outcome.token_times_s[1:], strict=True):
            gaps[int((at_s - run.started_s) // window_s)].append(1e3 * gap_s)
    for second, seconds in run.busy_in_s.items():
        number = (second - int(run.started_s)) // window_s
        if 0 <= number < num_windows:
            busy_s[number] += seconds
    whole_s = len(run.busy_s) * window_s
    return Series(
        window_s=window_s,
        ttft_p50_ms=[percentile(values, 0.5) for values in ttfts],
        ttft_p90_ms=[percentile(values, 0.9) for values in ttfts],
        itl_p50_ms=[percentile(values, 0.5) for values in gaps],
        itl_p99_ms=[percentile(values, 0.99) for values in gaps],
        utilisation=[min(100.0, 100 * seconds / whole_s) for seconds in busy_s],
    )
