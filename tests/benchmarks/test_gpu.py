"""The arithmetic of the GPU benchmark, and the benchmark itself on a model that is small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import Ceilings, decode_rows, hand_over_row, main, prefill_rows
from benchmarks.gpu_parts.hand_over import HandOver
from benchmarks.gpu_parts.shape import SHAPES

LARGE = SHAPES["8B"]
EMBEDDING = 128_256 * 4096


def test_large_shape_is_that_of_a_llama_of_8_b_parameters() -> None:
    norms = (2 * 32 + 1) * 4096
    assert 32 * LARGE.layer_parameters + 2 * EMBEDDING + norms == 8_030_261_248
    assert LARGE.kv_bytes_per_token == 131_072


def test_a_step_reads_all_matrices_once_and_the_keys_of_every_row() -> None:
    matrices = 2 * (8_030_261_248 - EMBEDDING - 65 * 4096)
    assert LARGE.step_bytes(batch=1, context=0) == matrices
    assert LARGE.step_bytes(batch=4, context=100) == matrices + 400 * 131_072


def test_a_prompt_multiplies_every_matrix_for_each_token_and_half_a_square_of_scores() -> None:
    layers = 32 * LARGE.layer_parameters
    scores_and_sums = 2 * 2 * (8192 * 8192 / 2) * 32 * 128 * 32
    assert LARGE.prefill_flops(8192) == 2 * 8192 * layers + scores_and_sums + 2 * EMBEDDING


def test_shares_are_of_what_the_device_can_do_in_that_time() -> None:
    ceilings = Ceilings(memory_bytes=3e12, matmul_flops=800e12)
    rate, share = decode_rows(
        LARGE, ceilings, batch=2, step_s=LARGE.step_bytes(batch=2, context=64) / 3e12 / 0.8, context=64
    )
    assert (rate.name, share.name, share.value) == ("decode/2", "decode_share/2", pytest.approx(0.8))
    assert rate.value == pytest.approx(2 / (rate.detail["step_ms"] / 1e3))
    rate, share = prefill_rows(LARGE, ceilings, num_tokens=8192, seconds=LARGE.prefill_flops(8192) / 800e12 / 0.5)
    assert (rate.name, share.name, share.value) == ("prefill/8192", "prefill_share/8192", pytest.approx(0.5))
    row = hand_over_row(512, HandOver(seconds=0.02, num_bytes=60_000_000, token_ids=[]))
    assert (row.name, row.value, row.detail["GB_per_s"]) == ("hand_over/512", 20.0, pytest.approx(3.0))


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--batches", "1", "3", "--prompts", "40", "--steps", "6"]

    status = main([*arguments, "--parts", "decode", "prefill", "--model", str(tmp_path / "model"), "--json", str(file)])

    assert status == 0
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text())}
    assert all(value > 0 for value in rows.values())
    assert rows.keys() == {
        "ceiling/memory",
        "ceiling/matmul",
        "start",
        *(f"{kind}/{batch}" for kind in ("decode", "decode_share", "eager") for batch in (1, 3)),
        "prefill/40",
        "prefill_share/40",
    }


def test_a_part_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--batches", "1", "--prompts", "40", "9999", "--steps", "6"]

    status = main([*arguments, "--parts", "prefill", "decode", "--model", str(tmp_path / "model"), "--json", str(file)])

    assert status == 1
    assert "these parts failed: prefill" in capsys.readouterr().err
    assert {"prefill/40", "decode/1"} < {row["name"] for row in json.loads(file.read_text())}
