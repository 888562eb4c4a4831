"""The runner's copy of the running requests, and the arrays that one step of the model needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.batch import AttentionBatch
from engine.sample.sampling_rows import SamplingRows
from engine.sample.token_history import TokenHistory
from engine.step import IntArray, SchedulerOutput

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step of the model, tokens of all requests back to back.

    input_ids, positions: [num_tokens]. last_tokens: [num_sampling] indices into the tokens whose successors are
    sampled; sampled_rows, sampled_positions: [num_sampling] the rows they belong to and where the new tokens go.
    """

    input_ids: LongArray
    positions: LongArray
    attention: AttentionBatch
    last_tokens: LongArray
    sampled_rows: IntArray
    sampled_positions: IntArray


class InputBatch:
    """Tokens, block table and sampling parameters of every row; only the scheduler's news and samples change it.

    ``num_prompt_logprobs`` is -1 for rows whose prompt nobody asks about.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        num_columns = max_model_len // block_size + 1
        # The token sampled from the last position that may be computed stands at max_model_len.
        self._token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._block_table: IntArray = np.zeros((max_num_seqs, num_columns), dtype=np.int32)
        num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs)
        self.num_prompt_logprobs: IntArray = np.full(max_num_seqs, -1, dtype=np.int32)
        self.history = TokenHistory(token_ids=self._token_ids, num_prompt_tokens=num_prompt_tokens)

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed. Released rows need no work: a row is read only after it was set anew."""
        for new in output.new_rows:
            self._token_ids[new.row, : len(new.token_ids)] = new.token_ids
            self._block_table[new.row, : len(new.block_ids)] = new.block_ids
            self.history.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.sampling.set(new.row, new.sampling, num_prompt_tokens=new.num_prompt_tokens)
            self.num_prompt_logprobs[new.row] = -1 if new.num_prompt_logprobs is None else new.num_prompt_logprobs
        self._block_table[output.append_rows, output.append_columns] = output.append_block_ids

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        """Lay out a step's tokens."""
        rows, lengths = output.rows, output.num_scheduled_tokens
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = output.first_positions + lengths
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_starts[-1], dtype=np.int64)
        positions += np.repeat(output.first_positions - query_starts[:-1], lengths)
        blocks, offsets = np.divmod(positions, self._block_size)
        num_columns = -(-int(ends.max()) // self._block_size)
        sampling = np.flatnonzero(output.is_sampling)
        return StepInputs(
            input_ids=self._token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            attention=AttentionBatch(
                query_starts=query_starts,
                first_positions=output.first_positions,
                block_tables=self._block_table[rows, :num_columns],
                slots=self._block_table[token_rows, blocks].astype(np.int64) * self._block_size + offsets,
            ),
            last_tokens=query_starts[1:][sampling].astype(np.int64) - 1,
            sampled_rows=rows[sampling],
            sampled_positions=ends[sampling],
        )

    def append(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Add sampled tokens to their rows."""
        self._token_ids[rows, positions] = token_ids
