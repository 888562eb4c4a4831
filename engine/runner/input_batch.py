"""The runner's copy of the running requests, and the arrays that one step of the model needs."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.attention.backend import AttentionBatch
from engine.contract.step import IntArray, SchedulerOutput
from engine.kernels import decode_rows
from engine.runner.step_inputs import DecodeLayout, LongArray, StepInputs, UnknownTokens
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory

UNKNOWN: Final = -1
"""Stands for a token that was sampled and is not known here yet."""


class InputBatch:
    """Tokens, block table and sampling parameters of every row; only what the scheduler says and samples change it.

    ``num_prompt_logprobs`` is -1 for rows whose prompt nobody asks about. While a step is prepared before the tokens of
    the step before are known (``expect``), each of these has a placeholder, until ``learn`` brings it.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        num_columns = max_model_len // block_size + 1
        # The token sampled from the last position that may be computed stands at max_model_len.
        self._token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._block_tables: IntArray = np.zeros((num_groups, max_num_seqs, num_columns), dtype=np.int32)
        self._block_table = self._block_tables[0]
        num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs)
        self.num_prompt_logprobs: IntArray = np.full(max_num_seqs, -1, dtype=np.int32)
        self._places: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._decode = DecodeLayout(
            token_ids=self._token_ids,
            block_table=self._block_table,
            is_argmax_only=self.sampling.is_argmax_only,
            block_size=block_size,
        )
        self._has_unknown = False
        self.history = TokenHistory(token_ids=self._token_ids, num_prompt_tokens=num_prompt_tokens)

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed. Released rows need no work: a row is read only after it was set anew."""
        for new in output.new_rows:
            self._token_ids[new.row, : len(new.token_ids)] = new.token_ids
            self._block_tables[:, new.row, : new.block_ids.shape[1]] = new.block_ids
            self.history.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.sampling.set(new.row, new.sampling, num_prompt_tokens=new.num_prompt_tokens)
            self.num_prompt_logprobs[new.row] = -1 if new.num_prompt_logprobs is None else new.num_prompt_logprobs
        if output.append_rows.size:
            groups = output.append_groups if output.append_groups.size else 0
            self._block_tables[groups, output.append_rows, output.append_columns] = output.append_block_ids

    @property
    def has_unknown(self) -> bool:
        """True while a step that was expected has not told its tokens."""
        return self._has_unknown

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        """Lay out a step's tokens."""
        rows, lengths = output.rows, output.num_scheduled_tokens
        if output.is_decode or (output.is_sampling.all() and output.num_tokens == rows.size):
            inputs, has_placeholders = self._decode.lay_out(rows, output.first_positions)
            if has_placeholders:
                inputs.unknown = self._find_unknown(rows, inputs.input_ids, inputs.attention.query_starts)
            return inputs
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = output.first_positions + lengths
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_starts[-1], dtype=np.int64)
        positions += np.repeat(output.first_positions - query_starts[:-1], lengths)
        blocks, offsets = np.divmod(positions, self.block_size)
        num_columns = -(-int(ends.max()) // self.block_size)
        sampling = np.flatnonzero(output.is_sampling)
        input_ids = self._token_ids[token_rows, positions].astype(np.int64)
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=query_starts,
                first_positions=output.first_positions,
                block_tables=self._block_table[rows, :num_columns],
                slots=self._block_table[token_rows, blocks].astype(np.int64) * self.block_size + offsets,
            ),
            last_tokens=query_starts[1:][sampling].astype(np.int64) - 1,
            sampled_rows=rows[sampling],
            sampled_positions=ends[sampling],
            unknown=self._find_unknown(rows, input_ids, query_starts) if self._has_unknown else None,
        )

    def expect(self, rows: IntArray, positions: IntArray) -> None:
        """Put placeholders where the step in flight samples tokens, in this order. To be called before ``apply``."""
        assert not self._has_unknown, "only one step may be in flight when the next one is launched"
        self._token_ids[rows, positions] = UNKNOWN
        self._places[rows] = np.arange(rows.size)
        self._has_unknown = True

    def learn(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Add sampled tokens to their rows, except where another request has taken the row since ``expect``."""
        if self._has_unknown:
            self._has_unknown = False
            is_waited_for = self._token_ids[rows, positions] == UNKNOWN
            rows, positions, token_ids = rows[is_waited_for], positions[is_waited_for], token_ids[is_waited_for]
        decode_rows.store(self._token_ids, rows, positions, token_ids)

    def _find_unknown(self, rows: IntArray, input_ids: LongArray, query_starts: IntArray) -> UnknownTokens | None:
        """Only the last token that a row computes can be one that was just sampled."""
        last = query_starts[1:].astype(np.int64) - 1
        index = np.flatnonzero(input_ids[last] == UNKNOWN)
        if index.size == 0:
            return None
        return UnknownTokens(rows=rows[index], tokens=last[index], sources=self._places[rows[index]])
