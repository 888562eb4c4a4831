"""What an engine must know of a model, whichever code computes it. Does not import torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from engine.layers.attention_spec import AttentionSpec
from kv_transfer.layout import KEYS_AND_VALUES, KVCacheGroup, group_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(ABC):
    """Sizes of a decoder-only transformer, and how its layers attend. Caches, plans and backends are built from it.

    attention: how each layer attends.
    dtype: the checkpoint's, one of ``SUPPORTED_DTYPES``.
    cpu_dtype: the dtype that the checkpoint asks for on a CPU, by the key ``baton_cpu_dtype``. In 16 bits, the matrix
        library's rounding depends on the number of requests in a step, so near-ties may be decided either way. A model
        that is small enough avoids that by asking for float32.
    max_model_len: the longest sequence the rotary embedding was made for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    attention: tuple[AttentionSpec, ...]
    dtype: str
    cpu_dtype: str

    @property
    @abstractmethod
    def mlp_size(self) -> int:
        """Numbers that the widest MLP or mixture holds for one token at a time, besides its input and output."""

    @property
    def gpu_dtype(self) -> str:
        """The meaning of ``dtype: auto`` on a GPU, which only computes in 16 bits: as in vLLM, bfloat16 for float32."""
        return "bfloat16" if self.dtype == "float32" else self.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.attention)

    @property
    def num_kv_parts(self) -> int:
        """Parts of a token that each layer caches: see ``KVLayout``."""
        return KEYS_AND_VALUES

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Name prefixes of a checkpoint's tensors that are not loaded."""
        return ()

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """Its layers, grouped by whose KV shares blocks. A window that no sequence can exceed counts as none."""
        windows = [spec.window for spec in self.attention]
        return group_layers([None if window is None or window >= self.max_model_len else window for window in windows])

    def for_length(self, max_model_len: int) -> Self:
        """The shape for an engine with sequences up to this length (``RopeConfig.for_length``)."""
        specs = (
            spec if spec.rope is None else dataclasses.replace(spec, rope=spec.rope.for_length(max_model_len))
            for spec in self.attention
        )
        return dataclasses.replace(self, attention=tuple(specs))

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values, of one token."""
        return self.num_kv_heads * self.head_dim
