"""The state of every replica as columns, one a field, for placement to loop over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from engine.contract.step_time import FIRST_CORE_GAIN, StepTimeModel, aim_share

FIRST_CAPACITY = 16

PRIOR_ROWS = 8.0
"""What rows cost in the rest of the fleet counts as much as a replica's own steps with so many rows."""

LEAST_BASE_SHARE = 0.5
"""A replica keeps at least this share of its ``base_s`` when its price of a row changes."""


class Column(Protocol):
    """One field of many replicas: a list, or an array if machine code reads it."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> float: ...

    def __setitem__(self, at: int, value: float, /) -> None: ...


class Standing(NamedTuple):
    """The state of one replica at one moment, including requests that are on their way there.

    ``num_rows``: streams that it decodes, or soon will; ``num_context_tokens``: the context of all of them.
    ``queued_tokens``: waiting prompt tokens, without ``deferred_tokens``, which prompts that are in time overtake.
    ``prompt_share``: the recent share of its time that went into prompts.
    ``leans_to_prompts`` and ``least_prompt_share``: see ``Role``, the latter as ``prompt_share``.
    ``keeps_to``: while the work is divided, 1 for only streams, -1 for only prompts; 0 for any work.
    ``base_s`` and the next four fields are the prices of its steps on its own cores. They are valid if ``is_known``,
    those of prompts only if it also ``knows_prompts``.
    ``aim_share``: the share of a promised gap that its steps aim at.
    ``most_rows``: the most rows in the steps that the prices come from; 0: unknown.
    ``core_gain``: see ``StepTimeModel``; nan if unknown, 0 if it takes no other workers' cores.
    ``own_cores``: its own; ``host_cores``: all that the workers of its ``host`` share; 0: none. ``max_rows``: the most
    streams that it decodes at a time; 0: unknown. ``order``: a number by which every router orders replicas alike.
    ``lost_rows``: how many streams of others on its host stall while it computes; a prompt counts as several streams.
    ``crowding_s``: the delay of one token, summed over the host's streams, if a stream comes here.
    ``is_behind``: it is idle, and would take its cores back while prompts wait on its host. So its first token comes no
    sooner than that of a worker that computes there. These three are 0 until ``share_cores`` has filled them.
    """

    num_available_blocks: float
    is_idle: float
    queued_tokens: float
    num_rows: float
    num_context_tokens: float
    prompt_share: float
    leans_to_prompts: float
    base_s: float
    row_s: float
    context_token_s: float
    prompt_token_s: float
    prompt_read_s: float
    is_known: float
    knows_prompts: float
    aim_share: float
    most_rows: float
    core_gain: float = 0.0
    own_cores: float = 0.0
    host_cores: float = 0.0
    host: float = 0.0
    max_rows: float = 0.0
    order: float = 0.0
    deferred_tokens: float = 0.0
    least_prompt_share: float = 0.0
    keeps_to: float = 0.0
    lost_rows: float = 0.0
    crowding_s: float = 0.0
    is_behind: float = 0.0


NOBODY = Standing(*[0.0] * 17)

Prices = tuple[float, float, float, float, float, float, float, float, float, float]


def prices_of(model: StepTimeModel, *, has_prompts: bool = True) -> Prices:
    """The fields of a ``Standing`` from ``base_s`` to ``core_gain``. ``has_prompts``: it has computed prompts."""
    is_known, model = model.num_steps > 0, model.on(1.0)
    return (
        model.base_s,
        model.row_s,
        model.context_token_s,
        model.prompt_token_s,
        model.prompt_read_s,
        float(is_known),
        float(is_known and has_prompts),
        aim_share(model.error) if is_known else 1.0,
        model.most_rows,
        math.nan if model.core_gain is None else model.core_gain,
    )


class Fleet:
    """One record a replica, in a slot that stays the same. Each replica rewrites its own record when it changes."""

    def __init__(self) -> None:
        self._standings = [NOBODY] * FIRST_CAPACITY
        self._values: npt.NDArray[np.float64] | None = None
        self._free = list(range(FIRST_CAPACITY - 1, -1, -1))
        self._hosts: dict[str, int] = {}
        self._free_hosts: list[int] = []
        self._addresses: dict[int, str] = {}

    def host(self, slot: int, address: str) -> int:
        """Assign a replica's slot to a host, and return the host's number; a host without replicas loses its number."""
        if self._addresses.get(slot) != address:
            self._leave_host(slot)
            self._addresses[slot] = address
            if address not in self._hosts:
                self._hosts[address] = self._free_hosts.pop() if self._free_hosts else len(self._hosts)
        return self._hosts[address]

    def take_slot(self) -> int:
        """A slot for a new replica."""
        if not self._free:
            size = len(self._standings)
            self._standings += [NOBODY] * size
            self._values = None
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free the slot of a replica that is gone."""
        self._leave_host(slot)
        self._free.append(slot)

    def write(self, slot: int, standing: Standing) -> None:
        """Store a replica's state."""
        self._standings[slot] = standing
        if self._values is not None:
            self._values[:, slot] = standing

    def standings(self, slots: Sequence[int]) -> Standings:
        """The state of some replicas, in the order of ``slots``, as lists that the caller may change."""
        rows = [self._standings[slot] for slot in slots]
        return Standings(*map(list, zip(*rows, strict=True)))

    def standings_as_arrays(self, slots: npt.NDArray[np.intp]) -> Standings:
        """The same as arrays."""
        if self._values is None:  # kept from here on: with many replicas, choices are more frequent than writes
            self._values = np.array(self._standings, np.float64).T.copy()
        return Standings(*cast("Sequence[Column]", self._values.take(slots, axis=1)))

    def _leave_host(self, slot: int) -> None:
        address = self._addresses.pop(slot, None)
        if address is not None and address not in self._addresses.values():
            self._free_hosts.append(self._hosts.pop(address))


class Standings(NamedTuple):
    """The fields of ``Standing``, each of many replicas."""

    num_available_blocks: Column
    is_idle: Column
    queued_tokens: Column
    num_rows: Column
    num_context_tokens: Column
    prompt_share: Column
    leans_to_prompts: Column
    base_s: Column
    row_s: Column
    context_token_s: Column
    prompt_token_s: Column
    prompt_read_s: Column
    is_known: Column
    knows_prompts: Column
    aim_share: Column
    most_rows: Column
    core_gain: Column
    own_cores: Column
    host_cores: Column
    host: Column
    max_rows: Column
    order: Column
    deferred_tokens: Column
    least_prompt_share: Column
    keeps_to: Column
    lost_rows: Column
    crowding_s: Column
    is_behind: Column


def standing_at(fleet: Standings, at: int) -> Standing:
    """The state of one replica. Functions take this and not all columns with an index: at every call, machine code
    would count references to each column."""
    return Standing(
        fleet.num_available_blocks[at],
        fleet.is_idle[at],
        fleet.queued_tokens[at],
        fleet.num_rows[at],
        fleet.num_context_tokens[at],
        fleet.prompt_share[at],
        fleet.leans_to_prompts[at],
        fleet.base_s[at],
        fleet.row_s[at],
        fleet.context_token_s[at],
        fleet.prompt_token_s[at],
        fleet.prompt_read_s[at],
        fleet.is_known[at],
        fleet.knows_prompts[at],
        fleet.aim_share[at],
        fleet.most_rows[at],
        fleet.core_gain[at],
        fleet.own_cores[at],
        fleet.host_cores[at],
        fleet.host[at],
        fleet.max_rows[at],
        fleet.order[at],
        fleet.deferred_tokens[at],
        fleet.least_prompt_share[at],
        fleet.keeps_to[at],
        fleet.lost_rows[at],
        fleet.crowding_s[at],
        fleet.is_behind[at],
    )


def fill_prices(fleet: Standings) -> None:
    """Give replicas with unknown prices the mean of the known ones; do nothing if none is known."""
    _fill(fleet.base_s, fleet.is_known)
    _fill(fleet.row_s, fleet.is_known)
    _fill(fleet.context_token_s, fleet.is_known)
    _fill(fleet.aim_share, fleet.is_known)
    _fill(fleet.prompt_token_s, fleet.knows_prompts)
    _fill(fleet.prompt_read_s, fleet.knows_prompts)
    num_known, total = 0, 0.0
    for at in range(len(fleet.core_gain)):
        if not math.isnan(fleet.core_gain[at]):
            num_known += 1
            total += fleet.core_gain[at]
    mean = total / num_known if num_known else FIRST_CORE_GAIN
    for at in range(len(fleet.core_gain)):
        if math.isnan(fleet.core_gain[at]):
            fleet.core_gain[at] = mean


def pool_row_prices(fleet: Standings) -> None:
    """Move what rows and their context add to a step towards the fleet's mean, where a replica has seen few rows.

    Steps with few rows do not tell these prices, and a fit of them is often 0. Then the replica with the least of many
    such prices would get all streams: the winner's curse. The remedy is that of Stein, 1956: estimates shrink towards
    their mean, and the more so the less is known. Prices count relative to ``base_s``, as replicas may differ in speed.
    A step with half of the most rows seen is predicted as before: what a row costs more, the rest costs less.
    """
    num_rows, row, context = 0.0, 0.0, 0.0
    for at in range(len(fleet.base_s)):
        if fleet.is_known[at] > 0.0 and fleet.base_s[at] > 0.0:
            num_rows += fleet.most_rows[at]
            row += fleet.most_rows[at] * fleet.row_s[at] / fleet.base_s[at]
            context += fleet.most_rows[at] * fleet.context_token_s[at] / fleet.base_s[at]
    if num_rows == 0.0:
        return
    for at in range(len(fleet.base_s)):
        if fleet.base_s[at] > 0.0:
            others = PRIOR_ROWS / (PRIOR_ROWS + fleet.most_rows[at])
            mean = others * fleet.base_s[at] / num_rows
            row_s = (1.0 - others) * fleet.row_s[at] + mean * row
            base_s = fleet.base_s[at] + (fleet.row_s[at] - row_s) * fleet.most_rows[at] / 2.0
            fleet.row_s[at], fleet.base_s[at] = row_s, max(base_s, LEAST_BASE_SHARE * fleet.base_s[at])
            fleet.context_token_s[at] = (1.0 - others) * fleet.context_token_s[at] + mean * context


def _fill(prices: Column, is_known: Column) -> None:
    num_known, total = 0, 0.0
    for at in range(len(prices)):
        if is_known[at] > 0.0:
            num_known += 1
            total += prices[at]
    if num_known == 0 or num_known == len(prices):
        return
    for at in range(len(prices)):
        if not is_known[at] > 0.0:
            prices[at] = total / num_known
