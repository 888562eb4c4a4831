"""Products with weights in panels: right for every size that fits, the same for a row in every batch."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.amx import has_tiles
from engine.kernels.lanes import HAS_BFLOAT16_UNIT
from engine.kernels.products.amx_product import STEP_INPUTS, STREAMED_BYTES
from engine.kernels.products.panel_product import BLOCK_WORDS, CHUNK_BYTES, WIDENING_ROWS
from engine.kernels.products.tile_product import PANEL, WORD_BYTES
from engine.layers.packed_weight import Multiply, best_columns, pack
from engine.layers.panel_weight import PanelWeight, fits_panels, multiplies_pairs, rows_for_product, suits_panels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = tuple(TOLERANCE)
UNIT = 8
"""Columns of the input that any panel can hold; in tiles it is ``STEP_INPUTS``."""

WAYS = (
    [(dtype, "") for dtype in DTYPES]
    + [(torch.bfloat16, "in pairs")] * HAS_BFLOAT16_UNIT
    + [(torch.bfloat16, "in tiles")] * has_tiles()
)
"""Dtypes, and how bfloat16 is multiplied: in pairs and in tiles where the machine can."""


@pytest.fixture(params=WAYS, ids=lambda way: " ".join(map(str, way)).strip())
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The dtype of weight and input, for each way of multiplying them."""
    dtype, way = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.layers.panel_weight.multiplies_pairs", lambda: way == "in pairs")
        patch.setattr("engine.layers.panel_weight.has_tiles", lambda: way == "in tiles")
        yield dtype


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    num_rows=st.integers(1, 200),
    num_panels=st.integers(1, 5),
    num_columns=st.integers(1, 10).map(UNIT.__mul__) | st.integers(1, 20).map(STEP_INPUTS.__mul__),
    has_bias=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_product_is_that_of_the_plain_weight(
    dtype: torch.dtype, num_rows: int, num_panels: int, num_columns: int, *, has_bias: bool
) -> None:
    weight = numbers(PANEL * num_panels, num_columns, seed=1, dtype=dtype)
    bias = numbers(PANEL * num_panels, seed=2, dtype=dtype) if has_bias else None
    x = numbers(num_rows, num_columns, seed=3, dtype=dtype)

    found = PanelWeight(weight, bias)(x)

    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    scale = expected.abs().max().item() + 1.0
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype] * scale, rtol=0.0)


@pytest.mark.parametrize("num_columns", [BLOCK_WORDS, 1056, 2 * BLOCK_WORDS + UNIT, 5 * BLOCK_WORDS - UNIT])
def test_row_is_the_same_in_every_batch_however_long_it_is(dtype: torch.dtype, num_columns: int) -> None:
    weight, bias = numbers(3 * PANEL, num_columns, seed=1, dtype=dtype), numbers(3 * PANEL, seed=3, dtype=dtype)
    multiply = PanelWeight(weight, bias)
    num_rows = max(2 * CHUNK_BYTES // (WORD_BYTES * num_columns) + 5, 202)  # the last ones are in another chunk
    x = numbers(num_rows, num_columns, seed=2, dtype=dtype)
    whole = multiply(x)

    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype] * expected.abs().max().item(), rtol=0.0)
    few = WIDENING_ROWS - 1
    for start, end in ((0, 1), (1, 3), (40, 45), (90, 102), (0, few), (0, 96), (96, 197), (num_rows - 9, num_rows)):
        assert torch.equal(multiply(x[start:end]), whole[start:end])


def test_output_too_large_for_the_caches_is_the_same(dtype: torch.dtype) -> None:
    num_panels, num_rows = 24, 345
    assert num_rows * num_panels * PANEL * torch.bfloat16.itemsize > STREAMED_BYTES
    multiply = PanelWeight(numbers(num_panels * PANEL, 64, seed=1, dtype=dtype), None)
    x = numbers(num_rows, 64, seed=2, dtype=dtype)

    whole = multiply(x)

    for start, end in ((0, 15), (15, 32), (32, 33), (300, num_rows)):
        assert torch.equal(multiply(x[start:end]), whole[start:end])


def test_number_that_bfloat16_holds_gives_the_same_result_from_half_the_bytes() -> None:
    exact = numbers(2 * PANEL, 64, seed=1, dtype=torch.bfloat16).float()
    x = numbers(7, 64, seed=2)
    off = torch.zeros_like(exact)
    off[0, 0] = 1e-4  # now one number needs more bits
    halved, whole = PanelWeight(exact, None), PanelWeight(exact + off, None)

    assert halved.num_bytes * 2 == whole.num_bytes
    assert torch.equal(halved(x)[:, 1:], whole(x)[:, 1:])


def test_what_is_no_number_stays_visible_in_its_row(dtype: torch.dtype) -> None:
    x = numbers(9, STEP_INPUTS, seed=2, dtype=dtype)
    x[4, 3], x[6, 0] = float("nan"), float("inf")

    found = PanelWeight(numbers(PANEL, STEP_INPUTS, seed=1, dtype=dtype), None)(x)

    assert [bool(row.isfinite().all()) for row in found] == [True] * 4 + [False, True, False, True, True]
    assert bool(found[4].isnan().all())


@given(
    num_rows=st.integers(1, 200),
    num_panels=st.integers(1, 40),
    num_kinds=st.integers(1, 40 * PANEL),
    num_threads=st.integers(1, 3),
    special=st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from([math.inf, -math.inf, 0.0, -0.0])), max_size=3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_best_column_is_the_first_of_the_highest(
    dtype: torch.dtype,
    num_rows: int,
    num_panels: int,
    num_kinds: int,
    num_threads: int,
    special: list[tuple[int, float]],
) -> None:
    size, num_columns = num_panels * PANEL, 2 * STEP_INPUTS
    kinds = numbers(num_kinds, num_columns, seed=1, dtype=dtype)
    bias = numbers(num_kinds, seed=2, dtype=dtype)
    for place, value in special:
        bias[place % num_kinds] = value
    columns = torch.arange(size) % num_kinds  # fewer kinds than columns: many are equal
    multiply, x = PanelWeight(kinds[columns], bias[columns]), numbers(num_rows, num_columns, seed=3, dtype=dtype)
    written = multiply(x)

    with threads(num_threads):
        found = multiply.best_columns(x)

    assert found is not None
    assert found.dtype == np.int32
    assert found.tolist() == [int((row == row.max()).nonzero()[0]) for row in written]
    assert torch.equal(multiply(x), written)


def test_best_column_of_rows_in_several_chunks(dtype: torch.dtype) -> None:
    num_columns = 2048
    num_rows = 2 * CHUNK_BYTES // (WORD_BYTES * num_columns) + 5
    multiply = PanelWeight(numbers(3 * PANEL, num_columns, seed=1, dtype=dtype), None)
    x = numbers(num_rows, num_columns, seed=2, dtype=dtype)

    with threads(2):
        found = multiply.best_columns(x)

    assert found is not None
    assert found.tolist() == [int((row == row.max()).nonzero()[0]) for row in multiply(x)]


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_no_column_is_the_best_beside_what_is_no_number(dtype: torch.dtype, nan: float) -> None:
    weight, x = numbers(9 * PANEL, STEP_INPUTS, seed=1, dtype=dtype), numbers(9, STEP_INPUTS, seed=2, dtype=dtype)
    bias = numbers(9 * PANEL, seed=3, dtype=dtype)
    whole = PanelWeight(weight, bias)
    before, written = whole.best_columns(x), whole(x)
    broken, broken_bias = x.clone(), bias.clone()
    broken[4, 3], broken_bias[5 * PANEL + 1] = nan, nan

    with threads(2):
        assert whole.best_columns(broken) is None
        assert PanelWeight(weight, broken_bias).best_columns(x) is None
        after = whole.best_columns(x)
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()
    assert torch.equal(whole(x), written)


def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    multiply = PanelWeight(numbers(PANEL, STEP_INPUTS, seed=1, dtype=dtype), None)

    assert multiply(numbers(0, STEP_INPUTS, seed=2, dtype=dtype)).shape == (0, PANEL)
    for num_rows in (0, 3, 0):
        found = multiply.best_columns(numbers(num_rows, STEP_INPUTS, seed=2, dtype=dtype))
        assert found is not None
        assert len(found) == num_rows


def test_more_panels_than_can_be_told_apart_are_not_searched(dtype: torch.dtype) -> None:
    multiply = PanelWeight(numbers(2 * PANEL, STEP_INPUTS, seed=1, dtype=dtype), None)
    assert best_columns(multiply, numbers(3, STEP_INPUTS, seed=2, dtype=dtype)) is not None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.layers.panel_weight.MOST_PANELS", {2: 1, 4: 1})
        assert best_columns(multiply, numbers(3, STEP_INPUTS, seed=2, dtype=dtype)) is None


@pytest.mark.parametrize("pack_weight", [pack, PanelWeight])
def test_rows_for_a_product_give_what_contiguous_ones_do(
    dtype: torch.dtype, pack_weight: Callable[[torch.Tensor, None], Multiply]
) -> None:
    x = numbers(40, 2048, seed=2, dtype=dtype)
    multiply = pack_weight(numbers(PANEL, 2048, seed=1, dtype=dtype), None)

    expected = multiply(x)
    tolerance = TOLERANCE[dtype] * expected.abs().max().item()
    for rows in (rows_for_product(40, 2048, x.dtype).copy_(x), x.T.contiguous().T):
        torch.testing.assert_close(multiply(rows), expected, atol=tolerance, rtol=0.0)


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    multiply = PanelWeight(numbers(PANEL, 8, seed=1), None)
    wide = numbers(5, 24, seed=2)

    assert torch.equal(multiply(wide[:, 8:16]), multiply(wide[:, 8:16].clone()))


@pytest.mark.parametrize("shape", [(PANEL + 1, 8), (PANEL, 6), (PANEL // 2, 16)])
def test_sizes_that_fill_no_panel_are_left_to_the_matrix_library(shape: tuple[int, int]) -> None:
    weight = numbers(*shape, seed=1)

    assert not fits_panels(weight)
    torch.testing.assert_close(
        pack(weight, None)(numbers(3, shape[1], seed=2)), numbers(3, shape[1], seed=2) @ weight.T
    )


AVX2 = {"avx2": True, "fma": True, "f16c": True}
AVX512 = {**AVX2, "avx512f": True}
MACHINES: dict[str, tuple[str, str, dict[str, bool], set[torch.dtype]]] = {
    "AVX2 only": ("x86_64", "haswell", AVX2, set(DTYPES)),
    "AVX only": ("x86_64", "sandybridge", {}, set()),
    "AVX-512 without instructions for bfloat16": ("x86_64", "icelake-server", AVX512, {torch.float32, torch.bfloat16}),
    "Intel, AMX hidden": ("x86_64", "sapphirerapids", {**AVX512, "avx512bf16": True}, {torch.float32, torch.bfloat16}),
    "AMX": (
        "x86_64",
        "sapphirerapids",
        {**AVX512, "avx512bf16": True, "amx-bf16": True},
        {torch.float32, torch.bfloat16},
    ),
    "AMD with instructions for bfloat16": (
        "x86_64",
        "znver4",
        {**AVX512, "avx512bf16": True},
        {torch.float32, torch.bfloat16},
    ),
    "no x86": ("aarch64", "neoverse-n1", {}, set()),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_panels_are_for_machines_whose_library_is_slower(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    architecture, name, features, expected = MACHINES[machine]
    monkeypatch.setattr("platform.machine", lambda: architecture)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: name)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    assert {dtype for dtype in DTYPES if suits_panels.__wrapped__(dtype)} == expected
    assert multiplies_pairs() == (name == "znver4")


UNMAPPED = """
import torch
from engine.layers.panel_weight import PanelWeight

weight, x = torch.ones(64, 512, dtype=torch.bfloat16), torch.ones(1024, 512, dtype=torch.bfloat16)
multiply = PanelWeight(weight, None)
assert bool((multiply(x) == 512).all())
assert not multiply.best_columns(x).any()
"""


def test_scratch_memory_is_kept_as_long_as_it_is_used() -> None:
    # What is freed is unmapped at once, so using it ends the process.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", UNMAPPED], env=environment, check=True, timeout=300)


def test_bfloat16_that_fills_no_tile_is_left_to_the_matrix_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.layers.panel_weight.suits_panels", lambda _: True)
    weight = numbers(PANEL, STEP_INPUTS + UNIT, seed=1, dtype=torch.bfloat16)
    fits = []
    for machine_has_tiles in (False, True):
        monkeypatch.setattr("engine.layers.panel_weight.has_tiles", lambda has=machine_has_tiles: has)
        fits.append(fits_panels(weight))

    assert fits == [True, False]
    assert fits_panels(weight[:, :STEP_INPUTS])


TILES = {"amx-tile": True, "amx-bf16": True, "avx512bf16": True}


@pytest.mark.parametrize(
    ("features", "answer", "expected"),
    [(TILES, 0, True), (TILES, -1, False), ({**TILES, "amx-bf16": False}, 0, False), ({}, 0, False)],
    ids=["allowed", "refused by the system", "tiles for integers only", "no tiles"],
)
def test_tiles_are_used_where_cpu_and_system_let_a_process(
    monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], answer: int, *, expected: bool
) -> None:
    asked: list[tuple[int, ...]] = []

    class Library:
        def syscall(self, *numbers: int) -> int:
            asked.append(numbers)
            return answer

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr("ctypes.CDLL", lambda _: Library())
    assert has_tiles.__wrapped__() is expected
    assert len(asked) == (features == TILES)
