"""Fused operators compute the same as the plain ones: interpreted for their results, compiled to check that GPUs accept
them.
"""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.contract.errors import ConfigError
from engine.layers import triton_ops
from engine.layers.fused_ops import FusedOps, choose_fused_ops
from engine.layers.layer_spec import FusedSpec, NormSpec
from tests.support.engine.interpreted_ops import CASES, OpsCase, interpret
from tests.support.triton_specializations import note_launches

CPU, OTHER = torch.device("cpu"), torch.device("meta")
SPEC = FusedSpec(norm=NormSpec(eps=1e-5))
ALL, LAST = slice(None), slice(4, None)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    """The kernels' outputs for every case, and for the last tokens of the second alone."""
    asked = [*((case, ALL) for case in CASES), (CASES[1], LAST)]
    return interpret(asked, tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_they_say_what_the_operators_say(answers: list[list[torch.Tensor]], index: int) -> None:
    for found, expected in zip(answers[index], CASES[index].answer(None), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_a_token_has_the_same_bits_among_fewer_tokens(answers: list[list[torch.Tensor]]) -> None:
    *of_tokens, blocks = answers[1]
    *of_last, last_blocks = answers[-1]
    assert all(torch.equal(found, whole[LAST]) for found, whole in zip(of_last, of_tokens, strict=True))
    written = last_blocks != 0
    assert written.any()
    assert torch.equal(last_blocks[written], blocks[written])


@pytest.mark.parametrize(("capability", "dtype"), [(75, "fp16"), (90, "bf16")])
def test_they_compile_for_gpus(capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model of 8 B parameters, with norms of its heads."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "PADDED_DIM": 128, "NUM_PAIRS": 64, "HAS_NORMS": True}
    kernels = {
        triton_ops._add_norm: {"SIZE": 4096, "PADDED_SIZE": 4096},
        triton_ops._gate: {"SIZE": 14_336, "ACTIVATION": "gelu", "TILE": triton_ops.GATE_TILE},
        triton_ops._place_heads: heads | {"TILE": triton_ops.HEADS_TILE},
    }
    tensors = ("hidden", "delta", "weight", "output", "gate_up", "heads", "query_norm", "key_norm", "table")
    tensors += ("query", "keys", "values")
    types = dict.fromkeys(tensors, f"*{dtype}") | dict.fromkeys(("positions", "blocks", "offsets"), "*i64")
    types |= dict.fromkeys(("delta_scale", "eps", "offset"), "fp32")
    for kernel, constants in kernels.items():
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


def test_none_is_compiled_anew_for_another_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait, that would be. What lies behind numbers of tokens is not always aligned alike."""
    kernels = note_launches(monkeypatch, triton_ops, "_add_norm", "_gate", "_place_heads")
    for num_tokens in (1, 2, 3, 8, 16, 17):
        OpsCase(num_tokens=num_tokens).answer(triton_ops.TritonOps)
    for first in range(4):
        OpsCase(num_tokens=16).answer(triton_ops.TritonOps, rows=slice(first, None))

    assert [len(kernel.seen) for kernel in kernels] == [1, 1, 1]


def _refuse(spec: FusedSpec) -> NoReturn:
    raise RuntimeError("no compiler here\nand many lines more")


def test_nothing_is_compiled_on_a_cpu_or_where_it_is_off() -> None:
    assert choose_fused_ops("auto", CPU, torch.float32, spec=SPEC, build=_refuse) is None
    assert choose_fused_ops(False, OTHER, torch.float32, spec=SPEC, build=_refuse) is None


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
    def refuse(spec: FusedSpec) -> FusedOps:
        raise error

    with caplog.at_level(logging.WARNING):
        assert choose_fused_ops("auto", OTHER, torch.float32, spec=SPEC, build=refuse) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"elementwise operators are not compiled, which makes steps slower: {reason}"
    ]


@pytest.mark.parametrize("device", [CPU, OTHER])
def test_required_operators_that_cannot_be_compiled_end_the_start(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"gpu\.compile_elementwise is true, but"):
        choose_fused_ops(True, device, torch.float32, spec=SPEC, build=_refuse)
