"""The kernel for decode rows, without a GPU: interpreted for its results, compiled to check that GPUs accept it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.attention import paged_decode
from tests.support.attention.interpreted_decode import DecodeCase, interpret
from tests.support.attention.varlen_double import VarlenDouble
from tests.support.triton_specializations import note_launches

ROUND = paged_decode.NUM_PROGRAMS * paged_decode.PART_LEN
CASES = (
    DecodeCase(lengths=(1,)),
    DecodeCase(lengths=(64, 65, 128, 129), num_kv_heads=2, group=3, head_dim=20),
    DecodeCase(lengths=(300, 7), group=2, head_dim=8, block_size=3),
    DecodeCase(lengths=(300, 40), num_kv_heads=2, block_size=256, window=1),
    DecodeCase(lengths=(200, 10, 150), group=17, block_size=1, window=100),
    DecodeCase(lengths=(ROUND + paged_decode.PART_LEN + 1,)),
    DecodeCase(lengths=(ROUND + 1,), window=150),
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The kernel's outputs for every case, and at the end for the first row of the second case alone."""
    return interpret([*((case, None) for case in CASES), (CASES[1], 1)], tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("index", range(len(CASES)))
def test_it_computes_attention(outputs: list[torch.Tensor], index: int) -> None:
    expected = CASES[index].attend(VarlenDouble(block_multiple=1))
    torch.testing.assert_close(outputs[index], expected, atol=2e-6, rtol=2e-6)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(outputs: list[torch.Tensor]) -> None:
    assert torch.equal(outputs[-1], outputs[1][:1])


def test_it_is_not_compiled_anew_for_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait, that would be."""
    kernels = note_launches(monkeypatch, paged_decode, "_attend_parts", "_join_parts")
    for lengths in ((1,), (16 * 14,), (300, 7), (200, 10, 150), (5,) * 16):
        DecodeCase(lengths=lengths).attend(paged_decode.paged_decode)

    assert [len(kernel.seen) for kernel in kernels] == [1, 1]


@pytest.mark.parametrize(("capability", "dtype"), [(75, "fp16"), (90, "bf16")])
def test_it_compiles_for_gpus(capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the heads of a model of 8 B parameters; with the shared memory that every GPU gives without being asked."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"HEAD_DIM": 128, "PADDED_DIM": 128, "NUM_PROGRAMS": 16, "PART_LEN": 128}
    tiles = {"GROUP": 4, "PADDED_GROUP": 16, "BLOCK_SIZE": 16, "TILE_LEN": 64}
    for kernel, constants in ((paged_decode._attend_parts, sizes | tiles), (paged_decode._join_parts, sizes)):
        pointers = dict.fromkeys(("query", "key", "value", "output"), f"*{dtype}")
        pointers |= dict.fromkeys(("totals", "tops", "weights"), "*fp32")
        pointers |= dict.fromkeys(("tables", "seq_lens"), "*i32") | {"scale": "fp32"}
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert result.asm["cubin"]
        assert result.metadata.shared <= 48 * 1024
