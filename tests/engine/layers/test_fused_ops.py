"""Fused operators that are compiled say what the operators say, and are not compiled for every batch size."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch.nn import functional as F

from engine.contract.errors import ConfigError
from engine.layers.fused_ops import Function, activate_halves, choose_fused_ops, compile_fused_ops, generate
from engine.layers.layer_spec import Activation, FusedSpec, NormSpec
from engine.layers.rotary import rotate_halves

CPU, OTHER = torch.device("cpu"), torch.device("meta")
EPS = 1e-5
SPEC = FusedSpec(norm=NormSpec(eps=EPS))
NUM_FUSED_OPS = 3


def _refuse(function: Function) -> NoReturn:
    raise RuntimeError("no compiler here\nand many lines more")


def test_fused_ops_are_compiled_for_one_token_and_for_any_other_number_of_them() -> None:
    """With a backend that counts instead of torch's own, which needs a compiler."""
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    fused_ops = compile_fused_ops(CPU, torch.float32, spec=SPEC, compile_=partial(generate, backend=backend))
    num_compiled = len(compiled)

    with torch.inference_mode():
        for num_tokens in (1, 2, 3, 7, 8, 48, 64, 200):
            hidden, delta, weight = torch.randn(num_tokens, 48), torch.randn(num_tokens, 48), torch.randn(48)
            expected = F.rms_norm(hidden + delta, (48,), weight, EPS)
            assert torch.equal(fused_ops.add_norm(hidden, delta, weight), expected)
            table, gate_up = torch.randn(num_tokens, 2, 8), torch.randn(num_tokens, 192)
            cosine, sine = table[:, 0, None, :], table[:, 1, None, :]
            fused = torch.randn(num_tokens, 12, 16)
            for heads in (fused[:, :6], fused[:, 6:9], fused[:, :6].contiguous()):
                assert torch.equal(fused_ops.rotate(heads, cosine, sine), rotate_halves(heads, cosine, sine))
            assert torch.equal(fused_ops.gate(gate_up), activate_halves(gate_up, Activation.SILU))
    assert len(compiled) == num_compiled
    assert num_compiled <= 2 * (NUM_FUSED_OPS + 1)


def test_scales_offsets_and_activations_are_part_of_what_is_compiled() -> None:
    spec = FusedSpec(norm=NormSpec(eps=EPS, offset=1.0), residual_scale=0.3, activation=Activation.GELU_TANH)
    fused_ops = compile_fused_ops(CPU, torch.float32, spec=spec, compile_=partial(generate, backend="eager"))
    hidden, delta, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    expected = F.rms_norm(hidden + 0.3 * delta, (48,), weight + 1, EPS)
    with torch.inference_mode():
        torch.testing.assert_close(fused_ops.add_norm(hidden, delta, weight), expected)
        gate, up = torch.randn(2, 5, 8)
        expected = F.gelu(gate, approximate="tanh") * up
        torch.testing.assert_close(fused_ops.gate(torch.cat((gate, up), dim=1)), expected)


def test_nothing_is_compiled_on_a_cpu_or_where_it_is_off() -> None:
    assert choose_fused_ops("auto", CPU, torch.float32, spec=SPEC, compile_=_refuse) is None
    assert choose_fused_ops(False, OTHER, torch.float32, spec=SPEC, compile_=_refuse) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no compiler here\nand many lines more"), "no compiler here"),
        (subprocess.CalledProcessError(1, "gcc"), "Command 'gcc' returned non-zero exit status 1."),
        (NotImplementedError(), "NotImplementedError"),
    ],
)
def test_where_nothing_can_be_compiled_operators_do_and_one_warning_says_why(
    caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    def refuse(function: Function) -> Function:
        raise error

    with caplog.at_level(logging.WARNING):
        assert choose_fused_ops("auto", OTHER, torch.float32, spec=SPEC, compile_=refuse) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"elementwise operators are not compiled, which is slower: {reason}"
    ]


@pytest.mark.parametrize("device", [CPU, OTHER])
def test_required_chains_that_cannot_be_compiled_end_the_start(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.compile_elementwise is true, but"):
        choose_fused_ops(True, device, torch.float32, spec=SPEC, compile_=_refuse)
