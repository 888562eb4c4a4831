"""The kernels that a GPU was found to run say what attention says, on whatever batch there can be."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.cuda import CUDAAttention
from engine.attention.flash import efficient_varlen
from engine.attention.kernel_choice import CUDAKernels, kernels_of
from engine.attention.paged_decode import paged_decode
from engine.attention.reference import ReferenceAttention
from engine.device.kv_cache import KVCache
from tests.support.attention.attention_cases import AttentionCase, AttentionInputs, make_inputs

pytestmark = pytest.mark.gpu

TOLERANCES = {"bfloat16": 2e-2, "float16": 4e-3}
MIXED = ((40, 1), (0, 30), (2333, 1), (100, 3), (17, 600), (0, 1), (5000, 1))
DECODING = ((40, 1), (0, 1), (255, 1), (256, 1), (6000, 1))
CASES = {
    f"{name}-{block_size}-{num_kv_heads}x{group}-{head_dim}-{window}": AttentionCase(
        lengths=lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        layer=1,
        seed=7,
        has_groups=window is not None,
    )
    for name, lengths in (("mixed", MIXED), ("decoding", DECODING))
    for block_size in (16, 256)
    for num_kv_heads, group, head_dim in ((8, 4, 128), (2, 7, 64), (1, 1, 80))
    for window in (None, 100)
}


def _on_gpu(inputs: AttentionInputs) -> AttentionInputs:
    return dataclasses.replace(
        inputs, blocks=inputs.blocks.cuda(), query=inputs.query.cuda(), key=inputs.key.cuda(), value=inputs.value.cuda()
    )


def _attend(backend: AttentionBackend, inputs: AttentionInputs, case: AttentionCase) -> torch.Tensor:
    with torch.inference_mode():
        layer = case.attention_layer
        plan = backend.plan(inputs.batch)[layer.group]
        return plan.attend(layer, inputs.query, inputs.key, inputs.value).double()


def _check(case: AttentionCase, dtype: str, kernels: CUDAKernels | None = None) -> None:
    inputs = _on_gpu(make_inputs(case, dtype))
    caches: tuple[KVCache, KVCache] = (inputs.new_cache(), inputs.new_cache())
    expected = _attend(ReferenceAttention(caches[0]), inputs, case)
    result = _attend(CUDAAttention(caches[1], kernels=kernels), inputs, case)
    torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(caches[0].blocks.nan_to_num(-1.0), caches[1].blocks.nan_to_num(-1.0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_chosen_kernels_agree_with_the_reference(dtype: str, name: str) -> None:
    _check(CASES[name], dtype)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("decoding")])
def test_triton_kernel_agrees_with_the_reference(name: str) -> None:
    _check(CASES[name], "bfloat16", CUDAKernels(packed=efficient_varlen, paged=None, decode=paged_decode))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("mixed")])
def test_gpus_without_flash_attention_agree_with_the_reference(name: str) -> None:
    _check(CASES[name], "float16", CUDAKernels(packed=efficient_varlen, paged=None, decode=paged_decode))


@pytest.mark.parametrize("block_size", (16, 256))
def test_decode_rows_are_never_gathered(block_size: int) -> None:
    case = dataclasses.replace(next(iter(CASES.values())), block_size=block_size)
    inputs = make_inputs(case, "bfloat16")
    assert kernels_of(inputs.layout, torch.bfloat16, torch.device("cuda", 0)).decode is not None
