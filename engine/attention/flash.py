"""torch's own attention kernels for GPUs, and the variants of the same call in different torch versions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from engine.attention.varlen import VarlenShape
from engine.layers.attention_spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashVarlen:
    """FlashAttention, through the operator below ``torch.nn.attention.varlen``.

    The function above that operator exists since torch 2.10. Its parameters differ between versions, and it adds
    another operator and a fill to every call.

    num_splits: 1, so that a request's numbers do not depend on the batch. Versions up to 2.11 have no such parameter,
        and in 2.12 FlashAttention 2 refuses it.
    names_key_starts: with paged keys FlashAttention 2 requires key starts, although it only reads ``seq_lens``;
        versions 3 and 4 refuse them.
    """

    num_splits: int | None = 1
    names_key_starts: bool = True

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``VarlenKernel``."""
        options: dict[str, Any] = {}
        if self.num_splits is not None and "num_splits" in _flash_parameters():
            options["num_splits"] = self.num_splits
        if shape.block_tables is not None:
            if "block_table" not in _flash_parameters():
                raise NotImplementedError(f"FlashAttention of torch {torch.__version__} does not support paged blocks")
            options |= {"seqused_k": shape.seq_lens, "block_table": shape.block_tables}
        has_key_starts = shape.block_tables is None or self.names_key_starts
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            shape.query_starts,
            shape.key_starts if has_key_starts else None,
            shape.max_query_len,
            shape.max_seq_len,
            0.0,
            spec.window is None,
            False,
            scale=spec.scale,
            # the kernel counts only positions left of a token, our window includes the token itself
            window_size_left=-1 if spec.window is None else spec.window - 1,
            window_size_right=0,
            **options,
        )[0]
        return output


FLASH_FORMS: Final = tuple(
    FlashVarlen(num_splits=num_splits, names_key_starts=names_key_starts)
    for names_key_starts in (True, False)
    for num_splits in (1, None)
)
"""The variants, in the order in which they are tried; the first one fits the torch version that we test with."""


@cache
def _flash_parameters() -> frozenset[str]:
    schema = torch.ops.aten._flash_attention_forward.default._schema
    return frozenset(argument.name for argument in schema.arguments)


_CAUSAL_FROM_THE_END: Final = 2
"""torch's constant for causal masks that are aligned at the last query and the last key."""


def efficient_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: VarlenShape, spec: AttentionSpec
) -> torch.Tensor:
    """Memory-efficient attention, for GPUs without FlashAttention (before compute capability 8.0)."""
    if shape.block_tables is not None:
        raise NotImplementedError("memory-efficient attention does not support paged blocks")
    group = query.shape[1] // key.shape[1]
    # it does not support grouped heads
    key, value = (tensor.repeat_interleave(group, dim=1)[None] for tensor in (key, value))
    output: torch.Tensor = torch.ops.aten._efficient_attention_forward(
        query[None],
        key,
        value,
        None,
        shape.query_starts,
        shape.key_starts,
        shape.max_query_len,
        shape.max_seq_len,
        0.0,
        _CAUSAL_FROM_THE_END,
        scale=spec.scale,
        window_size=spec.window,
    )[0]
    return output[0]
