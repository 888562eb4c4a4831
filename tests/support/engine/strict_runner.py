"""A runner that checks every step exactly, and knows the correct content of every position of its cache.

The KV of a position in a KV cache group is a number that stands for all tokens up to it and for the group, so that
every number a row attends to can be compared with what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.contract.step import BeamCandidates, ModelRunnerOutput, NewRow, SchedulerOutput
from kv_transfer.cache_groups import ABSENT_BLOCK, GroupBlocks

NUM_VALUES = 5
GARBAGE = -1
BEFORE_ALL = 17


def kv_values(token_ids: Sequence[int], after: int = BEFORE_ALL) -> list[int]:
    """The KV of each position: a number that represents all tokens up to it.

    after: the KV of the position before the first of these.
    """
    values: list[int] = []
    value = after
    for token_id in token_ids:
        value = (value * 1_000_003 + token_id + 1) % (1 << 61)
        values.append(value)
    return values


def group_values(values: Sequence[int], group: int) -> list[int]:
    """The values in a KV cache group; in the first group they are unchanged."""
    return [value + (group << 61) for value in values]


def next_token(value: int) -> int:
    """The token that follows a context."""
    return (value >> 20) % NUM_VALUES


def next_candidates(value: int, num_candidates: int) -> tuple[list[int], list[float]]:
    """The most likely tokens after a context, best first, and their log-probabilities."""
    logprobs = {token: -((value >> (7 * token + 5)) % 89) / 16 for token in range(NUM_VALUES)}
    tokens = sorted(logprobs, key=lambda token: -logprobs[token])[:num_candidates]
    return tokens, [logprobs[token] for token in tokens]


@dataclass(slots=True)
class RunnerRow:
    """The runner's own copy of a row: its block tables by group, and for a beam the number of candidates to return."""

    token_ids: list[int]
    tables: list[list[int]]
    num_candidates: int = 0
    _values: list[int] = field(default_factory=list)

    @property
    def block_ids(self) -> list[int]:
        """The block table of the first group."""
        return self.tables[0]

    def values(self, drafts: Sequence[int] = ()) -> list[int]:
        """The correct KV of the known tokens, which are only ever appended to, and of drafts behind them."""
        known = self._values
        known += kv_values(self.token_ids[len(known) :], known[-1] if known else BEFORE_ALL)
        return known + kv_values(drafts, known[-1]) if drafts else known


class StrictRunner:
    """Applies every step exactly, and fails where the step does not follow the rules of ``SchedulerOutput``."""

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, RunnerRow] = {}
        self.num_computed_positions = 0
        self._block_size = block_size
        self._windows = tuple(windows)
        self._max_num_seqs = max_num_seqs

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        self._apply(output)
        if output.num_decode_steps > 1:
            return self._decode_often(output)
        drafts = iter(output.draft_token_ids.tolist())
        sampled: list[int] = []
        accepted: list[int] = []
        candidates: list[tuple[int, list[int], list[float]]] = []
        for row, first, count, num_samples in zip(
            output.rows.tolist(),
            output.first_positions.tolist(),
            output.num_scheduled_tokens.tolist(),
            output.num_samples.tolist(),
            strict=True,
        ):
            assert count >= max(num_samples, 1)
            of_row = [next(drafts) for _ in range(num_samples - 1)]
            state = self.rows[row]
            drawn = self._compute(state, first, first + count, of_row, num_samples)
            if state.num_candidates and num_samples:
                assert not of_row, "beams have no drafts"
                candidates.append((row, *next_candidates(state.values()[-1], state.num_candidates)))
                accepted.append(0)
            else:
                accepted.append(self._append(state, drawn, of_row))
            sampled.extend(drawn)
        assert next(drafts, None) is None, "each draft belongs to a row"
        num_accepted = np.array(accepted, np.int32) if output.draft_token_ids.size else None
        return ModelRunnerOutput(
            sampled_token_ids=np.array(sampled, np.int32),
            num_accepted=num_accepted,
            candidates=_candidates_of(candidates) if candidates else None,
        )

    def _decode_often(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Have every row decode ``num_decode_steps`` times."""
        num_steps = output.num_decode_steps
        assert not output.draft_token_ids.size
        assert (output.num_scheduled_tokens == num_steps).all()
        assert (output.num_samples == num_steps).all()
        sampled: list[int] = []
        for row, first in zip(output.rows.tolist(), output.first_positions.tolist(), strict=True):
            for position in range(first, first + num_steps):
                drawn = self._compute(self.rows[row], position, position + 1, [], 1)
                self._append(self.rows[row], drawn, [])
                sampled += drawn
        num_accepted = np.full(output.rows.size, num_steps - 1, np.int32)
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32), num_accepted=num_accepted)

    def content(self, block_ids: Sequence[int], num_tokens: int, *, start: int = 0) -> list[int]:
        """The KV in a block table, of the tokens from ``start`` on."""
        assert ABSENT_BLOCK not in block_ids[start // self._block_size :], "a block of the window is absent"
        return [self.kv[block_ids[p // self._block_size]][p % self._block_size] for p in range(start, num_tokens)]

    def fill(self, tables: GroupBlocks, first_block: int, values: Sequence[int]) -> None:
        """Write ``values``, the KV of a prompt, into blocks, beginning with its ``first_block``-th block."""
        for group, table in enumerate(tables):
            for offset, block_id in enumerate(table):
                start = (first_block + offset) * self._block_size
                part = group_values(values[start : start + self._block_size], group)
                if block_id != ABSENT_BLOCK:
                    self.kv[block_id] = [*part, *[GARBAGE] * (self._block_size - len(part))]

    def check_window(self, tables: Sequence[Sequence[int]], first: int, end: int, values: Sequence[int]) -> None:
        """Compare the KV that positions ``first`` to ``end`` (exclusive) see in each group with the correct one."""
        for group, (table, window) in enumerate(zip(tables, self._windows, strict=True)):
            start = 0 if window is None else max(first - window + 1, 0)
            needed = table[: -(-end // self._block_size)]
            expected = group_values(values[start:end], group)
            assert self.content(needed, end, start=start) == expected, (
                f"group {group}: attended to KV that is not this context's (I3)"
            )

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with invalid KV."""
        for block_id in block_ids:
            self.kv[block_id] = [GARBAGE] * self._block_size

    def _apply(self, output: SchedulerOutput) -> None:
        for row in output.released_rows.tolist():
            del self.rows[row]
        for new_row in output.new_rows:
            self._start(new_row)
        columns, block_ids = output.append_columns.tolist(), output.append_block_ids.tolist()
        groups = output.append_groups.tolist() or [0] * len(columns)
        for row, group, column, block_id in zip(output.append_rows.tolist(), groups, columns, block_ids, strict=True):
            # Blocks that only rejected drafts needed go back without a word; others may follow in their places.
            table = self.rows[row].tables[group]
            assert column <= len(table), "blocks are appended in order"
            table[column:] = [block_id]
        sources, targets = output.copy_sources.tolist(), output.copy_targets.tolist()
        assert len(set(targets)) == len(targets), "a block is copied to once"
        assert not set(sources).intersection(targets), "no block is copied from and to"
        for source, target in zip(sources, targets, strict=True):
            self.kv[target] = list(self.kv[source])
        assert len(set(output.rows.tolist())) == output.rows.size, "a row computes once a step"

    def _start(self, new_row: NewRow) -> None:
        assert 0 <= new_row.row < self._max_num_seqs
        assert new_row.row not in self.rows, "a row must be released before it is used again"
        tables = new_row.block_ids.tolist()
        assert len(tables) == len(self._windows), "one table a group"
        for table in tables:
            while table and table[-1] == ABSENT_BLOCK:
                table.pop()
        beams, stop_ids = new_row.sampling.beams, new_row.sampling.all_stop_ids
        num_candidates = beams.num_candidates(len(stop_ids)) if beams is not None else 0
        self.rows[new_row.row] = RunnerRow(new_row.token_ids.tolist(), tables, num_candidates)

    def _compute(self, row: RunnerRow, first: int, end: int, drafts: list[int], num_samples: int) -> list[int]:
        """Write the KV of these positions; returns the tokens drawn after the last ones of them."""
        values = row.values(drafts)
        assert end <= len(values), "only known tokens and their drafts can be computed"
        assert num_samples == 0 or end == len(values), "only successors of the last known token and drafts are sampled"
        for group, table in enumerate(row.tables):
            assert end <= len(table) * self._block_size, "every position needs its block"
            for position, value in enumerate(group_values(values[first:end], group), start=first):
                block_id = table[position // self._block_size]
                assert block_id != ABSENT_BLOCK, "every position needs its block"
                self.kv[block_id][position % self._block_size] = value
        self.num_computed_positions += end - first
        self.check_window(row.tables, first, end, values)
        return [next_token(value) for value in values[end - num_samples :]] if num_samples else []

    @staticmethod
    def _append(row: RunnerRow, drawn: list[int], drafts: list[int]) -> int:
        """Append the drawn tokens up to the first wrong draft; returns the number of accepted drafts."""
        num_accepted = next((n for n, draft in enumerate(drafts) if draft != drawn[n]), len(drafts))
        row.token_ids.extend(drawn[: num_accepted + 1])
        return num_accepted


def _candidates_of(told: Sequence[tuple[int, list[int], list[float]]]) -> BeamCandidates:
    """What rows tell, as wide as the widest; no row looks at what others have behind its own."""
    width = max(len(tokens) for _, tokens, _ in told)
    return BeamCandidates(
        rows=np.array([row for row, _, _ in told], np.int32),
        token_ids=np.array([tokens + [0] * (width - len(tokens)) for _, tokens, _ in told], np.int32),
        logprobs=np.array([values + [-np.inf] * (width - len(values)) for _, _, values in told], np.float32),
    )
