"""Compiled kernels are cached until any of their sources change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine

GATE = """
import ctypes
import numpy as np
from engine.kernels import activation as kernel

counter, gate_up, output = np.zeros(1, np.int64), np.full((1, 64), 3, np.float32), np.zeros((1, 32), np.float32)
parameters = np.zeros(kernel.NUM_PARAMETERS, np.int64)
parameters[kernel.COUNTER] = counter.ctypes.data
parameters[kernel.INPUT], parameters[kernel.OUTPUT] = gate_up.ctypes.data, output.ctypes.data
parameters[kernel.NUM_ROWS], parameters[kernel.SIZE] = output.shape
parameters[kernel.KIND] = kernel.SILU_GATE
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.compiled_activation("float32"))(parameters.ctypes.data)
print(output[0, 0])
"""
SILU_OF_3_TIMES_3 = 8.573

ATTENTION = """
from engine.kernels.attention.paged_attention import compiled_attention
from engine.kernels.attention.run_attention import compiled_run_attention

compiled_attention("float32", fills_registers=True)
compiled_attention("bfloat16", fills_registers=False)
compiled_run_attention("float32", has_pairs=False)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a copy of the kernels in a package of their name."""
    (package,) = engine.__path__
    copied = tmp_path / "sources" / "engine"
    shutil.copytree(Path(package) / "kernels", copied / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "__init__.py").touch()
    return copied.parent


def run_gate(sources: Path, **environment: str) -> float:
    """The result of a copy's gate kernel for 3 and 3, in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    result = subprocess.run(
        [sys.executable, "-c", GATE],
        cwd=sources,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(result.stdout)


def compiled_files(folder: Path) -> set[Path]:
    return set(folder.rglob("activation*.nbc"))


def test_a_change_in_what_a_kernel_calls_compiles_it_anew(sources: Path, tmp_path: Path) -> None:
    before = run_gate(sources, NUMBA_CACHE_DIR=str(tmp_path))
    called = sources / "engine" / "kernels" / "row_loops.py"
    text = called.read_text()
    assert "builder.fmul(g, share(lanes, g))" in text
    called.write_text(text.replace("builder.fmul(g, share(lanes, g))", "builder.fadd(g, share(lanes, g))"))
    after = run_gate(sources, NUMBA_CACHE_DIR=str(tmp_path))

    assert before == pytest.approx(SILU_OF_3_TIMES_3, rel=1e-3)
    assert after == pytest.approx(3 * (3 + SILU_OF_3_TIMES_3 / 9), rel=1e-3)


def test_kernels_are_kept_beside_their_sources(sources: Path) -> None:
    run_gate(sources)
    (compiled,) = compiled_files(sources)
    written_ns = compiled.stat().st_mtime_ns
    run_gate(sources)

    assert compiled_files(sources) == {compiled}
    assert compiled.stat().st_mtime_ns == written_ns


def test_kernels_made_of_parts_that_are_chosen_are_kept_as_well(tmp_path: Path) -> None:
    """A kernel that holds another compiled function is never found again."""
    kept: list[dict[Path, int]] = []
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-c", ATTENTION], env=environment, check=True)
        kept.append({file: file.stat().st_mtime_ns for file in tmp_path.rglob("*attention*.nbc")})

    assert len(kept[0]) == 3
    assert kept[1] == kept[0]


def test_where_nothing_can_be_written_there_the_users_caches_keep_them(sources: Path, tmp_path: Path) -> None:
    (sources / "engine" / "kernels" / "__pycache__").touch()

    answer = run_gate(sources, NUMBA_CACHE_DIR="/dev/null/nowhere", XDG_CACHE_HOME=str(tmp_path / "caches"))

    assert answer == pytest.approx(SILU_OF_3_TIMES_3, rel=1e-3)
    assert len(compiled_files(tmp_path / "caches")) == 1


def test_where_nothing_can_be_written_at_all_kernels_are_compiled_each_time(sources: Path, tmp_path: Path) -> None:
    (sources / "engine" / "kernels" / "__pycache__").touch()

    answer = run_gate(sources, XDG_CACHE_HOME="/dev/null/nowhere")

    assert answer == pytest.approx(SILU_OF_3_TIMES_3, rel=1e-3)
    assert not compiled_files(tmp_path)


def test_folder_that_others_can_write_is_left_alone(sources: Path, tmp_path: Path) -> None:
    """Otherwise code in it would be executed."""
    run_gate(sources, NUMBA_CACHE_DIR=str(tmp_path / "shared"))
    (folder,) = (tmp_path / "shared").iterdir()
    shutil.rmtree(folder)
    folder.mkdir()
    folder.chmod(0o777)

    run_gate(sources, NUMBA_CACHE_DIR=str(tmp_path / "shared"))

    assert not compiled_files(tmp_path / "shared")
    assert len(compiled_files(sources)) == 1
