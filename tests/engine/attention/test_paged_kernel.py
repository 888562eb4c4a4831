"""The kernel for single queries: heads and sizes of all kinds, and registers of another machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention.cpu import CPUAttention
from engine.attention.reference import ReferenceAttention
from engine.kernels.lanes import LANES
from tests.support.attention.attention_cases import AttentionCase, make_inputs

NUM_HEADS = (1, 2, 3, 4, 5, 8, 9)
HEAD_DIMS = (8, 20, 48, 64, 80, 128, 256)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def check(*, group: int, head_dim: int, dtype: str, window: int | None = None, value_size: int | None = None) -> None:
    case = AttentionCase(
        lengths=((0, 1), (31, 1), (32, 1), (70, 1), (200, 1)),
        num_kv_heads=2 if value_size is None else 1,
        group=group,
        head_dim=head_dim,
        block_size=16,
        window=window,
        layer=1,
        seed=group * head_dim,
        value_size=value_size,
    )
    inputs, layer = make_inputs(case, dtype), case.attention_layer
    with torch.inference_mode():
        results = [
            backend(inputs.new_cache()).plan(inputs.batch)[0].attend(layer, inputs.query, inputs.key, inputs.value)
            for backend in (ReferenceAttention, CPUAttention)
        ]
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", NUM_HEADS)
def test_heads_of_any_number_and_size(group: int, dtype: str) -> None:
    for head_dim in HEAD_DIMS:
        check(group=group, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("window", [1, 5, 33, 64])
def test_a_window_begins_within_a_tile(window: int) -> None:
    check(group=3, head_dim=64, dtype="float32", window=window)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_values_that_are_part_of_their_keys(head_dim: int) -> None:
    check(group=10, head_dim=head_dim, dtype="float32", value_size=head_dim * 3 // 4)


_ON_OTHER_REGISTERS = """
from llvmlite import binding

features = binding.get_host_cpu_features()
features["avx512f"] = has_wide = {has_wide}
binding.get_host_cpu_features = lambda: features

from engine.kernels.lanes import LANES
from tests.engine.attention.test_paged_kernel import check

assert LANES == (16 if has_wide else 8)
for group in (1, 3, 4):
    check(group=group, head_dim=80, dtype="bfloat16")
check(group=3, head_dim=64, dtype="bfloat16", window=33)
"""


def test_it_computes_the_same_with_registers_of_the_other_width(tmp_path: Path) -> None:
    """LLVM's code for 16 numbers on a machine without AVX-512, and for 8 on one with it, is slow but right."""
    script = _ON_OTHER_REGISTERS.format(has_wide=LANES == 8)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}  # kept code knows nothing of the width
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
