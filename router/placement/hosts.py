"""What workers of one host do to each other: one computes with the cores of those that are idle, and gives them back.

So it matters to others on its host whether a worker computes at all. Few streams are served fastest by one of them with
all cores, which reads the weights once a step for all; many by all of them, each on its own cores. Pure functions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from router.placement.fleet import FloatArray, SlotArray, Standings

BoolArray = npt.NDArray[np.bool_]

IDLE_TIE = 0.5
"""Of two workers without streams, one that has prompts comes first."""

WAITING_ROWS = 8.0
"""Prompts that are computed count like so many streams: who waits for one has nothing yet."""

SPREAD_MARGIN = 1.1
"""So many times as long a step may be expected to take before streams are spread over one worker more of a host."""


def beside_others(standings: Standings, *, num_context_tokens: float) -> Standings:
    """The replicas with the prices that hold if the request goes there, and with what it does to others of the host.

    The request has ``num_context_tokens``. Where no cores are shared everything stays as it is.
    """
    shares = (standings.host_cores > standings.own_cores) & (standings.own_cores > 0.0)
    if not shares.any():
        return standings
    hosts = standings.host.astype(np.intp)
    hosts[~shares] = hosts.max() + 1 + np.arange(np.count_nonzero(~shares))  # each by itself
    is_busy = (standings.num_rows + standings.queued_tokens > 0.0) & shares
    own_busy, num_busy = _sums(hosts, standings.own_cores * is_busy), _sums(hosts, is_busy.astype(np.float64))
    num_then = num_busy + ~is_busy
    own_then = own_busy + np.where(is_busy, 0.0, standings.own_cores)
    speed = np.where(shares, _speed(standings, own_then, num_then), 1.0)
    # Those that compute already, as they are now and beside one more.
    before = _speed(standings, own_busy, num_busy)
    after = _speed(standings, own_busy + standings.own_cores, num_busy + 1.0)
    waiting = standings.num_rows + WAITING_ROWS * (standings.queued_tokens > 0.0)
    lost = _sums(hosts, np.where(is_busy, waiting * (1.0 - after / before), 0.0))
    return standings._replace(
        base_s=standings.base_s / speed,
        row_s=standings.row_s / speed,
        context_token_s=standings.context_token_s / speed,
        prompt_token_s=standings.prompt_token_s / speed,
        prompt_read_s=standings.prompt_read_s / speed,
        lost_rows=np.where(is_busy | ~shares, 0.0, lost),
        crowding_s=np.where(shares, _crowding_s(standings, hosts, shares, num_context_tokens), 0.0),
    )


def _crowding_s(standings: Standings, hosts: SlotArray, shares: BoolArray, num_context_tokens: float) -> FloatArray:
    """By how much each token of all streams of a host comes later, all together, than with the best number of workers,
    if the workers up to this one have them. Workers are taken to be alike, and those with most streams come first.
    """
    num_rows = _sums(hosts, standings.num_rows) + 1.0
    num_context = _sums(hosts, standings.num_context_tokens) + num_context_tokens
    members = _sums(hosts, np.ones(len(hosts)))
    rank = _ranks(hosts, standings.num_rows + IDLE_TIE * (standings.queued_tokens > 0.0))
    best_s = np.full(len(hosts), np.inf)
    here_s = np.empty(len(hosts))
    for number in range(1, int(members[shares].max()) + 1):
        count = float(number)
        step_s = standings.base_s + (standings.row_s * num_rows + standings.context_token_s * num_context) / count
        step_s = step_s / _speed(standings, count * standings.own_cores, np.full(len(hosts), count))
        is_better = (number <= members) & (step_s * SPREAD_MARGIN < best_s)
        here_s = np.where(rank == number - 1, np.maximum(step_s, SPREAD_MARGIN * best_s), here_s)
        here_s = np.where(is_better & (rank < number), step_s, here_s)
        best_s = np.where(is_better, step_s, best_s)
    crowding_s: FloatArray = num_rows * np.maximum(here_s - best_s, 0.0)
    return crowding_s


def _speed(standings: Standings, own_busy: FloatArray, num_busy: FloatArray) -> FloatArray:
    """How many times as fast as on its own cores each replica is while so many of its host compute, it among them.

    The cores of those that do not are divided among them.
    """
    idle = np.maximum(standings.host_cores - own_busy, 0.0) / np.maximum(num_busy, 1.0)
    speed: FloatArray = 1.0 + standings.core_gain * idle / np.maximum(standings.own_cores, 1.0)
    return speed


def _sums(hosts: SlotArray, values: FloatArray) -> FloatArray:
    """Of each replica: the sum of the values of its host's."""
    sums = np.bincount(hosts, weights=values).astype(np.float64)
    of_each: FloatArray = sums[hosts]
    return of_each


def _ranks(hosts: SlotArray, values: FloatArray) -> SlotArray:
    """Of each replica: how many of its host have more, or as much and come before it."""
    order = np.lexsort((np.arange(len(hosts)), -values, hosts))
    sorted_hosts = hosts[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_hosts[1:] != sorted_hosts[:-1])))
    places = np.arange(len(hosts)) - np.repeat(starts, np.diff(np.concatenate((starts, [len(hosts)]))))
    ranks = np.empty(len(hosts), dtype=np.intp)
    ranks[order] = places
    return ranks
