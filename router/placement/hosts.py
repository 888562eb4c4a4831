"""What workers of one host do to each other: one computes with the cores of those that are idle, and gives them back.

So it matters to others on its host whether a worker computes at all. Few streams are served fastest by one of them with
all cores, which reads the weights once a step for all; many by all of them, each on its own cores. Pure functions.
"""

from __future__ import annotations

import numpy as np

from engine.contract.step_time import COMPUTE_CORE_GAIN
from router.placement.fleet import BoolArray, FloatArray, SlotArray, Standings

IDLE_TIE = 0.5
"""Of two workers without streams, one that has prompts comes first."""

WAITING_ROWS = 8.0
"""Prompts that are computed count like so many streams: who waits for one has nothing yet."""

SPREAD_MARGIN = 1.25
"""Streams are spread over one worker more of a host only where a step becomes shorter by this factor: one worker with
all cores computes prompts sooner."""

LOSS_MARGIN = 2.0
"""So many times as much is lost to who takes its cores back as computing with fewer explains: they change hands within
steps, whose threads wait for each other meanwhile, and many streams gain more by cores than few. Measured with 32
streams on two cores (benchmarks/serving_peer.py): with 1.5 a prompt now and then went to the other worker, all first
tokens came later by half, and fewer tokens.
"""

COMPUTING_PRICES = ("row_s", "context_token_s", "prompt_token_s", "prompt_read_s")


def beside_others(
    standings: Standings,
    *,
    num_context_tokens: float,
    bystanders: Standings | None = None,
    is_promised: bool = False,
) -> Standings:
    """The replicas with the prices that hold if the request goes there, and with what it does to others of the host.

    The request has ``num_context_tokens``. ``bystanders`` may compute, and are not to be chosen. If it
    ``is_promised`` a first token in time, it is not to have it at the cost of prompts that wait already: another worker
    that begins makes those of its host late. Where no cores are shared everything stays as it is.
    """
    if not (standings.host_cores > standings.own_cores).any():
        return standings
    if bystanders is None:
        return _priced(standings, num_context_tokens, is_promised=is_promised)
    everyone = Standings(*(np.concatenate(columns) for columns in zip(standings, bystanders, strict=True)))
    priced = _priced(everyone.with_prices(), num_context_tokens, is_promised=is_promised)
    return Standings(*(column[: len(standings.host)] for column in priced))


def _priced(standings: Standings, num_context_tokens: float, *, is_promised: bool) -> Standings:
    shares = (standings.host_cores > standings.own_cores) & (standings.own_cores > 0.0)
    hosts = standings.host.astype(np.intp)
    hosts[~shares] = hosts.max() + 1 + np.arange(np.count_nonzero(~shares))  # each by itself
    ranks = _ranks(hosts, standings)
    standings = _priced_alike(standings, hosts, ranks)
    is_busy = (standings.num_rows + standings.queued_tokens > 0.0) & shares
    takes = is_busy & (standings.core_gain > 0.0)
    own_busy, num_takers = _sums(hosts, standings.own_cores * is_busy), _sums(hosts, takes.astype(np.float64))
    own_then = own_busy + np.where(is_busy, 0.0, standings.own_cores)
    takers_then = num_takers + (~takes & (standings.core_gain > 0.0))
    reading = np.where(shares, _speed(standings, standings.core_gain, own_then, takers_then), 1.0)
    computing = np.where(shares, _speed(standings, _computing_gain(standings), own_then, takers_then), 1.0)
    is_behind = shares & ~is_busy & (_sums(hosts, standings.queued_tokens) > 0.0)
    return standings._replace(
        base_s=standings.base_s / reading,
        **{name: getattr(standings, name) / computing for name in COMPUTING_PRICES},
        lost_rows=np.where(shares & ~is_busy, _lost_rows(standings, hosts, is_busy, own_busy, num_takers), 0.0),
        crowding_s=np.where(shares, _crowding_s(standings, hosts, ranks, num_context_tokens), 0.0),
        is_behind=np.where(is_promised, is_behind, 0.0),
    )


def _priced_alike(standings: Standings, hosts: SlotArray, ranks: SlotArray) -> Standings:
    """With the prices of the busiest of each host for all of it that have as many cores: one that is idle most of the
    time knows least what steps take. What cores gain is the mean of those that take any.
    """
    takes = (standings.core_gain > 0.0).astype(np.float64)
    gain = _sums(hosts, standings.core_gain) / np.maximum(_sums(hosts, takes), 1.0)
    busiest = np.empty(int(hosts.max()) + 1, dtype=np.intp)
    busiest[hosts[ranks == 0]] = np.flatnonzero(ranks == 0)
    source = busiest[hosts]
    source = np.where(standings.own_cores[source] == standings.own_cores, source, np.arange(len(hosts)))
    prices = {name: getattr(standings, name)[source] for name in ("base_s", *COMPUTING_PRICES)}
    return standings._replace(core_gain=gain * takes, **prices)


def _lost_rows(
    standings: Standings, hosts: SlotArray, is_busy: BoolArray, own_busy: FloatArray, num_takers: FloatArray
) -> FloatArray:
    """How many streams of its host stand still, all together, while a replica computes that does not yet.

    It has its own cores back, and a share of those that are idle then.
    """
    waiting = WAITING_ROWS * (standings.queued_tokens > 0.0)
    rows = np.where(is_busy, standings.num_rows + waiting, 0.0)
    gain = _step_gain(standings) * standings.num_rows + _computing_gain(standings) * waiting
    gain = gain / np.maximum(standings.num_rows + waiting, 1.0)
    before = _speed(standings, gain, own_busy, num_takers)
    slowest = _sums(hosts, rows / before)
    by_idle_core = _sums(hosts, rows / before * gain / np.maximum(standings.own_cores, 1.0))
    idle = np.maximum(standings.host_cores - own_busy - standings.own_cores, 0.0)
    lost: FloatArray = _sums(hosts, rows) - slowest - by_idle_core * idle / (num_takers + 1.0)
    return LOSS_MARGIN * np.maximum(lost, 0.0)


def _crowding_s(standings: Standings, hosts: SlotArray, ranks: SlotArray, num_context_tokens: float) -> FloatArray:
    """All streams of a replica's host times what a step takes longer than with the best number of its workers, if the
    replica has streams and so have those with more of them, which come first in ``ranks``.

    Fewer workers than have rows for all streams are never best.
    """
    num_rows = _sums(hosts, standings.num_rows) + 1.0
    num_context = _sums(hosts, standings.num_context_tokens) + num_context_tokens
    members = _sums(hosts, np.ones(len(hosts)))
    most_rows = np.where(standings.max_rows > 0.0, standings.max_rows, np.inf)
    fewest = np.minimum(np.ceil(num_rows / most_rows), members)
    best_s = np.full(len(hosts), np.inf)
    here_s = np.empty(len(hosts))
    computing_gain = _computing_gain(standings)
    for number in range(1, int(members.max()) + 1):
        count = float(number)
        own_busy, num_takers = count * standings.own_cores, np.full(len(hosts), count)
        step_s = standings.base_s / _speed(standings, standings.core_gain, own_busy, num_takers)
        computing_s = (standings.row_s * num_rows + standings.context_token_s * num_context) / count
        step_s += computing_s / _speed(standings, computing_gain, own_busy, num_takers)
        is_better = (number <= members) & ((number <= fewest) | (step_s * SPREAD_MARGIN < best_s))
        here_s = np.where(ranks == number - 1, np.maximum(step_s, SPREAD_MARGIN * best_s), here_s)
        here_s = np.where(is_better & (ranks < number), step_s, here_s)
        best_s = np.where(is_better, step_s, best_s)
    crowding_s: FloatArray = num_rows * np.maximum(here_s - best_s, 0.0)
    return crowding_s


def _computing_gain(standings: Standings) -> FloatArray:
    """What as many cores more gain in what rows and prompts add to a step; 0 for who takes none of others."""
    return np.where(standings.core_gain > 0.0, COMPUTE_CORE_GAIN, 0.0)


def _step_gain(standings: Standings) -> FloatArray:
    """What as many cores more gain in a whole step of the streams that are there: the more, the more of them."""
    computing_s = standings.row_s * standings.num_rows + standings.context_token_s * standings.num_context_tokens
    faster_s = standings.base_s / (1.0 + standings.core_gain) + computing_s / (1.0 + _computing_gain(standings))
    speed: FloatArray = 1.0 + standings.core_gain
    np.divide(standings.base_s + computing_s, faster_s, out=speed, where=faster_s > 0.0)
    return speed - 1.0


def _speed(standings: Standings, gain: FloatArray, own_busy: FloatArray, num_takers: FloatArray) -> FloatArray:
    """How many times as fast as on its own cores each replica is while those of its host compute that own so many.

    The cores of the others are divided among those that take any; as many more as its own gain it so much.
    """
    idle = np.maximum(standings.host_cores - own_busy, 0.0) / np.maximum(num_takers, 1.0)
    speed: FloatArray = 1.0 + gain * idle / np.maximum(standings.own_cores, 1.0)
    return speed


def _sums(hosts: SlotArray, values: FloatArray) -> FloatArray:
    """Of each replica: the sum of the values of its host's."""
    sums = np.bincount(hosts, weights=values).astype(np.float64)
    of_each: FloatArray = sums[hosts]
    return of_each


def _ranks(hosts: SlotArray, standings: Standings) -> SlotArray:
    """Of each replica: how many of its host have more streams, or as many and come before it, for every router."""
    values = standings.num_rows + IDLE_TIE * (standings.queued_tokens > 0.0)
    order = np.lexsort((standings.order, -values, hosts))
    sorted_hosts = hosts[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_hosts[1:] != sorted_hosts[:-1])))
    places = np.arange(len(hosts)) - np.repeat(starts, np.diff(np.concatenate((starts, [len(hosts)]))))
    ranks = np.empty(len(hosts), dtype=np.intp)
    ranks[order] = places
    return ranks
