"""The products of experts in Triton, without a GPU: interpreted for their results, compiled to check that GPUs accept
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.layers.experts import products
from engine.layers.experts.products import pack_experts
from engine.layers.experts.triton_product import TILE_COLUMNS, TILE_IN, TILE_ROWS, TritonProducts, _multiply
from tests.support.attention.graph_trace import GraphTrace
from tests.support.engine.interpreted_products import ProductsCase, interpret

ALL = slice(None)
CASES = (
    ProductsCase(counts=(5,)),
    ProductsCase(counts=(0, 3, 0, 40, 1, 0), has_bias=True),
    ProductsCase(counts=(TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS - 1), out_size=TILE_COLUMNS + 5, in_size=TILE_IN + 3),
    ProductsCase(counts=(1,) * 9, out_size=7, in_size=200, has_bias=True),
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The kernel's outputs for every case, and for the last rows of the third alone."""
    asked = [*((case, ALL) for case in CASES), (CASES[2], slice(70, None))]
    return interpret(asked, tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_it_multiplies_rows_with_the_matrix_of_their_expert(outputs: list[torch.Tensor], index: int) -> None:
    expected = CASES[index].multiply(pack_experts)
    torch.testing.assert_close(outputs[index], expected, atol=1e-4, rtol=1e-5)


def test_a_row_has_the_same_bits_among_fewer_rows(outputs: list[torch.Tensor]) -> None:
    assert torch.equal(outputs[-1], outputs[2][70:])


@pytest.mark.parametrize(("capability", "dtype"), [(75, "fp16"), (90, "bf16")])
@pytest.mark.parametrize("has_bias", [True, False])
def test_it_compiles_for_gpus(
    capability: int, dtype: str, has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the shared memory that every GPU gives without being asked."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS, "TILE_IN": TILE_IN}
    constants = {"HAS_BIAS": has_bias, "PADDED_EXPERTS": 8, **tiles}
    pointers = dict.fromkeys(("rows", "weight", "bias", "output"), f"*{dtype}")
    pointers |= dict.fromkeys(("ends", "tile_ends"), "*i64")
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in _multiply.arg_names}
    source = triton.compiler.ASTSource(_multiply, signature, constexprs=constants)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert result.asm["cubin"]
    assert result.metadata.shared <= 48 * 1024


def test_nothing_waits_for_the_device_on_the_way_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a decode step can be captured as a graph; the launch itself needs a GPU, and is left out here."""
    launched: list[tuple[int, int]] = []

    class Launch:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            launched.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr("engine.layers.experts.triton_product._multiply", Launch())
    multiply = TritonProducts(torch.randn(6, 32, 64), None)
    x, experts, traces = torch.randn(3, 64), torch.zeros(3, dtype=torch.int64), []
    for chosen in ([0, 0, 5], [1, 2, 3]):
        experts.copy_(torch.tensor(chosen))
        with GraphTrace() as trace:
            multiply(x, experts)
        traces.append(trace.steps)
    assert traces[0] == traces[1]
    assert not any("local_scalar" in name for name, _ in traces[0])
    assert launched[0] == launched[1] == (4, 1)


def test_it_is_looked_for_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> bool:
        return products.has_triton_product.__wrapped__(torch.device("cpu"), torch.float16)

    assert not found(), "a launch without a GPU fails"
    monkeypatch.setattr(TritonProducts, "__call__", lambda _, rows, experts: 0 * rows)
    assert not found(), "it says something else"

    def by_expert(self: TritonProducts, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return pack_experts(self._weight, self._bias)(rows, experts)

    monkeypatch.setattr(TritonProducts, "__call__", by_expert)
    assert found()
