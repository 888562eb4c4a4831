"""A model's shape, and how it is read from config.json. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.checkpoint.json_file import read_json_object
from engine.contract.errors import CheckpointError
from engine.layers.attention_spec import AttentionSpec, LatentSpec
from engine.layers.experts.spec import ExpertNames, ExpertsSpec
from engine.layers.layer_spec import Activation, FusedSpec, GateClamp, NormSpec, QueryKeyNorm
from engine.layers.rope_config import RopeConfig, RopeType, parse_rope_config
from engine.model.model_shape import ModelShape
from engine.model.tensor_names import LLAMA_NAMES, TensorNames
from kv_transfer.layout import KEYS_AND_VALUES, LATENTS

SUPPORTED_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_python": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
}
"""By transformers' names, some of which mean the same function."""

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

DEFAULT_SLIDING_WINDOW = 4096
"""Default of Mistral and Qwen in transformers, if config.json states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelShape):
    """The properties in which decoder-only transformers differ.

    norm: the norm between layers, and of queries and keys if the model has ``qk_norm``.
    has_gated_mlp: the MLP's first product has two halves; the activation of one is multiplied with the other.
    latent: how keys and values are computed from narrow vectors; None: they are not. With latents ``num_kv_heads`` is
        1, and ``head_dim`` is the width of the cached vector, to which queries are projected.
    num_draft_layers: layers behind the last one that only draft tokens; they are not loaded.
    experts: for each layer its experts, or None for a plain MLP; empty if no layer has experts.
    num_learned_positions: positions with a learnt vector, which is added to the token's; 0: none.
    embedding_scale, residual_scale, logit_scale: factors of embeddings, of what each part of a layer adds to the
        residual stream, and of logits. logit_softcap: logits ``x`` become ``cap * tanh(x / cap)``.
    """

    intermediate_size: int
    norm: NormSpec
    activation: Activation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QueryKeyNorm
    tie_word_embeddings: bool
    has_gated_mlp: bool = True
    num_learned_positions: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: TensorNames = LLAMA_NAMES
    experts: tuple[ExpertsSpec | None, ...] = ()
    latent: LatentSpec | None = None
    num_draft_layers: int = 0

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The distinct rotary embeddings of its layers; None stands for layers without one."""
        return tuple(dict.fromkeys(spec.rope for spec in self.attention))

    @property
    def num_kv_parts(self) -> int:
        """Parts of a token that each layer caches: see ``KVLayout``."""
        return KEYS_AND_VALUES if self.latent is None else LATENTS

    @property
    def rope_dim(self) -> int:
        """Size of a head as its rotary embedding sees it."""
        return self.head_dim if self.latent is None else self.latent.rotated_size

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Name prefixes of a checkpoint's tensors that are not loaded."""
        ends = range(self.num_layers, self.num_layers + self.num_draft_layers)
        return tuple(f"{self.names.layers}.{layer}." for layer in ends)

    @property
    def fused_spec(self) -> FusedSpec:
        """What fused kernels between its matrix products need to know."""
        return FusedSpec(norm=self.norm, residual_scale=self.residual_scale, activation=self.activation)

    @property
    def mlp_size(self) -> int:
        """Numbers that the widest MLP or mixture holds for one token at a time, besides its input and output."""
        has_plain = None in self.experts or not self.experts
        plain = (1 + self.has_gated_mlp) * self.intermediate_size if has_plain else 0
        mixed = (
            max(spec.num_active * (2 * spec.inner_size + self.hidden_size), 2 * spec.shared_size)
            for spec in self.experts
            if spec
        )
        return max(plain, *mixed, 0)


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


Windows = tuple[int | None, ...]


def read_decoder_config(
    raw: Mapping[str, Any],
    *,
    architecture: str,
    windows: Windows,
    head_dim: int | None = None,
    eps: float = 1e-6,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QueryKeyNorm = QueryKeyNorm.NONE,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    may_be_partial: bool = False,
    is_tied: bool = False,
) -> ModelConfig:
    """Check a decoder's config.json, and combine it with what the architecture's file knows.

    head_dim, eps, default_activation, is_tied: the architecture's defaults if config.json states none; a head_dim of
        None stands for hidden_size / num_attention_heads.
    activation_key: the activation's key there. may_be_partial: heads may be partly rotated.

    Raises:
        CheckpointError: Something is missing, contradictory, or of a kind that is not supported; the message lists
            what is.
    """
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"config.json: quantized weights ({method}) are not supported")
    num_heads, num_kv_heads, head_dim = _read_heads(raw, head_dim)
    max_position_embeddings = positive(raw, "max_position_embeddings")
    rope = parse_rope_config(
        raw, max_position_embeddings=max_position_embeddings, head_dim=head_dim, may_be_partial=may_be_partial
    )
    scale = 1 / math.sqrt(head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        intermediate_size=positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=_max_model_len(rope, max_position_embeddings),
        attention=tuple(AttentionSpec(scale=scale, rope=rope, window=window) for window in windows),
        norm=NormSpec(eps=positive_number(raw, "rms_norm_eps", default=eps)),
        activation=_read_activation(raw, activation_key, default_activation),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", is_tied)),
        dtype=read_dtype(raw),
        cpu_dtype=read_cpu_dtype(raw),
    )


def _read_heads(raw: Mapping[str, Any], default_head_dim: int | None) -> tuple[int, int, int]:
    """Number of query heads, number of key heads, and the size of a head."""
    num_heads = positive(raw, "num_attention_heads")
    num_kv_heads = positive(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = positive(raw, "head_dim", default=default_head_dim or positive(raw, "hidden_size") // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd")
    return num_heads, num_kv_heads, head_dim


def _read_activation(raw: Mapping[str, Any], key: str, default: str) -> Activation:
    name = raw.get(key) or default
    if name not in SUPPORTED_ACTIVATIONS:
        supported = ", ".join(SUPPORTED_ACTIVATIONS)
        raise CheckpointError(f"config.json: {key} {name!r} is not supported; supported: {supported}")
    return SUPPORTED_ACTIVATIONS[name]


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
    """A layer's experts, from an architecture's file. ``num_active``: default if config.json does not say.

    Raises:
        CheckpointError: A token would go through more experts than there are.
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
    """Every layer has the window that ``sliding_window`` states; null means none."""
    window = sliding_window(raw)
    return (window,) * positive(raw, "num_hidden_layers")


def optional_window(raw: Mapping[str, Any]) -> Windows:
    """Every layer has the window that ``sliding_window`` states; none if it is null or missing."""
    window = None if raw.get("sliding_window") is None else positive(raw, "sliding_window")
    return (window,) * positive(raw, "num_hidden_layers")


def sliding_window(raw: Mapping[str, Any]) -> int | None:
    """The stated window. null means none, but a missing key means transformers' default."""
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    return positive(raw, "sliding_window", default=DEFAULT_SLIDING_WINDOW)


def windows_of_layers(raw: Mapping[str, Any]) -> Windows:
    """If ``use_sliding_window`` is on, layers selected by ``layer_types`` or ``max_window_layers`` have the window."""
    num_layers, window = positive(raw, "num_hidden_layers"), sliding_window(raw)
    if window is None or not raw.get("use_sliding_window", False):
        return full_attention(raw)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return windows_by_type(layer_types, num_layers=num_layers, window=window)


def windows_by_type(layer_types: Sequence[str], *, num_layers: int, window: int | None) -> Windows:
    """The window of each layer, by its entry in ``layer_types``.

    Raises:
        CheckpointError: An unknown type, or not one for each layer.
    """
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    unknown = set(layer_types) - known.keys()
    if unknown or len(layer_types) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types must name one of {', '.join(known)} for each of {num_layers} layers"
        )
    return tuple(known[layer_type] for layer_type in layer_types)


def positive(raw: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """A positive integer from config.json.

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


def positive_number(raw: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A positive number from config.json, not necessarily whole.

    Raises:
        CheckpointError: It is missing and has no default, or is no positive number.
    """
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def read_cpu_dtype(raw: Mapping[str, Any]) -> str:
    """The dtype that a checkpoint wants to be computed in on a CPU.

    Raises:
        CheckpointError: Not one of ``SUPPORTED_DTYPES``.
    """
    return read_dtype({"dtype": raw.get("baton_cpu_dtype") or read_dtype(raw)})


def names_dtype(raw: Mapping[str, Any]) -> bool:
    """True if a config.json states the dtype of the weights."""
    return bool(raw.get("dtype") or raw.get("torch_dtype"))


def read_dtype(raw: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's weights.

    Raises:
        CheckpointError: Not one of ``SUPPORTED_DTYPES``.
    """
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        supported = ", ".join(SUPPORTED_DTYPES)
        raise CheckpointError(f"config.json: dtype {name} is not supported; supported: {supported}")
    return name


def _max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Linear scaling multiplies the stated length, yarn multiplies the original length, llama3 states the result."""
    if rope.rope_type is RopeType.LINEAR:
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type is RopeType.YARN:
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings
