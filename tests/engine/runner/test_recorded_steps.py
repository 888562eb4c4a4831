"""Decode steps that repeat recorded kernel calls compute, bit by bit, what the model's code computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelCode, ModelConfigSource, SchedulerConfig
from engine.model.registry import ANY_CODE
from engine.runner import recorded_steps
from engine.runner.model_runner import ModelRunner
from engine.runner.recorded_steps import MIN_REGION_BYTES
from tests.support.engine.checkpoints import (
    ARCHITECTURES,
    DENSE_FAMILIES,
    LATENT_FAMILIES,
    MIXTURES,
    VOCAB_SIZE,
    make_checkpoint,
)
from tests.support.engine.step_driver import StepDriver
from tests.support.engine.transformers_families import TRANSFORMERS_FAMILIES

BLOCK_SIZE = 4
MAX_NUM_SEQS = 8
LAYER_NORMS = ("gpt2", "starcoder2")
"""Models with norms that torch computes."""

RECORDED = (*ARCHITECTURES, *(family for family in DENSE_FAMILIES if family not in LAYER_NORMS))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class WatchedRunner(ModelRunner):
    """Keeps the hidden states of every step."""

    def __init__(self, path: Path, dtype: DTypeName = "float32", code: ModelCode = ANY_CODE) -> None:
        super().__init__(
            EngineConfig(
                model=ModelConfigSource(path=path, device="cpu", dtype=dtype, code=code),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=4096),
                scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
            )
        )
        self.hidden: list[torch.Tensor] = []
        self.forward_calls = 0
        forward, logits = self._model.forward, self._model.logits

        def counted(*args: object) -> torch.Tensor:
            self.forward_calls += 1
            return forward(*args)  # type: ignore[arg-type]

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            self.hidden.append(hidden.clone())
            return logits(hidden)

        self._model.forward, self._model.logits = counted, kept  # type: ignore[method-assign]


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens)]


def _serve(runner: WatchedRunner) -> dict[int, list[int]]:
    """Streams of different lengths, with prompts between their steps, rows that end, and tables that grow."""
    driver = StepDriver(runner)
    for row, length in enumerate((50, 7)):
        driver.add(row, _prompt(length, seed=row))
    driver.step({0: 50, 1: 7})
    for _ in range(2 * BLOCK_SIZE):
        driver.step({1: 1, 0: 1})
    driver.add(2, _prompt(30, seed=2))
    driver.step({0: 1, 2: 30, 1: 1})
    for _ in range(BLOCK_SIZE):
        driver.step({2: 1, 0: 1, 1: 1})
    ended = driver.rows[0].token_ids
    driver.release(0)
    for _ in range(2 * BLOCK_SIZE):
        driver.step({1: 1, 2: 1})
    driver.add(5, _prompt(3, seed=5))
    driver.step({5: 3})
    for _ in range(BLOCK_SIZE):
        driver.step({1: 1, 5: 1, 2: 1})
    return {row: driven.token_ids for row, driven in driver.rows.items()} | {0: ended}


def _assert_same(runner: WatchedRunner, plain: WatchedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both serve the same, though ``plain`` has to do without recordings."""
    tokens = _serve(runner)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_steps, "MAX_ROWS", 0)
        assert _serve(plain) == tokens
    assert plain.recorded_sizes == ()
    assert len(runner.hidden) == len(plain.hidden)
    assert all(map(torch.equal, runner.hidden, plain.hidden))
    assert torch.equal(*(each.kv_cache.blocks.view(torch.uint8) for each in (runner, plain)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", RECORDED)
def test_same_bits(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: DTypeName,
    num_threads: int,
) -> None:
    del num_threads
    runner, plain = (WatchedRunner(checkpoint(architecture), dtype) for _ in range(2))
    _assert_same(runner, plain, monkeypatch)
    assert runner.recorded_sizes == (2, 3)
    assert runner.forward_calls < plain.forward_calls - 3 * BLOCK_SIZE


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_same_bits_by_transformers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path, code = make_checkpoint(tmp_path, family), ModelCode(impl="transformers")
    _assert_same(WatchedRunner(path, code=code), WatchedRunner(path, code=code), monkeypatch)


def test_a_model_that_transformers_code_only_chains_is_recorded(checkpoint: Callable[[str], Path]) -> None:
    runner = WatchedRunner(checkpoint("llama"), code=ModelCode(impl="transformers"))
    _serve(runner)
    assert runner.recorded_sizes == (2, 3)


@pytest.mark.parametrize("architecture", (*LAYER_NORMS, *MIXTURES, *LATENT_FAMILIES))
def test_where_torch_computes_nothing_is_repeated(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    runner, plain = (WatchedRunner(checkpoint(architecture)) for _ in range(2))
    _assert_same(runner, plain, monkeypatch)
    assert runner.recorded_sizes == ()


def test_the_hook_is_called_before_each_layer_and_may_change_the_threads(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are borrowed and given back between the layers of a step."""
    runner, plain = (WatchedRunner(checkpoint("llama")) for _ in range(2))
    before, calls = torch.get_num_threads(), 0

    def hook() -> None:
        nonlocal calls
        calls += 1
        torch.set_num_threads(1 + calls % 2)

    runner.between_layers = hook
    try:
        _assert_same(runner, plain, monkeypatch)
    finally:
        torch.set_num_threads(before)
    num_layers, num_recordings = len(runner.model_config.attention), len(runner.recorded_sizes)
    assert calls == num_layers * (len(runner.hidden) - num_recordings)


def test_results_that_need_more_memory_than_was_thought(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_steps, "MIN_REGION_BYTES", 64)
    runner = WatchedRunner(checkpoint("qwen3"))
    monkeypatch.setattr(recorded_steps, "MIN_REGION_BYTES", MIN_REGION_BYTES)
    _assert_same(runner, WatchedRunner(checkpoint("qwen3")), monkeypatch)
    assert runner.recorded_sizes == (2, 3)


def test_large_steps_are_not_recorded(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "MAX_ROWS", 2)
    runner = WatchedRunner(checkpoint("llama"))
    _serve(runner)
    assert runner.recorded_sizes == (2,)
