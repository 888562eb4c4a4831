"""Where a request goes: the plan with the least predicted cost, over all replicas for prefill and for decode.

What a plan costs: :mod:`router.placement.prediction`. How workers of one host affect each other:
:mod:`router.placement.hosts`. Which plans are compared: :mod:`router.placement.plans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from router.placement.fleet import Column, Standings
from router.placement.machine_code import MACHINE_CODE
from router.placement.plans import Costs, Way, first_token_s
from router.placement.prediction import NEVER, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Indices of the replica that computes the prompt, and of the one that generates after it.

    num_head_tokens: tokens of a split prompt that the first one computes; the second computes the rest. 0: no split.
    """

    prompt: int
    stream: int
    cost: float
    num_head_tokens: int = 0

    @property
    def is_colocated(self) -> bool:
        """True if one replica does both."""
        return self.prompt == self.stream

    @property
    def is_split(self) -> bool:
        """True if the replica that generates also computes the end of the prompt."""
        return self.num_head_tokens > 0

    @property
    def way(self) -> tuple[int, int, bool]:
        """The identity of a plan among the plans for one request."""
        return self.prompt, self.stream, self.is_split


class Weighed(NamedTuple):
    """A plan, and the predicted seconds until its first token."""

    plan: Plan
    ttft_s: float


def are_any_known(fleet: Standings, num_candidates: int) -> bool:
    """True if the prices of steps and of prompts are known for some candidate."""
    return any(fleet.knows_prompts[at] > 0.0 for at in range(num_candidates))


def prepare(fleet: Standings, *, num_context_tokens: float) -> None:
    """Change the prices of replicas to those that hold if a request of ``num_context_tokens`` goes there.

    Unknown prices become the mean of the others'; a replica that shares its host's cores becomes slower or faster, and
    so do its neighbours. Call this before any other function here. The candidates come first among the replicas; the
    ones after them take no requests, but still compute.
    """
    MACHINE_CODE.loops_of(fleet).prepare(fleet, float(num_context_tokens))


def choose(fleet: Standings, wish: Wish, cached_tokens: Column) -> Plan | None:
    """The plan with the least cost; None if no replica has room for the request.

    ``cached_tokens``: cached tokens of its prompt at each candidate. An idle replica counts as having room, whatever it
    reports.
    """
    way = MACHINE_CODE.loops_of(fleet).best_way(fleet, wish, cached_tokens, room_for_costs(fleet, len(cached_tokens)))
    return None if way.cost == NEVER else _plan(way)


def choose_prompt(fleet: Standings, wish: Wish, cached_tokens: Column) -> int:
    """The candidate that should compute the prompt of a request without decode."""
    costs = room_for_costs(fleet, len(cached_tokens))
    return MACHINE_CODE.loops_of(fleet).best_prompt(fleet, wish, cached_tokens, costs)


def weigh(fleet: Standings, wish: Wish, cached_tokens: Column, chosen: Plan, *, limit: int) -> list[Weighed]:
    """The chosen plan, and up to ``limit`` others: the cheapest of those that ``choose`` compares.

    These are the colocated plan of each replica, pairs of the best replicas for prefill and decode, and the plan that
    splits the prompt.
    """
    loops = MACHINE_CODE.loops_of(fleet)
    costs = room_for_costs(fleet, len(cached_tokens))
    loops.assess(fleet, wish, cached_tokens, costs)
    together = [prompt + stream for prompt, stream in zip(*_lists(costs.prompt, costs.stream), strict=True)]
    plans = [Plan(prompt=at, stream=at, cost=together[at]) for at in _cheapest(together, limit + 2)]
    apart = [stream + joining for stream, joining in zip(*_lists(costs.stream, costs.joining), strict=True)]
    prompts = _lists(costs.prompt)[0]
    for prompt_at in _cheapest(prompts, limit + 1):
        plans += [
            Plan(prompt=prompt_at, stream=stream_at, cost=prompts[prompt_at] + apart[stream_at])
            for stream_at in _cheapest(apart, limit + 1)
            if prompt_at != stream_at
        ]
    whole = min(plans, key=lambda item: item.cost)
    split = loops.best_split(fleet, wish, cached_tokens, costs, whole.prompt)
    if split.cost < NEVER:
        plans.append(_plan(split))
    others = sorted((item for item in plans if item.way != chosen.way), key=lambda item: item.cost)
    best = [chosen, *(item for item in others[:limit] if item.cost < NEVER)]
    return [Weighed(item, _ttft_s(fleet, wish, cached_tokens, costs, item)) for item in best]


def _ttft_s(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs, plan: Plan) -> float:
    """For a split prompt: the head is computed and moved, then the replica that generates computes the rest."""
    if not plan.is_split:
        return float(costs.ttft_s[plan.prompt])
    num_head = float(plan.num_head_tokens)
    head_s = first_token_s(fleet, plan.prompt, num_head, wish.itl_s, cached_tokens, 0.0)
    tail_s = first_token_s(fleet, plan.stream, wish.num_prompt_tokens, wish.itl_s, cached_tokens, num_head - 1.0)
    return float(head_s + wish.hand_over_s + tail_s)


def _plan(way: Way) -> Plan:
    return Plan(prompt=way.prompt, stream=way.stream, num_head_tokens=way.num_head_tokens, cost=way.cost)


def room_for_costs(fleet: Standings, size: int) -> Costs:
    """Uninitialized cost columns of the same kind, lists or arrays, as the replicas' columns."""
    if isinstance(fleet.host, list):
        return Costs(*([0.0] * size for _ in Costs._fields))
    return Costs(*cast("Any", np.empty((len(Costs._fields), size))))


def _lists(*columns: Column) -> list[list[float]]:
    return [column if isinstance(column, list) else cast("Any", column).tolist() for column in columns]


def _cheapest(costs: Sequence[float], number: int) -> list[int]:
    return sorted(range(len(costs)), key=costs.__getitem__)[:number]
