"""The runner's copy of the running requests, and the arrays that one step of the model needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.attention.backend import AttentionBatch, first_seen
from engine.contract.step import IntArray, SchedulerOutput
from engine.kernels import decode_rows
from engine.runner.step_inputs import NONE_SAMPLED, DecodeLayout, LongArray, SampledHere, StepInputs, UnknownTokens
from engine.sampling.grammar.compiler import GrammarStore
from engine.sampling.sampling_rows import SamplingRows
from engine.sampling.token_history import TokenHistory

UNKNOWN: Final = -1
"""Placeholder for a token that was sampled but is not known on the host yet."""


class InputBatch:
    """Tokens, block tables and sampling parameters of every row; only scheduler output and sampled tokens change it.

    windows: one a KV cache group; a row has a block table for each group.
    ``num_prompt_logprobs`` is -1 for rows that want no log-probabilities of the prompt. When a step is prepared before
    the tokens of the step before are known, ``expect`` puts a placeholder for each of them, and ``learn`` replaces it.
    ``history`` is up to date from ``prepare`` on.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        grammars: GrammarStore | None = None,
    ) -> None:
        self.block_size = block_size
        num_columns = max_model_len // block_size + 1
        # One more column: a token sampled from the last computable position is stored at max_model_len.
        self._token_ids: IntArray = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._windows = tuple(windows)
        self._block_tables: IntArray = np.zeros((len(self._windows), max_num_seqs, num_columns), dtype=np.int32)
        num_prompt_tokens: IntArray = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = SamplingRows(max_num_seqs, grammars=grammars)
        self.num_prompt_logprobs: IntArray = np.full(max_num_seqs, -1, dtype=np.int32)
        self._places: LongArray = np.zeros(max_num_seqs, dtype=np.int64)
        self._decode = DecodeLayout(
            token_ids=self._token_ids,
            block_tables=self._block_tables,
            windows=self._windows,
            is_argmax_only=self.sampling.is_argmax_only,
            block_size=block_size,
        )
        self._has_unknown = False
        self._unstored = NONE_SAMPLED
        self.history = TokenHistory(token_ids=self._token_ids, num_prompt_tokens=num_prompt_tokens)

    def apply(self, output: SchedulerOutput) -> None:
        """Apply the scheduler's changes to the rows. Released rows need no work: rows are set before they are read."""
        if output.new_rows:
            self._store()  # a new row may be one of those
        for new in output.new_rows:
            self._token_ids[new.row, : len(new.token_ids)] = new.token_ids
            assert len(new.block_ids) == len(self._windows), "a block table for each KV cache group"
            self._block_tables[:, new.row, : new.block_ids.shape[1]] = new.block_ids
            self.history.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.sampling.set(new.row, new.sampling, num_prompt_tokens=new.num_prompt_tokens)
            self.num_prompt_logprobs[new.row] = -1 if new.num_prompt_logprobs is None else new.num_prompt_logprobs
        if output.append_rows.size:
            groups = output.append_groups if output.append_groups.size else 0
            self._block_tables[groups, output.append_rows, output.append_columns] = output.append_block_ids

    @property
    def has_unknown(self) -> bool:
        """True while the tokens of an expected step are not known yet."""
        return self._has_unknown

    def prepare(self, output: SchedulerOutput) -> StepInputs:
        """Lay out a step's tokens as the model's input."""
        rows, lengths = output.rows, output.num_scheduled_tokens
        if output.is_decode or (output.num_tokens == rows.size and output.num_samples.all()):
            unstored, self._unstored = self._unstored, NONE_SAMPLED
            inputs, has_placeholders = self._decode.lay_out(rows, output.first_positions, before=unstored)
            if has_placeholders:
                inputs.unknown = self._find_unknown(rows, inputs.input_ids, inputs.attention.query_starts)
            return inputs
        self._store()
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        ends = output.first_positions + lengths
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_starts[-1], dtype=np.int64)
        positions += np.repeat(output.first_positions - query_starts[:-1], lengths)
        blocks, offsets = np.divmod(positions, self.block_size)
        num_columns = -(-int(ends.max()) // self.block_size)
        sampled_rows, sampled_positions, last_tokens = self._lay_out_samples(output, ends, query_starts)
        if output.draft_token_ids.size:
            self._write_drafts(output, ends)
        input_ids = self._token_ids[token_rows, positions].astype(np.int64)
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            attention=AttentionBatch(
                query_starts=query_starts,
                first_positions=output.first_positions,
                block_tables=self._seen_blocks(rows, output.first_positions, num_columns),
                # numpy returns the result of such an index with the tokens as the outermost dimension in memory
                slots=np.ascontiguousarray(
                    self._block_tables[:, token_rows, blocks].astype(np.int64) * self.block_size + offsets
                ),
            ),
            last_tokens=last_tokens,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            unknown=self._find_unknown(rows, input_ids, query_starts) if self._has_unknown else None,
        )

    @staticmethod
    def _lay_out_samples(
        output: SchedulerOutput, ends: IntArray, query_starts: IntArray
    ) -> tuple[IntArray, IntArray, LongArray]:
        """For each sample: its row, the position of the new token, and the index of the token in the step that it
        follows.
        """
        behind, num_samples = query_starts[1:].astype(np.int64), output.num_samples
        if not output.draft_token_ids.size:
            sampling = np.flatnonzero(num_samples)
            return output.rows[sampling], ends[sampling], behind[sampling] - 1
        samples = np.repeat(np.arange(num_samples.size), num_samples)
        # A row's last sample follows the last token that it computes, its second last the second last token, and so on.
        num_later = (np.cumsum(num_samples)[samples] - 1 - np.arange(samples.size)).astype(np.int32)
        return output.rows[samples], ends[samples] - num_later, behind[samples] - 1 - num_later

    def _write_drafts(self, output: SchedulerOutput, ends: IntArray) -> None:
        """Write draft tokens to the positions that they will have if they are accepted.

        The model reads them there like known tokens, and logits processors read them as history of later positions. A
        sample that depends on a wrong draft is never used, so this is safe.
        """
        num_drafts = np.maximum(output.num_samples - 1, 0)
        owners = np.repeat(np.arange(num_drafts.size), num_drafts)
        num_later = np.cumsum(num_drafts)[owners] - 1 - np.arange(owners.size)
        self._token_ids[output.rows[owners], ends[owners] - 1 - num_later] = output.draft_token_ids

    def _seen_blocks(self, rows: IntArray, first_positions: IntArray, num_columns: int) -> IntArray:
        """Block tables [num_groups, num_rows, num_columns]. Entries before a group's window are replaced by the first
        block in the window: the blocks they name may belong to another request by now.
        """
        tables = self._block_tables[:, rows, :num_columns]
        columns = np.arange(num_columns)
        for table, window in zip(tables, self._windows, strict=True):
            if window is not None:
                first_columns = first_seen(first_positions, window)[:, None] // self.block_size
                table[:] = np.take_along_axis(table, np.maximum(columns, first_columns), axis=1)
        return tables

    def expect(self, rows: IntArray, positions: IntArray) -> None:
        """Put placeholders where the step in flight samples tokens, in this order. Call it before ``apply``."""
        assert not self._has_unknown, "only one step may be in flight when the next one is launched"
        self._store()
        self._token_ids[rows, positions] = UNKNOWN
        self._places[rows] = np.arange(rows.size)
        self._has_unknown = True

    def learn(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Write sampled tokens to their rows, unless another request has taken the row since ``expect``.

        Tokens behind a wrong draft are stored as well: nothing reads a row past its known tokens.
        """
        self._store()
        if self._has_unknown:
            self._has_unknown = False
            is_waited_for = self._token_ids[rows, positions] == UNKNOWN
            rows, positions, token_ids = rows[is_waited_for], positions[is_waited_for], token_ids[is_waited_for]
        decode_rows.store(self._token_ids, rows, positions, token_ids)

    def learn_later(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """``learn``, when the next step is laid out: a pass of its own takes 15 us, since caches are cold.

        No step may be expected. The arrays must not change any more.
        """
        if self._unstored is not NONE_SAMPLED:
            self._store()
        self._unstored = SampledHere(rows, positions, token_ids)

    def _store(self) -> None:
        unstored = self._unstored
        if unstored is not NONE_SAMPLED:
            self._unstored = NONE_SAMPLED
            decode_rows.store(self._token_ids, *unstored)

    def _find_unknown(self, rows: IntArray, input_ids: LongArray, query_starts: IntArray) -> UnknownTokens | None:
        """The step's unknown tokens. Only the last token that a row computes can be one that was just sampled."""
        last = query_starts[1:].astype(np.int64) - 1
        index = np.flatnonzero(input_ids[last] == UNKNOWN)
        if index.size == 0:
            return None
        return UnknownTokens(rows=rows[index], tokens=last[index], sources=self._places[rows[index]])
