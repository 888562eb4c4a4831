"""Attention on NVIDIA GPUs: prefill chunks and decode rows, by as few calls of a kernel as there can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch
from engine.attention.decode_tables import DecodeTables
from engine.attention.kernel_choice import CUDAKernels, kernels_of
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.contract.errors import CaptureRefusedError
from engine.device.copies import upload
from engine.device.kv_cache import KVCache
from engine.layers.heads import HeadTransform
from engine.layers.rotary import Rotations

MAX_GATHERED_TOKENS: Final = 65_536
"""Whose keys are gathered at a time, if they are not those of one request: 256 MiB of a model of 8 B parameters."""

IntArray = npt.NDArray[np.int64]


class CUDAAttention:
    """Paged where there is a kernel that takes the cache's blocks, else over keys gathered for each layer.

    ``kernels`` are this machine's by default. Where only the one for decode rows takes the blocks, all other rows
    gather, a bounded number of keys at a time.
    """

    def __init__(self, cache: KVCache, *, kernels: CUDAKernels | None = None) -> None:
        self._cache = cache
        self.kernels = kernels or kernels_of(cache.layout, cache.blocks.dtype, cache.blocks.device)

    def gathered_bytes(self, max_model_len: int) -> int:
        """See ``AttentionBackend``."""
        if self.kernels.paged is not None:
            return 0
        layout = self._cache.layout
        return (
            max(MAX_GATHERED_TOKENS, max_model_len)
            * layout.block_bytes
            // (layout.layers_per_block * layout.block_size)
        )

    def plan(self, batch: AttentionBatch) -> CUDAPlan:
        """Copy the step's tables to the device."""
        kernels = self.kernels
        everyone = np.arange(batch.num_reqs)
        if kernels.paged is not None or (kernels.decode is not None and bool((batch.query_lens == 1).all())):
            calls = [self._paged_call(batch, everyone)]
        else:
            is_decoding = batch.query_lens == 1 if kernels.decode is not None else np.zeros(batch.num_reqs, dtype=bool)
            calls = [self._paged_call(batch, everyone[is_decoding])] if is_decoding.any() else []
            calls += [self._packed_call(batch, group) for group in _groups(everyone[~is_decoding], batch.seq_lens)]
        key_rows = upload(self._cache.key_rows(batch.slots), self._cache.blocks.device)
        return CUDAPlan(self._cache, key_rows=key_rows, calls=calls)

    def plan_decode(self, tables: DecodeTables) -> CUDAPlan:
        """See ``DecodeGraphAttention``.

        The kernel takes ``max_seq_len`` as a number of the host, which a graph keeps for ever, so it is that of the
        longest sequence there can be. What kernels derive from it holds for any shorter one: it sizes the grid, and
        turns off a window that is no shorter. A smaller number would not do: a window that is off when the graph is
        captured would stay off for longer sequences. It costs next to nothing: how far a row reads comes from
        ``seq_lens`` on the device.
        """
        if self.kernels.decode is None:
            raise CaptureRefusedError(
                f"no attention kernel takes blocks of {self._cache.layout.block_size} tokens here, and keys that are "
                "gathered change their shape with every step; install Triton, or set cache.block_size to 256, which "
                "torch's own kernel takes from torch 2.13 on"
            )
        shape = VarlenShape(
            query_starts=tables.query_starts,
            seq_lens=tables.seq_lens,
            key_starts=tables.key_starts,
            block_tables=tables.block_tables,
            max_query_len=1,
            max_seq_len=tables.max_seq_len,
        )
        return CUDAPlan(self._cache, key_rows=tables.key_rows, calls=[_Call(kernel=self.kernels.decode, shape=shape)])

    def _paged_call(self, batch: AttentionBatch, requests: IntArray) -> _Call:
        kernel = self.kernels.decode if bool((batch.query_lens[requests] == 1).all()) else self.kernels.paged
        assert kernel is not None
        return self._call(batch, requests, kernel, is_paged=True)

    def _packed_call(self, batch: AttentionBatch, requests: IntArray) -> _Call:
        return self._call(batch, requests, self.kernels.packed, is_paged=False)

    def _call(self, batch: AttentionBatch, requests: IntArray, kernel: VarlenKernel, *, is_paged: bool) -> _Call:
        device, cache = self._cache.blocks.device, self._cache
        query_lens, seq_lens = batch.query_lens[requests], batch.seq_lens[requests]
        block_tables = batch.block_tables[requests]
        keys = None if is_paged else cache.key_rows(history_slots(block_tables, seq_lens, cache.layout.block_size))
        is_all = len(requests) == batch.num_reqs
        return _Call(
            kernel=kernel,
            shape=VarlenShape(
                query_starts=upload(_starts(query_lens), device),
                seq_lens=upload(seq_lens, device),
                key_starts=upload(_starts(seq_lens), device),
                block_tables=upload(np.ascontiguousarray(block_tables), device) if is_paged else None,
                max_query_len=int(query_lens.max()),
                max_seq_len=int(seq_lens.max()),
            ),
            tokens=None if is_all else upload(_places(batch.query_starts[requests], query_lens), device),
            gathered_rows=None if keys is None else upload(keys, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a kernel for each layer.

    tokens: [num_tokens] which of the step's it is for; None: all. gathered_rows: [sum(seq_lens)] where the keys of
    all that is attended to stand; None where the kernel finds them.
    """

    kernel: VarlenKernel
    shape: VarlenShape
    tokens: torch.Tensor | None = None
    gathered_rows: torch.Tensor | None = None


class CUDAPlan:
    """One step of ``CUDAAttention``, or, over tables at fixed addresses, any number of them.

    key_rows: [num_tokens] where in the cache's rows the keys of layer 0 go.
    """

    def __init__(self, cache: KVCache, *, key_rows: torch.Tensor, calls: Sequence[_Call]) -> None:
        self._cache = cache
        self._rows = cache.slot_rows()
        self._key_rows = key_rows
        self._calls = calls

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
        if len(self._calls) == 1:
            return self._run(self._calls[0], layer, query, window).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for call in self._calls:
            assert call.tokens is not None
            part = self._run(call, layer, query.index_select(0, call.tokens), window)
            output.index_copy_(0, call.tokens, part)
        return output.flatten(1)

    def attend_heads(
        self, layer: int, heads: torch.Tensor, transform: HeadTransform, rotations: Rotations, window: int | None
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        return self.attend(layer, *transform(heads, rotations), window)

    def _run(self, call: _Call, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        if call.gathered_rows is None:
            keys, values = self._cache.blocks[:, layer, 0], self._cache.blocks[:, layer, 1]
        else:
            first_key = layer * 2 * self._cache.layout.block_size
            first_value = first_key + self._cache.layout.block_size
            keys = self._rows[first_key:].index_select(0, call.gathered_rows)
            values = self._rows[first_value:].index_select(0, call.gathered_rows)
        return call.kernel(query, keys, values, call.shape, window)


def history_slots(
    block_tables: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], block_size: int
) -> npt.NDArray[np.int64]:
    """The slots of every position that each request attends to, requests back to back, [sum(seq_lens)]."""
    lengths = seq_lens.astype(np.int64)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    blocks, offsets = np.divmod(_places(np.zeros_like(lengths), lengths), block_size)
    return block_tables[owners, blocks].astype(np.int64) * block_size + offsets


def _groups(requests: IntArray, seq_lens: npt.NDArray[np.int32]) -> list[IntArray]:
    """The requests in order, as many together as have up to ``MAX_GATHERED_TOKENS`` keys; one may have more."""
    groups: list[list[int]] = []
    num_gathered = 0
    for request in requests.tolist():
        num_gathered += int(seq_lens[request])
        if not groups or num_gathered > MAX_GATHERED_TOKENS:
            groups.append([])
            num_gathered = int(seq_lens[request])
        groups[-1].append(request)
    return [np.array(group) for group in groups]


def _starts(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _places(firsts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Runs of consecutive numbers, one after the other: ``lengths[i]`` of them from ``firsts[i]`` on."""
    lengths = lengths.astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: npt.NDArray[np.int64] = np.repeat(firsts.astype(np.int64), lengths) + within
    return places
