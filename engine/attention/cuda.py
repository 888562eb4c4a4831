"""Attention on NVIDIA GPUs: prefill chunks and decode rows in one variable-length call a layer."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import AttentionBatch
from engine.attention.varlen import VarlenKernel, VarlenShape, flash_varlen
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations
from engine.runner.kv_cache import KVCache
from engine.runner.upload import upload

logger = logging.getLogger(f"baton.{__name__}")


class CUDAAttention:
    """Paged where the kernel takes blocks of this size, else over keys gathered for each layer.

    Which of the two is found by asking the kernel once: what it accepts depends on the GPU and on its version
    (FlashAttention 2 wants multiples of 256, FlashAttention 3 takes any).
    """

    def __init__(self, cache: KVCache, *, kernel: VarlenKernel = flash_varlen) -> None:
        self._cache = cache
        self._kernel = kernel
        self.is_paged = self._accepts_blocks()
        if not self.is_paged:
            logger.warning(
                "the attention kernel takes no blocks of %d tokens here: keys are gathered for each layer, at a cost "
                "in memory bandwidth",
                cache.layout.block_size,
            )

    def plan(self, batch: AttentionBatch) -> CUDAPlan:
        """Copy the step's tables to the device."""
        return CUDAPlan(self._cache, self._kernel, batch, is_paged=self.is_paged)

    @torch.inference_mode()
    def _accepts_blocks(self) -> bool:
        blocks = self._cache.blocks
        layout = self._cache.layout
        one = np.ones(1, dtype=np.int32)
        zero = np.zeros(1, dtype=np.int32)
        shape = VarlenShape(
            query_starts=upload(np.concatenate((zero, one)), blocks.device),
            seq_lens=upload(one, blocks.device),
            key_starts=None,
            block_tables=upload(zero[None], blocks.device),
            max_query_len=1,
            max_seq_len=1,
        )
        query = torch.zeros(1, layout.num_kv_heads, layout.head_dim, dtype=blocks.dtype, device=blocks.device)
        try:
            self._kernel(query, blocks[:, 0, 0], blocks[:, 0, 1], shape, None)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            logger.debug("paged attention was refused: %s", error)
            return False
        return True


class CUDAPlan:
    """One step of ``CUDAAttention``."""

    def __init__(self, cache: KVCache, kernel: VarlenKernel, batch: AttentionBatch, *, is_paged: bool) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._kernel = kernel
        layout, device, seq_lens = cache.layout, cache.blocks.device, batch.seq_lens
        self._key_rows = upload(self._rows_of(batch.slots), device)
        self._gathered_rows = (
            None if is_paged else upload(self._rows_of(history_slots(batch, layout.block_size)), device)
        )
        starts = np.concatenate(([0], np.cumsum(seq_lens))).astype(np.int32)
        self._shape = VarlenShape(
            query_starts=upload(batch.query_starts, device),
            seq_lens=upload(seq_lens, device),
            key_starts=None if is_paged else upload(starts, device),
            block_tables=upload(np.ascontiguousarray(batch.block_tables), device) if is_paged else None,
            max_query_len=int(batch.query_lens.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _rows_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots as rows of the cache, for the keys of layer 0."""
        block_size, num_layers = self._cache.layout.block_size, self._cache.layout.num_layers
        blocks, offsets = np.divmod(slots, block_size)
        return blocks * (num_layers * 2 * block_size) + offsets

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        block_size = self._cache.layout.block_size
        first_key = layer * 2 * block_size
        first_value = first_key + block_size
        self._rows.index_copy_(0, self._key_rows + first_key, key)
        self._rows.index_copy_(0, self._key_rows + first_value, value)
        if self._gathered_rows is None:
            keys, values = self._cache.blocks[:, layer, 0], self._cache.blocks[:, layer, 1]
        else:
            keys = self._rows.index_select(0, self._gathered_rows + first_key)
            values = self._rows.index_select(0, self._gathered_rows + first_value)
        return self._kernel(query, keys, values, self._shape, window).flatten(1)

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return self.attend(layer, *transform(heads, rotations), window)


def history_slots(batch: AttentionBatch, block_size: int) -> npt.NDArray[np.int64]:
    """The slots of every position that each request attends to, requests back to back, [sum(seq_lens)]."""
    seq_lens = batch.seq_lens.astype(np.int64)
    owners = np.repeat(np.arange(batch.num_reqs), seq_lens)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(seq_lens) - seq_lens, seq_lens)
    blocks, offsets = np.divmod(positions, block_size)
    return batch.block_tables[owners, blocks].astype(np.int64) * block_size + offsets
