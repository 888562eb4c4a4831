"""What a request would see at each replica, and what it would cost there.

The cost of a plan is a sum of seconds: those that the request needs itself, and those by which it delays the streams
that run where it goes, or on the same host. A second by which somebody is later than was promised counts
``LATE_WEIGHT`` times: so plans that keep all promises come first, and if none does, the one that breaks them least. The
own seconds of a request that was promised something count little, and so do those by which it delays others that are in
time: it gives way to those that lack the time, and they to it. Of one that was promised nothing those before the first
token count most.

All but the constants here is also compiled (:mod:`router.placement.machine_code`): plain loops over numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from decode.role import DECODE
from prefill.role import PREFILL
from router.placement.fleet import Standing

LATE_WEIGHT = 100.0
AIM = 0.8
"""Of what was promised for the first token: what predictions are off, and what comes after a choice, needs the rest."""

FIRST_WEIGHT = 8.0
"""What a second before the first token counts of a request that was promised nothing: who waits for it has nothing yet.
By sums of seconds alone prompts queue for seconds rather than delay the streams of a busy worker a little.
"""

SLACK_WEIGHT = 0.1
"""What a second counts of a request that was promised something, or by which it delays others; what is late counts in
full beside it."""

DEFERRED_WEIGHT = 0.1
"""What a second of prompts counts that are deferred, and so delay nobody who is in time."""

CHUNK_TOKENS = 2048.0
MAX_PROMPT_SHARE = 0.9
JOINING_STEPS = 2.0
"""A stream that comes waits on average for half a step, one that reads its KV, and some of its own."""

BEHIND_MARGIN = 1.1
"""So many times as late: a leaning or a tie is no reason to take cores from prompts that wait."""

NEVER = math.inf
PREFILL_SHARE, DECODE_SHARE = PREFILL.prompt_share, DECODE.prompt_share


class Wish(NamedTuple):
    """What is to be placed. All are numbers of the same kind, since machine code reads them too.

    num_new_tokens: tokens that are expected to come, after the first.
    least_head_tokens: fewer cached tokens are no reason to split the prompt; 0: it may not be split.
    num_blocks: what must be free where its tokens are generated; ``num_prompt_blocks``: where its prompt is computed.
    ttft_s, itl_s: what was promised for its first token, and for the gaps behind it; ``NEVER``: nothing.
    hand_over_s: until another worker can go on with the prompt's KV.
    key: a whole number below 2**32 that differs from request to request.
    """

    num_prompt_tokens: float
    num_new_tokens: float
    least_head_tokens: float = 0.0
    num_blocks: float = 0.0
    num_prompt_blocks: float = 0.0
    ttft_s: float = NEVER
    itl_s: float = NEVER
    hand_over_s: float = 0.0
    key: float = 0.0


def promised_seconds(milliseconds: float | None) -> float:
    """A part of a promise as a wish has it."""
    return NEVER if milliseconds is None else milliseconds / 1e3


class Prediction(NamedTuple):
    """Of a request at one replica: seconds until its first token, and between those that follow.

    step_s: a step of the streams that are there, ``slower_s``: what this one adds to it.
    prompt_s: what the prompt adds to steps, all together.
    joining_s: how long a stream that comes from elsewhere waits until it is in a step.
    """

    ttft_s: float
    gap_s: float
    step_s: float
    slower_s: float
    prompt_s: float
    joining_s: float


class Cost(NamedTuple):
    """What it costs to compute the prompt at a replica, to generate there, and to come there from another one; and the
    seconds until the first token if the prompt is computed there.
    """

    prompt: float
    stream: float
    joining: float
    ttft_s: float


def predict(here: Standing, num_prompt_tokens: float, itl_s: float, cached_tokens: float) -> Prediction:
    """What a request would see at one replica, which has so much of its prompt cached.

    A prompt waits for those ahead of it. A step with streams takes as many prompt tokens as fit into the promised gap,
    one without takes a whole chunk; where nothing is promised, so does every step.
    """
    step_s = here.base_s + here.row_s * here.num_rows + here.context_token_s * here.num_context_tokens
    slower_s = here.row_s + here.context_token_s * num_prompt_tokens
    num_tokens = max(num_prompt_tokens - cached_tokens, 1.0)  # the last one in any case
    prompt_s = _prompt_s(here, num_tokens, num_tokens * (num_prompt_tokens - num_tokens / 2.0))
    num_queued = here.queued_tokens  # taken to be of prompts as long as this one
    queue_s = _prompt_s(here, num_queued, num_queued * min(num_queued, num_prompt_tokens) / 2.0)
    num_steps = (num_queued + num_prompt_tokens) / CHUNK_TOKENS
    if itl_s < NEVER and here.num_rows > 0.0:
        least = PREFILL_SHARE if here.leans_to_prompts > 0.0 else DECODE_SHARE
        beside_streams_s = max(here.aim_share * itl_s - step_s, least * step_s)
        num_steps = max((queue_s + prompt_s) / beside_streams_s, num_steps)
    alone_s = step_s + slower_s
    gap_s = alone_s / (1.0 - min(here.prompt_share, MAX_PROMPT_SHARE))
    if itl_s < NEVER:  # steps take no more prompt tokens than fit
        gap_s = max(alone_s, min(gap_s, itl_s))
    ttft_s = queue_s + prompt_s + math.ceil(num_steps) * step_s
    joining_s = _joining_s(here, step_s, min(queue_s, here.prompt_token_s * num_prompt_tokens), itl_s)
    return Prediction(ttft_s, gap_s, step_s, slower_s, prompt_s, joining_s)


def _prompt_s(here: Standing, num_tokens: float, num_reads: float) -> float:
    return here.prompt_token_s * num_tokens + here.prompt_read_s * num_reads


def _joining_s(here: Standing, step_s: float, longest_s: float, itl_s: float) -> float:
    """How long a stream that comes from elsewhere waits until it is in a step.

    Steps with prompts are as long as the promised gap; a worker has some while they wait there, else for the share of
    its time that it gave them lately. One without streams computes a whole prompt first.
    """
    has_prompts = 1.0 if here.queued_tokens > 0.0 else here.prompt_share
    with_prompts_s = max(step_s, itl_s) if itl_s < NEVER else longest_s
    whole_s = 0.0 if here.num_rows > 0.0 else longest_s / 2.0
    return JOINING_STEPS * (step_s + has_prompts * max(with_prompts_s - step_s, 0.0)) + whole_s


def not_before(here: Standing, ttft_s: float, soonest_s: float) -> float:
    """The time to the first token where the soonest that computes on the replica's host would bring it in so many
    seconds: later than that, if the replica is behind. ``NEVER``: there is nobody else.
    """
    if here.is_behind > 0.0 and soonest_s < NEVER:
        return max(ttft_s, BEHIND_MARGIN * soonest_s)
    return ttft_s


def cost(here: Standing, wish: Wish, cached_tokens: float, soonest_s: float, begins_s: float) -> Cost:
    """Of one replica, for each part of a plan. Its prompt cannot begin before ``begins_s``; see ``not_before``."""
    seen = predict(here, wish.num_prompt_tokens, wish.itl_s, cached_tokens)
    is_promised = wish.ttft_s < NEVER or wish.itl_s < NEVER
    own = SLACK_WEIGHT if is_promised else 1.0
    ttft_s = not_before(here, seen.ttft_s, soonest_s) + begins_s
    deferred_s = here.prompt_token_s * here.deferred_tokens
    delayed_s = (here.num_rows + here.lost_rows) * seen.prompt_s
    prompt = (own if is_promised else FIRST_WEIGHT) * ttft_s + DEFERRED_WEIGHT * deferred_s + own * delayed_s
    if wish.ttft_s < NEVER:
        prompt += LATE_WEIGHT * max(ttft_s - AIM * wish.ttft_s, 0.0)
    num_tokens = wish.num_new_tokens
    stream = num_tokens * (own * (seen.gap_s + here.num_rows * seen.slower_s) + here.crowding_s)
    joining = own * (wish.hand_over_s + seen.joining_s)
    if wish.itl_s < NEVER:
        others_late_s = max(seen.step_s + seen.slower_s - wish.itl_s, 0.0) - max(seen.step_s - wish.itl_s, 0.0)
        late_s = max(seen.gap_s - wish.itl_s, 0.0) + here.num_rows * others_late_s
        stream += LATE_WEIGHT * num_tokens * late_s
        joining += LATE_WEIGHT * max(seen.joining_s - wish.itl_s, 0.0)
    return Cost(prompt, stream, joining, ttft_s)
