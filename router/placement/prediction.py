"""Predicts latencies of a request at each replica, and what it costs there.

The cost of a plan is a weighted sum of seconds: those that the request itself takes, and those by which it delays the
streams that run at the same replica or host. A second beyond a promise counts ``LATE_WEIGHT`` times. So plans that keep
all promises come first; if there is none, the plan that breaks them least does. For a request with a promise, its own
seconds and the seconds by which it delays others within their promises count little, so requests with time to spare
give way to those without. For a request without a promise, seconds before the first token count most.

All functions here are also compiled (:mod:`router.placement.machine_code`), so they are plain loops over numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from router.placement.fleet import Standing

LATE_WEIGHT = 100.0
AIM = 0.8
"""Share of the promised TTFT to plan for. The rest covers prediction errors and load that comes after the choice."""

FIRST_WEIGHT = 8.0
"""Weight of a second before the first token, for a request without a promise: its caller has nothing yet.
With equal weights, prompts would queue for seconds rather than delay the streams of a busy worker a little.
"""

SLACK_WEIGHT = 0.1
"""Weight of a second that a request with a promise takes itself, or by which it delays others. Seconds beyond a promise
count in full besides."""

DEFERRED_WEIGHT = 0.1
"""Weight of a second of deferred prompts: they delay no request that is in time."""

PROMPT_AWAY = 1000.0
"""What a prompt costs more at a worker that keeps to streams, while the work is divided: it would delay all of them."""

STREAM_AWAY = 100.0
"""What a stream costs more at a worker that keeps to prompts. Like ``PROMPT_AWAY`` it is finite: promises that would be
missed by more than that still count (``LATE_WEIGHT``)."""

CHUNK_TOKENS = 2048.0
MAX_PROMPT_SHARE = 0.9
JOINING_STEPS = 2.0
"""Steps that an arriving stream waits on average: half a step, one in which its KV is read, and part of its own."""

BEHIND_MARGIN = 1.1
"""A replica that is behind has its first token predicted this many times as late as the soonest on its host, so that
a leaning or a tie is no reason to take cores from prompts that wait."""

NEVER = math.inf


class Wish(NamedTuple):
    """The request to place. All fields are floats, since machine code reads them too.

    num_new_tokens: expected output tokens after the first.
    least_head_tokens: fewer cached tokens than this are no reason to split the prompt; 0: it may not be split.
    num_blocks: free blocks needed at the replica that generates; ``num_prompt_blocks``: at the one that prefills.
    ttft_s, itl_s: the promised time to first token and inter-token latency; ``NEVER``: no promise.
    hand_over_s: time until another worker can continue with the prompt's KV.
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
    """Convert one bound of a promise to a wish's seconds."""
    return NEVER if milliseconds is None else milliseconds / 1e3


class Prediction(NamedTuple):
    """Predicted seconds of a request at one replica: until its first token, and between later ones.

    step_s: a step of the current streams; ``slower_s``: what this request adds to each step.
    prompt_s: what the prompt adds to all steps together.
    joining_s: how long a stream that arrives from another replica waits until it is in a step.
    """

    ttft_s: float
    gap_s: float
    step_s: float
    slower_s: float
    prompt_s: float
    joining_s: float


class Cost(NamedTuple):
    """The costs, at one replica, of computing the prompt, of generating, and of arriving from another replica; and the
    seconds until the first token if the replica computes the prompt.
    """

    prompt: float
    stream: float
    joining: float
    ttft_s: float


def predict(here: Standing, num_prompt_tokens: float, itl_s: float, cached_tokens: float) -> Prediction:
    """Predict a request's latencies at one replica, which has ``cached_tokens`` of its prompt.

    A prompt waits for the prompts ahead of it. A step with streams takes as many prompt tokens as fit into the promised
    gap. A step without streams takes a whole chunk, and so does every step if nothing is promised.
    """
    step_s = here.base_s + here.row_s * here.num_rows + here.context_token_s * here.num_context_tokens
    slower_s = here.row_s + here.context_token_s * num_prompt_tokens
    num_tokens = max(num_prompt_tokens - cached_tokens, 1.0)  # the last token is always computed
    prompt_s = _prompt_s(here, num_tokens, num_tokens * (num_prompt_tokens - num_tokens / 2.0))
    num_queued = here.queued_tokens  # assumed to be of prompts as long as this one
    queue_s = _prompt_s(here, num_queued, num_queued * min(num_queued, num_prompt_tokens) / 2.0)
    num_steps = (num_queued + num_prompt_tokens) / CHUNK_TOKENS
    if itl_s < NEVER and here.num_rows > 0.0:
        beside_streams_s = max(here.aim_share * itl_s - step_s, here.least_prompt_share * step_s)
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
    """How long a stream that arrives from another replica waits until it is in a step.

    Steps with prompts are as long as the promised gap. A worker makes such steps while prompts wait there, otherwise
    for its recent prompt share. A worker without streams first completes a whole prompt.
    """
    has_prompts = 1.0 if here.queued_tokens > 0.0 else here.prompt_share
    with_prompts_s = max(step_s, itl_s) if itl_s < NEVER else longest_s
    whole_s = 0.0 if here.num_rows > 0.0 else longest_s / 2.0
    return JOINING_STEPS * (step_s + has_prompts * max(with_prompts_s - step_s, 0.0)) + whole_s


def not_before(here: Standing, ttft_s: float, soonest_s: float) -> float:
    """The time to first token at a replica, corrected if it is behind: then it is later than ``soonest_s``, the time at
    the soonest replica of its host that is not behind. ``soonest_s`` of ``NEVER``: there is no such replica.
    """
    if here.is_behind > 0.0 and soonest_s < NEVER:
        return max(ttft_s, BEHIND_MARGIN * soonest_s)
    return ttft_s


def cost(here: Standing, wish: Wish, cached_tokens: float, soonest_s: float, begins_s: float) -> Cost:
    """The cost of each part of a plan at a replica. The prompt cannot begin before ``begins_s``; see ``not_before``."""
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
        prompt += PROMPT_AWAY if here.keeps_to > 0.0 else 0.0
        stream += STREAM_AWAY if here.keeps_to < 0.0 else 0.0
    return Cost(prompt, stream, joining, ttft_s)
