"""What may be recorded and what not, and where results of recorded steps lie; with models of a few lines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionBackend, AttentionBatch, AttentionPlan
from engine.contract.step import EMPTY_INTS, SchedulerOutput
from engine.layers.embedding import Embedding
from engine.model.step_context import StepContext
from engine.runner.input_batch import InputBatch
from engine.runner.recorded_steps import RecordedSteps
from engine.runner.recording import StepMemory, Watch
from engine.runner.step_inputs import StepInputs


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
    for _ in range(3):
        assert steps.run(_inputs(), NoAttention(), None) is model.result
    assert steps.sizes == (1,)


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

    model = LayerByLayer(lambda: embedding(ids))
    steps = RecordedSteps(model.forward)
    steps.run(_inputs(), NoAttention(), None)
    model.layers = (*model.layers, fail)
    with pytest.raises(RuntimeError):
        steps.run(_inputs(), NoAttention(), None)
    assert steps.sizes == ()
    model.layers = model.layers[:1]
    steps.run(_inputs(), NoAttention(), None)
    assert steps.sizes == (1,)


def test_memory_grows_without_moving_what_it_gave() -> None:
    memory = StepMemory(sizes=[64, 64, 64])
    memory.rewind(2)
    memory.next_part()
    given = [memory.take(torch.empty(2, 30)) for _ in range(5)]
    tensors = [tensor for tensor in given if tensor is not None]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [tensor[0, 0].item() for tensor in tensors] == list(range(5))
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= {each.data_ptr() for each in memory.lent}


def test_memory_of_the_size_that_was_seen_does_not_grow() -> None:
    shapes = ((7, 33), (7,), (7, 2, 5))
    watched = StepMemory(21, sizes=None)
    watched.rewind(7)
    watched.next_part()
    for shape in shapes:
        plain = torch.empty(shape)
        assert watched.take(plain) is plain
    memory = StepMemory(21, sizes=watched.peaks)
    memory.rewind(7)
    memory.next_part()
    before = list(memory.lent)
    given = [memory.take(torch.empty(shape)) for shape in shapes]
    rows = [tensor.as_strided((21, *tensor.shape[1:]), tensor.stride()) for tensor in given if tensor is not None]
    for number, tensor in enumerate(rows):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in rows] == [[0.0], [1.0], [2.0]]
    assert all(one is other for one, other in zip(memory.lent, before, strict=True))


def test_what_has_no_rows_has_no_place_in_memory_for_other_numbers_of_rows() -> None:
    memory = StepMemory(21, sizes=[64, 64, 64])
    memory.rewind(7)
    assert memory.take(torch.empty(8, 7)) is None
    assert memory.take(torch.empty(())) is None


def test_no_recording_in_inference_mode() -> None:
    """In it, operators that may copy look like views."""
    with torch.inference_mode(), pytest.raises(AssertionError, match="views"):
        Watch(StepMemory(sizes=None))
