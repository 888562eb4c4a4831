"""Finds the plan with the least cost, over all replicas for a request's prefill and all for its decode.

Only the best replica for prefill and the best one for decode are tried as a pair. If both are the same, the pairs with
the second best on either side are tried.

All functions here are also compiled (:mod:`router.placement.machine_code`), so they are plain loops over numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from router.placement.fleet import Column, Standings, fill_prices, pool_row_prices, standing_at
from router.placement.hosts import share_cores
from router.placement.prediction import NEVER, Wish, cost, not_before, predict

LEANING_MARGIN = 0.05
"""When replicas are compared, work costs less by this share at replicas that lean to it: so near ties follow the
cluster's roles. A leaning alone is no reason for a hand-over.
"""

TIE_MARGIN = 0.01
"""Plans within this share are ordered differently for each request, so that routers do not all choose the same one."""

LEAST_HEAD_SHARE = 0.25
"""A prompt is split only if another replica has at least this share more of it cached than the one that would compute
it."""


class Way(NamedTuple):
    """A plan as numbers only: see :class:`router.placement.planner.Plan`. A cost of ``NEVER`` means no plan."""

    prompt: int
    stream: int
    num_head_tokens: int
    cost: float


class Costs(NamedTuple):
    """The fields of :class:`router.placement.prediction.Cost` as columns over replicas. ``stream`` is ``NEVER`` at a
    replica without room."""

    prompt: Column
    stream: Column
    joining: Column
    ttft_s: Column


def prepare(fleet: Standings, num_context_tokens: float) -> None:
    """Give every replica the prices that hold if a request of ``num_context_tokens`` goes there."""
    fill_prices(fleet)
    pool_row_prices(fleet)
    share_cores(fleet, num_context_tokens)


def assess(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs) -> None:
    """Write the costs at each candidate replica into ``costs``. The candidates are the first replicas, as many as
    ``cached_tokens`` has entries."""
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
    """The earliest first token from the replicas of the same host that are not behind, if each has at least
    ``least_cached`` tokens of the prompt; ``NEVER`` if there is no such replica."""
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
    """The plan with the least cost."""
    assess(fleet, wish, cached_tokens, costs)
    best = _best_whole(fleet, wish, costs)
    split = best_split(fleet, wish, cached_tokens, costs, best.prompt)
    return split if split.cost * (1.0 + TIE_MARGIN) < best.cost else best


def best_prompt(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs) -> int:
    """The replica that should compute the prompt of a request without decode."""
    assess(fleet, wish, cached_tokens, costs)
    prompt = [0.0] * len(cached_tokens)
    for at in range(len(prompt)):
        prompt[at] = costs.prompt[at] * _biases(fleet.leans_to_prompts[at], at, wish.key)[0]
    return _least(prompt, -1)


def best_split(fleet: Standings, wish: Wish, cached_tokens: Column, costs: Costs, prompt_at: int) -> Way:
    """The best plan in which one replica hands over its cached part of the prompt, and another does all the rest. It is
    no plan (``NEVER``) if a split is not worth while compared with the best whole plan, with prefill at ``prompt_at``.

    Only cached tokens justify a split: the second replica waits for the first, so tokens that neither has cached come
    sooner from one replica alone. The first replica computes just one token, after the cached ones.
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
    """The best plan without a split. A hand-over must cost less than every colocated plan, before leanings count."""
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
    """The index of the least value, the first of several; index ``besides`` is left out."""
    found = -1
    for at in range(len(values)):
        if at != besides and (found < 0 or values[at] < values[found]):
            found = at
    return found


def _biases(leans_to_prompts: float, at: int, key: float) -> tuple[float, float]:
    """The factors on the costs of prompt and stream with which replicas are compared."""
    mixed = (at + 1) * 0x9E3779B1 ^ (int(key) * 0x85EBCA6B & 0xFFFFFFFF)
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
    wobble = 1.0 + TIE_MARGIN * ((mixed >> 8) & 0xFFFF) / 65_536.0  # breaks ties by request
    margin = LEANING_MARGIN * leans_to_prompts
    return wobble * (1.0 + LEANING_MARGIN - margin), wobble * (1.0 + margin)
