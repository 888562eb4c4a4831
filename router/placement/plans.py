"""The plan with the least cost, of all replicas for a prompt and all for its tokens.

Only the best replica for the prompt and the best for the tokens make a pair; where they are the same one, the next best
takes its place on either side.

All but the constants here is also compiled (:mod:`router.placement.machine_code`): plain loops over numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from router.placement.fleet import Column, Standings, fill_prices, standing_at
from router.placement.hosts import share_cores
from router.placement.prediction import NEVER, Wish, cost, not_before, predict

LEANING_MARGIN = 0.05
"""So much less does it seem to cost where a replica leans to the work, when replicas are compared: near ties go where
the cluster's roles want them. It is no reason for a hand-over.
"""

TIE_MARGIN = 0.01
"""Of plans that differ by less, each request prefers others: routers that know the same do not all choose the same."""

LEAST_HEAD_SHARE = 0.25
"""A prompt is split where somebody else has so much more of it cached than whoever would compute it."""


class Way(NamedTuple):
    """A plan by numbers alone: see :class:`router.placement.planner.Plan`. A cost of ``NEVER``: there is none."""

    prompt: int
    stream: int
    num_head_tokens: int
    cost: float


class Costs(NamedTuple):
    """The fields of :class:`router.placement.prediction.Cost`, each of many replicas. ``stream`` is ``NEVER`` where
    there is no room."""

    prompt: Column
    stream: Column
    joining: Column
    ttft_s: Column


def prepare(fleet: Standings, num_context_tokens: float) -> None:
    """Have every replica tell the prices that would hold if a request with so much context went there."""
    fill_prices(fleet)
    share_cores(fleet, num_context_tokens)


def assess(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs) -> None:
    """Write what everything costs at each replica that the request could go to: as many as ``costs`` and
    ``cached_tokens`` have."""
    for at in range(len(cached_tokens)):
        soonest_s = NEVER
        if fleet.is_behind[at] > 0.0:
            soonest_s = soonest_beside(fleet, at, wish.num_prompt_tokens, wish.itl_s, cached_tokens, 0.0)
        here = standing_at(fleet, at)
        found = cost(here, wish, cached_tokens[at], soonest_s, 0.0)
        costs.prompt[at], costs.joining[at], costs.ttft_s[at] = found.prompt, found.joining, found.ttft_s
        has_room = here.num_available_blocks >= wish.num_blocks or here.is_idle > 0.0
        costs.stream[at] = found.stream if has_room else NEVER


def soonest_beside(
    fleet: Standings, at: int, num_prompt_tokens: float, itl_s: float, cached_tokens: Column, least_cached: float
) -> float:
    """How soon the first token would come from those that compute on a replica's host already, each of which has at
    least ``least_cached`` tokens of the prompt; ``NEVER`` where nobody does."""
    soonest_s = NEVER
    for other in range(len(cached_tokens)):
        if fleet.host[other] == fleet.host[at] and not fleet.is_behind[other] > 0.0:
            cached = max(cached_tokens[other], least_cached)
            soonest_s = min(soonest_s, predict(standing_at(fleet, other), num_prompt_tokens, itl_s, cached).ttft_s)
    return soonest_s


def first_token_s(
    fleet: Standings, at: int, num_prompt_tokens: float, itl_s: float, cached_tokens: Column, least_cached: float
) -> float:
    """The predicted seconds until the first token at one replica; see ``soonest_beside``."""
    here = standing_at(fleet, at)
    there = predict(here, num_prompt_tokens, itl_s, max(cached_tokens[at], least_cached))
    if not here.is_behind > 0.0:
        return there.ttft_s
    soonest_s = soonest_beside(fleet, at, num_prompt_tokens, itl_s, cached_tokens, least_cached)
    return not_before(here, there.ttft_s, soonest_s)


def best_way(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs) -> Way:
    """The plan that costs least."""
    assess(fleet, wish, cached_tokens, costs)
    best = _best_whole(fleet, wish, costs)
    split = best_split(fleet, wish, cached_tokens, costs, best.prompt)
    return split if split.cost * (1.0 + TIE_MARGIN) < best.cost else best


def best_prompt(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs) -> int:
    """The replica that should compute a prompt behind which nothing is generated."""
    assess(fleet, wish, cached_tokens, costs)
    prompt = [0.0] * len(cached_tokens)
    for at in range(len(prompt)):
        prompt[at] = costs.prompt[at] * _biases(fleet.leans_to_prompts[at], at, wish.key)[0]
    return _least(prompt, -1)


def best_split(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs, prompt_at: int) -> Way:
    """The plan by which one replica hands over what it has cached, and another does all the rest; none where the best
    plan that cuts nothing, with its prompt at ``prompt_at``, leaves nothing worth a cut.

    Only what is cached is worth a cut: the second replica waits for the first, so that a token that both could compute
    comes sooner from either of them alone. The first one computes a single token, behind the cached ones.
    """
    num_replicas, at = len(cached_tokens), 0
    if not wish.least_head_tokens or num_replicas < 2:
        return Way(0, 0, 0, NEVER)
    for other in range(num_replicas):
        if cached_tokens[other] > cached_tokens[at]:
            at = other
    num_cached = float(int(cached_tokens[at]))
    num_more = num_cached - cached_tokens[prompt_at]
    least = max(wish.least_head_tokens, LEAST_HEAD_SHARE * wish.num_prompt_tokens)
    if at == prompt_at or num_more < least or num_cached + 1.0 >= wish.num_prompt_tokens:
        return Way(0, 0, 0, NEVER)
    head_s = first_token_s(fleet, at, num_cached + 1.0, wish.itl_s, cached_tokens, 0.0)
    together = [0.0] * num_replicas
    for other in range(num_replicas):
        soonest_s = NEVER
        if fleet.is_behind[other] > 0.0:
            soonest_s = soonest_beside(fleet, other, wish.num_prompt_tokens, wish.itl_s, cached_tokens, num_cached)
        cached = max(cached_tokens[other], num_cached)
        tail = cost(standing_at(fleet, other), wish, cached, soonest_s, head_s + wish.hand_over_s)
        together[other] = tail.prompt + costs.stream[other]
    stream_at = _least(together, at)
    delayed_s = predict(standing_at(fleet, at), num_cached + 1.0, wish.itl_s, num_cached).prompt_s
    return Way(at, stream_at, int(num_cached) + 1, together[stream_at] + fleet.num_rows[at] * delayed_s)


def _best_whole(fleet: Standings, wish: Wish, costs: Costs) -> Way:
    """The best one that cuts nothing. One that hands over has to cost less than all others, leanings or not."""
    prompt, stream, together = [0.0] * len(costs.prompt), [0.0] * len(costs.prompt), [0.0] * len(costs.prompt)
    least = NEVER
    for at in range(len(prompt)):
        prompt_bias, stream_bias = _biases(fleet.leans_to_prompts[at], at, wish.key)
        together[at] = costs.prompt[at] * prompt_bias + costs.stream[at] * stream_bias
        has_room = fleet.num_available_blocks[at] >= wish.num_prompt_blocks or fleet.is_idle[at] > 0.0
        prompt[at] = costs.prompt[at] * prompt_bias if has_room else NEVER
        stream[at] = (costs.stream[at] + costs.joining[at]) * stream_bias
        least = min(least, costs.prompt[at] + costs.stream[at])
    at = _least(together, -1)
    best = Way(at, at, 0, costs.prompt[at] + costs.stream[at])
    if len(prompt) < 2:
        return best
    prompt_at, stream_at = _least(prompt, -1), _least(stream, -1)
    if prompt_at != stream_at:
        return _better_pair(best, least, prompt, costs, prompt_at, stream_at)
    best = _better_pair(best, least, prompt, costs, _least(prompt, prompt_at), stream_at)
    return _better_pair(best, least, prompt, costs, prompt_at, _least(stream, stream_at))


def _better_pair(best: Way, least: float, prompt: list[float], costs: Costs, prompt_at: int, stream_at: int) -> Way:
    if prompt[prompt_at] == NEVER:
        return best
    together = costs.prompt[prompt_at] + (costs.stream[stream_at] + costs.joining[stream_at])
    return Way(prompt_at, stream_at, 0, together) if together < min(best.cost, least) else best


def _least(values: list[float], besides: int) -> int:
    """The index of the least value, the first one of several; not the one that is left out."""
    found = -1
    for at in range(len(values)):
        if at != besides and (found < 0 or values[at] < values[found]):
            found = at
    return found


def _biases(leans_to_prompts: float, at: int, key: float) -> tuple[float, float]:
    """By how much costs of a prompt and of a stream are multiplied when replicas are compared."""
    mixed = (at + 1) * 0x9E3779B1 ^ (int(key) * 0x85EBCA6B & 0xFFFFFFFF)
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    wobble = 1.0 + TIE_MARGIN * ((mixed >> 8) & 0xFFFF) / 65_536.0  # in an order that depends on the request
    margin = LEANING_MARGIN * leans_to_prompts
    return wobble * (1.0 + LEANING_MARGIN - margin), wobble * (1.0 + margin)
