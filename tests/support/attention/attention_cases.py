"""Hypothesis-made batches for attention backends: paged, grouped, windowed, chunks and decodes mixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from engine.attention.backend import AttentionBatch
from engine.device.kv_cache import KVCache
from engine.runner.device import DTYPES
from kv_transfer.layout import KVLayout, group_layers

NUM_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The shape of one call: ``lengths`` are pairs of positions already in the cache and tokens computed now."""

    lengths: tuple[tuple[int, int], ...]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    layer: int
    seed: int

    @property
    def max_num_tokens(self) -> int:
        """Positions of the longest request."""
        return max(history + new for history, new in self.lengths)


def attention_cases() -> st.SearchStrategy[AttentionCase]:
    """Small batches of every kind; a tenth of the requests is longer than a tile of any backend."""
    history = st.one_of(st.integers(0, 70), st.integers(0, 70), st.integers(200, 400))
    new = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 90), st.integers(250, 300))
    return st.builds(
        AttentionCase,
        lengths=st.lists(st.tuples(history, new), min_size=1, max_size=5).map(tuple),
        num_kv_heads=st.integers(1, 3),
        group=st.integers(1, 4),
        head_dim=st.sampled_from((8, 16, 20, 64)),
        block_size=st.integers(1, 32),
        window=st.one_of(st.none(), st.integers(1, 100), st.integers(1, 1000)),
        layer=st.integers(0, NUM_LAYERS - 1),
        seed=st.integers(0, 1 << 30),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """A case filled with numbers. Everything in the cache that no request may see is NaN."""

    blocks: torch.Tensor
    batch: AttentionBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: KVLayout

    def new_cache(self) -> KVCache:
        """A cache with the case's content, to be written by one backend."""
        cache = KVCache(self.layout, num_blocks=len(self.blocks), dtype=self.blocks.dtype, device=self.blocks.device)
        cache.blocks.copy_(self.blocks)
        return cache


def make_inputs(case: AttentionCase, dtype: str) -> AttentionInputs:
    """Fill a case with normal numbers and scatter its blocks."""
    rng = np.random.default_rng(case.seed)
    num_blocks_of = [-(-(history + new) // case.block_size) for history, new in case.lengths]
    num_blocks = sum(num_blocks_of) + 3
    order = rng.permutation(num_blocks).astype(np.int32)
    # Entries past a request's end name some other request's block: whoever looks there gets wrong numbers.
    tables = np.full((len(case.lengths), max(num_blocks_of)), order[0], dtype=np.int32)
    taken = 0
    for request, count in enumerate(num_blocks_of):
        tables[request, :count] = order[taken : taken + count]
        taken += count
    torch_dtype = DTYPES[dtype]
    generator = torch.Generator().manual_seed(case.seed)
    layout = KVLayout(
        model_hash="",
        groups=group_layers([None] * NUM_LAYERS),
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=dtype,
        bytes_per_element=torch_dtype.itemsize,
    )
    shape = (num_blocks, NUM_LAYERS, 2, case.block_size, case.num_kv_heads, case.head_dim)
    numbers = torch.randn(shape, generator=generator).to(torch_dtype)
    blocks = torch.full(shape, torch.nan, dtype=torch_dtype)
    slots: list[int] = []
    for request, (history, new) in enumerate(case.lengths):
        for position in range(history + new):
            block, offset = int(tables[request, position // case.block_size]), position % case.block_size
            if position < history:
                blocks[block, :, :, offset] = numbers[block, :, :, offset]
            else:
                slots.append(block * case.block_size + offset)
    num_tokens, num_heads = len(slots), case.num_kv_heads * case.group

    def heads(count: int) -> torch.Tensor:
        return torch.randn(num_tokens, count, case.head_dim, generator=generator).to(torch_dtype)

    # As in a model, query, key and value are views of one fused projection.
    fused = torch.cat((heads(num_heads), heads(case.num_kv_heads), heads(case.num_kv_heads)), dim=1)
    query, key, value = torch.split(fused, [num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    return AttentionInputs(
        blocks=blocks,
        batch=AttentionBatch(
            query_starts=np.cumsum([0, *(new for _, new in case.lengths)]).astype(np.int32),
            first_positions=np.array([history for history, _ in case.lengths], dtype=np.int32),
            block_tables=tables,
            slots=np.array(slots, dtype=np.int64),
        ),
        query=query,
        key=key,
        value=value,
        layout=layout,
    )
