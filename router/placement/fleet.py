"""What predictions go by, of all replicas as arrays: a choice reads hundreds of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.contract.step_time import FIRST_CORE_GAIN, StepTimeModel, aim_share

FloatArray = npt.NDArray[np.float64]
SlotArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

FIRST_CAPACITY = 16


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
    """A column a replica, in a slot that it keeps; replicas write their own when anything of it changes."""

    def __init__(self) -> None:
        self._values = np.zeros((len(Standing._fields), FIRST_CAPACITY))
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
            size = self._values.shape[1]
            self._values = np.concatenate((self._values, np.zeros_like(self._values)), axis=1)
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The replica is gone."""
        self._leave_host(slot)
        self._free.append(slot)

    def write(self, slot: int, standing: Standing) -> None:
        """Take note of how a replica stands."""
        self._values[:, slot] = standing

    def standings(self, slots: SlotArray) -> Standings:
        """Those of some replicas, in the order of ``slots``."""
        return Standings(*self._values[:, slots])

    def _leave_host(self, slot: int) -> None:
        address = self._addresses.pop(slot, None)
        if address is not None and address not in self._addresses.values():
            self._free_hosts.append(self._hosts.pop(address))


class Standings(NamedTuple):
    """The fields of ``Standing``, each of many replicas."""

    num_available_blocks: FloatArray
    is_idle: FloatArray
    queued_tokens: FloatArray
    num_rows: FloatArray
    num_context_tokens: FloatArray
    prompt_share: FloatArray
    leans_to_prompts: FloatArray
    base_s: FloatArray
    row_s: FloatArray
    context_token_s: FloatArray
    prompt_token_s: FloatArray
    prompt_read_s: FloatArray
    is_known: FloatArray
    knows_prompts: FloatArray
    aim_share: FloatArray
    core_gain: FloatArray
    own_cores: FloatArray
    host_cores: FloatArray
    host: FloatArray
    max_rows: FloatArray
    order: FloatArray
    deferred_tokens: FloatArray
    lost_rows: FloatArray
    crowding_s: FloatArray
    is_behind: FloatArray

    @property
    def are_any_known(self) -> bool:
        """True when the prices of some replica's steps are known, and those of prompts."""
        return bool(self.knows_prompts.any())

    def with_prices(self) -> Standings:
        """These, where replicas whose prices are not known have the mean of those that are."""
        filled = _filled(self, self.is_known > 0, ("base_s", "row_s", "context_token_s", "aim_share"))
        filled = _filled(filled, self.knows_prompts > 0, ("prompt_token_s", "prompt_read_s"))
        has_gain = ~np.isnan(filled.core_gain)
        if not has_gain.any():
            return filled._replace(core_gain=np.full(has_gain.size, FIRST_CORE_GAIN))
        return _filled(filled, has_gain, ("core_gain",))


def _filled(standings: Standings, known: npt.NDArray[np.bool_], names: Sequence[str]) -> Standings:
    """With the mean of those that are ``known`` elsewhere; as they are where all are known, or none is."""
    if known.all() or not known.any():
        return standings
    prices = {name: getattr(standings, name) for name in names}
    return standings._replace(**{name: np.where(known, price, price[known].mean()) for name, price in prices.items()})
