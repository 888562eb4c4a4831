"""I1 across machines: a process that compiles the kernels computes the same bits as one that loads them from
the cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine.checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(1800)  # all kernels of two architectures are compiled: 1.5 minutes on an idle core


def _engine_bits(kernel_cache: Path, checkpoints: list[Path]) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.engine.engine_bits", *map(str, checkpoints)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NUMBA_CACHE_DIR": str(kernel_cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return result.stdout.splitlines()


def test_compiled_and_loaded_kernels_give_the_same_bits(tmp_path: Path) -> None:
    """Prefill on a fresh machine and decode on one that has served before hold one KV cache between them."""
    checkpoints = [
        make_checkpoint(tmp_path / "llama", "llama", head_dim=64),
        make_checkpoint(tmp_path / "qwen3", "qwen3"),
    ]
    kernel_cache = tmp_path / "kernels"

    compiled = _engine_bits(kernel_cache, checkpoints)
    assert any(kernel_cache.rglob("rotary*.nbi")), "nothing was kept: the second run would compile, too"
    loaded = _engine_bits(kernel_cache, checkpoints)

    assert len(compiled) == 4
    assert compiled == loaded
