"""Runs the most memory-intensive sampling that a step can ask for, to measure its memory."""

from __future__ import annotations

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory

_EVERYTHING = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    allowed_token_ids=(0, 1),
    num_logprobs=1,
)


def sample_worst_case(logits: torch.Tensor) -> None:
    """Sample every row with everything that a request may ask for.

    logits: [num_rows, vocab_size], on the device.
    """
    num_rows = len(logits)
    sampling = SamplingRows(num_rows)
    for row in range(num_rows):
        sampling.set(row, _EVERYTHING, num_prompt_tokens=0)
    history = TokenHistory(
        token_ids=np.zeros((num_rows, 1), dtype=np.int32), num_prompt_tokens=np.zeros(num_rows, dtype=np.int32)
    )
    rows = np.arange(num_rows, dtype=np.int32)
    Sampler(sampling, history, may_wait=False).sample(logits, rows, np.ones_like(rows))
