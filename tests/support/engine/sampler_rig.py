"""A sampler with rows filled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.contract.messages import LogprobTable, SamplingParams
from engine.contract.step import BoolArray, IntArray, SampledLogprobs
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.processors.registry import PROCESSORS, ProcessorFactory
from engine.sampling.sampler import Sampler
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory


class HostTokens(NamedTuple):
    """``SampledTokens`` as arrays."""

    token_ids: IntArray
    has_nan: BoolArray
    logprobs: SampledLogprobs | None


def on_host(table: LogprobTensors) -> LogprobTable:
    """The same as arrays."""
    return LogprobTable(*(column.numpy() for column in table))


class SamplerRig:
    """Up to 64 rows of up to 256 tokens."""

    def __init__(self, *, may_wait: bool = True, processors: Sequence[ProcessorFactory] = PROCESSORS) -> None:
        self.history = TokenHistory(
            token_ids=np.zeros((64, 256), dtype=np.int32), num_prompt_tokens=np.zeros(64, dtype=np.int32)
        )
        self.rows = SamplingRows(64, processors=processors)
        self.lengths = np.zeros(64, dtype=np.int32)
        self.sampler = Sampler(self.rows, self.history, may_wait=may_wait)

    def set(
        self, row: int, sampling: SamplingParams, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
    ) -> None:
        """Fill a row."""
        tokens = prompt + output
        self.history.token_ids[row, : len(tokens)] = tokens
        self.history.num_prompt_tokens[row] = len(prompt)
        self.lengths[row] = len(tokens)
        self.rows.set(row, sampling, num_prompt_tokens=len(prompt))

    def sample(self, logits: torch.Tensor, rows: list[int]) -> HostTokens:
        """Sample the successors of the rows' last tokens."""
        index = np.array(rows, dtype=np.int32)
        sampled = self.sampler.sample(logits, index, self.lengths[index])
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = SampledLogprobs(rows=sampled.logprob_rows, table=on_host(sampled.logprobs))
        return HostTokens(sampled.token_ids.numpy(), sampled.has_nan.numpy(), logprobs)

    def sample_at(self, logits: torch.Tensor, row: int, positions: range) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """One draw of ``row`` at each position, all from the same logits [vocab_size]."""
        places = np.array(positions, dtype=np.int32)
        index = np.full(len(places), row, dtype=np.int32)
        return self.sampler.sample(logits.expand(len(places), -1), index, places).token_ids.numpy()
