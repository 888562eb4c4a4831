"""What the model needs of one step, as arrays; those of decode steps lie at addresses that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.contract.step import BoolArray, IntArray
from engine.kernels import decode_rows

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

    input_ids, positions: [num_tokens]. last_tokens: [num_samples] indices into the tokens whose successors are
    sampled; sampled_rows, sampled_positions: [num_samples] the rows they belong to and where the new tokens go. A row
    with draft tokens stands there once for each of its samples.
    unknown: the tokens among ``input_ids`` that the step before samples and has not told yet; None: all are known.
    is_decode: every request computes one token, its last known one, and samples its successor: in these arrays the
    requests, the tokens and the sampled ones are the same. They hold until the next step is laid out, all but
    ``sampled_rows`` and ``sampled_positions``.
    is_argmax_only: it is a decode step, and every row takes its most likely token and tells nothing else.
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
    is_argmax_only: bool = False
    on_host: tuple[torch.Tensor, torch.Tensor] | None = None


class DecodeLayout:
    """Lays out one decode step after the other in the same memory.

    What it returns holds until the next step is laid out: the model has run by then, or has copies. While steps have
    as many rows and columns as the one before, the arrays are the same objects too, and so may be what others made of
    their addresses.
    """

    def __init__(
        self,
        *,
        token_ids: IntArray,
        block_tables: IntArray,
        windows: Sequence[int | None],
        is_argmax_only: BoolArray,
        block_size: int,
    ) -> None:
        max_num_seqs = len(token_ids)
        self._input_ids: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._positions: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_groups = len(windows)
        self._slots: LongArray = np.zeros(self._num_groups * max_num_seqs, dtype=np.int64)
        self._first_positions: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        # Never touched beyond what is used: the operating system backs only pages that were written.
        self._tables: IntArray = np.empty(block_tables.size, dtype=np.int32)
        # Where the tokens of a decode step begin and stand: never written.
        self._starts: IntArray = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._tokens: LongArray = np.arange(max_num_seqs, dtype=np.int64)
        self._memory = (
            *(token_ids, block_tables, np.array([window or 0 for window in windows], dtype=np.int64)),
            *(block_size, is_argmax_only),
            *(self._input_ids, self._positions, self._slots, self._first_positions, self._tables),
        )
        self._inputs = self._view(0, 0)

    def lay_out(self, rows: IntArray, positions: IntArray) -> tuple[StepInputs, bool]:
        """The inputs of a step in which each of ``rows`` computes the token at its position, and samples the next;
        True with them where some token is a negative placeholder.
        """
        ends = np.empty(rows.size, dtype=np.int32)
        num_columns, num_unknown, num_argmax_only = decode_rows.lay_out(rows, positions, ends, *self._memory)
        inputs = self._inputs
        if inputs.attention.block_tables.shape[1:] != (rows.size, num_columns):
            inputs = self._inputs = self._view(rows.size, num_columns)
        inputs.sampled_rows = rows
        inputs.sampled_positions = ends
        inputs.unknown = None
        inputs.is_argmax_only = num_argmax_only == rows.size
        return inputs, num_unknown > 0

    def _view(self, num_rows: int, num_columns: int) -> StepInputs:
        input_ids, positions, num_groups = self._input_ids[:num_rows], self._positions[:num_rows], self._num_groups
        tables = self._tables[: num_groups * num_rows * num_columns]
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=self._starts[: num_rows + 1],
                first_positions=self._first_positions[:num_rows],
                block_tables=tables.reshape(num_groups, num_rows, num_columns),
                slots=self._slots[: num_groups * num_rows].reshape(num_groups, num_rows),
                is_reused=True,
            ),
            last_tokens=self._tokens[:num_rows],
            sampled_rows=self._starts[:0],
            sampled_positions=self._starts[:0],
            is_decode=True,
            on_host=(torch.from_numpy(input_ids), torch.from_numpy(positions)),
        )
