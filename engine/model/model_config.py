"""A model's shape, and how its numbers are read from config.json. Free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.errors import CheckpointError
from engine.layers.attention_spec import AttentionSpec
from engine.layers.experts.spec import ExpertNames, ExpertsSpec, GateClamp
from engine.layers.rope_config import RopeConfig, RopeType, parse_rope_config
from kv_transfer.layout import KVCacheGroup, group_layers

SUPPORTED_ACTIVATIONS = ("silu", "swish")
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

DEFAULT_SLIDING_WINDOW = 4096
"""Of Mistral and Qwen in transformers, where config.json says nothing of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What distinguishes one decoder-only transformer from another.

    attention: how each layer attends.
    experts: those of each layer, None for one with a plain MLP; empty where no layer has any.
    dtype: the checkpoint's, one of ``SUPPORTED_DTYPES``.
    cpu_dtype: what the checkpoint asks to run in on a CPU, by the key ``baton_cpu_dtype``. In 16 bits the matrix
        library's rounding depends on how many requests share a step, so that near-ties can fall either way; a model
        small enough to afford it asks for float32.
    max_model_len: the longest sequence the rotary embedding was made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    attention: tuple[AttentionSpec, ...]
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    cpu_dtype: str
    experts: tuple[ExpertsSpec | None, ...] = ()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.attention)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of its layers, each once."""
        return tuple(dict.fromkeys(spec.rope for spec in self.attention))

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """Its layers by whose KV shares blocks. A window that no sequence outgrows is none."""
        windows = [spec.window for spec in self.attention]
        return group_layers([None if window is None or window >= self.max_model_len else window for window in windows])

    @property
    def mlp_size(self) -> int:
        """Numbers that the widest MLP or mixture holds of one token at a time, beside what comes in and goes out."""
        plain = 2 * self.intermediate_size if None in self.experts or not self.experts else 0
        mixed = (spec.num_active * (2 * spec.inner_size + self.hidden_size) for spec in self.experts if spec)
        return max(plain, *mixed, 0)

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, of one token."""
        return self.num_kv_heads * self.head_dim


def read_config_json(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    Raises:
        CheckpointError: No such directory, no config.json in it, or it is not a JSON object.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: it has no config.json")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file that holds an object.

    Raises:
        CheckpointError: Unreadable, or something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return content


Windows = tuple[int | None, ...]


def read_decoder_config(
    raw: Mapping[str, Any],
    *,
    architecture: str,
    windows: Windows,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    experts: Sequence[ExpertsSpec | None] = (),
) -> ModelConfig:
    """Check what the config.json of a decoder with gated MLPs says, and put it together with what its file knows.

    head_dim: the architecture's default where config.json states none; None for hidden_size / num_attention_heads.

    Raises:
        CheckpointError: Something is missing, contradictory, or of a kind that is not supported; the message lists
            what is.
    """
    activation = raw.get("hidden_act") or "silu"
    if activation not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise CheckpointError(f"config.json: hidden_act {activation!r} is not supported; supported: {supported}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"config.json: quantized weights ({method}) are not supported")
    num_heads = positive(raw, "num_attention_heads")
    num_kv_heads = positive(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    hidden_size = positive(raw, "hidden_size")
    head_dim = positive(raw, "head_dim", default=head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd")
    max_position_embeddings = positive(raw, "max_position_embeddings")
    rope = parse_rope_config(raw, max_position_embeddings=max_position_embeddings)
    scale = 1 / math.sqrt(head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_model_len=_max_model_len(rope, max_position_embeddings),
        attention=tuple(AttentionSpec(scale=scale, rope=rope, window=window) for window in windows),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_dtype(raw),
        cpu_dtype=_dtype({"dtype": raw.get("baton_cpu_dtype") or _dtype(raw)}),
        experts=tuple(experts),
    )


def read_experts(
    raw: Mapping[str, Any],
    *,
    num_experts: int,
    num_active: int,
    inner_size: int,
    is_normalized: bool,
    names: ExpertNames,
    clamp: GateClamp | None = None,
    is_mxfp4: bool = False,
) -> ExpertsSpec:
    """What an architecture's file knows of a layer's experts. ``num_active``: where config.json does not say.

    Raises:
        CheckpointError: A token would go through more of them than there are.
    """
    num_active = positive(raw, "num_experts_per_tok", default=num_active)
    if num_active > num_experts:
        raise CheckpointError(f"config.json: num_experts_per_tok {num_active} is more than the {num_experts} experts")
    return ExpertsSpec(
        num_experts=num_experts,
        num_active=num_active,
        inner_size=inner_size,
        is_normalized=is_normalized,
        names=names,
        clamp=clamp,
        is_mxfp4=is_mxfp4,
    )


def full_attention(raw: Mapping[str, Any]) -> Windows:
    """No layer has a window."""
    return (None,) * positive(raw, "num_hidden_layers")


def same_window(raw: Mapping[str, Any]) -> Windows:
    """Every layer has the window that ``sliding_window`` states; null is none."""
    window = _sliding_window(raw)
    return (window,) * positive(raw, "num_hidden_layers")


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """What transformers takes where the key is missing is not what null says."""
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    return positive(raw, "sliding_window", default=DEFAULT_SLIDING_WINDOW)


def windows_of_layers(raw: Mapping[str, Any]) -> Windows:
    """Layers named by ``layer_types`` or ``max_window_layers`` have the window, if ``use_sliding_window`` is on."""
    num_layers, window = positive(raw, "num_hidden_layers"), _sliding_window(raw)
    if window is None or not raw.get("use_sliding_window", False):
        return full_attention(raw)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return named_windows(layer_types, window, num_layers)


def named_windows(layer_types: Sequence[str], window: int | None, num_layers: int) -> Windows:
    """Each layer has the window or not, by what ``layer_types`` calls it.

    Raises:
        CheckpointError: It names something else, or another number of layers.
    """
    known = {"full_attention": None, "sliding_attention": window}
    unknown = set(layer_types) - known.keys()
    if unknown or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types must name one of {', '.join(known)} for each of {num_layers} layers"
        )
    return tuple(known[layer_type] for layer_type in layer_types)


def positive(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """A number of config.json.

    Raises:
        CheckpointError: It is missing and has no default, or is no positive integer.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        raise CheckpointError(f"config.json: dtype {name} is not supported; supported: {supported}")
    return name


def _max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Linear scaling multiplies the stated length; yarn multiplies the original one; llama3 states the result."""
    if rope.rope_type is RopeType.LINEAR:
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type is RopeType.YARN:
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings
