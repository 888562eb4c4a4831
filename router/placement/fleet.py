"""What predictions go by: how each replica stands, field by field, for a choice that looks at all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from engine.contract.step_time import FIRST_CORE_GAIN, StepTimeModel, aim_share

FIRST_CAPACITY = 16


class Column(Protocol):
    """One field of many replicas: a list, or an array where machine code reads it."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> float: ...

    def __setitem__(self, at: int, value: float, /) -> None: ...


class Standing(NamedTuple):
    """One replica at a moment, with what is promised to requests on their way there.

    ``num_rows``: streams that it generates, or is to; ``num_context_tokens``: what they read.
    ``queued_tokens``: of prompts, without the ``deferred_tokens``, which a prompt that is in time passes.
    ``prompt_share``: of its time lately, what went into prompts.
    ``base_s`` and the four behind it are the prices of its steps on its own cores; they hold if ``is_known``, and those
    of prompts if it also ``knows_prompts``.
    ``aim_share``: of a promised gap, what its steps are aimed at.
    ``core_gain``: see ``StepTimeModel``; nan where nobody knows, 0 where it takes no cores of others.
    ``own_cores``, and ``host_cores``: all that it and the others of its ``host`` share; 0: none. ``max_rows``: as many
    streams as it computes at a time; 0: nobody knows. ``order``: a number by which every router orders replicas.
    ``lost_rows``: streams of others on its host that stand still while it computes, prompts counted as several;
    ``crowding_s``: by how much all tokens of the host's streams come later, together, if one comes here.
    ``is_behind``: it would take cores back from prompts that wait on its host, and so brings no first token sooner than
    who computes there. These three are 0 until somebody looked at the hosts.
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
    core_gain: float = 0.0
    own_cores: float = 0.0
    host_cores: float = 0.0
    host: float = 0.0
    max_rows: float = 0.0
    order: float = 0.0
    deferred_tokens: float = 0.0
    lost_rows: float = 0.0
    crowding_s: float = 0.0
    is_behind: float = 0.0


NOBODY = Standing(*[0.0] * 16)

Prices = tuple[float, float, float, float, float, float, float, float, float]


def prices_of(model: StepTimeModel, *, has_prompts: bool = True) -> Prices:
    """The fields of a ``Standing`` from ``base_s`` to ``core_gain``. ``has_prompts``: the replica computed some."""
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
        math.nan if model.core_gain is None else model.core_gain,
    )


class Fleet:
    """A record a replica, in a slot that it keeps; replicas write their own when anything of it changes."""

    def __init__(self) -> None:
        self._standings = [NOBODY] * FIRST_CAPACITY
        self._values: npt.NDArray[np.float64] | None = None
        self._free = list(range(FIRST_CAPACITY - 1, -1, -1))
        self._hosts: dict[str, int] = {}
        self._free_hosts: list[int] = []
        self._addresses: dict[int, str] = {}

    def host(self, slot: int, address: str) -> int:
        """The number of the host on which the replica in a slot is; hosts that have no replica any more keep none."""
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
        """The replica is gone."""
        self._leave_host(slot)
        self._free.append(slot)

    def write(self, slot: int, standing: Standing) -> None:
        """Take note of how a replica stands."""
        self._standings[slot] = standing
        if self._values is not None:
            self._values[:, slot] = standing

    def standings(self, slots: Sequence[int]) -> Standings:
        """Those of some replicas, in the order of ``slots``, as lists that the caller may change."""
        rows = [self._standings[slot] for slot in slots]
        return Standings(*map(list, zip(*rows, strict=True)))

    def standings_as_arrays(self, slots: npt.NDArray[np.intp]) -> Standings:
        """The same as arrays."""
        if self._values is None:  # kept from here on: many replicas write less often than there are choices among them
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
    core_gain: Column
    own_cores: Column
    host_cores: Column
    host: Column
    max_rows: Column
    order: Column
    deferred_tokens: Column
    lost_rows: Column
    crowding_s: Column
    is_behind: Column


def standing_at(fleet: Standings, at: int) -> Standing:
    """One of them. Functions take this, and not all with an index: machine code would count references to each column
    at every call."""
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
        fleet.core_gain[at],
        fleet.own_cores[at],
        fleet.host_cores[at],
        fleet.host[at],
        fleet.max_rows[at],
        fleet.order[at],
        fleet.deferred_tokens[at],
        fleet.lost_rows[at],
        fleet.crowding_s[at],
        fleet.is_behind[at],
    )


def fill_prices(fleet: Standings) -> None:
    """Give replicas whose prices are not known the mean of those that are; nothing where none is."""
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
