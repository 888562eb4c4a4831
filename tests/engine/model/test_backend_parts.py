"""Parts of transformers' models are replaced by ours if they compute the same, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from engine.layers.layer_spec import Activation, NormKind
from engine.model.transformers_backend.model import TransformersModel
from engine.model.transformers_backend.parts.agreement import NUM_ROWS, ROW_SCALES, TOLERANCE, agree
from engine.model.transformers_backend.parts.mlps import OwnMLP, find_mlp
from engine.model.transformers_backend.parts.norms import OwnNorm, find_norm
from tests.support.engine.checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint, oracle_logits
from tests.support.engine.model_harness import ModelHarness

NUM_TOKENS = 70
HIDDEN_SIZE = 24


def _tokens() -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return [int(token) for token in torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)]


def _logits(path: Path, *, dtype: str = "float32", model_impl: Any = "transformers") -> torch.Tensor:
    harness = ModelHarness(path, dtype=dtype, model_impl=model_impl)
    return harness.run((harness.start(_tokens()), NUM_TOKENS))[0]


def _model(path: Path) -> TransformersModel:
    model = ModelHarness(path, model_impl="transformers").model
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "olmo3", "smollm3", "starcoder2"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_ours_in_every_part_has_the_bits_of_the_native_model(tmp_path: Path, family: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, family)
    assert _model(path).replaced.chain is not None
    assert torch.equal(_logits(path, dtype=dtype), _logits(path, dtype=dtype, model_impl="native"))


@pytest.mark.parametrize(
    ("family", "ours", "theirs"),
    [
        ("granite", {"model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp"}, set()),  # scaled embeddings
        ("olmoe", {"model.layers.0", "model.layers.0.self_attn"}, {"model.layers.0.mlp"}),  # experts
        ("phi", {"model.layers.0.self_attn", "model.layers.0.mlp"}, {"model.layers.0"}),  # both parts side by side
        ("olmo", {"model.layers.0.mlp"}, {"model.layers.0.self_attn", "model.layers.0"}),  # clipped projections
        ("cohere", {"model.layers.0.mlp"}, {"model.layers.0.self_attn"}),  # other coordinates rotate together
        ("glm", {"model.layers.0.mlp", "model.layers.0.input_layernorm"}, {"model.layers.0.self_attn"}),
        ("arcee", {"model.layers.0", "model.layers.0.self_attn"}, {"model.layers.0.mlp"}),  # another activation
    ],
)
def test_parts_that_we_have_are_ours_beside_others(
    tmp_path: Path, family: str, ours: set[str], theirs: set[str]
) -> None:
    names = _model(make_checkpoint(tmp_path, family)).replaced.names
    assert ours <= names
    assert not theirs & names


def _late_queries(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention that says the same as Llama's until late in the context."""

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        late = kwargs["position_ids"][..., None] > 60
        return forward(self, torch.where(late, 2 * hidden_states, hidden_states), *args, **kwargs)

    return changed


def _bounded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention whose input is cut off where it is larger than any that norms make."""

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, hidden_states.clamp(-500, 500), *args, **kwargs)

    return changed


def _gated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention whose result is changed behind the last product."""

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result, weights = forward(self, hidden_states, *args, **kwargs)
        return result * torch.sigmoid(hidden_states), weights

    return changed


def _scaled_in_place(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention that writes to what it is given back before its last product."""

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = self.o_proj.register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(0.5),))
        try:
            return forward(self, *args, **kwargs)
        finally:
            handle.remove()

    return changed


@pytest.mark.parametrize("change", [_late_queries, _bounded, _gated, _scaled_in_place])
def test_attention_that_differs_somewhere_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, "llama")
    plain = oracle_logits(load_oracle(path), _tokens())
    attention = modeling_llama.LlamaAttention
    monkeypatch.setattr(attention, "forward", change(attention.forward))
    expected = oracle_logits(load_oracle(path), _tokens())
    names = _model(path).replaced.names
    assert "model.layers.0.self_attn" not in names
    assert "model.layers.0.mlp" in names
    allowed = 2e-4 * expected.abs().max()
    assert (_logits(path) - expected).abs().max() < allowed
    assert change is _bounded or (plain - expected).abs().max() > allowed


def test_layer_that_adds_more_than_its_parts_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "llama")
    forward = modeling_llama.LlamaDecoderLayer.forward

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = forward(self, hidden_states, *args, **kwargs)
        return result + 0.01 * hidden_states

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", changed)
    expected = oracle_logits(load_oracle(path), _tokens())
    replaced = _model(path).replaced
    assert replaced.chain is None
    assert "model.layers.0" not in replaced.names
    assert "model.layers.0.self_attn" in replaced.names
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_model_that_does_something_between_its_layers_keeps_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's input is not the tensor that the one before returned; what it holds is not asked."""
    path = make_checkpoint(tmp_path, "llama")
    call = modeling_llama.LlamaDecoderLayer.__call__

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call(self, hidden_states.clone(), *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__call__", changed)
    replaced = _model(path).replaced
    assert replaced.chain is None
    assert "model.layers.0" in replaced.names
    expected = oracle_logits(load_oracle(path), _tokens())
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_layer_that_writes_to_what_it_is_given_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "llama")
    call = modeling_llama.LlamaDecoderLayer.__call__

    def changed(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call(self, hidden_states.mul_(0.5), *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__call__", changed)
    assert "model.layers.0" not in _model(path).replaced.names
    expected = oracle_logits(load_oracle(path), _tokens())
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_model_that_writes_between_its_layers_keeps_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's input is the tensor that the one before returned, with other numbers in it."""
    path = make_checkpoint(tmp_path, "llama")
    forward = modeling_llama.LlamaModel.forward

    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: (given[0].mul_(0.5), *given[1:])) for layer in self.layers
        ]
        try:
            return forward(self, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", changed)
    replaced = _model(path).replaced
    assert "model.layers.0" in replaced.names
    assert replaced.chain is None
    expected = oracle_logits(load_oracle(path), _tokens())
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_mlp_that_is_given_more_than_hidden_states_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called with hidden states alone, as parts are tried, it says what an MLP of ours says."""
    path = make_checkpoint(tmp_path, "llama")
    mlp_forward = modeling_llama.LlamaMLP.forward

    def with_scale(self: nn.Module, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = mlp_forward(self, x)
        return scale * result

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        made: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states), 0.5)
        return hidden_states + made

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", with_scale)
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    expected = oracle_logits(load_oracle(path), _tokens())
    names = _model(path).replaced.names
    assert "model.layers.0.self_attn" in names
    assert not {"model.layers.0", "model.layers.0.mlp"} & names
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_model_that_cannot_be_tried_is_served_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "llama")
    expected = oracle_logits(load_oracle(path), _tokens())

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("its code")

    monkeypatch.setattr("engine.model.transformers_backend.parts.replacement.find_attention", fail)
    assert not _model(path).replaced.names
    assert "no part of the model is replaced" in caplog.text
    assert (_logits(path) - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_context_of_few_tokens_is_tried_within_its_bounds(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    expected = oracle_logits(load_oracle(path), _tokens()[:4])
    harness = ModelHarness(path, max_model_len=4, model_impl="transformers")
    (logits,) = harness.run((harness.start(_tokens()[:4]), 4))
    assert (logits - expected).abs().max() < 2e-4 * expected.abs().max()


class _Norm(nn.Module):
    """A norm by the root mean square, with a difference."""

    def __init__(self, weight: torch.Tensor, *, eps: float = 1e-5, change: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self._change = eps, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._change(x, self.weight, self.eps)


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


NORMS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "plain": (_plain_norm, True),
    "offset": (lambda x, weight, eps: _plain_norm(x, 1 + weight, eps), True),
    "other eps": (lambda x, weight, eps: _plain_norm(x, weight, 3 * eps), False),
    "mean taken away": (lambda x, weight, eps: _plain_norm(x - x.mean(-1, keepdim=True), weight, eps), False),
    "bounded": (lambda x, weight, eps: _plain_norm(x.clamp(-100, 100), weight, eps), False),
}


@pytest.mark.parametrize("which", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_ours_only_if_it_says_the_same(which: str, dtype: torch.dtype) -> None:
    change, is_ours = NORMS[which]
    module = _Norm(torch.linspace(-1, 2, HIDDEN_SIZE).to(dtype), change=change)
    found = find_norm(module)
    assert (found is not None) is is_ours
    if found is not None:
        assert found.spec.kind is NormKind.RMS
        x = torch.randn(3, 5, HIDDEN_SIZE).to(dtype)
        expected = module(x.float())
        assert torch.allclose(
            OwnNorm(found)(x).float(), expected, rtol=1e-2, atol=1e-2 if dtype != x.float().dtype else 1e-5
        )


class _MLP(nn.Module):
    def __init__(self, inner_size: int, activate: Callable[..., torch.Tensor], *, is_gated: bool, first: bool) -> None:
        super().__init__()
        self.a = nn.Linear(HIDDEN_SIZE, inner_size, bias=is_gated)
        self.b = nn.Linear(HIDDEN_SIZE, inner_size) if is_gated else None
        self.out = nn.Linear(inner_size, HIDDEN_SIZE)
        self._activate, self._first = activate, first
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.b is None:
            result: torch.Tensor = self.out(self._activate(self.a(x)))
            return result
        gate, up = (self.a, self.b) if self._first else (self.b, self.a)
        gated: torch.Tensor = self.out(self._activate(gate(x)) * up(x))
        return gated


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("inner_size", [40, HIDDEN_SIZE])
@pytest.mark.parametrize(
    ("activate", "activation"),
    [
        (F.silu, Activation.SILU),
        (F.gelu, Activation.GELU),
        (lambda x: F.gelu(x, approximate="tanh"), Activation.GELU_TANH),
        (lambda x: F.relu(x).square(), None),
        (lambda x: x * torch.sigmoid(1.702 * x), None),
        (lambda x: F.silu(x).clamp(max=50), None),
    ],
)
def test_mlp_is_ours_only_if_it_says_the_same(
    activate: Callable[..., torch.Tensor], activation: Activation | None, inner_size: int, first: bool, is_gated: bool
) -> None:
    torch.manual_seed(1)
    module = _MLP(inner_size, activate, is_gated=is_gated, first=first)
    x = torch.randn(2, 3, HIDDEN_SIZE)
    expected = module(x)
    found = find_mlp(module)
    assert (None if found is None else found.activation) is activation
    if found is not None:
        assert found.is_gated is is_gated
        assert torch.allclose(OwnMLP(found)(x), expected, atol=1e-5)


def test_rows_agree_each_by_its_own_size() -> None:
    rows = torch.ones(NUM_ROWS, 4) * torch.tensor(ROW_SCALES)[:, None]
    assert agree(rows, rows * (1 + TOLERANCE / 2))
    off = rows.clone()
    off[0, 1] *= 1 + 3 * TOLERANCE
    assert not agree(off, rows)
    assert not agree(rows, None)
    assert not agree(rows, rows[:1])
