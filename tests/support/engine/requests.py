"""Requests for the tests of several folders."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.token_ids import TokenIds


def greedy_request(
    request_id: str, prompt: Sequence[int], *, max_tokens: int, client_id: str = "", priority: int = 0
) -> GenerateRequest:
    """A greedy request that ends by length only."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        client_id=client_id,
        priority=priority,
    )
