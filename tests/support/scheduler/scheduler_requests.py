"""Requests for scheduler tests: short to write, with prompts that share nothing unless asked to."""

from __future__ import annotations

from itertools import count

from engine.contract.config import SchedulerConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.promise import NO_PROMISE, Promise
from engine.contract.token_ids import TokenIds
from kv_transfer.params import KVTransferParams

_ids = count(1000)


def fresh_prompt(num_tokens: int) -> tuple[int, ...]:
    """A prompt that shares no block with any other."""
    return tuple(next(_ids) for _ in range(num_tokens))


def make_request(
    request_id: str,
    prompt: int | tuple[int, ...],
    *,
    max_tokens: int = 100,
    output: tuple[int, ...] = (),
    priority: int = 0,
    stop: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    hand_over: bool = False,
    kv_transfer: KVTransferParams | None = None,
    salt: str | None = None,
    arrival_s: float = 0.0,
    promise: Promise = NO_PROMISE,
) -> GenerateRequest:
    """A request; ``prompt`` may be a length."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(fresh_prompt(prompt) if isinstance(prompt, int) else prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=stop,
            eos_token_ids=eos,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        ),
        output_token_ids=output,
        priority=priority,
        arrival_s=arrival_s,
        hand_over=hand_over,
        kv_transfer=kv_transfer,
        cache_salt=salt,
        promise=promise,
    )


def make_config(*, seqs: int = 4, budget: int = 64, watermark: float = 0.0, **options: object) -> SchedulerConfig:
    """A small configuration without a watermark."""
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        watermark=watermark,
        **options,  # type: ignore[arg-type]
    )
