"""What the model needs of one step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import AttentionBatch
from engine.step import IntArray

LongArray = npt.NDArray[np.int64]


class UnknownTokens(NamedTuple):
    """rows: whose last token is not known; tokens: where it stands in the step; sources: which one of those that the
    step before samples it is. All [num_unknown].
    """

    rows: IntArray
    tokens: LongArray
    sources: LongArray


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step of the model, tokens of all requests back to back.

    input_ids, positions: [num_tokens]. last_tokens: [num_sampling] indices into the tokens whose successors are
    sampled; sampled_rows, sampled_positions: [num_sampling] the rows they belong to and where the new tokens go.
    unknown: the tokens among ``input_ids`` that the step before samples and has not told yet; None: all are known.
    is_decode: every request computes one token, its last known one, and samples its successor: in these arrays the
    requests, the tokens and the sampled ones are the same. They hold until the next step is laid out, all but
    ``sampled_rows`` and ``sampled_positions``.
    is_bare: it is a decode step, and every row takes its most likely token and tells nothing else.
    on_host: ``input_ids`` and ``positions`` as tensors over the same memory, where somebody keeps them.
    """

    input_ids: LongArray
    positions: LongArray
    attention: AttentionBatch
    last_tokens: LongArray
    sampled_rows: IntArray
    sampled_positions: IntArray
    unknown: UnknownTokens | None = None
    is_decode: bool = False
    is_bare: bool = False
    on_host: tuple[torch.Tensor, torch.Tensor] | None = None
