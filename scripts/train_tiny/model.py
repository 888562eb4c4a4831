"""The Llama architecture in plain torch, with the parameter names and layouts of the Hugging Face checkpoint."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the model; the names are those of ``config.json``."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return asdict(self)


def training_dtype() -> torch.dtype:
    """bfloat16, or float32 on a CPU that emulates it (measured with AVX2 only: 90 times as slow)."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


class Linear(nn.Module):
    """A linear map without bias whose float32 weight is cast to the input's dtype at each use."""

    def __init__(self, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * std)

    def forward(self, x: Tensor) -> Tensor:
        """Map the last dimension of ``x``."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(config: ModelConfig, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [num_tokens, head_dim]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float32), config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x`` [batch, heads, num_tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        hidden, std = config.hidden_size, config.hidden_size**-0.5
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(hidden, query_size, std=std)
        self.k_proj = Linear(hidden, kv_size, std=std)
        self.v_proj = Linear(hidden, kv_size, std=std)
        self.o_proj = Linear(query_size, hidden, std=std / (2 * config.num_hidden_layers) ** 0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the tokens of ``x`` [batch, num_tokens, hidden_size]."""
        batch, num_tokens, _ = x.shape
        shape = (batch, num_tokens, -1, self.head_dim)
        query = rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        key = key.repeat_interleave(self.num_groups, dim=1)
        value = value.repeat_interleave(self.num_groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, num_tokens, -1))
        return out


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, std = config.hidden_size, config.intermediate_size, config.hidden_size**-0.5
        self.gate_proj = Linear(hidden, inner, std=std)
        self.up_proj = Linear(hidden, inner, std=std)
        self.down_proj = Linear(inner, hidden, std=inner**-0.5 / (2 * config.num_hidden_layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token of ``x`` by itself."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One layer: attention, then the feed-forward network, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the final norm (``model.`` in the checkpoint)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyLlama(nn.Module):
    """A causal language model with tied embeddings that computes in ``dtype`` from float32 weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = Decoder(config)

    def hidden_states(self, token_ids: Tensor) -> Tensor:
        """Final normalised states [batch, num_tokens, hidden_size] of ``token_ids`` [batch, num_tokens]."""
        cos, sin = rope_tables(self.config, token_ids.shape[1], self.dtype)
        x: Tensor = self.model.embed_tokens(token_ids).to(self.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, float32, of states of any leading shape."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits [batch, num_tokens, vocab_size]."""
        return self.logits(self.hidden_states(token_ids))
