"""Chooses the attention kernels of a GPU, by running them and comparing their results with attention's definition.

Which inputs they accept depends on the GPU, on torch's version and on what is installed, and some accept inputs for
which they give wrong results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from engine.attention.flash import FLASH_FORMS, efficient_varlen
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.contract.errors import ConfigError
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig
from kv_transfer.layout import KVLayout

logger = logging.getLogger(f"baton.{__name__}")

TOLERANCE = 5e-2
"""For 16-bit outputs of about 1. A kernel that reads the wrong keys is off by about 1."""

GROUP = 2
"""Query heads for each key head in the test."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CUDAKernels:
    """packed: for keys back to back. paged: for keys in blocks, or None.
    decode: for steps of one token a request, with keys in blocks, or None.
    """

    packed: VarlenKernel
    paged: VarlenKernel | None
    decode: VarlenKernel | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCandidates:
    """Kernels to test, best first. If no ``decode`` kernel is right, the chosen ``paged`` kernel decodes too.

    FlashAttention, which may not split a row's keys, takes 1053 us where Triton's kernel takes 281 (32 rows of 8,192
    tokens on an H200, whose memory allows 262), and 541 where it takes 155 (64 of 2,048).
    """

    packed: Sequence[VarlenKernel]
    paged: Sequence[VarlenKernel]
    decode: Sequence[VarlenKernel]


def torch_candidates() -> KernelCandidates:
    """The candidates on a GPU."""
    decode: tuple[VarlenKernel, ...] = ()
    try:
        from engine.attention.paged_decode import paged_decode  # imported late: it needs Triton
    except ImportError as error:
        logger.debug("Triton is not available: %s", error)
    else:
        decode = (paged_decode,)
    return KernelCandidates(packed=(*FLASH_FORMS, efficient_varlen), paged=FLASH_FORMS, decode=decode)


def choose_kernels(
    layout: KVLayout, dtype: torch.dtype, device: torch.device, candidates: KernelCandidates
) -> CUDAKernels:
    """The first kernel of each kind whose results are right.

    Raises:
        ConfigError: None is, not even for keys back to back.
    """
    question = _Question(layout, dtype, device)
    packed = _first(candidates.packed, question.is_packed_right)
    if packed is None:
        raise ConfigError(
            f"no attention kernel of torch {torch.__version__} works on {_describe(device)} in {layout.dtype} with "
            f"heads of {layout.head_dim}",
            remedy="use device cpu",
        )
    paged = _first(candidates.paged, question.is_paged_right)
    decode = _first(candidates.decode, question.is_decode_right)
    kernels = CUDAKernels(packed=packed, paged=paged, decode=decode or paged)
    logger.debug("attention kernels: %s", kernels)
    return kernels


@lru_cache(maxsize=8)
def kernels_of(layout: KVLayout, dtype: torch.dtype, device: torch.device) -> CUDAKernels:
    """The kernels of this machine's GPU for a cache. Logs the consequences once."""
    kernels = choose_kernels(layout, dtype, device, torch_candidates())
    if kernels.paged is None:
        logger.warning(
            "torch's attention kernel takes no blocks of %d tokens here: keys are gathered for each layer for %s, at a "
            "cost in memory bandwidth; from torch 2.13 on it takes cache.block_size 256",
            layout.block_size,
            "all requests" if kernels.decode is None else "prompts",
        )
    return kernels


class _Question:
    """A test case with its right answers: two requests with scattered keys, one longer than a block."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, device: torch.device) -> None:
        size = layout.block_size
        self._lengths = (size + 5, 7)
        tables = [[4, 1, 0], [2, 0, 0]] if size >= 7 else _scattered(self._lengths, size)
        num_blocks = 1 + max(map(max, tables))
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        # as in the cache: the tokens of a head are next to each other
        blocks = random(num_blocks, layout.num_kv_heads, 2, size, layout.head_dim)
        self._blocks = blocks.permute(0, 2, 3, 1, 4)
        self._tables = torch.tensor(tables, dtype=torch.int32, device=device)
        self._query = random(4, GROUP * layout.num_kv_heads, layout.head_dim)
        self._histories = [
            self._blocks[table].transpose(1, 2).flatten(0, 1)[:length]
            for table, length in zip(tables, self._lengths, strict=True)
        ]

    def is_packed_right(self, kernel: VarlenKernel) -> bool:
        """With keys back to back: a chunk beside a decode row, with and without a window."""
        keys, values = (torch.cat([history[:, half] for history in self._histories]) for half in (0, 1))
        return all(self._is_right(kernel, keys, values, (3, 1), window, is_paged=False) for window in (None, 4))

    def is_paged_right(self, kernel: VarlenKernel) -> bool:
        """With keys in blocks: a chunk beside a decode row, and decode rows, with and without a window."""
        keys, values = self._blocks[:, 0], self._blocks[:, 1]
        return all(
            self._is_right(kernel, keys, values, query_lens, window, is_paged=True)
            for query_lens in ((3, 1), (1, 1))
            for window in (None, 4)
        )

    def is_decode_right(self, kernel: VarlenKernel) -> bool:
        """With keys in blocks: decode rows, with and without a window."""
        keys, values = self._blocks[:, 0], self._blocks[:, 1]
        return all(self._is_right(kernel, keys, values, (1, 1), window, is_paged=True) for window in (None, 4))

    def _is_right(
        self,
        kernel: VarlenKernel,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_lens: tuple[int, int],
        window: int | None,
        *,
        is_paged: bool,
    ) -> bool:
        query = self._query[: sum(query_lens)]
        shape = VarlenShape(
            query_starts=self._starts(query_lens),
            seq_lens=self._starts(self._lengths).diff(),
            key_starts=self._starts(self._lengths),
            block_tables=self._tables if is_paged else None,
            max_query_len=max(query_lens),
            max_seq_len=max(self._lengths),
        )
        expected = torch.cat(
            [
                _attend(rows, history, window)
                for rows, history in zip(torch.split(query, list(query_lens)), self._histories, strict=True)
            ]
        )
        spec = AttentionSpec(scale=1 / math.sqrt(query.shape[2]), rope=RopeConfig(), window=window)
        output = kernel(query, keys, values, shape, spec).float()
        return torch.allclose(output, expected, atol=TOLERANCE, rtol=TOLERANCE)

    def _starts(self, lengths: tuple[int, ...]) -> torch.Tensor:
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        return torch.tensor(starts, dtype=torch.int32, device=self._blocks.device)


@torch.inference_mode()
def _first(kernels: Sequence[VarlenKernel], is_right: Callable[[VarlenKernel], bool]) -> VarlenKernel | None:
    for kernel in kernels:
        try:
            if is_right(kernel):
                return kernel
            logger.warning("an attention kernel is not used, because its results are wrong: %r", kernel)
        except Exception as error:  # from torch, Triton or a missing compiler: the kernel is not usable
            logger.debug("an attention kernel is not supported here: %r: %s", kernel, error)
    return None


def _scattered(lengths: tuple[int, ...], block_size: int) -> list[list[int]]:
    """Block tables for small blocks, with the last request's blocks first."""
    counts = [-(-length // block_size) for length in lengths]
    firsts = [sum(counts[index + 1 :]) for index in range(len(counts))]
    return [
        [*range(first, first + count), *([0] * (max(counts) - count))]
        for first, count in zip(firsts, counts, strict=True)
    ]


def _attend(query: torch.Tensor, history: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention as it is defined, in float32. history: [num_keys, 2 (key, value), num_kv_heads, head_dim]."""
    keys, values = (half.float().repeat_interleave(GROUP, dim=1) for half in history.unbind(1))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) / math.sqrt(query.shape[2])
    positions = torch.arange(len(keys), device=query.device)
    distance = positions[-len(query) :, None] - positions[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(dim=2), values)


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
