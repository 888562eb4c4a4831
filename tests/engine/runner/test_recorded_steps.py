"""Decode steps that repeat recorded kernel calls compute, bit by bit, what the model's code computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelCode, ModelConfigSource, SchedulerConfig
from engine.contract.step import IntArray
from engine.layers.panel_weight import suits_panels
from engine.model.registry import ANY_CODE
from engine.model.step_context import StepContext
from engine.runner import recorded_prompts, recorded_steps
from engine.runner.model_runner import ModelRunner
from engine.runner.recorded_steps import RecordedSteps
from engine.runner.recording import StepMemory
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

CHAINED = ("exaone4", "ministral", "seed_oss", "stablelm")
"""Families of which transformers' code computes nothing any more (``transformers_backend.parts.chain``)."""

NUM_SHORT_OR_LONG = 2
"""Steps of ``_serve`` that compute too few or too many tokens to be recorded."""

NUM_WATCHED = 2
"""The first decode step and the first other one only show what memory they need."""

RECORDED = (2, 3) if suits_panels(torch.float32) else ()
"""Numbers of rows whose steps are recorded in ``_serve``: none where the matrix library multiplies."""


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class WatchedRunner(ModelRunner):
    """Keeps the hidden states of every step."""

    def __init__(
        self,
        path: Path,
        dtype: DTypeName = "float32",
        code: ModelCode = ANY_CODE,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        super().__init__(
            EngineConfig(
                model=ModelConfigSource(path=path, device="cpu", dtype=dtype, code=code),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=4096),
                scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            )
        )
        self.hidden: list[torch.Tensor] = []
        self.forward_calls = 0
        forward, logits, best = self._model.forward, self._model.logits, self._model.best_tokens

        def counted(input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
            self.forward_calls += 1
            return forward(input_ids, context)

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            self.hidden.append(hidden.clone())
            return logits(hidden)

        def kept_if_told(hidden: torch.Tensor) -> IntArray | None:
            found = best(hidden)
            if found is not None:
                self.hidden.append(hidden.clone())
            return found

        self._model.forward, self._model.logits = counted, kept  # type: ignore[method-assign]
        self._model.best_tokens = kept_if_told  # type: ignore[method-assign]
        self.recorded = self._recorded = RecordedSteps(counted)

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """Numbers of rows whose decode steps are repeated."""
        return self.recorded.sizes

    @property
    def repeats_prompts(self) -> bool:
        """True once steps with prompts are repeated."""
        return self.recorded.repeats_prompts


_next_part = StepMemory.next_part


def _next_part_in_dirt(memory: StepMemory) -> None:
    """Begin a part whose memory holds no numbers."""
    _next_part(memory)
    memory._regions[memory._region].numpy()[:] = 0xFF


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
    for row, length in ((0, 270), (3, 190), (4, 9)):
        driver.add(row, _prompt(length, seed=row))
    driver.step({0: 270})
    driver.step({3: 190, 1: 1, 0: 1, 4: 9})
    driver.step({3: 1, 4: 1})
    return {row: driven.token_ids for row, driven in driver.rows.items()} | {-1: ended}


def _assert_same(runner: WatchedRunner, plain: WatchedRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both serve the same, though ``plain`` has to do without recordings. While a step is recorded, memory of the arena
    is overwritten as soon as nothing should need it.
    """
    with monkeypatch.context() as patch:
        patch.setattr(StepMemory, "next_part", _next_part_in_dirt)
        tokens = _serve(runner)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_steps, "MAX_ROWS", 0)
        patch.setattr(recorded_prompts, "MAX_TOKENS", 0)
        assert _serve(plain) == tokens
    assert plain.recorded_sizes == ()
    assert len(runner.hidden) == len(plain.hidden)
    assert all(map(torch.equal, runner.hidden, plain.hidden))
    assert torch.equal(*(each.kv_cache.blocks.view(torch.uint8) for each in (runner, plain)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", (*ARCHITECTURES, *DENSE_FAMILIES))
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
    assert runner.recorded_sizes == RECORDED
    assert runner.repeats_prompts == bool(RECORDED)
    if RECORDED:
        assert runner.forward_calls == NUM_SHORT_OR_LONG + NUM_WATCHED + len(("a prompt", *RECORDED))
    assert plain.forward_calls == len(plain.hidden)


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_same_bits_by_transformers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path, code = make_checkpoint(tmp_path, family), ModelCode(impl="transformers")
    runner = WatchedRunner(path, code=code)
    _assert_same(runner, WatchedRunner(path, code=code), monkeypatch)
    assert runner.recorded_sizes == (RECORDED if family in CHAINED else ())


def test_a_model_that_transformers_code_only_chains_is_recorded(checkpoint: Callable[[str], Path]) -> None:
    runner = WatchedRunner(checkpoint("llama"), code=ModelCode(impl="transformers"))
    _serve(runner)
    assert runner.recorded_sizes == RECORDED
    assert runner.repeats_prompts == bool(RECORDED)


@pytest.mark.parametrize("architecture", (*MIXTURES, *LATENT_FAMILIES))
def test_where_torch_computes_nothing_is_repeated(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    runner, plain = (WatchedRunner(checkpoint(architecture)) for _ in range(2))
    _assert_same(runner, plain, monkeypatch)
    assert runner.recorded_sizes == ()
    assert not runner.repeats_prompts


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mixtral", "deepseek_v3"])
def test_the_hook_is_called_for_each_layer_and_may_change_the_threads(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Cores are borrowed and given back between the layers of a step, be it watched, recorded, repeated or none."""
    runner, plain = (WatchedRunner(checkpoint(architecture)) for _ in range(2))
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
    num_layers = len(runner.model_config.attention)
    assert calls == num_layers * len(runner.hidden)


@pytest.mark.parametrize("recorded", [recorded_prompts.MIN_TOKENS, 13, recorded_prompts.MAX_TOKENS])
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}])
def test_prompts_of_all_lengths_repeat_the_calls_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], recorded: int
) -> None:
    """Rows of 4096 bytes are padded, and copied if they are not, since they compete for places in the cache."""
    path = make_checkpoint(tmp_path, "llama", **sizes)
    runner, plain = WatchedRunner(path), WatchedRunner(path)
    lengths = (20, recorded, recorded_prompts.MIN_TOKENS, 100, recorded_prompts.MAX_TOKENS)

    def serve(one: WatchedRunner) -> None:
        driver = StepDriver(one)
        for row, length in enumerate(lengths):
            driver.add(row, _prompt(length, seed=row))
            driver.step({row: length})
        for row in (5, 6, 7):
            driver.add(row, _prompt(4, seed=row))
        driver.step({5: 4, 6: 4, 7: 4})  # only short ones, as of rows whose drafts are verified

    serve(runner)
    with monkeypatch.context() as patch:
        patch.setattr(recorded_steps, "MAX_ROWS", 0)
        patch.setattr(recorded_prompts, "MAX_TOKENS", 0)
        serve(plain)
    assert runner.repeats_prompts == bool(RECORDED)
    assert len(runner.hidden) == len(lengths) + 1
    assert all(map(torch.equal, runner.hidden, plain.hidden))
    assert torch.equal(*(each.kv_cache.blocks.view(torch.uint8) for each in (runner, plain)))


def test_decode_steps_of_many_rows_are_taken_for_prompts(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their block tables grow between steps."""
    num_rows = 2 * recorded_prompts.MIN_TOKENS
    runner, plain = (WatchedRunner(checkpoint("gemma3"), max_num_seqs=num_rows) for _ in range(2))

    def serve(one: WatchedRunner) -> None:
        driver = StepDriver(one)
        for row in range(num_rows):
            driver.add(row, _prompt(5, seed=row))
        driver.step(dict.fromkeys(range(num_rows), 5))
        for _ in range(2 * BLOCK_SIZE):
            driver.step(dict.fromkeys(range(num_rows), 1))

    with monkeypatch.context() as patch:
        patch.setattr(recorded_steps, "MAX_ROWS", 2)
        serve(runner)
        patch.setattr(recorded_prompts, "MAX_TOKENS", 0)
        serve(plain)
    assert runner.recorded_sizes == ()
    assert runner.repeats_prompts == bool(RECORDED)
    assert runner.forward_calls < plain.forward_calls == len(plain.hidden)
    assert all(map(torch.equal, runner.hidden, plain.hidden))
