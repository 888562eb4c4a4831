"""Decode graphs and generated kernels on a real GPU. Runs where CUDA is: `make test-gpu`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.contract.config import CacheConfig, EngineConfig, GPUConfig, ModelConfigSource, SchedulerConfig
from engine.layers.triton_ops import TritonOps
from engine.runner.model_runner import ModelRunner
from tests.support.engine.cache_blocks import read_block
from tests.support.engine.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from tests.support.engine.interpreted_ops import CASES
from tests.support.engine.step_driver import StepDriver

pytestmark = pytest.mark.gpu

PAGED_BLOCK_SIZE = 256
"""A block size that every kernel supports."""
MAX_NUM_SEQS = 12
NUM_STEPS = 40


def _runner(path: Path, *, cuda_graphs: bool, is_fused: bool = True, block_size: int = PAGED_BLOCK_SIZE) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model=ModelConfigSource(path=path, device="cuda", dtype="bfloat16"),
            cache=CacheConfig(block_size=block_size, num_blocks=24_576 // block_size),
            scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512),
            gpu=GPUConfig(cuda_graphs=cuda_graphs, compile_elementwise=is_fused),
        )
    )


def _decode(runner: ModelRunner, num_rows: int, *, num_prompts: int = 0) -> tuple[list[dict[int, int]], list[bytes]]:
    """Prefill prompts of different lengths, then decode all rows; returns the tokens, and the blocks that belong to no
    row.

    ``num_prompts``: how many rows are prefilled, of which the first ``num_rows`` go on; as many by default.
    """
    driver = StepDriver(runner, seed=1)
    rng = np.random.default_rng(5)
    for row in range(num_prompts or num_rows):
        driver.add(row, rng.integers(0, VOCAB_SIZE, 1 + 29 * row).tolist())
        driver.step({row: 1 + 29 * row})
    steps = [driver.step(dict.fromkeys(range(num_rows), 1)) for _ in range(NUM_STEPS)]
    return steps, [read_block(runner.kv_cache, block) for block in sorted(driver.untouched)]


@pytest.mark.parametrize("block_size", (16, PAGED_BLOCK_SIZE))
@pytest.mark.parametrize("num_rows", (1, 4, 8, 12))
@pytest.mark.parametrize("architecture", (*ARCHITECTURES, "mixtral", "qwen3_moe"))
def test_same_tokens_with_graphs_and_without(tmp_path: Path, architecture: str, num_rows: int, block_size: int) -> None:
    path = make_checkpoint(tmp_path, architecture)
    runner = _runner(path, cuda_graphs=True, block_size=block_size)
    assert runner.graph_sizes == (1, 2, 4, 8, 12)

    steps, unused = _decode(runner, num_rows)

    assert steps == _decode(_runner(path, cuda_graphs=False, block_size=block_size), num_rows)[0]
    assert all(block == bytes(len(block)) for block in unused)


@pytest.mark.parametrize(("num_rows", "padded"), ((3, 4), (5, 8), (11, 12)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing(tmp_path: Path, architecture: str, num_rows: int, padded: int) -> None:
    """Against the same graph with real rows in their place: a product of other sizes may sum up otherwise."""
    path = make_checkpoint(tmp_path, architecture)

    steps, unused = _decode(_runner(path, cuda_graphs=True), num_rows, num_prompts=padded)

    full, _ = _decode(_runner(path, cuda_graphs=True), padded)
    assert steps == [{row: tokens[row] for row in range(num_rows)} for tokens in full]
    assert all(block == bytes(len(block)) for block in unused)


def test_graphs_take_no_more_memory_than_was_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    config = EngineConfig(
        model=ModelConfigSource(path=path, device="cuda", dtype="bfloat16"),
        cache=CacheConfig(block_size=PAGED_BLOCK_SIZE, gpu_memory_utilization=0.5),
        scheduler=SchedulerConfig(max_num_seqs=128),
        gpu=GPUConfig(cuda_graphs=True),
    )
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(config)
    assert runner.graph_sizes[-1] == 128
    _, total = torch.cuda.mem_get_info()
    assert torch.cuda.memory_reserved() <= 0.5 * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_fused_operators_say_what_the_operators_say(index: int, dtype: str) -> None:
    case = dataclasses.replace(CASES[index], dtype=dtype)
    tolerance = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 5e-3}[dtype]

    found = case.answer(TritonOps, device=torch.device("cuda"))

    for one, expected in zip(found, case.answer(None), strict=True):
        torch.testing.assert_close(one.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "granite", "gemma3"])
def test_first_tokens_are_the_same_with_fused_operators_and_without(tmp_path: Path, architecture: str) -> None:
    path = make_checkpoint(tmp_path, architecture)

    def first_tokens(*, is_fused: bool) -> dict[int, int]:
        driver = StepDriver(_runner(path, cuda_graphs=False, is_fused=is_fused), seed=1)
        rng = np.random.default_rng(5)
        for row in range(MAX_NUM_SEQS):
            driver.add(row, rng.integers(0, VOCAB_SIZE, 1 + 29 * row).tolist())
        return {row: driver.step({row: 1 + 29 * row})[row] for row in range(MAX_NUM_SEQS)}

    assert first_tokens(is_fused=True) == first_tokens(is_fused=False)
