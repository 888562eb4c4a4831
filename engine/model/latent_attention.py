"""Multi-head latent attention: the cache holds one narrow vector a token, which all heads share.

By definition, a head's keys are the cached vectors times a matrix of the head. Here the query is multiplied with the
transposed matrix instead, so that attention reads only cached vectors. One more product turns the weighted sum of
cached vectors into the head's values. Source: DeepSeek-AI, DeepSeek-V2, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.layers.attention_layer import HeadTransform
from engine.layers.layer_spec import NormSpec
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotations, rotate
from engine.model.model_config import ModelConfig
from engine.model.self_attention import attention_layer
from engine.model.step_context import StepContext

LEAST_TOKENS = 4
"""Products of fewer tokens are summed in another order than larger ones: 1 token on Intel CPUs, up to 3 on AMD."""

NORM = NormSpec(eps=1e-6)
"""The norm of narrow vectors; config.json only states the epsilon of other norms."""

QUERY = "self_attn.q_proj"
QUERY_INTO, QUERY_NORM, QUERY_OUT = "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj"
LATENT_INTO, LATENT_NORM, LATENT_OUT = (
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm",
    "self_attn.kv_b_proj.weight",
)


class HeadProducts:
    """``x[:, head] @ weight[head]`` for every head. weight: [num_heads, in_size, out_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads, in_size] to [num_tokens, num_heads, out_size], which may be a view.

        Fewer tokens are padded to ``LEAST_TOKENS``, so that each gets the same bits as in a larger batch.
        """
        num_tokens = len(x)
        if 0 < num_tokens < LEAST_TOKENS and x.device.type == "cpu":
            x = torch.cat([x, x[:1].expand(LEAST_TOKENS - num_tokens, -1, -1)])
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)[:num_tokens]


class LatentAttention:
    """Implements ``Attention``."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        latent = config.latent
        assert latent is not None, "a model without latents has other attention"
        self._latent, self._names, self._num_heads = latent, config.names, config.num_heads
        self._rope = config.ropes.index(config.attention[index].rope)
        self._layer = attention_layer(
            config,
            index,
            HeadTransform(num_heads=config.num_heads, num_kv_heads=1, query_norm=None, key_norm=None),
            device,
        )
        query_size = config.num_heads * latent.head_size
        into = [latent.query_rank or query_size, latent.cached_size]
        self._into = Linear(config.hidden_size, into, bias=latent.has_bias, dtype=dtype, device=device)
        self._query_norm: RMSNorm | None = None
        self._query_out: Linear | None = None
        if latent.query_rank is not None:
            self._query_norm = RMSNorm(latent.query_rank, spec=NORM, dtype=dtype, device=device)
            self._query_out = Linear(latent.query_rank, [query_size], bias=False, dtype=dtype, device=device)
        self._latent_norm = RMSNorm(latent.rank, spec=NORM, dtype=dtype, device=device)
        rows = config.num_heads * (latent.plain_size + latent.value_size)
        self._latent_out = torch.empty(rows, latent.rank, dtype=dtype, device=device)
        self._absorb: HeadProducts | None = None
        self._to_values: HeadProducts | None = None
        self._o = Linear(
            config.num_heads * latent.value_size, [config.hidden_size], bias=config.o_bias, dtype=dtype, device=device
        )

    def targets(self) -> dict[str, torch.Tensor]:
        """See ``Attention``."""
        places = {LATENT_OUT: self._latent_out, **self._latent_norm.targets(LATENT_NORM)}
        places.update(self._o.targets((self._names.o,)))
        if self._query_norm is None or self._query_out is None:
            places.update(self._into.targets((QUERY, LATENT_INTO)))
            bias = places.pop(f"{QUERY}.bias", None)  # queries have no bias
            if bias is not None:
                bias.zero_()
            return places
        places.update(self._into.targets((QUERY_INTO, LATENT_INTO)))
        places.update(self._query_norm.targets(QUERY_NORM))
        places.update(self._query_out.targets((QUERY_OUT,)))
        return places

    def pack(self) -> None:
        """See ``Attention``."""
        latent = self._latent
        if latent.is_interleaved:
            self._part_pairs()
        into_heads = self._latent_out.view(self._num_heads, -1, latent.rank)
        to_keys, to_values = torch.split(into_heads, [latent.plain_size, latent.value_size], dim=1)
        self._absorb, self._to_values = HeadProducts(to_keys), HeadProducts(to_values.transpose(1, 2))
        self._latent_out = self._latent_out.new_empty(0)
        for linear in (self._into, self._query_out, self._o):
            if linear is not None:
                linear.pack()

    def _part_pairs(self) -> None:
        """Reorder the rotated numbers of queries and keys for ``rotate_halves``: all first coordinates come first."""
        size = self._latent.rotated_size
        query = self._into.weight[: self._into.out_sizes[0]] if self._query_out is None else self._query_out.weight
        parts = [query.view(self._num_heads, -1, query.shape[1])[:, -size:], self._into.weight[None, -size:]]
        if self._into.bias is not None:
            parts.append(self._into.bias[None, -size:, None])
        for part in parts:
            part.copy_(torch.cat((part[:, ::2], part[:, 1::2]), dim=1))

    def __call__(self, read: torch.Tensor, rotations: Sequence[Rotations], context: StepContext) -> torch.Tensor:
        """See ``Attention``."""
        assert self._absorb is not None, "pack() comes after loading"
        assert self._to_values is not None
        latent, layer, rope = self._latent, self._layer, rotations[self._rope]
        query, key = torch.split(self._into(read), self._into.out_sizes, dim=1)
        if self._query_norm is not None and self._query_out is not None:
            self._query_norm.normalize_in_place(query)
            query = self._query_out(query.contiguous())
        heads = query.reshape(len(read), self._num_heads, latent.head_size)
        plain, rotated = torch.split(heads, [latent.plain_size, latent.rotated_size], dim=2)
        absorbed = torch.cat((self._absorb(plain), rotate(rotated, rope)), dim=2)
        self._latent_norm.normalize_in_place(key[:, : latent.rank])
        key = key[:, None]
        key[..., latent.rank :] = rotate(key[..., latent.rank :], rope)
        summed = context.plans[layer.group].attend(layer, absorbed, key, key[..., : latent.rank])
        values = self._to_values(summed.view(len(read), self._num_heads, latent.rank))
        return self._o(values.flatten(1).contiguous())
