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
        firsts, counts = output.first_positions.tolist(), output.num_scheduled_tokens.tolist()
        for row, first, count in zip(output.rows.tolist(), firsts, counts, strict=True):
            assert count >= 1
            self._write(self.rows[row], first, first + count)
        sampled = [
            self._sample(self.rows[row], first + count) if is_sampling else GARBAGE
            for row, first, count, is_sampling in zip(
                output.rows.tolist(), firsts, counts, output.is_sampling.tolist(), strict=True
            )
        ]
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32))

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
            assert column == len(self.rows[row].block_ids), "blocks are appended in order"
            self.rows[row].block_ids.append(block_id)
        assert len(set(output.rows.tolist())) == output.rows.size, "a row computes once a step"

    def _start(self, new_row: NewRow) -> None:
        assert 0 <= new_row.row < self._max_num_seqs
        assert new_row.row not in self.rows, "a row must be released before it is used again"
        self.rows[new_row.row] = RunnerRow(new_row.token_ids.tolist(), new_row.block_ids[0].tolist())

    def _write(self, row: RunnerRow, first: int, end: int) -> None:
        assert end <= len(row.token_ids), "only known tokens can be computed"
        assert end <= len(row.block_ids) * self._block_size, "every position needs its block"
        values = kv_values(row.token_ids[:end])
        for position in range(first, end):
            block = self.kv[row.block_ids[position // self._block_size]]
            block[position % self._block_size] = values[position]
        self.num_computed_positions += end - first
        assert self.content(row.block_ids, end) == values, "attended to KV that is not this context's (I3)"

    def _sample(self, row: RunnerRow, end: int) -> int:
        assert end == len(row.token_ids), "only the successor of the last known token can be sampled"
        token = next_token(self.kv[row.block_ids[(end - 1) // self._block_size]][(end - 1) % self._block_size])
        row.token_ids.append(token)
        return token
