"""Attention of decode rows over blocks of any size, in Triton, where torch's kernels do not support it.

A row's keys are split among a fixed number of programs and joined afterwards, so that a few long rows can use a whole
GPU. The split and the order of summation depend on the row alone, so its result does not depend on the batch.

Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from engine.attention.varlen import VarlenShape
from engine.layers.attention_spec import AttentionSpec

NUM_PROGRAMS: Final = 16
"""Programs for each row and key head. Programs that get no keys end at once."""

PART_LEN: Final = 128
"""Keys that a program takes at a time."""

TILE_LEN: Final = 64

MIN_SIDE: Final = 16
"""Smallest side of the matrices that tensor cores multiply."""


def paged_decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
) -> torch.Tensor:
    """See ``VarlenKernel``; for steps in which every request computes one token."""
    tables = shape.block_tables
    if tables is None or shape.max_query_len != 1:
        raise NotImplementedError("this kernel is for decode rows over blocks")
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_heads // num_kv_heads
    totals = query.new_empty((num_rows, num_heads, NUM_PROGRAMS, head_dim), dtype=torch.float32)
    tops, weights = query.new_empty((2, num_rows, num_heads, NUM_PROGRAMS), dtype=torch.float32)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    padded_dim = max(triton.next_power_of_2(head_dim), MIN_SIDE)
    _attend_parts[(num_rows, num_kv_heads, NUM_PROGRAMS)](
        query,
        key,
        value,
        tables,
        shape.seq_lens,
        totals,
        tops,
        weights,
        math.log2(math.e) * spec.scale,
        spec.window or 0,
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        tables.stride(0),
        GROUP=group,
        PADDED_GROUP=max(triton.next_power_of_2(group), MIN_SIDE),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=key.shape[1],
        NUM_PROGRAMS=NUM_PROGRAMS,
        PART_LEN=PART_LEN,
        TILE_LEN=TILE_LEN,
        num_warps=4,
        num_stages=2,
    )
    _join_parts[(num_rows, num_heads)](
        totals,
        tops,
        weights,
        shape.seq_lens,
        output,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        NUM_PROGRAMS=NUM_PROGRAMS,
        PART_LEN=PART_LEN,
        num_warps=1,
    )
    return output


# Arguments that change from step to step must not specialise the kernel: it would be recompiled while requests wait.
@triton.jit(do_not_specialize=["window", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _attend_parts(
    query,
    key,
    value,
    tables,
    seq_lens,
    totals,
    tops,
    weights,
    scale,
    window,
    query_row,
    query_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PART_LEN: tl.constexpr,
    TILE_LEN: tl.constexpr,
):
    """One row and key head, every ``NUM_PROGRAMS``-th part of the keys. For each query head of the group it stores the
    highest score, the sum of weights relative to it, and the sum of values with these weights.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    program = tl.program_id(2)
    length = tl.load(seq_lens + row)
    if program * PART_LEN >= length:
        return
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + members
    is_head = members[:, None] < GROUP
    is_dim = dims < HEAD_DIM
    queries = tl.load(
        query + row * query_row + heads[:, None] * query_head + dims[None, :],
        mask=is_head & is_dim[None, :],
        other=0.0,
    )
    top = tl.full([PADDED_GROUP], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([PADDED_GROUP], dtype=tl.float32)
    total = tl.zeros([PADDED_GROUP, PADDED_DIM], dtype=tl.float32)
    for part in range(program, tl.cdiv(length, PART_LEN), NUM_PROGRAMS):
        end = tl.minimum((part + 1) * PART_LEN, length)
        begin = tl.maximum(part * PART_LEN, first // TILE_LEN * TILE_LEN)
        for start in range(begin, end, TILE_LEN):
            positions = start + tl.arange(0, TILE_LEN)
            is_seen = (positions >= first) & (positions < end)
            blocks = tl.load(tables + row * table_row + positions // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
            offsets = positions % BLOCK_SIZE
            keys = tl.load(
                key + (blocks * key_block + offsets * key_token + kv_head * key_head)[None, :] + dims[:, None],
                mask=is_seen[None, :] & is_dim[:, None],
                other=0.0,
            )
            scores = tl.dot(queries, keys, input_precision="ieee") * scale
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            next_top = tl.maximum(top, tl.max(scores, axis=1))
            # in a tile before the window all scores are -inf, and -inf - -inf is NaN
            anchor = tl.where(next_top == float("-inf"), 0.0, next_top)
            shares = tl.exp2(scores - anchor[:, None])
            fade = tl.exp2(top - anchor)
            values = tl.load(
                value + (blocks * value_block + offsets * value_token + kv_head * value_head)[:, None] + dims[None, :],
                mask=is_seen[:, None] & is_dim[None, :],
                other=0.0,
            )
            total = total * fade[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
            weight = weight * fade + tl.sum(shares, axis=1)
            top = next_top
    places = (row * tl.num_programs(1) * GROUP + heads) * NUM_PROGRAMS + program
    tl.store(totals + places[:, None] * HEAD_DIM + dims[None, :], total, mask=is_head & is_dim[None, :])
    tl.store(tops + places, top, mask=members < GROUP)
    tl.store(weights + places, weight, mask=members < GROUP)


@triton.jit(do_not_specialize_on_alignment=["seq_lens"])
def _join_parts(
    totals,
    tops,
    weights,
    seq_lens,
    output,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PART_LEN: tl.constexpr,
):
    """One row and query head: join the results of its programs, rescaled to the highest score of all."""
    row = tl.program_id(0).to(tl.int64)
    head = row * tl.num_programs(1) + tl.program_id(1)
    programs = tl.arange(0, NUM_PROGRAMS)
    dims = tl.arange(0, PADDED_DIM)
    is_there = programs * PART_LEN < tl.load(seq_lens + row)
    is_dim = dims < HEAD_DIM
    places = head * NUM_PROGRAMS + programs
    found = tl.load(tops + places, mask=is_there, other=float("-inf"))
    shares = tl.exp2(found - tl.max(found, axis=0))
    weight = tl.sum(shares * tl.load(weights + places, mask=is_there, other=0.0), axis=0)
    parts = tl.load(
        totals + places[:, None] * HEAD_DIM + dims[None, :], mask=is_there[:, None] & is_dim[None, :], other=0.0
    )
    total = tl.sum(shares[:, None] * parts, axis=0)
    tl.store(output + head * HEAD_DIM + dims, (total / weight).to(output.dtype.element_ty), mask=is_dim)
