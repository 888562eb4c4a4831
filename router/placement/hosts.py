"""How workers on one host affect each other: one that computes borrows the cores of idle ones, and gives them back.

So whether one worker computes at all affects the others on its host. One worker with all cores serves a few streams
fastest, because it reads the weights once a step for all of them. All workers, each on its own cores, serve many
streams fastest.

All functions here are also compiled (:mod:`router.placement.machine_code`), so they are plain loops over numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.contract.step_time import COMPUTE_CORE_GAIN
from router.placement.fleet import Standing, Standings, standing_at

IDLE_TIE = 0.5
"""Added to the streams of a worker with queued prompts: of two without streams, the one with prompts ranks first."""

WAITING_ROWS = 8.0
"""A worker's queued prompts count as this many streams, because their callers have no token yet."""

SPREAD_MARGIN = 1.25
"""Streams are spread over one more worker of a host only if that shortens a step by this factor, because one worker
with all cores computes prompts sooner."""

LOSS_MARGIN = 2.0
"""When a worker takes its cores back, others lose this many times what computing with fewer cores explains: cores
change hands within steps, whose threads wait for each other meanwhile, and many streams gain more by cores than few.
Measured with 32 streams on two cores (benchmarks/serving_peer.py): with 1.5, some prompts went to the other worker,
all first tokens came later by half, and there were fewer tokens.
"""


class HostLoad(NamedTuple):
    """Totals over the workers of one host that share its cores.

    ``own_busy``: cores of the workers that compute; ``num_takers``: how many of these borrow cores. The last three are
    sums over workers that compute: ``rows`` are their streams, with prompts counted as several; ``rows_now`` are the
    same divided by the speed that borrowed cores give now; ``rows_by_core`` is the gain from one more idle core.
    """

    num_members: int
    own_busy: float
    num_takers: float
    queued_tokens: float
    num_rows: float
    num_context_tokens: float
    rows: float
    rows_now: float
    rows_by_core: float


class Effect(NamedTuple):
    """What one more request at a replica does: the fields of a ``Standing`` about others on the host, and the replica's
    speed relative to its own cores alone, for reading weights (``reading``) and for all else (``computing``).
    """

    lost_rows: float
    crowding_s: float
    is_behind: float
    reading: float
    computing: float


def share_cores(fleet: Standings, num_context_tokens: float) -> None:
    """Give each replica the prices that hold if the request goes there, and its effects on others on the host.

    The request has ``num_context_tokens``. Its first token should not come at the expense of prompts that wait already,
    and another worker that starts to compute delays those of its host. All prices must be known.
    """
    num_hosts = 0
    for at in range(len(fleet.host)):
        if _shares(fleet, at):
            num_hosts = max(num_hosts, int(fleet.host[at]) + 1)
    if num_hosts == 0:
        return
    first, following = [-1] * num_hosts, [-1] * len(fleet.host)
    for at in range(len(fleet.host)):
        if _shares(fleet, at):
            _rank(fleet, at, first, following)
    for host in range(num_hosts):
        if first[host] < 0:
            continue
        _price_alike(fleet, first[host], following)
        load = _host_load(fleet, first[host], following)
        rank, at = 0, first[host]
        while at >= 0:  # inlined here for the reason in standing_at
            _write(fleet, at, _effect(standing_at(fleet, at), rank, load, num_context_tokens))
            rank, at = rank + 1, following[at]


def _shares(fleet: Standings, at: int) -> bool:
    return 0.0 < fleet.own_cores[at] < fleet.host_cores[at]


def _rank(fleet: Standings, at: int, first: list[int], following: list[int]) -> None:
    """Insert a replica into the linked list of its host: most streams first, in the same order at every router.

    ``first``: the first replica of each host; ``following``: the next one after each replica, -1 after the last.
    """
    host, before = int(fleet.host[at]), -1
    other = first[host]
    while other >= 0 and not _comes_before(standing_at(fleet, at), standing_at(fleet, other)):
        before, other = other, following[other]
    following[at] = other
    if before < 0:
        first[host] = at
    else:
        following[before] = at


def _comes_before(one: Standing, other: Standing) -> bool:
    streams = one.num_rows + IDLE_TIE * (one.queued_tokens > 0.0)
    of_other = other.num_rows + IDLE_TIE * (other.queued_tokens > 0.0)
    return streams > of_other or (streams == of_other and one.order < other.order)


def _effect(here: Standing, rank: int, load: HostLoad, num_context_tokens: float) -> Effect:
    """The effect of the request going to this replica, which has position ``rank`` on its host."""
    is_busy, takes = _is_busy(here), here.core_gain > 0.0
    own_then = load.own_busy + (0.0 if is_busy else here.own_cores)
    takers_then = load.num_takers + (1.0 if takes and not is_busy else 0.0)
    lent = _lent(here, own_then, takers_then)
    return Effect(
        lost_rows=0.0 if is_busy else _lost_rows(here, load),
        crowding_s=_crowding_s(here, rank, load, num_context_tokens),
        is_behind=1.0 if not is_busy and load.queued_tokens > 0.0 else 0.0,
        reading=1.0 + here.core_gain * lent,
        computing=1.0 + _computing_gain(here) * lent,
    )


def _write(fleet: Standings, at: int, effect: Effect) -> None:
    fleet.lost_rows[at] = effect.lost_rows
    fleet.crowding_s[at] = effect.crowding_s
    fleet.is_behind[at] = effect.is_behind
    fleet.base_s[at] = fleet.base_s[at] / effect.reading
    fleet.row_s[at] = fleet.row_s[at] / effect.computing
    fleet.context_token_s[at] = fleet.context_token_s[at] / effect.computing
    fleet.prompt_token_s[at] = fleet.prompt_token_s[at] / effect.computing
    fleet.prompt_read_s[at] = fleet.prompt_read_s[at] / effect.computing


def _price_alike(fleet: Standings, first: int, following: list[int]) -> None:
    """Give all workers of a host with equally many cores the prices of the busiest one, since a mostly idle worker has
    the worst model of its steps. ``core_gain`` becomes the mean over the workers that borrow cores.
    """
    gain, num_takers, at = 0.0, 0, first
    while at >= 0:
        if fleet.core_gain[at] > 0.0:
            gain += fleet.core_gain[at]
            num_takers += 1
        at = following[at]
    busiest, at = standing_at(fleet, first), first
    while at >= 0:
        fleet.core_gain[at] = gain / num_takers if fleet.core_gain[at] > 0.0 else 0.0
        if fleet.own_cores[at] == busiest.own_cores:
            fleet.base_s[at] = busiest.base_s
            fleet.row_s[at] = busiest.row_s
            fleet.context_token_s[at] = busiest.context_token_s
            fleet.prompt_token_s[at] = busiest.prompt_token_s
            fleet.prompt_read_s[at] = busiest.prompt_read_s
        at = following[at]


def _host_load(fleet: Standings, first: int, following: list[int]) -> HostLoad:
    members, own_busy, num_takers, queued_tokens, num_rows, num_context = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    at = first
    while at >= 0:
        here = standing_at(fleet, at)
        members += 1
        queued_tokens += here.queued_tokens
        num_rows += here.num_rows
        num_context += here.num_context_tokens
        if _is_busy(here):
            own_busy += here.own_cores
            num_takers += 1.0 if here.core_gain > 0.0 else 0.0
        at = following[at]
    rows, rows_now, rows_by_core, at = 0.0, 0.0, 0.0, first
    while at >= 0:
        here = standing_at(fleet, at)
        if _is_busy(here):
            waiting = WAITING_ROWS if here.queued_tokens > 0.0 else 0.0
            own = here.num_rows + waiting
            gain = (_step_gain(here) * here.num_rows + _computing_gain(here) * waiting) / max(own, 1.0)
            now = own / (1.0 + gain * _lent(here, own_busy, num_takers))
            rows += own
            rows_now += now
            rows_by_core += now * gain / max(here.own_cores, 1.0)
        at = following[at]
    return HostLoad(members, own_busy, num_takers, queued_tokens, num_rows, num_context, rows, rows_now, rows_by_core)


def _is_busy(here: Standing) -> bool:
    return here.num_rows + here.queued_tokens > 0.0


def _lost_rows(here: Standing, load: HostLoad) -> float:
    """How many streams of the host stall, in sum, while this replica, which is idle now, computes.

    It takes its own cores back, and borrows a share of the cores that are still idle.
    """
    idle = max(here.host_cores - load.own_busy - here.own_cores, 0.0)
    lost = load.rows - load.rows_now - load.rows_by_core * idle / (load.num_takers + 1.0)
    return LOSS_MARGIN * max(lost, 0.0)


def _crowding_s(here: Standing, rank: int, load: HostLoad, num_context_tokens: float) -> float:
    """The time that all the host's streams lose a step, in sum, because not the best number of its workers decodes.

    It assumes that the replica decodes, and so do the workers before its ``rank``, which have more streams. A number of
    workers that has too few rows for all streams is never the best.
    """
    num_rows, num_context = load.num_rows + 1.0, load.num_context_tokens + num_context_tokens
    fewest = 1.0
    if here.max_rows > 0.0:
        fewest = min(math.ceil(num_rows / here.max_rows), load.num_members)
    computing_s = here.row_s * num_rows + here.context_token_s * num_context
    best_s, here_s = math.inf, 0.0
    for number in range(1, load.num_members + 1):
        count = float(number)
        lent = _lent(here, count * here.own_cores, count)
        step_s = here.base_s / (1.0 + here.core_gain * lent)
        step_s += computing_s / (count * (1.0 + _computing_gain(here) * lent))
        is_better = number <= fewest or step_s * SPREAD_MARGIN < best_s
        if is_better and rank < number:
            here_s = step_s
        elif rank == number - 1:
            here_s = max(step_s, SPREAD_MARGIN * best_s)
        if is_better:
            best_s = step_s
    return num_rows * max(here_s - best_s, 0.0)


def _computing_gain(here: Standing) -> float:
    """The speed gain of rows and prompts from doubling the cores; 0 for a worker that borrows none."""
    return COMPUTE_CORE_GAIN if here.core_gain > 0.0 else 0.0


def _step_gain(here: Standing) -> float:
    """The speed gain of a whole step of the current streams from doubling the cores; it grows with the streams."""
    computing_s = here.row_s * here.num_rows + here.context_token_s * here.num_context_tokens
    faster_s = here.base_s / (1.0 + here.core_gain) + computing_s / (1.0 + _computing_gain(here))
    return (here.base_s + computing_s) / faster_s - 1.0 if faster_s > 0.0 else here.core_gain


def _lent(here: Standing, own_busy: float, num_takers: float) -> float:
    """How many borrowed cores a replica has for each of its own, while workers with ``own_busy`` cores compute: idle
    cores are divided among the ``num_takers`` that borrow. The replica is ``1 + gain * lent`` times as fast then.
    """
    idle = max(here.host_cores - own_busy, 0.0)
    return idle / (max(num_takers, 1.0) * max(here.own_cores, 1.0))
