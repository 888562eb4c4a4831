"""The model's input for one step, as arrays. Those of decode steps keep their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.contract.step import EMPTY_INTS, BoolArray, IntArray
from engine.kernels import decode_rows

LongArray = npt.NDArray[np.int64]


class SampledHere(NamedTuple):
    """Tokens that a step sampled, and the row and the position of each. All arrays: [num_samples]."""

    rows: IntArray
    positions: IntArray
    token_ids: IntArray


NONE_SAMPLED: Final = SampledHere(EMPTY_INTS, EMPTY_INTS, EMPTY_INTS)


class UnknownTokens(NamedTuple):
    """Tokens that the step before sampled and that the host does not know yet. All arrays: [num_unknown].

    rows: their rows. tokens: their indices in this step. sources: their indices among the samples of the step before.
    """

    rows: IntArray
    tokens: LongArray
    sources: LongArray


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step of the model, with the tokens of all requests back to back.

    input_ids, positions: [num_tokens].
    last_tokens: [num_samples] indices of the tokens whose successors are sampled.
    sampled_rows, sampled_positions: [num_samples] the rows of the samples and where the new tokens go. A row with draft
        tokens appears once for each of its samples.
    unknown: the tokens in ``input_ids`` that the host does not know yet; None: all are known.
    is_decode: every request computes one token, its last known one, and samples the next. So requests, tokens and
        samples have the same indices. All arrays but ``sampled_rows`` and ``sampled_positions`` are reused by the next
        step.
    is_argmax_only: a decode step in which every row takes its most likely token and reports nothing else.
    on_host: ``input_ids`` and ``positions`` as tensors over the same memory, if somebody keeps such tensors.
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
    """Lays out one decode step after another in the same memory.

    The returned inputs are valid until the next step is laid out; by then the model has run or has copied them. Steps
    with the same number of rows have their arrays at the same addresses. While the number of columns stays the same
    too, so do the array objects: callers may cache what they derive from them.
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
        # Never touched beyond the part in use: the operating system backs only pages that were written.
        self._tables: IntArray = np.empty(block_tables.shape, dtype=np.int32)
        # Starts and indices of a decode step's tokens: constant.
        self._starts: IntArray = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._tokens: LongArray = np.arange(max_num_seqs, dtype=np.int64)
        self._memory = (
            *(token_ids, block_tables, np.array([window or 0 for window in windows], dtype=np.int64)),
            *(block_size, is_argmax_only),
            *(self._input_ids, self._positions, self._slots, self._first_positions, self._tables),
        )
        self._shape = (0, 0)
        self._inputs = self._view(0, 0)

    def lay_out(
        self, rows: IntArray, positions: IntArray, *, before: SampledHere = NONE_SAMPLED
    ) -> tuple[StepInputs, bool]:
        """The inputs of a step in which each of ``rows`` computes the token at its position and samples the next; with
        it, whether some token is still a negative placeholder. The tokens of the step ``before`` are stored first.
        """
        ends = np.empty(rows.size, dtype=np.int32)
        num_columns, num_unknown, num_argmax_only = decode_rows.lay_out(*before, rows, positions, ends, *self._memory)
        inputs, shape = self._inputs, (rows.size, num_columns)
        if shape != self._shape:
            self._shape = shape
            inputs = self._inputs = self._view(*shape)
        inputs.sampled_rows = rows
        inputs.sampled_positions = ends
        inputs.unknown = None
        inputs.is_argmax_only = num_argmax_only == rows.size
        return inputs, num_unknown > 0

    def _view(self, num_rows: int, num_columns: int) -> StepInputs:
        input_ids, positions, num_groups = self._input_ids[:num_rows], self._positions[:num_rows], self._num_groups
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=self._starts[: num_rows + 1],
                first_positions=self._first_positions[:num_rows],
                block_tables=self._tables[:, :num_rows, :num_columns],
                slots=self._slots[: num_groups * num_rows].reshape(num_groups, num_rows),
                is_reused=True,
            ),
            last_tokens=self._tokens[:num_rows],
            sampled_rows=self._starts[:0],
            sampled_positions=self._starts[:0],
            is_decode=True,
            on_host=(torch.from_numpy(input_ids), torch.from_numpy(positions)),
        )
