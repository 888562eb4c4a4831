"""Log-probabilities of fake workers: the right shapes, with numbers by a rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.contract.messages import DeltaLogprobs, GenerateRequest, LogprobTable, TokenDelta


def with_logprobs(delta: TokenDelta, request: GenerateRequest, *, is_first: bool) -> TokenDelta:
    """A delta with the log-probabilities that its request asks for; ``is_first`` marks the one with the prompt's."""
    sampling = request.sampling
    num, num_prompt = sampling.num_logprobs, sampling.num_prompt_logprobs
    tells_prompt = num_prompt is not None and is_first
    if num is None and not tells_prompt:
        return delta
    table = None if num is None else _table(delta.token_ids, num)
    tokens = () if table is None or num is None else tuple(table.entry(at, num) for at in range(len(delta.token_ids)))
    prompt = _table(request.prompt_token_ids[1:], num_prompt) if tells_prompt and num_prompt is not None else None
    return delta._replace(logprobs=DeltaLogprobs(tokens=tokens, prompt=prompt))


def _table(token_ids: Sequence[int], num_top: int) -> LogprobTable:
    """Token 40 is the most likely everywhere, then 41 and so on; the actual tokens come after these."""
    ids = np.array([[token, *range(40, 40 + num_top)] for token in token_ids], np.int32).reshape(-1, 1 + num_top)
    order = np.array([num_top, *range(num_top)], np.float32)
    return LogprobTable(
        token_ids=ids,
        logprobs=np.broadcast_to(-1.0 - order, ids.shape).astype(np.float32),
        ranks=np.full(len(ids), 1 + num_top, np.int32),
    )
