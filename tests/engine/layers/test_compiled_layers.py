"""The compiled passes between matrix products compute the same as torch's operators."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from engine.attention.cpu import CPUAttention
from engine.attention.reference import ReferenceAttention
from engine.layers.activation import ActivationLayer
from engine.layers.attention_layer import HeadTransform
from engine.layers.embedding import Embedding
from engine.layers.fused_ops import activate_plain
from engine.layers.layer_spec import Activation, NormKind, NormSpec
from engine.layers.norm import LayerNorm, ResidualSum, RMSNorm
from engine.layers.rope_config import RopeConfig
from engine.layers.rotary import RotaryEmbedding
from engine.runner.device import DTYPES
from tests.support.attention.attention_cases import AttentionCase, attention_cases, make_inputs

CPU = torch.device("cpu")
TOLERANCES = {"float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}


def _norm(
    size: int, dtype: torch.dtype, generator: torch.Generator, *, offset: float = 0.0, delta_scale: float = 1.0
) -> RMSNorm:
    norm = RMSNorm(size, spec=NormSpec(eps=1e-5, offset=offset), dtype=dtype, device=CPU, delta_scale=delta_scale)
    norm.weight.copy_(torch.randn(size, generator=generator))
    return norm


def _gate(dtype: torch.dtype) -> ActivationLayer:
    return ActivationLayer(Activation.SILU, is_gated=True, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 70), size=st.integers(1, 900), has_delta=st.booleans(), seed=st.integers(0, 1 << 20))
def test_the_sum_and_its_norm(dtype: str, num_tokens: int, size: int, has_delta: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, size, generator=generator).to(DTYPES[dtype])
    delta = torch.randn(num_tokens, size, generator=generator).to(DTYPES[dtype]) if has_delta else None
    norm = _norm(size, DTYPES[dtype], generator)
    expected_sum = hidden if delta is None else hidden + delta
    expected = F.rms_norm(expected_sum.double(), (size,), norm.weight.double(), norm.spec.eps)
    result = norm.add_and_normalize(hidden, delta)
    assert torch.equal(hidden, expected_sum)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 30), size=st.integers(1, 300), offset=st.sampled_from((0.0, 1.0)))
def test_a_scaled_sum_and_a_norm_with_an_offset(dtype: str, num_tokens: int, size: int, offset: float) -> None:
    hidden, delta = torch.randn(2, num_tokens, size).to(DTYPES[dtype])
    norm = _norm(size, DTYPES[dtype], torch.Generator().manual_seed(size), offset=offset, delta_scale=0.3)
    expected_sum = hidden.double() + 0.3 * delta.double()
    weight = norm.weight.double() + offset
    result = norm.add_and_normalize(hidden, delta)
    tolerance = 2 * TOLERANCES[dtype]
    torch.testing.assert_close(hidden.double(), expected_sum, atol=tolerance, rtol=tolerance)
    expected = F.rms_norm(hidden.double(), (size,), weight, norm.spec.eps)
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_columns_are_normalised_where_they_are(dtype: str) -> None:
    whole = torch.randn(5, 90).to(DTYPES[dtype])
    norm = _norm(50, DTYPES[dtype], torch.Generator().manual_seed(1))
    expected = whole.clone()
    expected[:, 20:70] = norm.add_and_normalize(whole[:, 20:70].contiguous(), None)
    norm.normalize_in_place(whole[:, 20:70])
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("activation", Activation)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 40), size=st.integers(1, 2500), scale=st.sampled_from((1.0, 30.0)))
def test_the_gate(dtype: str, activation: Activation, num_tokens: int, size: int, scale: float) -> None:
    gate_up = (torch.randn(num_tokens, 2 * size) * scale).to(DTYPES[dtype])
    gate, up = gate_up.double().chunk(2, dim=-1)
    bent = activate_plain(gate, activation)
    result = ActivationLayer(activation, is_gated=True, dtype=DTYPES[dtype], device=CPU)(gate_up)
    torch.testing.assert_close(result.double(), bent * up, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_rows_that_a_product_reads_may_be_apart(
    monkeypatch: pytest.MonkeyPatch, dtype: str, num_tokens: int, *, is_gated: bool
) -> None:
    monkeypatch.setattr("engine.layers.panel_weight.suits_panels", lambda _: True)
    source = torch.randn(num_tokens, 4096 * (1 + is_gated)).to(DTYPES[dtype])
    close, apart = (
        ActivationLayer(Activation.GELU, is_gated=is_gated, feeds_product=feeds, dtype=DTYPES[dtype], device=CPU)
        for feeds in (False, True)
    )

    result = apart(source)

    assert result.is_contiguous() == (num_tokens == 1)
    assert torch.equal(result, close(source))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", [1, 24, 31, 1100])
@pytest.mark.parametrize(("activation", "approximate"), [(Activation.GELU_TANH, "tanh"), (Activation.GELU, "none")])
def test_an_activation_without_a_gate(dtype: str, size: int, activation: Activation, approximate: str) -> None:
    x = (torch.randn(20, size) * 4).to(DTYPES[dtype])
    result = ActivationLayer(activation, is_gated=False, dtype=DTYPES[dtype], device=CPU)(x)
    expected = F.gelu(x.double(), approximate=approximate)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_what_the_error_function_leaves_of_small_numbers_is_right_in_its_own_digits() -> None:
    x = torch.linspace(-8.0, 8.0, 20_003)
    expected = 0.5 * x.double() * torch.special.erfc(-x.double() * 0.5**0.5)
    for width in (20_000, 7):  # by registers, and one by one
        parts = torch.stack(list(x[: 20_003 // width * width].split(width)))
        result = ActivationLayer(Activation.GELU, is_gated=False, dtype=torch.float32, device=CPU)(parts).flatten()
        torch.testing.assert_close(result.double(), expected[: len(result)], atol=0.0, rtol=1e-5)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH])
def test_what_is_no_number_stays_visible(activation: Activation) -> None:
    x = torch.tensor([[0.0, torch.nan, torch.inf, -torch.inf, 1.0] * 20])
    result = ActivationLayer(activation, is_gated=False, dtype=torch.float32, device=CPU)(x)[0].view(20, 5)
    assert result[:, 1].isnan().all()
    assert (result[:, 2] == torch.inf).all()
    assert result[:, 0].eq(0.0).all()
    assert result[:, 4].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(case=attention_cases(), offset=st.sampled_from((None, 0.0, 1.0)), partial=st.sampled_from((1.0, 0.5, 0.0)))
def test_heads_are_normalised_rotated_and_stored(
    dtype: str, case: AttentionCase, offset: float | None, partial: float
) -> None:
    """Offset None: without norms. Partial 0: heads are not rotated."""
    inputs = make_inputs(case, dtype)
    generator = torch.Generator().manual_seed(case.seed)
    norms = [
        None if offset is None else _norm(case.head_dim, DTYPES[dtype], generator, offset=offset) for _ in range(2)
    ]
    transform = HeadTransform(
        num_heads=inputs.query.shape[1], num_kv_heads=case.num_kv_heads, query_norm=norms[0], key_norm=norms[1]
    )
    layer = dataclasses.replace(case.attention_layer, transform=transform)
    rotary = RotaryEmbedding(
        RopeConfig(theta=1e4, partial=partial) if partial else None,
        head_dim=case.head_dim,
        max_positions=case.max_num_tokens,
        dtype=DTYPES[dtype],
        device=CPU,
    )
    positions = np.concatenate([np.arange(history, history + new) for history, new in case.lengths])
    rotations = rotary.rotations(torch.from_numpy(positions))
    results, caches = [], [inputs.new_cache(), inputs.new_cache()]
    for backend in (ReferenceAttention(caches[0]), CPUAttention(caches[1])):
        heads = torch.cat((inputs.query, inputs.key, inputs.value), dim=1)
        with torch.inference_mode():
            plan = backend.plan(inputs.batch)[layer.group]
            results.append(plan.attend_heads(layer, heads, rotations).double())
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(caches[1].blocks, caches[0].blocks, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_token_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    norm = _norm(512, torch.float32, generator)
    gate = _gate(torch.float32)
    hidden = torch.randn(300, 512, generator=generator)
    alone = norm.add_and_normalize(hidden[7:8].clone(), None), gate(hidden[7:8])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        together = norm.add_and_normalize(hidden.clone(), None), gate(hidden)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone[0][0], together[0][7])
    assert torch.equal(alone[1][0], together[1][7])


def test_a_number_that_is_none_stays_in_its_row() -> None:
    generator = torch.Generator().manual_seed(3)
    norm, gate = _norm(64, torch.float32, generator), _gate(torch.float32)
    hidden = torch.randn(3, 64, generator=generator)
    hidden[1, 5] = torch.nan
    assert norm.add_and_normalize(hidden, None).isnan().any(dim=1).tolist() == [False, True, False]
    assert gate(hidden).isnan().any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 70), size=st.integers(1, 900), scale=st.sampled_from((1.0, 0.22)))
def test_a_sum_without_a_norm(dtype: str, num_tokens: int, size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    hidden, delta = (torch.randn(num_tokens, size, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    expected = (hidden.double() + scale * delta.double()).to(DTYPES[dtype])
    result = ResidualSum(scale, dtype=DTYPES[dtype], device=CPU)(hidden, delta)
    assert result is hidden
    torch.testing.assert_close(result, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    if scale == 1.0:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("scale", (1.0, 27.7))
@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 300), size=st.integers(1, 200))
def test_embeddings_are_torchs(dtype: str, scale: float, num_tokens: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    table = torch.randn(50, size, generator=generator).to(DTYPES[dtype])
    ids = torch.randint(50, (num_tokens,), generator=generator)
    expected = F.embedding(ids, table)
    if scale != 1.0:
        expected *= torch.tensor(scale, dtype=DTYPES[dtype])
    assert torch.equal(Embedding(table, scale=scale)(ids), expected)


def test_the_embedding_of_an_id_that_is_no_token_is_zero() -> None:
    rows = Embedding(torch.ones(50, 24))(torch.tensor([50, 3, -1, 1 << 40]))
    assert rows[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(
    num_tokens=st.integers(1, 70), size=st.integers(2, 900), has_delta=st.booleans(), shift=st.sampled_from((0.0, 5.0))
)
def test_layer_norms(dtype: str, num_tokens: int, size: int, has_delta: bool, shift: float) -> None:
    generator = torch.Generator().manual_seed(size)
    norm = LayerNorm(size, spec=NormSpec(kind=NormKind.LAYER, eps=1e-5), dtype=DTYPES[dtype], device=CPU)
    for weight in (norm.weight, norm.bias):
        weight.copy_(torch.randn(size, generator=generator))
    hidden, delta = (torch.randn(num_tokens, size, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    hidden += shift
    expected_sum = hidden + delta if has_delta else hidden.clone()
    weights = norm.weight.double(), norm.bias.double()
    expected = F.layer_norm(expected_sum.double(), (size,), *weights, norm.spec.eps)
    result = norm.add_and_normalize(hidden, delta if has_delta else None)
    assert torch.equal(hidden, expected_sum)
    torch.testing.assert_close(result.double(), expected, atol=4 * TOLERANCES[dtype], rtol=TOLERANCES[dtype])
