"""A sampler with rows filled by hand."""

from __future__ import annotations

import numpy as np
import torch

from engine.messages import SamplingParams
from engine.sample.sampler import SampledTokens, Sampler
from engine.sample.sampling_rows import SamplingRows
from engine.sample.token_history import TokenHistory


class SamplerRig:
    """Up to 64 rows of up to 256 tokens."""

    def __init__(self) -> None:
        self.history = TokenHistory(
            token_ids=np.zeros((64, 256), dtype=np.int32), num_prompt_tokens=np.zeros(64, dtype=np.int32)
        )
        self.rows = SamplingRows(64)
        self.lengths = np.zeros(64, dtype=np.int32)
        self.sampler = Sampler(self.rows, self.history)

    def set(
        self, row: int, sampling: SamplingParams, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
    ) -> None:
        """Fill a row."""
        tokens = prompt + output
        self.history.token_ids[row, : len(tokens)] = tokens
        self.history.num_prompt_tokens[row] = len(prompt)
        self.lengths[row] = len(tokens)
        self.rows.set(row, sampling, num_prompt_tokens=len(prompt))

    def sample(self, logits: torch.Tensor, rows: list[int]) -> SampledTokens:
        """Sample the successors of the rows' last tokens."""
        index = np.array(rows, dtype=np.int32)
        return self.sampler.sample(logits, index, self.lengths[index])

    def sample_at(self, logits: torch.Tensor, row: int, positions: range) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """One draw of ``row`` at each position, all from the same logits [vocab_size]."""
        places = np.array(positions, dtype=np.int32)
        index = np.full(len(places), row, dtype=np.int32)
        return self.sampler.sample(logits.expand(len(places), -1), index, places).token_ids
