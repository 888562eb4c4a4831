"""Attention on NVIDIA GPUs: prefill chunks and decode rows in one variable-length call a layer."""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.batch import AttentionBatch
from engine.attention.decode_tables import DecodeTables
from engine.attention.varlen import VarlenKernel, VarlenShape, flash_varlen
from engine.errors import CaptureRefusedError
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
                "in memory bandwidth; every kernel takes cache.block_size 256",
                cache.layout.block_size,
            )

    def plan(self, batch: AttentionBatch) -> CUDAPlan:
        """Copy the step's tables to the device."""
        cache, device, seq_lens = self._cache, self._cache.blocks.device, batch.seq_lens
        block_size = cache.layout.block_size
        starts = np.concatenate(([0], np.cumsum(seq_lens))).astype(np.int32)
        is_paged = self.is_paged
        return CUDAPlan(
            cache,
            self._kernel,
            key_rows=upload(cache.key_rows(batch.slots), device),
            gathered_rows=None if is_paged else upload(cache.key_rows(history_slots(batch, block_size)), device),
            shape=VarlenShape(
                query_starts=upload(batch.query_starts, device),
                seq_lens=upload(seq_lens, device),
                key_starts=None if is_paged else upload(starts, device),
                block_tables=upload(np.ascontiguousarray(batch.block_tables), device) if is_paged else None,
                max_query_len=int(batch.query_lens.max()),
                max_seq_len=int(seq_lens.max()),
            ),
        )

    def plan_decode(self, tables: DecodeTables) -> CUDAPlan:
        """See ``DecodeGraphAttention``.

        The kernel takes ``max_seq_len`` as a number of the host, which a graph keeps for ever, so it is that of the
        longest sequence there can be. What kernels derive from it holds for any shorter one: it sizes the grid, and
        turns off a window that is no shorter. A smaller number would not do: a window that is off when the graph is
        captured would stay off for longer sequences. It costs nothing: with one split, which ``flash_varlen`` asks
        for, a decode step's grid is batch times heads, and how far a row reads comes from ``seq_lens`` on the device.
        """
        if not self.is_paged:
            raise CaptureRefusedError(
                f"the attention kernel takes no blocks of {self._cache.layout.block_size} tokens here, and keys that "
                "are gathered change their shape with every step; set cache.block_size to 256, which every kernel takes"
            )
        shape = VarlenShape(
            query_starts=tables.query_starts,
            seq_lens=tables.seq_lens,
            key_starts=None,
            block_tables=tables.block_tables,
            max_query_len=1,
            max_seq_len=tables.max_seq_len,
        )
        return CUDAPlan(self._cache, self._kernel, key_rows=tables.key_rows, gathered_rows=None, shape=shape)

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
    """One step of ``CUDAAttention``, or, over tables at fixed addresses, any number of them.

    key_rows: [num_tokens] where in the cache's rows the keys of layer 0 go.
    gathered_rows: [sum(seq_lens)] where the keys of all that is attended to stand; None where the kernel finds them.
    """

    def __init__(
        self,
        cache: KVCache,
        kernel: VarlenKernel,
        *,
        key_rows: torch.Tensor,
        gathered_rows: torch.Tensor | None,
        shape: VarlenShape,
    ) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._kernel = kernel
        self._key_rows = key_rows
        self._gathered_rows = gathered_rows
        self._shape = shape

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        block_size = self._cache.layout.block_size
        first_key = layer * 2 * block_size
        first_value = first_key + block_size
        # rows from a layer's first on, instead of adding the layer to every index on the device
        self._rows[first_key:].index_copy_(0, self._key_rows, key)
        self._rows[first_value:].index_copy_(0, self._key_rows, value)
        if self._gathered_rows is None:
            keys, values = self._cache.blocks[:, layer, 0], self._cache.blocks[:, layer, 1]
        else:
            keys = self._rows[first_key:].index_select(0, self._gathered_rows)
            values = self._rows[first_value:].index_select(0, self._gathered_rows)
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
