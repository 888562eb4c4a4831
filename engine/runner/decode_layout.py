"""The inputs of decode steps, at addresses that stay."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.batch import AttentionBatch
from engine.kernels import decode_rows
from engine.runner.step_inputs import LongArray, StepInputs
from engine.step import BoolArray, IntArray


class DecodeLayout:
    """Lays out one decode step after the other in the same memory.

    What it returns holds until the next step is laid out: the model has run by then, or has copies. While steps have
    as many rows and columns as the one before, the arrays are the same objects too, and so may be what others made of
    their addresses.
    """

    def __init__(self, *, token_ids: IntArray, block_table: IntArray, is_bare: BoolArray, block_size: int) -> None:
        max_num_seqs = len(token_ids)
        self._input_ids: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._positions: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._slots: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._first_positions: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        # Never touched beyond what is used: the operating system backs only pages that were written.
        self._tables: IntArray = np.empty(block_table.size, dtype=np.int32)
        # Where the tokens of a decode step begin and stand: never written.
        self._starts: IntArray = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._tokens: LongArray = np.arange(max_num_seqs, dtype=np.int64)
        self._memory = (
            *(token_ids, block_table, block_size, is_bare),
            *(self._input_ids, self._positions, self._slots, self._first_positions, self._tables),
        )
        self._inputs = self._view(0, 0)

    def lay_out(self, rows: IntArray, positions: IntArray) -> tuple[StepInputs, bool]:
        """The inputs of a step in which each of ``rows`` computes the token at its position, and samples the next;
        True with them where some token is a negative placeholder.
        """
        ends = np.empty(rows.size, dtype=np.int32)
        num_columns, num_unknown, num_bare = decode_rows.lay_out(rows, positions, ends, *self._memory)
        inputs = self._inputs
        if inputs.attention.block_tables.shape != (rows.size, num_columns):
            inputs = self._inputs = self._view(rows.size, num_columns)
        inputs.sampled_rows = rows
        inputs.sampled_positions = ends
        inputs.unknown = None
        inputs.is_bare = num_bare == rows.size
        return inputs, num_unknown > 0

    def _view(self, num_rows: int, num_columns: int) -> StepInputs:
        input_ids, positions = self._input_ids[:num_rows], self._positions[:num_rows]
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=self._starts[: num_rows + 1],
                first_positions=self._first_positions[:num_rows],
                block_tables=self._tables[: num_rows * num_columns].reshape(num_rows, num_columns),
                slots=self._slots[:num_rows],
                is_reused=True,
            ),
            last_tokens=self._tokens[:num_rows],
            sampled_rows=self._starts[:0],
            sampled_positions=self._starts[:0],
            is_decode=True,
            on_host=(torch.from_numpy(input_ids), torch.from_numpy(positions)),
        )
