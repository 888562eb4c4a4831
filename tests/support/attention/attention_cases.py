"""Random batches for attention backends, made by hypothesis: paged, grouped, windowed, with chunks and decodes
mixed."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from engine.attention.backend import AttentionBatch
from engine.device.kv_cache import KVCache
from engine.layers.attention_layer import AttentionLayer, HeadTransform
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig
from engine.runner.device import DTYPES
from kv_transfer.layout import KEYS_AND_VALUES, LATENTS, KVCacheGroup, KVLayout, group_layers

NUM_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The shape of one call: ``lengths`` has a pair for each request, its positions already in the cache and its tokens
    computed now.

    has_groups: the other layer has another window, so that each of the two is a KV cache group of its own.
    relative_scale: the scale of scores, as a part of the usual one.
    """

    lengths: tuple[tuple[int, int], ...]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None
    layer: int
    seed: int
    has_groups: bool = False
    relative_scale: float = 1.0
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None

    @property
    def num_parts(self) -> int:
        """The number of parts that are cached of each token and layer: keys and values, or latents."""
        return KEYS_AND_VALUES if self.value_size is None else LATENTS

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV cache groups of two layers, one of which attends."""
        windows = [self.window] * NUM_LAYERS
        if self.has_groups:
            windows[1 - self.layer] = 5 if self.window is None else None
        return group_layers(windows)

    @property
    def spec(self) -> AttentionSpec:
        """The attention of the layer."""
        return AttentionSpec(
            scale=self.relative_scale / math.sqrt(self.head_dim),
            rope=RopeConfig(),
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
            value_size=self.value_size,
        )

    @property
    def attention_layer(self) -> AttentionLayer:
        """The layer under test."""
        group = next(number for number, group in enumerate(self.groups) if self.layer in group.layers)
        num_heads = self.num_kv_heads * self.group
        sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(self.seed)) if self.has_sinks else None
        transform = HeadTransform(num_heads=num_heads, num_kv_heads=self.num_kv_heads, query_norm=None, key_norm=None)
        index = self.groups[group].layers.index(self.layer)
        return AttentionLayer(group=group, index=index, spec=self.spec, transform=transform, sinks=sinks)

    @property
    def max_num_tokens(self) -> int:
        """The number of positions of the longest request."""
        return max(history + new for history, new in self.lengths)


def attention_cases(*, is_plain: bool = False, has_latents: bool = False) -> st.SearchStrategy[AttentionCase]:
    """Small batches of every kind; a tenth of the requests is longer than a tile of any backend.

    is_plain: no scores are capped, and there are no sinks. has_latents: a third of them has latents in the cache.
    """
    cases = _cases(is_plain=is_plain)
    return st.one_of(cases, cases, cases.map(_with_latents)) if has_latents else cases


def _with_latents(case: AttentionCase) -> AttentionCase:
    """The same case with one latent shared by all of a larger number of heads."""
    value_size = 3 * case.head_dim // 4
    return dataclasses.replace(case, num_kv_heads=1, group=5 * case.num_kv_heads * case.group, value_size=value_size)


def _cases(*, is_plain: bool) -> st.SearchStrategy[AttentionCase]:
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
        has_groups=st.booleans(),
        relative_scale=st.sampled_from((1.0, 0.6)),
        softcap=st.none() if is_plain else st.sampled_from((None, None, 2.0, 50.0)),
        has_sinks=st.just(False) if is_plain else st.booleans(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """A case filled with numbers. Whatever no request may read is NaN in the cache."""

    blocks: torch.Tensor
    batch: AttentionBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: KVLayout

    def new_cache(self) -> KVCache:
        """A cache with the case's content, for one backend to write to."""
        cache = KVCache(self.layout, num_blocks=len(self.blocks), dtype=self.blocks.dtype, device=self.blocks.device)
        cache.blocks.copy_(self.blocks)
        return cache


def _layout(case: AttentionCase, dtype: str) -> KVLayout:
    return KVLayout(
        model_hash="",
        groups=case.groups,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=dtype,
        bytes_per_element=DTYPES[dtype].itemsize,
        num_parts=case.num_parts,
    )


def make_inputs(case: AttentionCase, dtype: str, *, absent_block: int | None = None) -> AttentionInputs:
    """Fill a case with normal numbers and scatter its blocks.

    absent_block: what stands in tables before a group's window; None: the first block in it, as backends may ask.
    """
    rng = np.random.default_rng(case.seed)
    groups, block_size = case.groups, case.block_size
    num_blocks_of = [-(-(history + new) // block_size) for history, new in case.lengths]
    num_blocks = len(groups) * sum(num_blocks_of) + 3
    order = rng.permutation(num_blocks).astype(np.int32)
    # Entries past a request's end name some other request's block: whoever looks there gets wrong numbers.
    tables = np.full((len(groups), len(case.lengths), max(num_blocks_of)), order[0], dtype=np.int32)
    torch_dtype, generator = DTYPES[dtype], torch.Generator().manual_seed(case.seed)
    layout = _layout(case, dtype)
    shape = (num_blocks, case.num_kv_heads, layout.layers_per_block, case.num_parts, block_size, case.head_dim)
    numbers = torch.randn(shape, generator=generator).to(torch_dtype)
    blocks = torch.full(shape, torch.nan, dtype=torch_dtype)
    slots: list[list[int]] = [[] for _ in groups]
    taken = 0
    for number, group in enumerate(groups):
        for request, (history, new) in enumerate(case.lengths):
            table = tables[number, request, : num_blocks_of[request]]
            table[:] = order[taken : taken + len(table)]
            taken += len(table)
            first_column = 0 if group.window is None else max(history - group.window + 1, 0) // block_size
            for position in range(first_column * block_size, history):
                block, offset = int(table[position // block_size]), position % block_size
                blocks[block, :, :, :, offset] = numbers[block, :, :, :, offset]
            for column, offset in (divmod(position, block_size) for position in range(history, history + new)):
                slots[number].append(int(table[column]) * block_size + offset)
            table[:first_column] = table[first_column] if absent_block is None else absent_block
    num_tokens, num_heads = len(slots[0]), case.num_kv_heads * case.group

    def heads(count: int) -> torch.Tensor:
        return torch.randn(num_tokens, count, case.head_dim, generator=generator).to(torch_dtype)

    # As in a model, query, key and value are views of one fused projection.
    fused = torch.cat((heads(num_heads), heads(case.num_kv_heads), heads(case.num_kv_heads)), dim=1)
    query, key, value = torch.split(fused, [num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    if case.value_size is not None:
        value = key[..., : case.value_size]
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
