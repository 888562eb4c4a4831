"""Decode steps that repeat recorded kernel calls compute, bit by bit, what the model's code computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionBackend, AttentionBatch, AttentionPlan
from engine.contract.config import CacheConfig, DTypeName, EngineConfig, ModelCode, ModelConfigSource, SchedulerConfig
from engine.contract.step import EMPTY_INTS, SchedulerOutput
from engine.layers.embedding import Embedding
from engine.layers.panel_weight import suits_panels
from engine.model.registry import ANY_CODE
from engine.model.step_context import StepContext
from engine.runner import recorded_prompts, recorded_steps, recording
from engine.runner.input_batch import InputBatch
from engine.runner.model_runner import ModelRunner
from engine.runner.recorded_steps import RecordedSteps
from engine.runner.recording import MIN_REGION_BYTES, StepMemory
from engine.runner.step_inputs import StepInputs
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

NUM_SHORT_OR_LONG = 2
"""Steps of ``_serve`` that compute too few or too many tokens to be recorded."""

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

        def counted(input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
            self.forward_calls += 1
            return forward(input_ids, context)

        def kept(hidden: torch.Tensor) -> torch.Tensor:
            self.hidden.append(hidden.clone())
            return logits(hidden)

        self._model.forward, self._model.logits = counted, kept  # type: ignore[method-assign]
        self._recorded = RecordedSteps(counted)


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
        assert runner.forward_calls == NUM_SHORT_OR_LONG + len(("a prompt", *RECORDED))
    assert plain.forward_calls == len(plain.hidden)


@pytest.mark.parametrize("family", TRANSFORMERS_FAMILIES)
def test_same_bits_by_transformers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path, code = make_checkpoint(tmp_path, family), ModelCode(impl="transformers")
    _assert_same(WatchedRunner(path, code=code), WatchedRunner(path, code=code), monkeypatch)


def test_a_model_that_transformers_code_only_chains_is_recorded(checkpoint: Callable[[str], Path]) -> None:
    runner = WatchedRunner(checkpoint("llama"), code=ModelCode(impl="transformers"))
    _serve(runner)
    assert runner.recorded_sizes == RECORDED


@pytest.mark.parametrize("architecture", (*MIXTURES, *LATENT_FAMILIES))
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
    num_layers = len(runner.model_config.attention)
    assert calls == num_layers * len(runner.hidden)


def test_results_that_need_more_memory_than_was_thought(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MIN_REGION_BYTES", 64)
    runner = WatchedRunner(checkpoint("qwen3"))
    monkeypatch.setattr(recording, "MIN_REGION_BYTES", MIN_REGION_BYTES)
    _assert_same(runner, WatchedRunner(checkpoint("qwen3")), monkeypatch)
    assert runner.recorded_sizes == RECORDED


def test_large_steps_are_not_recorded(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "MAX_ROWS", 2)
    runner = WatchedRunner(checkpoint("llama"))
    _serve(runner)
    assert runner.recorded_sizes == RECORDED[:1]
    assert runner.repeats_prompts


class LayerByLayer:
    """Stands for a model: ``layers`` are called in order, with the hook before each."""

    def __init__(self, *layers: Callable[[], object]) -> None:
        self.layers = layers
        self.result = torch.zeros(1, 8)

    def forward(self, input_ids: torch.Tensor, context: StepContext) -> torch.Tensor:
        """A step."""
        del input_ids
        for layer in self.layers:
            assert context.between_layers is not None
            context.between_layers()
            layer()
        return self.result


class NoAttention(AttentionBackend):
    """For models without attention."""

    def plan(self, batch: AttentionBatch) -> list[AttentionPlan]:
        """None."""
        del batch
        return []


def _inputs() -> StepInputs:
    """A decode step of one row."""
    rows = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    one = np.ones(1, dtype=np.int32)
    output = SchedulerOutput(
        step_id=0,
        rows=0 * one,
        first_positions=0 * one,
        num_scheduled_tokens=one,
        num_samples=one,
        released_rows=EMPTY_INTS,
    )
    return rows.prepare(output)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.zeros(3),
        lambda: torch._foreach_add_([torch.empty(3)], 1.0),
        lambda: torch.tensor([3.0]),
        lambda: torch.empty(3).sum().item(),
        lambda: torch.empty(3)[1:].copy_(torch.empty(2)),
    ],
    ids=["a constant", "an operator that returns nothing", "numbers of Python", "a number for Python", "a copy"],
)
def test_no_step_in_which_torch_computes_is_repeated(compute: Callable[[], object]) -> None:
    model = LayerByLayer(compute)
    steps = RecordedSteps(model.forward)
    assert steps.run(_inputs(), NoAttention(), None) is model.result
    assert steps.sizes == ()
    assert steps.run(_inputs(), NoAttention(), None) is None


def test_views_and_new_tensors_do_not_hinder_recording() -> None:
    model = LayerByLayer(lambda: torch.empty(3, 4).view(12)[2:].unflatten(0, (5, 2)).t().split(1))
    steps = RecordedSteps(model.forward)
    steps.run(_inputs(), NoAttention(), None)
    assert steps.sizes == (1,)
    assert steps.run(_inputs(), NoAttention(), None) is model.result


def test_what_a_model_keeps_for_longer_survives_if_it_cannot_be_recorded() -> None:
    """Its first step, which was to be recorded, is right as well."""
    kept: list[torch.Tensor] = []

    def keep() -> None:
        kept.append(torch.zeros(2).new_empty(4).fill_(7.0))

    model = LayerByLayer(keep, *[lambda: torch.empty(4).fill_(1.0)] * 4)
    RecordedSteps(model.forward).run(_inputs(), NoAttention(), None)
    assert kept[0].tolist() == [7.0] * 4


def test_the_hook_runs_outside_the_recording() -> None:
    """It takes arrivals and begins hand-overs, which is no part of the step."""
    embedding, ids = Embedding(torch.ones(4, 4)), torch.tensor([1])
    made: list[torch.Tensor] = []

    def hook() -> None:
        made.append(torch.zeros(3) + embedding(ids).sum())

    model = LayerByLayer(lambda: embedding(ids), lambda: None)
    steps = RecordedSteps(model.forward)
    for _ in range(3):
        steps.run(_inputs(), NoAttention(), hook)
    assert steps.sizes == (1,)
    assert len(made) == 3 * len(model.layers)


def test_a_step_that_fails_while_it_is_recorded_leaves_nothing_behind() -> None:
    embedding, ids = Embedding(torch.ones(4, 4)), torch.tensor([1])

    def fail() -> None:
        raise RuntimeError("out of memory")

    model = LayerByLayer(lambda: embedding(ids), fail)
    steps = RecordedSteps(model.forward)
    with pytest.raises(RuntimeError):
        steps.run(_inputs(), NoAttention(), None)
    assert steps.sizes == ()
    model.layers = model.layers[:1]
    steps.run(_inputs(), NoAttention(), None)
    assert steps.sizes == (1,)
