"""Every attention backend agrees with the reference on whatever batch there can be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.attention import cuda
from engine.attention.backend import AttentionBackend, AttentionBatch
from engine.attention.cpu import ChooseKernel, CPUAttention
from engine.attention.cuda import CUDAAttention
from engine.attention.paged_runs import RunKernel, choose_run_kernel
from engine.attention.reference import ReferenceAttention
from engine.device.kv_cache import KVCache
from engine.kernels.lanes import HAS_BFLOAT16_UNIT
from kv_transfer.cache_groups import ABSENT_BLOCK
from tests.support.attention.attention_cases import AttentionCase, AttentionInputs, attention_cases, make_inputs
from tests.support.attention.varlen_double import DecodeDouble, VarlenDouble, kernels_over

TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def _attend(backend: AttentionBackend, inputs: AttentionInputs, case: AttentionCase) -> torch.Tensor:
    with torch.inference_mode():
        layer = case.attention_layer
        plan = backend.plan(inputs.batch)[layer.group]
        return plan.attend(layer, inputs.query, inputs.key, inputs.value).double()


def _written(cache: KVCache) -> torch.Tensor:
    return cache.blocks.nan_to_num(nan=-1234.0)


def _no_kernel(cache: KVCache) -> None:
    del cache


def _kernel_of_numbers(cache: KVCache) -> RunKernel:
    return RunKernel(cache, has_pairs=False)


def _kernel_of_pairs(cache: KVCache) -> RunKernel:
    """In vector registers, where the chosen kernel may multiply tiles."""
    is_paired = cache.layout.dtype == "bfloat16" and HAS_BFLOAT16_UNIT and cache.layout.head_dim % 2 == 0
    return RunKernel(cache, has_pairs=is_paired)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("choose_kernel", [choose_run_kernel, _kernel_of_pairs, _kernel_of_numbers, _no_kernel])
@settings(max_examples=20, deadline=None)
@given(case=attention_cases(has_latents=True))
def test_cpu_backend_agrees_with_the_reference(choose_kernel: ChooseKernel, dtype: str, case: AttentionCase) -> None:
    inputs = make_inputs(case, dtype, absent_block=ABSENT_BLOCK)
    caches = inputs.new_cache(), inputs.new_cache()
    expected = _attend(ReferenceAttention(caches[0]), inputs, case)
    result = _attend(CPUAttention(caches[1], choose_kernel=choose_kernel), inputs, case)
    torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(_written(caches[0]), _written(caches[1]))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("choose_kernel", [choose_run_kernel, _kernel_of_pairs, _kernel_of_numbers])
def test_compiled_runs_say_the_same_bits_however_a_prompt_is_cut(choose_kernel: ChooseKernel, dtype: str) -> None:
    case = AttentionCase(
        lengths=((0, 400),), num_kv_heads=2, group=3, head_dim=64, block_size=16, window=None, layer=1, seed=7
    )
    whole = make_inputs(case, dtype)
    if choose_kernel(cache := whole.new_cache()) is None:
        return  # torch's SDPA makes no such promise
    expected = _attend(CPUAttention(cache, choose_kernel=choose_kernel), whole, case)
    cut = whole.new_cache()
    backend = CPUAttention(cut, choose_kernel=choose_kernel)
    for start, end in ((0, 5), (5, 140), (140, 147), (147, 400)):
        part = dataclasses.replace(
            whole,
            batch=AttentionBatch(
                query_starts=np.array([0, end - start], dtype=np.int32),
                first_positions=np.array([start], dtype=np.int32),
                block_tables=whole.batch.block_tables,
                slots=whole.batch.slots[:, start:end],
            ),
            query=whole.query[start:end],
            key=whole.key[start:end],
            value=whole.value[start:end],
        )
        assert torch.equal(_attend(backend, part, case), expected[start:end])


@pytest.mark.parametrize("takes", ["all blocks", "blocks of decode rows", "all blocks by two", "no blocks"])
@settings(max_examples=12, deadline=None)
@given(case=attention_cases(is_plain=True))
def test_cuda_backend_feeds_its_kernels_the_right_keys(takes: str, case: AttentionCase) -> None:
    inputs = make_inputs(case, "float32")
    caches = inputs.new_cache(), inputs.new_cache()
    expected = _attend(ReferenceAttention(caches[0]), inputs, case)
    anything, multiples, of_rows = VarlenDouble(block_multiple=1), VarlenDouble(block_multiple=256), DecodeDouble()
    takes_all = takes.startswith("all blocks")
    has_own = takes in ("blocks of decode rows", "all blocks by two")
    kernels = kernels_over(anything if takes_all else multiples, caches[1], decode=of_rows if has_own else None)
    of_rows.num_rows.clear()
    result = _attend(CUDAAttention(caches[1], kernels=kernels), inputs, case)
    assert (kernels.paged is not None, kernels.decode is not None) == (takes_all, takes != "no blocks")
    num_decoding = int((inputs.batch.query_lens == 1).sum())
    assert of_rows.num_rows == ([num_decoding] if has_own and num_decoding else [])
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(_written(caches[0]), _written(caches[1]))


def test_cuda_backend_gathers_a_bounded_number_of_keys_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_GATHERED_TOKENS", 130)
    inputs = make_inputs(CASE, "float32")
    caches = inputs.new_cache(), inputs.new_cache()
    expected = _attend(ReferenceAttention(caches[0]), inputs, CASE)
    double = VarlenDouble(block_multiple=256)
    kernels = kernels_over(double, caches[1])
    double.num_keys.clear()
    result = _attend(CUDAAttention(caches[1], kernels=kernels), inputs, CASE)
    torch.testing.assert_close(result, expected, atol=2e-6, rtol=2e-6)
    assert double.num_keys == [41 + 30, 334, 103, 77]
    assert CUDAAttention(caches[1], kernels=kernels).gathered_bytes(1000) == 1000 * 2 * 2 * 16 * 4


CASE = AttentionCase(
    lengths=((40, 1), (0, 30), (333, 1), (100, 3), (17, 60)),
    num_kv_heads=2,
    group=3,
    head_dim=16,
    block_size=16,
    window=None,
    layer=1,
    seed=5,
)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_cpu_backend_gives_the_same_bits_on_any_number_of_threads(num_threads: int) -> None:
    inputs = make_inputs(dataclasses.replace(CASE, lengths=((40, 1), (0, 1), (333, 2), (100, 3))), "float32")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = _attend(CPUAttention(inputs.new_cache()), inputs, CASE)
        torch.set_num_threads(num_threads)
        result = _attend(CPUAttention(inputs.new_cache()), inputs, CASE)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, expected)


def test_a_decode_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    case = dataclasses.replace(CASE, lengths=((40, 1), (333, 1), (5, 1), (100, 1)))
    inputs = make_inputs(case, "float32")
    together = _attend(CPUAttention(inputs.new_cache()), inputs, case)
    batch = inputs.batch
    alone = dataclasses.replace(
        inputs,
        batch=dataclasses.replace(
            batch,
            query_starts=batch.query_starts[:2],
            first_positions=batch.first_positions[1:2],
            block_tables=batch.block_tables[:, 1:2],
            slots=batch.slots[:, 1:2],
        ),
        query=inputs.query[1:2],
        key=inputs.key[1:2],
        value=inputs.value[1:2],
    )
    assert torch.equal(_attend(CPUAttention(inputs.new_cache()), alone, case)[0], together[1])


def test_damaged_keys_of_one_request_do_not_reach_another() -> None:
    case = dataclasses.replace(CASE, lengths=((40, 1), (41, 1)))
    inputs = make_inputs(case, "float32")
    expected = _attend(CPUAttention(inputs.new_cache()), inputs, case)
    damaged = inputs.new_cache()
    damaged.blocks[int(inputs.batch.block_tables[0, 0, 1])] = torch.nan
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        result = _attend(CPUAttention(damaged), inputs, case)
    finally:
        torch.set_num_threads(before)
    assert result[0].isnan().all()
    assert torch.equal(result[1], expected[1])


def test_cpu_plan_of_a_reused_batch_sees_what_is_written_there_now() -> None:
    case = dataclasses.replace(CASE, lengths=((40, 1), (333, 1)))
    inputs = make_inputs(case, "float32")
    expected = _attend(ReferenceAttention(inputs.new_cache()), inputs, case)
    other = dataclasses.replace(
        inputs,
        batch=dataclasses.replace(
            inputs.batch,
            first_positions=inputs.batch.first_positions.copy(),
            block_tables=inputs.batch.block_tables.copy(),
            slots=inputs.batch.slots.copy(),
        ),
    )
    backend, reused = CPUAttention(inputs.new_cache()), dataclasses.replace(inputs.batch, is_reused=True)

    first = _attend(backend, dataclasses.replace(inputs, batch=reused), case)
    for array in (reused.first_positions, reused.block_tables[0], reused.slots[0]):
        array[:] = array[::-1].copy()
    turned = dataclasses.replace(
        inputs, batch=reused, query=inputs.query.flip(0), key=inputs.key.flip(0), value=inputs.value.flip(0)
    )
    second = _attend(backend, turned, case)
    between = _attend(backend, other, case)
    third = _attend(backend, turned, case)

    torch.testing.assert_close(first, expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(second, first.flip(0))
    assert torch.equal(between, first)
    assert torch.equal(third, second)
