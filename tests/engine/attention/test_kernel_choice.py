"""The signatures of FlashAttention in different versions of torch, and what happens if no kernel is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.attention.flash import FLASH_FORMS, FlashVarlen
from engine.attention.kernel_choice import CUDAKernels, KernelCandidates, choose_kernels
from engine.attention.varlen import VarlenKernel, VarlenShape
from engine.contract.errors import ConfigError
from engine.layers.attention_spec import AttentionSpec
from engine.layers.rope_config import RopeConfig
from kv_transfer.layout import KVLayout, group_layers
from tests.support.attention.varlen_double import VarlenDouble

Operator = Callable[..., tuple[torch.Tensor, ...]]
FLASH_2, FLASH_2_OF_TORCH_2_12, FLASH_3 = (
    FlashVarlen(num_splits=1, names_key_starts=True),
    FlashVarlen(num_splits=None, names_key_starts=True),
    FlashVarlen(num_splits=1, names_key_starts=False),
)


def _flash(*, version: int, takes_num_splits: bool = True) -> Operator:
    """An operator with torch's signature and the rules of a version of FlashAttention."""
    double = VarlenDouble(block_multiple=256 if version == 2 else 1)

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
        window_size_left: int,
        window_size_right: int,
        seqused_k: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        num_splits: int | None = None,
        **others: object,
    ) -> tuple[torch.Tensor, ...]:
        if num_splits is not None and not takes_num_splits:
            raise RuntimeError("num_splits requires FA3")
        if version == 2 and cum_seq_k is None:
            raise RuntimeError("cumulative_sequence_length_q and cumulative_sequence_length_k must be both set")
        if version == 3 and block_table is not None and cum_seq_k is not None:
            raise RuntimeError("If cu_seqlens_k is passed in, then page table is not supported")
        assert (window_size_right, is_causal, dropout_p) == (0, window_size_left < 0, 0.0)
        ends = seqused_k if cum_seq_k is None else cum_seq_k
        assert ends is not None
        if seqused_k is not None and cum_seq_k is not None:
            assert torch.equal(cum_seq_k.diff(), seqused_k)
        shape = VarlenShape(
            query_starts=cum_seq_q,
            seq_lens=seqused_k if seqused_k is not None else ends.diff(),
            key_starts=ends,
            block_tables=block_table,
            max_query_len=max_q,
            max_seq_len=max_k,
        )
        window = window_size_left + 1 if window_size_left >= 0 else None
        output = double(query, key, value, shape, AttentionSpec(scale=scale, rope=RopeConfig(), window=window))
        nothing = query.new_empty(0)
        return output, nothing, nothing, nothing, nothing

    return forward


@pytest.fixture
def install() -> Iterator[Callable[[Operator], None]]:
    """Replaces FlashAttention by an operator on the CPU, where torch does not have it."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        yield lambda operator: library.impl("_flash_attention_forward", operator, "CPU")


def _layout(block_size: int) -> KVLayout:
    return KVLayout(
        model_hash="",
        groups=group_layers([None] * 1),
        num_kv_heads=2,
        head_dim=16,
        block_size=block_size,
        dtype="bfloat16",
        bytes_per_element=2,
    )


def _choose(block_size: int, *, decode: tuple[VarlenKernel, ...] = ()) -> CUDAKernels:
    candidates = KernelCandidates(packed=FLASH_FORMS, paged=FLASH_FORMS, decode=decode)
    return choose_kernels(_layout(block_size), torch.bfloat16, torch.device("cpu"), candidates)


@pytest.mark.parametrize(
    ("operator", "block_size", "packed", "paged"),
    [
        (_flash(version=2), 256, FLASH_2, FLASH_2),
        (_flash(version=2), 16, FLASH_2, None),
        (_flash(version=2, takes_num_splits=False), 256, FLASH_2_OF_TORCH_2_12, FLASH_2_OF_TORCH_2_12),
        (_flash(version=3), 16, FLASH_2, FLASH_3),
        (_flash(version=3), 3, FLASH_2, FLASH_3),
    ],
)
def test_each_version_gets_the_form_that_it_takes(
    install: Callable[[Operator], None],
    operator: Operator,
    block_size: int,
    packed: FlashVarlen,
    paged: FlashVarlen | None,
) -> None:
    install(operator)
    assert _choose(block_size) == CUDAKernels(packed=packed, paged=paged, decode=paged)


def test_decoding_has_a_kernel_of_its_own_whatever_the_other_takes(
    install: Callable[[Operator], None],
) -> None:
    install(_flash(version=2))
    decode = VarlenDouble(block_multiple=1)
    assert _choose(16, decode=(decode,)) == CUDAKernels(packed=FLASH_2, paged=None, decode=decode)
    assert _choose(256, decode=(decode,)) == CUDAKernels(packed=FLASH_2, paged=FLASH_2, decode=decode)


def test_a_kernel_that_computes_something_else_is_not_used(install: Callable[[Operator], None]) -> None:
    right = _flash(version=2)

    def forgetful(*arguments: torch.Tensor, **options: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Takes a block table and does not look at it."""
        if (table := options.get("block_table")) is not None:
            options["block_table"] = table.sort(dim=1).values
        return right(*arguments, **options)

    install(forgetful)
    assert _choose(256) == CUDAKernels(packed=FLASH_2, paged=None, decode=None)


def test_a_gpu_on_which_no_kernel_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no attention kernel of torch .* in bfloat16 with heads of 16"):
        _choose(16)
