"""A runner that is strict: it follows every step exactly, and knows what each position of its cache must hold.

The KV of a position is a number that stands for all tokens up to it, so that every number a row attends to can be
compared with what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.contract.step import ModelRunnerOutput, NewRow, SchedulerOutput

NUM_VALUES = 5
GARBAGE = -1


def kv_values(token_ids: Sequence[int]) -> list[int]:
    """The KV of each position: a number that stands for all tokens up to it."""
    values: list[int] = []
    value = 17
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % (1 << 61)
        values.append(value)
    return values


def next_token(value: int) -> int:
    """The token that follows a context."""
    return (value >> 20) % NUM_VALUES


@dataclass(slots=True)
class RunnerRow:
    """The runner's own copy of a row."""

    token_ids: list[int]
    block_ids: list[int]


class StrictRunner:
    """Applies every step exactly, and fails where the step does not follow the rules of ``SchedulerOutput``."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, RunnerRow] = {}
        self.num_computed_positions = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        self._apply(output)
        drafts = iter(output.draft_token_ids.tolist())
        sampled: list[int] = []
        accepted: list[int] = []
        for row, first, count, num_samples in zip(
            output.rows.tolist(),
            output.first_positions.tolist(),
            output.num_scheduled_tokens.tolist(),
            output.num_samples.tolist(),
            strict=True,
        ):
            assert count >= max(num_samples, 1)
            of_row = [next(drafts) for _ in range(num_samples - 1)]
            drawn = self._compute(self.rows[row], first, first + count, of_row, num_samples)
            accepted.append(self._append(self.rows[row], drawn, of_row))
            sampled.extend(drawn)
        assert next(drafts, None) is None, "each draft belongs to a row"
        num_accepted = np.array(accepted, np.int32) if output.draft_token_ids.size else None
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32), num_accepted=num_accepted)

    def content(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The KV in a block table."""
        return [self.kv[block_ids[p // self._block_size]][p % self._block_size] for p in range(num_tokens)]

    def fill(self, block_ids: Sequence[int], first_block: int, values: Sequence[int]) -> None:
        """Write ``values``, the KV of a prompt, into blocks that stand from its ``first_block``-th block on."""
        for offset, block_id in enumerate(block_ids):
            start = (first_block + offset) * self._block_size
            part = values[start : start + self._block_size]
            self.kv[block_id] = [*part, *[GARBAGE] * (self._block_size - len(part))]

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what is nobody's KV."""
        for block_id in block_ids:
            self.kv[block_id] = [GARBAGE] * self._block_size

    def _apply(self, output: SchedulerOutput) -> None:
        for row in output.released_rows.tolist():
            del self.rows[row]
        for new_row in output.new_rows:
            self._start(new_row)
        columns, block_ids = output.append_columns.tolist(), output.append_block_ids.tolist()
        for row, column, block_id in zip(output.append_rows.tolist(), columns, block_ids, strict=True):
            # Blocks that only rejected drafts needed go back without a word; others may follow in their places.
            assert column <= len(self.rows[row].block_ids), "blocks are appended in order"
            self.rows[row].block_ids[column:] = [block_id]
        assert len(set(output.rows.tolist())) == output.rows.size, "a row computes once a step"

    def _start(self, new_row: NewRow) -> None:
        assert 0 <= new_row.row < self._max_num_seqs
        assert new_row.row not in self.rows, "a row must be released before it is used again"
        self.rows[new_row.row] = RunnerRow(new_row.token_ids.tolist(), new_row.block_ids.tolist())

    def _compute(self, row: RunnerRow, first: int, end: int, drafts: list[int], num_samples: int) -> list[int]:
        """Write the KV of these positions; returns the tokens drawn after the last ones of them."""
        tokens = row.token_ids + drafts
        assert end <= len(tokens), "only known tokens and their drafts can be computed"
        assert end <= len(row.block_ids) * self._block_size, "every position needs its block"
        assert num_samples == 0 or end == len(tokens), "only successors of the last known token and drafts are sampled"
        values = kv_values(tokens[:end])
        for position in range(first, end):
            block = self.kv[row.block_ids[position // self._block_size]]
            block[position % self._block_size] = values[position]
        self.num_computed_positions += end - first
        assert self.content(row.block_ids, end) == values, "attended to KV that is not this context's (I3)"
        return [next_token(value) for value in values[end - num_samples :]] if num_samples else []

    @staticmethod
    def _append(row: RunnerRow, drawn: list[int], drafts: list[int]) -> int:
        """Add what was drawn up to the first wrong draft; returns how many drafts were right."""
        num_accepted = next((n for n, draft in enumerate(drafts) if draft != drawn[n]), len(drafts))
        row.token_ids.extend(drawn[: num_accepted + 1])
        return num_accepted
