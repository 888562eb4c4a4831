"""A replacement of FlashAttention's variable-length kernel that runs on the CPU and follows its documentation."""

from __future__ import annotations

import math

import torch

from engine.attention.kernel_choice import CUDAKernels, KernelCandidates, choose_kernels
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.device.kv_cache import KVCache
from engine.layers.attention_spec import AttentionSpec


def kernels_over(kernel: VarlenKernel, cache: KVCache, *, decode: VarlenKernel | None = None) -> CUDAKernels:
    """The kernels of a GPU with a single kernel, or with a second one for decode rows."""
    candidates = KernelCandidates(packed=(kernel,), paged=(kernel,), decode=() if decode is None else (decode,))
    return choose_kernels(cache.layout, cache.blocks.dtype, cache.blocks.device, candidates)


class DecodeDouble:
    """A kernel for decode rows only. num_rows: the number of rows of each call."""

    def __init__(self) -> None:
        self._double = VarlenDouble(block_multiple=1)
        self.num_rows: list[int] = []

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend, as ``VarlenDouble`` does."""
        if shape.block_tables is None or shape.max_query_len != 1:
            raise NotImplementedError("this kernel is for decode rows over blocks")
        self.num_rows.append(len(query))
        return self._double(query, key, value, shape, spec)


class VarlenDouble:
    """Refuses blocks whose size is not a multiple of ``block_multiple``, as FlashAttention 2 does with 256.

    num_keys: how many keys each call was given back to back.
    """

    def __init__(self, *, block_multiple: int) -> None:
        self.block_multiple = block_multiple
        self.num_keys: list[int] = []

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend one request after the other in float64."""
        if shape.block_tables is not None and key.shape[1] % self.block_multiple:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {self.block_multiple}")
        if shape.block_tables is None:
            self.num_keys.append(len(key))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for request in range(len(shape.seq_lens)):
            start, end = shape.query_starts[request : request + 2].tolist()
            keys, values = (self._history(tensor, shape, request) for tensor in (key, value))
            output[start:end] = self._attend(query[start:end], keys, values, spec)
        return output

    @staticmethod
    def _history(tensor: torch.Tensor, shape: VarlenShape, request: int) -> torch.Tensor:
        if shape.block_tables is not None:
            pages = tensor[shape.block_tables[request].long()]
            return pages.flatten(0, 1)[: int(shape.seq_lens[request])]
        start, end = shape.key_starts[request : request + 2].tolist()
        return tensor[start:end]

    @staticmethod
    def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        group = query.shape[1] // keys.shape[1]
        keys, values = (tensor.double().repeat_interleave(group, dim=1) for tensor in (keys, values))
        first = 0 if spec.window is None else max(len(keys) - len(query) - spec.window + 1, 0)
        keys, values = keys[first:], values[first:]  # it looks at no key that no query sees
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
        distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))[None, :]
        hidden = distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=2)
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
