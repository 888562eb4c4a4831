"""Attention on NVIDIA GPUs: prefill chunks and decode rows, with as few kernel calls as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBatch, first_seen
from engine.attention.decode_tables import DecodeTables
from engine.attention.kernel_choice import CUDAKernels, kernels_of
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.contract.errors import CaptureRefusedError
from engine.device.copies import upload
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer
from engine.layers.rotary import Rotations

MAX_GATHERED_TOKENS: Final = 65_536
"""Most keys that are gathered at a time, unless they belong to one request: 256 MiB for a model of 8 B parameters."""

IntArray = npt.NDArray[np.int64]


class CUDAAttention:
    """Paged if a kernel reads the cache's blocks, else over keys that are gathered for each layer.

    ``kernels`` are this machine's by default. A decode row always uses the decode kernel, whatever else is in the
    batch, so that its numbers do not depend on the batch. If only the decode kernel reads blocks, all other rows gather
    their keys, a bounded number at a time.
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

    def plan(self, batch: AttentionBatch) -> list[CUDAPlan]:
        """Copy the step's tables to the device."""
        return [self._plan_group(batch, group) for group in range(len(batch.slots))]

    def _plan_group(self, batch: AttentionBatch, group: int) -> CUDAPlan:
        kernels = self.kernels
        everyone = np.arange(batch.num_reqs)
        is_decoding = batch.query_lens == 1
        if kernels.decode is kernels.paged:  # one kernel for all rows, or none that reads blocks
            is_decoding = np.full(batch.num_reqs, kernels.paged is not None and bool(is_decoding.all()))
        calls, others = [], everyone[~is_decoding]
        if is_decoding.any():
            calls.append(self._paged_call(batch, group, everyone[is_decoding]))
        if kernels.paged is not None and len(others):
            calls.append(self._paged_call(batch, group, others))
        elif len(others):
            num_keys = batch.seq_lens - self._first_seen(batch, group)
            calls += [self._packed_call(batch, group, requests) for requests in _groups(others, num_keys)]
        return CUDAPlan(self._cache, places=self._upload_places(batch.slots[group]), calls=calls)

    def plan_decode(self, tables: DecodeTables) -> list[CUDAPlan]:
        """See ``DecodeGraphAttention``.

        The kernel takes ``max_seq_len`` from the host, and a graph keeps that number for ever. So it is the longest
        possible length. Shorter sequences work with it: it sizes the grid, and turns off windows that are at least as
        long. A smaller number would be wrong: a window turned off at capture would stay off for longer sequences. The
        cost is negligible, since ``seq_lens`` on the device limits how far a row reads.
        """
        kernel = self.kernels.decode
        if kernel is None:
            raise CaptureRefusedError(
                f"no attention kernel takes blocks of {self._cache.layout.block_size} tokens here, and keys that are "
                "gathered change their shape with every step; install Triton, or set cache.block_size to 256, which "
                "torch's own kernel takes from torch 2.13 on"
            )
        return [
            CUDAPlan(
                self._cache,
                places=(blocks, tables.offsets),
                calls=[
                    _Call(
                        kernel=kernel,
                        shape=VarlenShape(
                            query_starts=tables.query_starts,
                            seq_lens=tables.seq_lens,
                            key_starts=tables.key_starts,
                            block_tables=block_tables,
                            max_query_len=1,
                            max_seq_len=tables.max_seq_len,
                        ),
                    )
                ],
            )
            for blocks, block_tables in zip(tables.blocks, tables.block_tables, strict=True)
        ]

    def _first_seen(self, batch: AttentionBatch, group: int) -> npt.NDArray[np.int32]:
        """[num_reqs] the first position that each request's first token attends to."""
        window = self._cache.layout.groups[group].window
        return np.zeros_like(batch.first_positions) if window is None else first_seen(batch.first_positions, window)

    def _paged_call(self, batch: AttentionBatch, group: int, requests: IntArray) -> _Call:
        """One call over blocks. A kernel may read a whole tile of keys that is only partly in the window, so all table
        entries must name the request's own blocks (``AttentionBatch``).
        """
        kernel = self.kernels.decode if bool((batch.query_lens[requests] == 1).all()) else self.kernels.paged
        assert kernel is not None
        tables = upload(np.ascontiguousarray(batch.block_tables[group, requests]), self._cache.blocks.device)
        return self._call(batch, requests, kernel, num_keys=batch.seq_lens[requests], block_tables=tables)

    def _packed_call(self, batch: AttentionBatch, group: int, requests: IntArray) -> _Call:
        first, ends = self._first_seen(batch, group)[requests], batch.seq_lens[requests]
        slots = history_slots(batch.block_tables[group, requests], first, ends, self._cache.layout.block_size)
        return self._call(
            batch, requests, self.kernels.packed, num_keys=ends - first, gathered=self._upload_places(slots)
        )

    def _call(
        self,
        batch: AttentionBatch,
        requests: IntArray,
        kernel: VarlenKernel,
        *,
        num_keys: npt.NDArray[np.int32],
        block_tables: torch.Tensor | None = None,
        gathered: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> _Call:
        device = self._cache.blocks.device
        query_lens = batch.query_lens[requests]
        is_all = len(requests) == batch.num_reqs
        return _Call(
            kernel=kernel,
            shape=VarlenShape(
                query_starts=upload(_starts(query_lens), device),
                seq_lens=upload(num_keys, device),
                key_starts=upload(_starts(num_keys), device),
                block_tables=block_tables,
                max_query_len=int(query_lens.max()),
                max_seq_len=int(num_keys.max()),
            ),
            tokens=None if is_all else upload(_places(batch.query_starts[requests], query_lens), device),
            gathered=gathered,
        )

    def _upload_places(self, slots: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids and offsets of some slots, on the device."""
        blocks, offsets = upload(np.stack(np.divmod(slots, self._cache.layout.block_size)), self._cache.blocks.device)
        return blocks, offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A kernel call that each layer makes.

    tokens: [num_tokens] indices of the step's tokens that it covers; None: all. gathered: block ids and offsets of all
        attended keys, each [sum(seq_lens)]; None if the kernel reads blocks itself.
    """

    kernel: VarlenKernel
    shape: VarlenShape
    tokens: torch.Tensor | None = None
    gathered: tuple[torch.Tensor, torch.Tensor] | None = None


class CUDAPlan:
    """One step of ``CUDAAttention`` for one KV cache group; over tables at fixed addresses, any number of steps.

    places: block ids and offsets, each [num_tokens], where the step's keys and values go.
    """

    def __init__(self, cache: KVCache, *, places: tuple[torch.Tensor, torch.Tensor], calls: Sequence[_Call]) -> None:
        self._cache = cache
        self._places = places
        self._calls = calls

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``AttentionPlan``."""
        self._cache.write(layer.index, self._places, key, value)
        return self._attend(layer, query, self._cache.keys(layer.index), self._cache.values(layer.index))

    def attend_heads(self, layer: AttentionLayer, heads: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        """See ``AttentionPlan``."""
        if layer.transform.fused_ops is None:
            return self.attend(layer, *layer.transform(heads, rotations))
        keys, values = self._cache.keys(layer.index), self._cache.values(layer.index)
        query = layer.transform.place(heads, rotations, (keys, values), self._places)
        return self._attend(layer, query, keys, values)

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if len(self._calls) == 1:
            return _run(self._calls[0], layer, query, keys, values).flatten(1)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for call in self._calls:
            assert call.tokens is not None
            part = _run(call, layer, query.index_select(0, call.tokens), keys, values)
            output.index_copy_(0, call.tokens, part)
        return output.flatten(1)


def _run(
    call: _Call, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    if call.gathered is not None:
        keys, values = keys[call.gathered], values[call.gathered]
    return call.kernel(query, keys, values, call.shape, layer.spec)


def history_slots(
    block_tables: npt.NDArray[np.int32],
    firsts: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int32],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """The slots of each request's positions, from its first to before its end; requests back to back."""
    lengths = ends.astype(np.int64) - firsts
    owners = np.repeat(np.arange(len(lengths)), lengths)
    blocks, offsets = np.divmod(_places(firsts, lengths), block_size)
    return block_tables[owners, blocks].astype(np.int64) * block_size + offsets


def _groups(requests: IntArray, num_keys: npt.NDArray[np.int32]) -> list[IntArray]:
    """Split the requests, in order, into groups of at most ``MAX_GATHERED_TOKENS`` keys; a single one may have more."""
    groups: list[list[int]] = []
    num_gathered = 0
    for request in requests.tolist():
        num_gathered += int(num_keys[request])
        if not groups or num_gathered > MAX_GATHERED_TOKENS:
            groups.append([])
            num_gathered = int(num_keys[request])
        groups[-1].append(request)
    return [np.array(group) for group in groups]


def _starts(lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _places(firsts: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Runs of consecutive numbers, back to back: run ``i`` has ``lengths[i]`` numbers and starts at ``firsts[i]``."""
    lengths = lengths.astype(np.int64)
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: npt.NDArray[np.int64] = np.repeat(firsts.astype(np.int64), lengths) + within
    return places
