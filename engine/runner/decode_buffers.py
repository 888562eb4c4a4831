"""The input of decode graphs: tensors at fixed addresses, filled anew for each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.decode_tables import DecodeTables
from engine.device.graph_device import GraphDevice
from engine.device.kv_cache import KVCache
from engine.runner.step_inputs import StepInputs

NUM_STAGINGS = 2
"""Host copies used in turn, so that a step is laid out while the copy of the one before is still under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeView:
    """What a graph of one batch size reads: the first rows of the buffers."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    tables: DecodeTables


class DecodeBuffers:
    """Rows of up to ``max_batch_size`` requests and ``max_model_len`` tokens.

    Rows that stand for no request compute token 0 at position 0 of the cache's scratch block: they write to no block
    that a request can have, and read nothing but what they wrote.
    """

    def __init__(self, device: GraphDevice, cache: KVCache, *, max_batch_size: int, max_model_len: int) -> None:
        self._cache = cache
        self._max_batch_size = max_batch_size
        self._max_model_len = max_model_len
        self._num_columns = -(-max_model_len // cache.layout.block_size)
        at = cache.blocks.device
        # One piece, one copy a step: ids, positions, key rows, and as 32-bit numbers the lengths and their sums.
        self._numbers = torch.zeros(_num_words(max_batch_size), dtype=torch.int64, device=at)
        self._block_tables = torch.zeros(max_batch_size, self._num_columns, dtype=torch.int32, device=at)
        self._query_starts = torch.arange(max_batch_size + 1, dtype=torch.int32, device=at)
        self._stagings = [
            _Staging(device, max_batch_size=max_batch_size, num_columns=self._num_columns) for _ in range(NUM_STAGINGS)
        ]
        scratch_slots = np.array([cache.scratch_block * cache.layout.block_size], dtype=np.int64)
        self._scratch_row = int(cache.key_rows(scratch_slots)[0])
        self._send(self._next_staging(), num_rows=0, batch_size=max_batch_size, num_columns=self._num_columns)

    @property
    def num_bytes(self) -> int:
        """What they take on the device."""
        return sum(tensor.nbytes for tensor in (self._numbers, self._block_tables, self._query_starts))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that changes from step to step."""
        return self._numbers, self._block_tables

    def view(self, batch_size: int) -> DecodeView:
        """The buffers as a graph of ``batch_size`` rows sees them."""
        ids, positions, key_rows, seq_lens, key_starts = _parts(self._numbers, self._max_batch_size)
        return DecodeView(
            input_ids=ids[:batch_size],
            positions=positions[:batch_size],
            tables=DecodeTables(
                query_starts=self._query_starts[: batch_size + 1],
                key_rows=key_rows[:batch_size],
                seq_lens=seq_lens[:batch_size],
                key_starts=key_starts[: batch_size + 1],
                block_tables=self._block_tables[:batch_size],
                max_seq_len=self._max_model_len,
            ),
        )

    def fill(self, inputs: StepInputs, *, batch_size: int) -> None:
        """Queue the copy of a step of at most ``batch_size`` rows; the rows behind become padding."""
        attention = inputs.attention
        num_rows, num_columns = attention.block_tables.shape
        staging = self._next_staging()
        ids, positions, key_rows, seq_lens, _ = (part.numpy() for part in staging.parts)
        ids[:num_rows] = inputs.input_ids
        positions[:num_rows] = inputs.positions
        key_rows[:num_rows] = self._cache.key_rows(attention.slots)
        seq_lens[:num_rows] = attention.seq_lens
        staging.table(batch_size, num_columns)[:num_rows].numpy()[:] = attention.block_tables
        self._send(staging, num_rows=num_rows, batch_size=batch_size, num_columns=num_columns)

    def _next_staging(self) -> _Staging:
        staging = self._stagings.pop(0)
        self._stagings.append(staging)
        staging.copied.synchronize()
        return staging

    def _send(self, staging: _Staging, *, num_rows: int, batch_size: int, num_columns: int) -> None:
        """Pad what is staged and queue its copies. Columns past ``num_columns`` keep what they held: block ids that
        no row is long enough to look at.
        """
        ids, positions, key_rows, seq_lens, _ = (part[num_rows:batch_size].numpy() for part in staging.parts)
        ids[:] = 0
        positions[:] = 0
        key_rows[:] = self._scratch_row
        seq_lens[:] = 1
        *_, all_lens, key_starts = staging.parts
        np.cumsum(all_lens[:batch_size].numpy(), out=key_starts[1 : batch_size + 1].numpy())
        table = staging.table(batch_size, num_columns)
        table[num_rows:].numpy()[:] = self._cache.scratch_block
        self._numbers.copy_(staging.numbers, non_blocking=True)
        self._block_tables[:batch_size, :num_columns].copy_(table, non_blocking=True)
        staging.copied.record()


class _Staging:
    """A step on the host, laid out as it is on the device; not to be written to until ``copied`` has passed."""

    def __init__(self, device: GraphDevice, *, max_batch_size: int, num_columns: int) -> None:
        self.numbers = device.new_staging(_num_words(max_batch_size), torch.int64)
        self.parts = _parts(self.numbers, max_batch_size)
        self.copied = device.new_event()
        self._table = device.new_staging(max_batch_size * num_columns, torch.int32)

    def table(self, num_rows: int, num_columns: int) -> torch.Tensor:
        """Block tables of a step, in one piece: [num_rows, num_columns]."""
        return self._table[: num_rows * num_columns].view(num_rows, num_columns)


def _num_words(batch_size: int) -> int:
    return 4 * batch_size + 1


def _parts(numbers: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, ...]:
    """Token ids, positions and key rows in 64 bits, then lengths and where keys start in 32."""
    ids, positions, key_rows = numbers[: 3 * batch_size].view(3, batch_size).unbind()
    small = numbers[3 * batch_size :].view(torch.int32)
    return ids, positions, key_rows, small[:batch_size], small[batch_size : 2 * batch_size + 1]
