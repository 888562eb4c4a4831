"""A runner without a model, whose tokens are right only if the KV that it reads is right.

The "KV" of a position is a 64-bit number that chains the previous position's number, as read from the cache, with the
token. The next token depends on every number of the context. One damaged, missing or foreign block anywhere in the
context therefore changes the output, and the cache is real memory that connectors can move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.contract.step import ModelRunnerOutput, NewRow, PendingStep, SchedulerOutput
from kv_transfer.layout import KVLayout, KVRegion, MemoryKind, group_layers

VOCAB_SIZE = 1000
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _next_token(context: npt.NDArray[np.uint64]) -> int:
    return _mix(int(context.sum(dtype=np.uint64))) % VOCAB_SIZE


def expected_tokens(prompt: list[int] | tuple[int, ...], num_tokens: int) -> list[int]:
    """What any undisturbed engine generates after ``prompt``."""
    tokens, values = list(prompt), list[int]()
    while len(tokens) < len(prompt) + num_tokens:
        for token in tokens[len(values) :]:
            values.append(_mix((values[-1] if values else 0) + token + 1))
        tokens.append(_next_token(np.array(values, dtype=np.uint64)))
    return tokens[len(prompt) :]


def expected_kv(tokens: list[int] | tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """The correct content of the cache for a context: one number per position."""
    values: list[int] = []
    for token in tokens:
        values.append(_mix((values[-1] if values else 0) + token + 1))
    return np.array(values, dtype=np.uint64)


class LateStep:
    """Implements ``PendingStep`` for a step that has not begun."""

    def __init__(self, runner: ChainRunner, output: SchedulerOutput) -> None:
        self.output = output
        self.computed: ModelRunnerOutput | None = None
        self._runner = runner

    def result(self) -> ModelRunnerOutput:
        """Run this step now, after the steps before it."""
        self._runner.run_until(self)
        assert self.computed is not None
        return self.computed


class ChainRunner:
    """Implements ``StepRunner`` over ``num_blocks`` blocks of real memory.

    With ``is_late`` it is a device that runs as late as it may: a step reads its tokens and touches the cache when its
    result is asked for, and not before. Whoever uses what a step in flight computes, or gives away what it still
    writes, then gets wrong tokens.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int, is_late: bool = False
    ) -> None:
        self.kv = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self.num_computed_positions = 0
        self.num_steps = 0
        self.between_layers: Callable[[], None] | None = None
        """Called within each step, before and after it touches the cache."""
        self._is_late = is_late
        self._launched: deque[LateStep] = deque()
        self._block_size = block_size
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size) + 1), dtype=np.int64)

    @property
    def layout(self) -> KVLayout:
        """One layer of one head of one 4-byte key and value: 8 bytes a token."""
        return KVLayout(
            model_hash="chain",
            groups=group_layers([None] * 1),
            num_kv_heads=1,
            head_dim=1,
            block_size=self._block_size,
            dtype="float32",
            bytes_per_element=4,
        )

    @property
    def region(self) -> KVRegion:
        """Where the cache lies."""
        return KVRegion(
            base_address=self.kv.ctypes.data,
            num_blocks=self.kv.shape[0],
            block_bytes=self.layout.block_bytes,
            memory=MemoryKind.DRAM,
            device_index=0,
        )

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Compute one step as a model would: write KV, then read all of the context."""
        if not self._is_late:
            return self._run_layers(output)
        step = LateStep(self, output)
        self._launched.append(step)
        assert sum(step.output.has_work for step in self._launched) <= 2, "only one step may be unfinished at a launch"
        return step

    def run_until(self, last: LateStep) -> None:
        """Run the launched steps up to and including this one."""
        while last.computed is None:
            step = self._launched.popleft()
            step.computed = self._run(step.output)

    def _run_layers(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.between_layers is None or not output.has_work:
            return self._run(output)
        self.between_layers()
        result = self._run(output)
        self.between_layers()
        return result

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        for new_row in output.new_rows:
            self._start(new_row)
        self._block_table[output.append_rows, output.append_columns] = output.append_block_ids
        if output.num_decode_steps > 1:
            return self._decode_often(output)
        drafts = iter(output.draft_token_ids.tolist())
        sampled: list[int] = []
        accepted: list[int] = []
        for index, row in enumerate(output.rows.tolist()):
            first, num_samples = int(output.first_positions[index]), int(output.num_samples[index])
            end = first + int(output.num_scheduled_tokens[index])
            of_row = [next(drafts) for _ in range(num_samples - 1)]
            self._tokens[row, end - len(of_row) : end] = of_row
            self._compute(row, first, end)
            drawn = [_next_token(self._context(row, place)) for place in range(end - num_samples + 1, end + 1)]
            self._tokens[row, end - num_samples + 1 : end + 1] = drawn
            accepted.append(next((n for n, draft in enumerate(of_row) if draft != drawn[n]), len(of_row)))
            sampled.extend(drawn)
        num_accepted = np.array(accepted, np.int32) if output.draft_token_ids.size else None
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32), num_accepted=num_accepted)

    def _decode_often(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled: list[int] = []
        for row, first in zip(output.rows.tolist(), output.first_positions.tolist(), strict=True):
            for position in range(first, first + output.num_decode_steps):
                self._compute(row, position, position + 1)
                sampled.append(_next_token(self._context(row, position + 1)))
                self._tokens[row, position + 1] = sampled[-1]
        num_accepted = np.full(output.rows.size, output.num_decode_steps - 1, np.int32)
        return ModelRunnerOutput(sampled_token_ids=np.array(sampled, np.int32), num_accepted=num_accepted)

    def _start(self, new_row: NewRow) -> None:
        self._tokens[new_row.row, : new_row.token_ids.size] = new_row.token_ids
        self._block_table[new_row.row, : new_row.block_ids.size] = new_row.block_ids[0]

    def _compute(self, row: int, first: int, end: int) -> None:
        for position in range(first, end):
            previous = int(self._slot(row, position - 1)) if position else 0
            block = self._block_table[row, position // self._block_size]
            value = _mix(previous + int(self._tokens[row, position]) + 1)
            self.kv[block, position % self._block_size] = value
        self.num_computed_positions += end - first

    def _slot(self, row: int, position: int) -> np.uint64:
        block = self._block_table[row, position // self._block_size]
        value: np.uint64 = self.kv[block, position % self._block_size]
        return value

    def _context(self, row: int, num_tokens: int) -> npt.NDArray[np.uint64]:
        num_blocks = -(-num_tokens // self._block_size)
        context: npt.NDArray[np.uint64] = self.kv[self._block_table[row, :num_blocks]].reshape(-1)[:num_tokens]
        return context
