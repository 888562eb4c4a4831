"""Drives a ModelRunner without a scheduler: hand-made steps with scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.contract.messages import SamplingParams
from engine.contract.step import ModelRunnerOutput, NewRow, SchedulerOutput
from engine.runner.model_runner import ModelRunner
from kv_transfer.cache_groups import ABSENT_BLOCK

GREEDY = SamplingParams(max_tokens=1 << 20)


@dataclass(slots=True)
class DrivenRow:
    """What the driver knows of one row; ``tables`` are its blocks of each KV cache group."""

    token_ids: list[int]
    num_computed: int
    tables: list[list[int]]

    @property
    def block_ids(self) -> list[int]:
        """Its blocks of the first group."""
        return self.tables[0]


class StepDriver:
    """Schedules what a test asks for. Blocks are assigned in a shuffled order, so that tables are scattered.

    A block that has left its group's window is filled with what is no number, and given to whoever needs one next; the
    runner is not told.
    """

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self.rows: dict[int, DrivenRow] = {}
        order = np.random.default_rng(seed).permutation(runner.num_blocks)
        self._free = [int(block) for block in order]
        self.untouched = set(self._free)
        """Blocks that no row has used yet."""
        self._new: list[NewRow] = []
        self._released: list[int] = []
        self._appended: list[tuple[int, int, int, int]] = []
        self._step_id = 0

    def add(
        self, row: int, token_ids: Sequence[int], *, sampling: SamplingParams = GREEDY, num_output_tokens: int = 0
    ) -> None:
        """Start a request in ``row``; the last ``num_output_tokens`` of its tokens count as output."""
        tables: list[list[int]] = [[] for _ in self.runner.layout.groups]
        driven = DrivenRow(token_ids=list(token_ids), num_computed=0, tables=tables)
        self._grow(driven, len(token_ids))
        self.rows[row] = driven
        self._new.append(
            NewRow(
                row=row,
                request_id=f"request-{row}",
                token_ids=np.array(token_ids, dtype=np.int32),
                num_prompt_tokens=len(token_ids) - num_output_tokens,
                block_ids=np.array(driven.tables, dtype=np.int32),
                sampling=sampling,
            )
        )

    def release(self, row: int) -> None:
        """End a row and free its blocks."""
        tables = self.rows.pop(row).tables
        self._free.extend(block for table in tables for block in table if block != ABSENT_BLOCK)
        self._released.append(row)

    def step(self, chunks: dict[int, int]) -> dict[int, int]:
        """Compute the given number of tokens of each row; returns the tokens sampled by rows that reached their end."""
        return self.run(chunks)[0]

    def run(self, chunks: dict[int, int]) -> tuple[dict[int, int], ModelRunnerOutput]:
        """Like ``step``, but also returns the runner's whole output."""
        for row in chunks:
            self._append_blocks(row)
        order = list(chunks)
        firsts = [self.rows[row].num_computed for row in order]
        ends = [first + chunks[row] for first, row in zip(firsts, order, strict=True)]
        is_sampling = [end == len(self.rows[row].token_ids) for end, row in zip(ends, order, strict=True)]
        appended = np.array(self._appended, dtype=np.int32).reshape(-1, 4)
        output = SchedulerOutput(
            step_id=self._step_id,
            rows=np.array(order, dtype=np.int32),
            first_positions=np.array(firsts, dtype=np.int32),
            num_scheduled_tokens=np.array([chunks[row] for row in order], dtype=np.int32),
            num_samples=np.array(is_sampling, dtype=np.int32),
            released_rows=np.array(self._released, dtype=np.int32),
            new_rows=tuple(self._new),
            append_rows=appended[:, 0],
            append_columns=appended[:, 1],
            append_block_ids=appended[:, 2],
            append_groups=appended[:, 3],
        )
        self._new, self._released, self._appended = [], [], []
        self._step_id += 1
        result = self.runner.execute(output)
        sampled: dict[int, int] = {}
        tokens = iter(result.sampled_token_ids.tolist())
        for index, row in enumerate(order):
            self.rows[row].num_computed = ends[index]
            self._free_behind_windows(self.rows[row])
            if is_sampling[index]:
                sampled[row] = next(tokens)
                self.rows[row].token_ids.append(sampled[row])
        return sampled, result

    def generate(self, row: int, num_tokens: int, *, chunk: int | None = None) -> list[int]:
        """Prefill a row in chunks of at most ``chunk`` tokens and decode until it has ``num_tokens`` new tokens."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            driven = self.rows[row]
            todo = len(driven.token_ids) - driven.num_computed
            tokens.extend(self.step({row: min(todo, chunk or todo)}).values())
        return tokens

    def _append_blocks(self, row: int) -> None:
        driven = self.rows[row]
        before = len(driven.block_ids)
        self._grow(driven, len(driven.token_ids))
        for group, table in enumerate(driven.tables):
            for column in range(before, len(table)):
                self._appended.append((row, column, table[column], group))

    def _grow(self, driven: DrivenRow, num_tokens: int) -> None:
        for table in driven.tables:
            while len(table) * self.runner.layout.block_size < num_tokens:
                table.append(self._free.pop())
                self.untouched.discard(table[-1])

    def _free_behind_windows(self, driven: DrivenRow) -> None:
        """Free the blocks that the next position does not see."""
        for group, table in zip(self.runner.layout.groups, driven.tables, strict=True):
            first = 0 if group.window is None else max(driven.num_computed - group.window + 1, 0)
            for column in range(first // self.runner.layout.block_size):
                if table[column] != ABSENT_BLOCK:
                    self.runner.kv_cache.blocks[table[column]] = torch.nan
                    self._free.append(table[column])
                    table[column] = ABSENT_BLOCK
