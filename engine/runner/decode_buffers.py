"""The input of decode graphs: tensors at fixed addresses that are refilled for each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.decode_tables import DecodeTables
from engine.device.graph_device import GraphDevice
from engine.device.kv_cache import KVCache
from engine.runner.step_inputs import StepInputs

NUM_STAGINGS = 2
"""Host copies, used in turn: one step is laid out while the copy of the step before is still under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """What a graph of one batch size reads: the first rows of the buffers."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    tables: DecodeTables


class DecodeBuffers:
    """Up to ``max_batch_size`` rows of up to ``max_model_len`` tokens; each row computes one token of a request.

    Padding rows belong to no request. They compute token 0 at position 0 of the cache's scratch block, so they write to
    no block that a request can own, and read only what they wrote.
    """

    def __init__(self, device: GraphDevice, cache: KVCache, *, max_batch_size: int, max_model_len: int) -> None:
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len
        self._num_columns = -(-max_model_len // cache.layout.block_size)
        at = cache.blocks.device
        num_groups = cache.layout.num_groups
        # One tensor, so one copy a step; see ``_parts``.
        self._numbers = torch.zeros(_num_words(max_batch_size, num_groups), dtype=torch.int64, device=at)
        self._block_tables = torch.zeros(num_groups, max_batch_size, self._num_columns, dtype=torch.int32, device=at)
        self._query_starts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=at)
        self._stagings = [
            _Staging(device, max_batch_size=max_batch_size, num_groups=num_groups, num_columns=self._num_columns)
            for _ in range(NUM_STAGINGS)
        ]
        self._send(self._next_staging(), num_rows=0, batch_size=max_batch_size, num_columns=self._num_columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the buffers take."""
        return sum(tensor.nbytes for tensor in (self._numbers, self._block_tables, self._query_starts))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that change from step to step."""
        return self._numbers, self._block_tables

    def view(self, batch_size: int) -> DecodeView:
        """The buffers as a graph of ``batch_size`` rows sees them."""
        parts = _parts(self._numbers, self._max_batch_size)
        return DecodeView(
            input_ids=parts.input_ids[:batch_size],
            positions=parts.positions[:batch_size],
            tables=DecodeTables(
                query_starts=self._query_starts[: batch_size + 1],
                seq_lens=parts.seq_lens[:batch_size],
                key_starts=parts.key_starts[: batch_size + 1],
                block_tables=self._block_tables[:, :batch_size],
                blocks=parts.blocks[:, :batch_size],
                offsets=parts.offsets[:batch_size],
                max_seq_len=self._max_model_len,
            ),
        )

    def fill(self, inputs: StepInputs, *, batch_size: int) -> None:
        """Queue the copy of a step of at most ``batch_size`` tokens; the remaining rows become padding."""
        attention, num_rows = inputs.attention, len(inputs.input_ids)
        tables = attention.block_tables
        if not attention.is_decode:
            tables = np.repeat(tables, attention.query_lens, axis=1)
        num_columns = tables.shape[2]
        staging = self._next_staging()
        parts = staging.parts
        parts.input_ids[:num_rows].numpy()[:] = inputs.input_ids
        parts.positions[:num_rows].numpy()[:] = inputs.positions
        blocks, offsets = np.divmod(attention.slots, self._cache.layout.block_size)
        parts.blocks[:, :num_rows].numpy()[:] = blocks
        parts.offsets[:num_rows].numpy()[:] = offsets[0]
        parts.seq_lens[:num_rows].numpy()[:] = inputs.positions + 1
        staging.table(batch_size, num_columns)[:, :num_rows].numpy()[:] = tables
        self._send(staging, num_rows=num_rows, batch_size=batch_size, num_columns=num_columns)

    def _next_staging(self) -> _Staging:
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        staging.copied.synchronize()
        return staging

    def _send(self, staging: _Staging, *, num_rows: int, batch_size: int, num_columns: int) -> None:
        """Pad the staged step and queue its copies to the device. Block table columns past ``num_columns`` keep their
        old block ids: no row is long enough to read them.
        """
        parts, padding = staging.parts, slice(num_rows, batch_size)
        for part in (parts.input_ids, parts.positions, parts.offsets):
            part[padding].numpy()[:] = 0
        parts.blocks[:, padding].numpy()[:] = self._cache.scratch_block
        parts.seq_lens[padding].numpy()[:] = 1
        np.cumsum(parts.seq_lens[:batch_size].numpy(), out=parts.key_starts[1 : batch_size + 1].numpy())
        table = staging.table(batch_size, num_columns)
        table[:, num_rows:].numpy()[:] = self._cache.scratch_block
        self._numbers.copy_(staging.numbers, non_blocking=True)
        self._block_tables[:, :batch_size, :num_columns].copy_(table, non_blocking=True)
        staging.copied.record()


class _Staging:
    """A step on the host, laid out as on the device. Do not write to it until ``copied`` has passed."""

    def __init__(self, device: GraphDevice, *, max_batch_size: int, num_groups: int, num_columns: int) -> None:
        self.numbers = device.new_staging(_num_words(max_batch_size, num_groups), torch.int64)
        self._num_groups = num_groups
        self.parts = _parts(self.numbers, max_batch_size)
        self.copied = device.new_event()
        self._table = device.new_staging(num_groups * max_batch_size * num_columns, torch.int32)

    def table(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Block tables of a step, in one piece: [num_groups, num_rows, num_columns]."""
        shape = self._num_groups, num_rows, num_columns
        return self._table[: math.prod(shape)].view(shape)


class _Parts(NamedTuple):
    """Layout of a step's numbers in one piece of memory: 64-bit numbers, then lengths and their sums in 32 bits."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    blocks: torch.Tensor
    seq_lens: torch.Tensor
    key_starts: torch.Tensor


def _num_words(batch_size: int, num_groups: int) -> int:
    return (4 + num_groups) * batch_size + 1


def _parts(numbers: torch.Tensor, batch_size: int) -> _Parts:
    num_rows = (len(numbers) - 1) // batch_size - 1
    rows = numbers[: num_rows * batch_size].view(num_rows, batch_size)
    small = numbers[num_rows * batch_size :].view(torch.int32)
    return _Parts(
        input_ids=rows[0],
        positions=rows[1],
        offsets=rows[2],
        blocks=rows[3:],
        seq_lens=small[:batch_size],
        key_starts=small[batch_size : 2 * batch_size + 1],
    )
