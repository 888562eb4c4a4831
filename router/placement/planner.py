"""Where a request goes: the plan with the least predicted cost, of all replicas for its prompt and all for its tokens.

The cost of a plan is a sum of seconds: those that the request needs itself, and those by which it delays the streams
that run where it goes, or on the same host. A second by which somebody is later than was promised counts
``LATE_WEIGHT`` times: so plans that keep all promises come first, and if none does, the one that breaks them least. The
own seconds of a request that was promised something count little: while it is in time it gives way to those that lack
the time. Of one that was promised nothing those before the first token count most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from decode.role import DECODE
from engine.contract.promise import NO_PROMISE, Promise
from prefill.role import PREFILL
from router.placement.fleet import FloatArray, Standings

LATE_WEIGHT = 100.0
AIM = 0.8
"""Of what was promised for the first token: what predictions are off, and what comes after a choice, needs the rest."""

FIRST_WEIGHT = 8.0
"""What a second before the first token counts of a request that was promised nothing: who waits for it has nothing yet.
By sums of seconds alone prompts queue for seconds rather than delay the streams of a busy worker a little.
"""

SLACK_WEIGHT = 0.1
"""What an own second counts of a request that was promised something; what is late counts in full beside it."""

DEFERRED_WEIGHT = 0.1
"""What a second of prompts counts that are deferred, and so delay nobody who is in time."""

LEANING_MARGIN = 0.05
"""So much less does it seem to cost where a replica leans to the work, when replicas are compared: near ties go where
the cluster's roles want them. It is no reason for a hand-over.
"""

TIE_MARGIN = 0.01
"""Of plans that differ by less, each request prefers others: routers that know the same do not all choose the same."""

CHUNK_TOKENS = 2048.0
MAX_PROMPT_SHARE = 0.9
JOINING_STEPS = 2.0
"""A stream that comes waits on average for half a step, one that reads its KV, and some of its own."""

LEAST_HEAD_SHARE = 0.25
"""A prompt is split where somebody else has so much more of it cached than whoever would compute it."""

BEHIND_MARGIN = 1.1
"""So many times as late: a leaning or a tie is no reason to take cores from prompts that wait."""

NEVER = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be placed.

    num_blocks: what must be free where its tokens are generated; ``num_prompt_blocks``: where its prompt is computed.
    num_new_tokens: tokens that are expected to come, after the first.
    least_head_tokens: fewer cached tokens are no reason to split the prompt; 0: it may not be split.
    hand_over_s: until another worker can go on with the prompt's KV.
    key: a number that differs from request to request.
    """

    num_prompt_tokens: int
    num_new_tokens: float
    least_head_tokens: int = 0
    num_blocks: int = 0
    num_prompt_blocks: int = 0
    promise: Promise = NO_PROMISE
    hand_over_s: float = 0.0
    key: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Indices of the replica that computes the prompt and of the one that generates behind it.

    num_head_tokens: of a prompt that is split, what the former computes; the latter computes the rest. 0: it is not.
    """

    prompt: int
    stream: int
    cost: float
    num_head_tokens: int = 0

    @property
    def is_colocated(self) -> bool:
        """True when one replica does both."""
        return self.prompt == self.stream

    @property
    def is_split(self) -> bool:
        """True when the one that generates computes the end of the prompt."""
        return self.num_head_tokens > 0

    @property
    def way(self) -> tuple[int, int, bool]:
        """What tells plans for one request apart."""
        return self.prompt, self.stream, self.is_split


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Of a request at each replica: seconds until its first token, and between those that follow.

    step_s: a step of the streams that are there, ``slower_s``: what this one adds to it.
    prompt_s: what the prompt adds to steps, all together.
    joining_s: how long a stream that comes from elsewhere waits until it is in a step.
    """

    ttft_s: FloatArray
    gap_s: FloatArray
    step_s: FloatArray
    slower_s: FloatArray
    prompt_s: FloatArray
    joining_s: FloatArray


def predict(fleet: Standings, wish: Wish, cached_tokens: FloatArray) -> Predictions:
    """What the request would see at each replica.

    A prompt waits for those ahead of it. A step with streams takes as many prompt tokens as fit into the promised gap,
    one without takes a whole chunk; where nothing is promised, so does every step.
    """
    step_s = fleet.base_s + fleet.row_s * fleet.num_rows + fleet.context_token_s * fleet.num_context_tokens
    slower_s = fleet.row_s + fleet.context_token_s * wish.num_prompt_tokens
    prompt_s = _prompt_s(fleet, wish, cached_tokens)
    itl_s = _seconds(wish.promise.itl_ms)
    queue_s = _queue_s(fleet, wish)
    prompts_s = queue_s + prompt_s
    num_steps = (fleet.queued_tokens + wish.num_prompt_tokens) / CHUNK_TOKENS
    if itl_s is not None:
        least = np.where(fleet.leans_to_prompts > 0, PREFILL.prompt_share, DECODE.prompt_share)
        beside_streams_s = np.maximum(fleet.aim_share * itl_s - step_s, least * step_s)
        num_steps = np.where(fleet.num_rows > 0, np.maximum(prompts_s / beside_streams_s, num_steps), num_steps)
    ttft_s = _not_before_others(fleet, prompts_s + np.ceil(num_steps) * step_s)
    alone_s = step_s + slower_s
    gap_s = alone_s / (1.0 - np.minimum(fleet.prompt_share, MAX_PROMPT_SHARE))
    if itl_s is not None:  # steps take no more prompt tokens than fit
        gap_s = np.maximum(alone_s, np.minimum(gap_s, itl_s))
    joining_s = _joining_s(fleet, step_s, np.minimum(queue_s, fleet.prompt_token_s * wish.num_prompt_tokens), itl_s)
    return Predictions(
        ttft_s=ttft_s, gap_s=gap_s, step_s=step_s, slower_s=slower_s, prompt_s=prompt_s, joining_s=joining_s
    )


def _not_before_others(fleet: Standings, ttft_s: FloatArray) -> FloatArray:
    """Those that are behind bring a first token later than the soonest that computes on their host."""
    is_behind = fleet.is_behind > 0
    if not is_behind.any():
        return ttft_s
    hosts = fleet.host.astype(np.intp)
    soonest = np.full(int(hosts.max()) + 1, np.inf)
    np.minimum.at(soonest, hosts[~is_behind], ttft_s[~is_behind])
    there_s = soonest[hosts]
    return np.where(is_behind & (there_s < np.inf), np.maximum(ttft_s, BEHIND_MARGIN * there_s), ttft_s)


class Costs(NamedTuple):
    """What it costs to compute the prompt at each replica, to generate there, and to come there from another one."""

    prompt: FloatArray
    stream: FloatArray
    joining: FloatArray


def costs(fleet: Standings, wish: Wish, cached_tokens: FloatArray, *, begins_s: float = 0.0) -> Costs:
    """Of each replica, for each part of a plan. Prompts cannot begin before ``begins_s``."""
    at = predict(fleet, wish, cached_tokens)
    if begins_s:
        at = replace(at, ttft_s=at.ttft_s + begins_s)
    promise, num_tokens = wish.promise, wish.num_new_tokens
    own = 1.0 if promise == NO_PROMISE else SLACK_WEIGHT
    first = FIRST_WEIGHT if promise == NO_PROMISE else own
    deferred_s = fleet.prompt_token_s * fleet.deferred_tokens
    prompt = first * at.ttft_s + DEFERRED_WEIGHT * deferred_s + own * (fleet.num_rows + fleet.lost_rows) * at.prompt_s
    if (ttft_s := _seconds(promise.ttft_ms)) is not None:
        prompt += LATE_WEIGHT * np.maximum(at.ttft_s - AIM * ttft_s, 0.0)
    stream = num_tokens * (own * at.gap_s + fleet.num_rows * at.slower_s + fleet.crowding_s)
    joining = own * (wish.hand_over_s + at.joining_s)
    if (itl_s := _seconds(promise.itl_ms)) is not None:
        others_late_s = np.maximum(at.step_s + at.slower_s - itl_s, 0.0) - np.maximum(at.step_s - itl_s, 0.0)
        late_s = np.maximum(at.gap_s - itl_s, 0.0) + fleet.num_rows * others_late_s
        stream += LATE_WEIGHT * num_tokens * late_s
        joining += LATE_WEIGHT * np.maximum(at.joining_s - itl_s, 0.0)
    return Costs(prompt, stream, joining)


def choose(fleet: Standings, wish: Wish, cached_tokens: FloatArray) -> Plan | None:
    """The plan that costs least; None where no replica has room for the request.

    A replica that is idle has room, whatever it says. Only the best replica for the prompt and the best for the tokens
    make a pair; where they are the same one, the next best takes its place on either side.
    """
    prompt, stream, joining = costs(fleet, wish, cached_tokens)
    prompt_bias, stream_bias = _biases(fleet, wish)
    is_idle = fleet.is_idle > 0
    stream = np.where((fleet.num_available_blocks >= wish.num_blocks) | is_idle, stream, NEVER)
    at = int((prompt * prompt_bias + stream * stream_bias).argmin())
    best = Plan(prompt=at, stream=at, cost=float(prompt[at] + stream[at]))
    least = float((prompt + stream).min())
    apart_prompt = np.where((fleet.num_available_blocks >= wish.num_prompt_blocks) | is_idle, prompt, NEVER)
    apart_stream = stream + joining
    for prompt_at, stream_at in _pairs(apart_prompt * prompt_bias, apart_stream * stream_bias):
        cost = float(apart_prompt[prompt_at] + apart_stream[stream_at])
        if cost < min(best.cost, least):
            best = Plan(prompt=prompt_at, stream=stream_at, cost=cost)
    split = _split(fleet, wish, cached_tokens, stream, best)
    if split is not None and split.cost * (1.0 + TIE_MARGIN) < best.cost:
        best = split
    return best if best.cost < NEVER else None


def _split(fleet: Standings, wish: Wish, cached_tokens: FloatArray, stream: FloatArray, best: Plan) -> Plan | None:
    """The plan by which one replica hands over what it has cached, and another does all the rest; None where ``best``,
    the best one that cuts nothing, leaves nothing worth a cut.

    Only what is cached is worth a cut: the second replica waits for the first, so that a token that both could compute
    comes sooner from either of them alone. The first one computes a single token, behind the cached ones.
    ``stream``: what it costs to generate at each replica; never where there is no room.
    """
    if not wish.least_head_tokens or fleet.num_rows.size < 2:
        return None
    at = int(cached_tokens.argmax())
    num_cached = int(cached_tokens[at])
    num_more = num_cached - cached_tokens[best.prompt]
    least = max(wish.least_head_tokens, LEAST_HEAD_SHARE * wish.num_prompt_tokens)
    if at == best.prompt or num_more < least or num_cached + 1 >= wish.num_prompt_tokens:
        return None
    head = predict(fleet, replace(wish, num_prompt_tokens=num_cached + 1), cached_tokens)
    begins_s = float(head.ttft_s[at]) + wish.hand_over_s
    tail = costs(fleet, wish, np.maximum(cached_tokens, float(num_cached)), begins_s=begins_s).prompt
    together = tail + stream
    together[at] = NEVER
    stream_at = int(together.argmin())
    cost = float(together[stream_at] + fleet.num_rows[at] * head.prompt_s[at])
    return Plan(prompt=at, stream=stream_at, cost=cost, num_head_tokens=num_cached + 1)


class Weighed(NamedTuple):
    """A plan, and the predicted seconds until its first token."""

    plan: Plan
    ttft_s: float


def weigh(fleet: Standings, wish: Wish, cached_tokens: FloatArray, chosen: Plan, *, limit: int) -> list[Weighed]:
    """The chosen plan, and up to ``limit`` others that cost least among those that ``choose`` compares.

    Of each replica the plan that does all there, the pairs of the best for either work, and the one that splits the
    prompt.
    """
    prompt, stream, joining = costs(fleet, wish, cached_tokens)
    has_room = (fleet.num_available_blocks >= wish.num_blocks) | (fleet.is_idle > 0)
    stream = np.where(has_room, stream, NEVER)
    plans = [Plan(prompt=at, stream=at, cost=float(prompt[at] + stream[at])) for at in range(len(prompt))]
    prompts, streams = prompt.argsort()[: limit + 1].tolist(), (stream + joining).argsort()[: limit + 1].tolist()
    for prompt_at in prompts:
        for stream_at in streams:
            if prompt_at != stream_at:
                cost = float(prompt[prompt_at] + stream[stream_at] + joining[stream_at])
                plans.append(Plan(prompt=prompt_at, stream=stream_at, cost=cost))
    whole = min(plans, key=lambda item: item.cost)
    if (split := _split(fleet, wish, cached_tokens, stream, whole)) is not None:
        plans.append(split)
    others = sorted((item for item in plans if item.way != chosen.way), key=lambda item: item.cost)
    ttft_s = predict(fleet, wish, cached_tokens).ttft_s
    best = [chosen, *(item for item in others[:limit] if item.cost < NEVER)]
    return [
        Weighed(item, _split_ttft_s(fleet, wish, cached_tokens, item) if item.is_split else float(ttft_s[item.prompt]))
        for item in best
    ]


def _split_ttft_s(fleet: Standings, wish: Wish, cached_tokens: FloatArray, plan: Plan) -> float:
    """Of a prompt that is split: the beginning is computed and moved, then the rest by who generates."""
    num_cached = plan.num_head_tokens - 1
    head = predict(fleet, replace(wish, num_prompt_tokens=plan.num_head_tokens), cached_tokens).ttft_s[plan.prompt]
    tail = predict(fleet, wish, np.maximum(cached_tokens, float(num_cached))).ttft_s[plan.stream]
    return float(head + wish.hand_over_s + tail)


def choose_prompt(fleet: Standings, wish: Wish, cached_tokens: FloatArray) -> int:
    """The replica that should compute a prompt behind which nothing is generated."""
    prompt_bias, _ = _biases(fleet, wish)
    return int((costs(fleet, wish, cached_tokens).prompt * prompt_bias).argmin())


def _pairs(prompt: FloatArray, stream: FloatArray) -> list[tuple[int, int]]:
    """The cheapest pairs of two different replicas: one of them is the best."""
    if len(prompt) < 2:
        return []
    first_prompt, first_stream = int(prompt.argmin()), int(stream.argmin())
    if first_prompt != first_stream:
        return [(first_prompt, first_stream)]
    return [(_second(prompt, first_prompt), first_stream), (first_prompt, _second(stream, first_stream))]


def _second(costs: FloatArray, first: int) -> int:
    others = costs.copy()
    others[first] = NEVER
    second = int(others.argmin())
    return second if second != first else int(first == 0)


def _prompt_s(fleet: Standings, wish: Wish, cached_tokens: FloatArray) -> FloatArray:
    """What the prompt adds to the steps of each replica, all together."""
    num_tokens = np.maximum(wish.num_prompt_tokens - cached_tokens, 1.0)  # the last one in any case
    reads = num_tokens * (wish.num_prompt_tokens - num_tokens / 2.0)
    return fleet.prompt_token_s * num_tokens + fleet.prompt_read_s * reads


def _queue_s(fleet: Standings, wish: Wish) -> FloatArray:
    """What the prompts do that wait already, taken to be of the length of this one."""
    num_tokens = fleet.queued_tokens
    reads = num_tokens * np.minimum(num_tokens, wish.num_prompt_tokens) / 2.0
    return fleet.prompt_token_s * num_tokens + fleet.prompt_read_s * reads


def _joining_s(fleet: Standings, step_s: FloatArray, longest_s: FloatArray, itl_s: float | None) -> FloatArray:
    """How long a stream that comes from elsewhere waits until it is in a step.

    Steps with prompts are as long as the
    promised gap; a worker has some while they wait there, else for the share of its time that it gave them lately. One
    without streams computes a whole prompt first.
    """
    has_prompts = np.where(fleet.queued_tokens > 0, 1.0, fleet.prompt_share)
    with_prompts_s = longest_s if itl_s is None else np.maximum(step_s, itl_s)
    whole_s = np.where(fleet.num_rows > 0, 0.0, longest_s) / 2
    joined_s: FloatArray = JOINING_STEPS * (step_s + has_prompts * np.maximum(with_prompts_s - step_s, 0.0)) + whole_s
    return joined_s


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _biases(fleet: Standings, wish: Wish) -> tuple[FloatArray, FloatArray]:
    """By how much costs of a prompt and of a stream are multiplied when replicas are compared."""
    wobble = 1.0 + TIE_MARGIN * _wobble(len(fleet.num_rows), wish.key)
    margin = LEANING_MARGIN * fleet.leans_to_prompts
    return wobble * (1.0 + LEANING_MARGIN - margin), wobble * (1.0 + margin)


def _wobble(size: int, key: int) -> FloatArray:
    """A number from 0 to 1 for each replica, in an order that depends on the request."""
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B1) ^ np.uint64(key * 0x85EBCA6B & 0xFFFFFFFF)
    mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(0x2C1B3C6D)
    return (mixed >> np.uint64(8) & np.uint64(0xFFFF)).astype(np.float64) / 65_536.0
