"""The operations between matrix products and attention, in Triton: one launch instead of three to twenty operators.

A decoder layer has few of these, but prompts of some hundred tokens wait for their launches on a GPU, and decode steps
would write and read intermediate results. Each program handles one token (``add_norm``), a part of one (``gate``) or
some of its heads (``place_heads``), so a token's numbers do not depend on other tokens. Everything is computed in
float32 and rounded once; a sum for the residual stream is rounded before it is normalised.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engine.layers.layer_spec import FusedSpec
from engine.layers.rotary import Rotations

GATE_TILE: Final = 1024
HEADS_TILE: Final = 8
MAX_WARPS: Final = 16
NUMBERS_OF_WARP: Final = 512
"""Numbers of a row that each warp adds and normalises."""


class TritonOps:
    """Implements ``FusedOps`` for the model that ``spec`` describes."""

    def __init__(self, spec: FusedSpec) -> None:
        self._spec = spec

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See ``FusedOps``."""
        assert hidden.is_contiguous()
        assert delta.is_contiguous()
        size, norm = len(weight), self._spec.norm
        output = torch.empty_like(hidden)
        padded_size = triton.next_power_of_2(size)
        _add_norm[(len(hidden),)](
            hidden,
            delta,
            weight,
            output,
            self._spec.residual_scale,
            norm.eps,
            norm.offset,
            SIZE=size,
            PADDED_SIZE=padded_size,
            num_warps=max(1, min(MAX_WARPS, padded_size // NUMBERS_OF_WARP)),
        )
        return output

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``FusedOps``."""
        assert gate_up.is_contiguous()
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        _gate[(num_tokens, triton.cdiv(size, GATE_TILE))](
            gate_up, output, SIZE=size, ACTIVATION=self._spec.activation.value, TILE=GATE_TILE, num_warps=4
        )
        return output

    def place_heads(
        self,
        heads: torch.Tensor,
        counts: tuple[int, int],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        rotations: Rotations,
        cache: tuple[torch.Tensor, torch.Tensor],
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See ``FusedOps``."""
        num_tokens, num_all, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1)
        num_heads, num_kv_heads = counts
        query = heads.new_empty(num_tokens, num_heads, head_dim)
        keys, values = cache
        query_norm, key_norm = norms or (heads, heads)
        _place_heads[(num_tokens, triton.cdiv(num_all, HEADS_TILE))](
            heads,
            query_norm,
            key_norm,
            rotations.table,
            rotations.positions,
            *places,
            query,
            keys,
            values,
            self._spec.norm.eps,
            self._spec.norm.offset,
            heads.stride(0),
            *keys.stride()[:3],
            *values.stride()[:3],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            NUM_PAIRS=rotations.table.shape[2],
            HAS_NORMS=norms is not None,
            TILE=HEADS_TILE,
            num_warps=4,
        )
        return query


@triton.jit
def _add_norm(hidden, delta, weight, output, delta_scale, eps, offset, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """One token: add in place, and write the normalised sum."""
    columns = tl.arange(0, PADDED_SIZE)
    is_there = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    before = tl.load(hidden + places, mask=is_there, other=0.0).to(tl.float32)
    added = tl.load(delta + places, mask=is_there, other=0.0).to(tl.float32)
    total = (before + delta_scale * added).to(hidden.dtype.element_ty)
    tl.store(hidden + places, total, mask=is_there)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32) + offset
    tl.store(output + places, (total * scale * weights).to(output.dtype.element_ty), mask=is_there)


@triton.jit
def _gate(gate_up, output, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """A part of one token: the activation of its gate, times up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=is_there, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 1 + tanh(x) is 2 * sigmoid(2 * x)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(output + row * SIZE + columns, (gate * up).to(output.dtype.element_ty), mask=is_there)


# Their addresses change with the number of tokens. This must not cause a recompilation while requests wait.
@triton.jit(do_not_specialize_on_alignment=["positions", "blocks", "offsets"])
def _place_heads(
    heads,
    query_norm,
    key_norm,
    table,
    positions,
    blocks,
    offsets,
    query,
    keys,
    values,
    eps,
    offset,
    heads_row,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some heads of one token: queries go to ``query``, keys and values to the token's slot in the cache."""
    token = tl.program_id(0).to(tl.int64)
    members = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    is_query = members < NUM_HEADS
    is_value = members >= NUM_HEADS + NUM_KV_HEADS
    is_there = (members < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim[None, :]
    source = heads + token * heads_row + members[:, None] * HEAD_DIM
    as_given = tl.load(source + dims[None, :], mask=is_there, other=0.0)
    numbers = as_given.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / HEAD_DIM + eps)[:, None]
        of_query = tl.load(query_norm + dims, mask=is_dim, other=0.0).to(tl.float32) + offset
        of_key = tl.load(key_norm + dims, mask=is_dim, other=0.0).to(tl.float32) + offset
        numbers = numbers * scale * tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    if NUM_PAIRS > 0:
        # the other coordinate of each pair is loaded again, from the other half of the rotated part
        is_first = dims < NUM_PAIRS
        is_rotated = dims < 2 * NUM_PAIRS
        others = tl.where(is_first, dims + NUM_PAIRS, dims - NUM_PAIRS)
        has_other = is_there & is_rotated[None, :]
        partners = tl.load(source + others[None, :], mask=has_other, other=0.0).to(tl.float32)
        if HAS_NORMS:
            of_query = tl.load(query_norm + others, mask=is_rotated, other=0.0).to(tl.float32) + offset
            of_key = tl.load(key_norm + others, mask=is_rotated, other=0.0).to(tl.float32) + offset
            partners = partners * scale * tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
        angles = table + tl.load(positions + token) * 2 * NUM_PAIRS + tl.where(is_first, dims, others)
        cosine = tl.load(angles, mask=is_rotated, other=1.0).to(tl.float32)
        sine = tl.load(angles + NUM_PAIRS, mask=is_rotated, other=0.0).to(tl.float32)
        sine = tl.where(is_first, -sine, sine)
        numbers = numbers * cosine[None, :] + partners * sine[None, :]
    turned = numbers.to(query.dtype.element_ty)
    tl.store(
        query + (token * NUM_HEADS + members)[:, None] * HEAD_DIM + dims[None, :],
        turned,
        mask=is_query[:, None] & is_dim[None, :],
    )
    block = tl.load(blocks + token).to(tl.int64)
    place = tl.load(offsets + token).to(tl.int64)
    is_key = (members >= NUM_HEADS) & (members < NUM_HEADS + NUM_KV_HEADS)
    target = block * key_block + place * key_token + (members - NUM_HEADS) * key_head
    tl.store(keys + target[:, None] + dims[None, :], turned, mask=is_key[:, None] & is_dim[None, :])
    target = block * value_block + place * value_token + (members - NUM_HEADS - NUM_KV_HEADS) * value_head
    tl.store(values + target[:, None] + dims[None, :], as_given, mask=is_value[:, None] & is_there)
