"""What is measured before the KV cache is sized holds for whatever requests may ask for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.contract.messages import SamplingParams
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory
from engine.sampling.worst_case import sample_worst_case

NUM_ROWS, VOCAB_SIZE = 8, 4000
LOGITS = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


class PeakMeter(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that are still held, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in self._held:
                self._held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, self._held.pop, tensor.data_ptr(), None)
        self.peak = max(self.peak, sum(self._held.values()))
        return result


def _peak(work: Callable[[], object]) -> int:
    with torch.inference_mode(), PeakMeter() as meter:
        work()
    return meter.peak


def _sample(params: SamplingParams) -> None:
    sampling = SamplingRows(NUM_ROWS)
    for row in range(NUM_ROWS):
        sampling.set(row, params, num_prompt_tokens=2)
    history = TokenHistory(
        token_ids=np.ones((NUM_ROWS, 40), dtype=np.int32), num_prompt_tokens=np.full(NUM_ROWS, 2, dtype=np.int32)
    )
    rows = np.arange(NUM_ROWS, dtype=np.int32)
    Sampler(sampling, history, may_wait=False).sample(LOGITS, rows, np.full_like(rows, 30))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, num_logprobs=20),
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.5, num_logprobs=5),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=2000, top_p=0.5),
        SamplingParams(max_tokens=9, temperature=0.7, top_k=5, presence_penalty=1.0, frequency_penalty=1.0),
        SamplingParams(max_tokens=9, min_tokens=60, eos_token_ids=(3,), allowed_token_ids=(3, 4)),
    ],
)
def test_nothing_takes_more(params: SamplingParams) -> None:
    assert _peak(lambda: _sample(params)) <= _peak(lambda: sample_worst_case(LOGITS)) * 1.01


def test_it_takes_several_copies_of_the_logits() -> None:
    assert _peak(lambda: sample_worst_case(LOGITS)) > 8 * 4 * NUM_ROWS * VOCAB_SIZE
