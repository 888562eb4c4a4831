"""Strategies for random worlds around a scheduler: configurations, prompts, sampling, and what a peer has of a
prompt."""

from __future__ import annotations

from hypothesis import strategies as st

from engine.contract.config import SchedulerConfig
from engine.contract.messages import BeamParams, SamplingParams

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


def make_config(**options: object) -> SchedulerConfig:
    """A configuration whose options do not contradict each other."""
    if options["policy"] == "fcfs":
        options["enable_priority_preemption"] = False
    if not options["enable_chunked_prefill"]:
        options |= {"max_num_batched_tokens": 48, "long_prefill_token_threshold": 0, "max_num_partial_prefills": 0}
    return SchedulerConfig(**options)  # type: ignore[arg-type]


CONFIGS = st.builds(
    make_config,
    max_num_batched_tokens=st.sampled_from([8, 16, 48]),
    max_num_seqs=st.sampled_from([2, 1, 2, 5]),
    enable_chunked_prefill=st.sampled_from([True, True, False]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
    policy=st.sampled_from(["priority", "priority", "fcfs"]),
    load_failure_policy=st.sampled_from(["recompute", "recompute", "recompute", "fail"]),
    recompute_damaged_only=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    enable_priority_preemption=st.sampled_from([True, True, False]),
    max_num_partial_prefills=st.sampled_from([0, 0, 1, 2]),
    scheduler_delay_factor=st.sampled_from([0.0, 0.0, 1.0]),
    artificial_preemption_probability=st.sampled_from([0.0, 0.0, 0.0, 0.3]),
    max_num_artificial_preemptions=st.just(3),
    max_decode_steps=st.sampled_from([1, 1, 4]),
    enable_cache_events=st.booleans(),
)
PROMPTS = st.sampled_from(
    [
        tuple([stem] * num_tokens + tail)
        for num_tokens in (8, 12, 4, 1, 3, 7, 16, 20)
        for stem in (0, 0, 1)
        for tail in ([], [2], [2, 3, 1])
    ]
)
"""Prompts from few stems, so that most share a prefix with most others."""

BEAMS = (
    BeamParams(width=2),
    BeamParams(width=2, length_penalty=-1.0, early_stopping=True),
    BeamParams(width=3, num_results=2, length_penalty=2.0, early_stopping="never"),
)

SAMPLING = st.sampled_from(
    [
        SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            eos_token_ids=(3,),
            ignore_eos=ignore_eos,
        )
        for max_tokens in (2, 1, 5, 12, 20)
        for min_tokens, stop_token_ids, ignore_eos in [(0, (), False), (0, (0, 2), False), (3, (1,), True)]
    ]
    + [
        SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, eos_token_ids=(3,), beams=beams)
        for max_tokens, stop_token_ids in [(5, ()), (12, (0,)), (1, ()), (20, ())]
        for beams in BEAMS
    ]
)
WINDOWS = st.sampled_from([(None,), (None,), (None, 5), (7,), (None, 4, 4), (None, 6, 11), (3,)])
"""The windows of KV cache groups, in tokens: most prompts are several of them long."""

SHARES = st.sampled_from([1.0, 1.0, 1.0, 0.7, 0.4])
"""The share of a prompt that a peer hands over."""

FAILED_BLOCKS = st.sampled_from([1, 0, 0, 1, 2, 3, 5, 9, 10, 63])
"""The blocks of a load that fail, as bits; the first block is the lowest bit."""

PRIORITIES = st.sampled_from([(0,), (1,), (2,), (1,), (0, 1), (1, 1, 0), (2, 0, 1)])
"""Priorities of the choices of one prompt, most often of its only one."""

RARE_EVENTS = st.sampled_from(
    ["drain", "some leave", "who waits leaves", "front end goes", "reset", "reset while idle"]
)
"""Events that affect all requests at once, or some."""
