"""Mixtures of experts: a token's result follows their definition, with the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from engine.layers.activation import ActivationLayer
from engine.layers.experts.mixture import Mixture
from engine.layers.experts.products import ExpertsPacker, GroupedProducts, has_grouped_product, pack_experts
from engine.layers.experts.spec import ExpertNames, ExpertsSpec
from engine.layers.layer_spec import Activation, GateClamp
from engine.runner.device import DTYPES
from tests.support.attention.graph_trace import GraphTrace

CPU = torch.device("cpu")
HIDDEN_SIZE, INNER_SIZE = 64, 32
TOLERANCES = {"float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}
SPLIT = ExpertNames(router="gate", gate_up=("experts.{}.w1", "experts.{}.w3"), down="experts.{}.w2")
FUSED = ExpertNames(router="router", gate_up=("experts.gate_up",), down="experts.down")


def _spec(names: ExpertNames = SPLIT, *, inner_size: int = INNER_SIZE, is_normalized: bool = True) -> ExpertsSpec:
    return ExpertsSpec(
        num_experts=6,
        num_active=2,
        inner_size=inner_size,
        is_normalized=is_normalized,
        names=names,
        clamp=GateClamp(alpha=1.702, limit=2.0) if names is FUSED else None,
    )


def _mixture(
    spec: ExpertsSpec, hidden_size: int = HIDDEN_SIZE, *, packer: ExpertsPacker = pack_experts
) -> tuple[Mixture, dict[str, torch.Tensor]]:
    """A random one, and the tensors that it was loaded with, in float64."""
    mixture = Mixture(
        spec,
        hidden_size,
        activation=Activation.SILU,
        dtype=torch.float32,
        device=CPU,
        fused_ops=None,
        packer=packer,
    )
    generator = torch.Generator().manual_seed(1)
    for place in mixture.targets().values():
        place.copy_(torch.randn(place.shape, generator=generator) * hidden_size**-0.5)
    loaded = {name: place.double() for name, place in mixture.targets().items()}
    mixture.pack()
    return mixture, loaded


def _bounded_gate(dtype: torch.dtype) -> ActivationLayer:
    clamp = GateClamp(alpha=1.702, limit=7.0)
    return ActivationLayer(Activation.SILU, is_gated=True, clamp=clamp, dtype=dtype, device=CPU)


def _tokens(count: int, hidden_size: int = HIDDEN_SIZE) -> torch.Tensor:
    return 2 * torch.randn(count, hidden_size, generator=torch.Generator().manual_seed(2))


def _of_one_expert(spec: ExpertsSpec, loaded: dict[str, torch.Tensor], expert: int, x: torch.Tensor) -> torch.Tensor:
    if spec.clamp is None:
        gate, up = (x @ loaded[f"experts.{expert}.{name}.weight"].T for name in ("w1", "w3"))
        return (F.silu(gate) * up) @ loaded[f"experts.{expert}.w2.weight"].T
    both = x @ loaded["experts.gate_up"][expert] + loaded["experts.gate_up_bias"][expert]
    gate, up = both[::2].clamp(max=spec.clamp.limit), both[1::2].clamp(-spec.clamp.limit, spec.clamp.limit)
    inner = gate * torch.sigmoid(spec.clamp.alpha * gate) * (up + 1)
    return inner @ loaded["experts.down"][expert] + loaded["experts.down_bias"][expert]


@pytest.mark.parametrize("packer", (pack_experts, GroupedProducts))
@pytest.mark.parametrize("names", (SPLIT, FUSED))
@pytest.mark.parametrize("is_normalized", (True, False))
def test_a_token_gets_the_weighted_sum_of_its_experts(
    names: ExpertNames, is_normalized: bool, packer: ExpertsPacker
) -> None:
    spec = _spec(names, is_normalized=is_normalized)
    mixture, loaded = _mixture(spec, packer=packer)
    x = _tokens(40)

    found = mixture(x)

    scores = x.double() @ loaded[f"{names.router}.weight"].T
    if names is FUSED:
        scores = scores + loaded["router.bias"]
    for token, shares in enumerate(scores.softmax(dim=1)):
        weights, experts = shares.topk(spec.num_active)
        weights = weights / weights.sum() if is_normalized else weights
        parts = [_of_one_expert(spec, loaded, int(expert), x[token].double()) for expert in experts]
        expected = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(found[token].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("hidden_size", "inner_size"), ((64, 32), (256, 2048)))
def test_a_token_has_the_same_bits_in_every_batch(hidden_size: int, inner_size: int) -> None:
    """With 2,048 numbers to sum up, oneDNN's product of one row has other bits than the same row among others."""
    mixture, _ = _mixture(_spec(inner_size=inner_size), hidden_size)
    x = _tokens(300, hidden_size)
    whole = mixture(x)

    for start, end in ((0, 1), (7, 8), (8, 9), (1, 3), (40, 45), (90, 122), (0, 96), (96, 300)):
        assert torch.equal(mixture(x[start:end]), whole[start:end])


def test_experts_that_nobody_goes_through_cost_nothing_and_change_nothing() -> None:
    weight, bias = torch.randn(5, 32, 64), torch.randn(5, 32)
    rows, experts = torch.randn(7, 64), torch.tensor([1, 1, 1, 1, 3, 3, 3])

    found = [products(rows, experts) for products in (pack_experts(weight, bias), GroupedProducts(weight, bias))]

    expected = torch.cat((rows[:4] @ weight[1].T + bias[1], rows[4:] @ weight[3].T + bias[3]))
    for result in found:
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_grouped_product_is_looked_for_by_what_it_computes() -> None:
    assert has_grouped_product(CPU, torch.bfloat16)


def test_grouped_products_are_the_same_operators_whatever_the_router_says() -> None:
    """So that a decode step can be captured as a graph."""
    mixture, _ = _mixture(_spec(), packer=GroupedProducts)
    x, traces = _tokens(8), []
    for of_step in (x.clone(), -x):
        x.copy_(of_step)
        with GraphTrace() as trace:
            mixture(x)
        traces.append(trace.steps)

    assert traces[0] == traces[1]
    assert not any("local_scalar" in name for name, _ in traces[0]), "the host would wait for the device"


@pytest.mark.parametrize("dtype", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(num_tokens=st.integers(1, 40), size=st.integers(1, 2500), scale=st.sampled_from((1.0, 30.0)))
def test_the_bounded_gate(dtype: str, num_tokens: int, size: int, scale: float) -> None:
    gate_up = (torch.randn(num_tokens, 2 * size) * scale).to(DTYPES[dtype])
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)

    result = _bounded_gate(DTYPES[dtype])(gate_up)

    torch.testing.assert_close(result.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_what_is_no_number_stays_in_its_row() -> None:
    gate = _bounded_gate(torch.float32)
    hidden = torch.randn(4, 70, generator=torch.Generator().manual_seed(3))
    hidden[1, 5], hidden[2, 34] = torch.nan, torch.nan  # in the vector part of a row, and behind it

    assert gate(hidden).isnan().any(dim=1).tolist() == [False, True, True, False]
