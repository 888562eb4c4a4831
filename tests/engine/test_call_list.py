"""Recorded kernel calls repeat in order, on any number of threads, with the arguments that they had."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch

from engine.kernels import call, call_loop, row_copies
from engine.kernels.call import CallList, KernelCall, recording, threads_for
from engine.layers.embedding import Embedding
from engine.layers.experts.compiled import CompiledExperts
from engine.layers.layer_spec import Activation

NUM_ROWS, SIZE = 64, 1024
NUM_COPIES, NUM_TURNS = 12, 50
TIMEOUT_S = 300.0


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> int:
    """So many threads run a list."""
    return int(request.param)


@pytest.fixture(autouse=True)
def _threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _copy(one: KernelCall, source: torch.Tensor, target: torch.Tensor) -> None:
    one.parameters[row_copies.SOURCE], one.parameters[row_copies.TARGET] = source.data_ptr(), target.data_ptr()
    one.parameters[row_copies.NUM_ROWS], one.parameters[row_copies.SIZE] = source.shape
    one.parameters[row_copies.SOURCE_STRIDE], one.parameters[row_copies.TARGET_STRIDE] = source.shape[1:] * 2
    one.run_over(source.numel())


def _copies() -> tuple[list[torch.Tensor], CallList]:
    """A list that copies from each tensor to the next one."""
    tensors, calls = list(torch.zeros(NUM_COPIES, NUM_ROWS, SIZE)), CallList()
    one = KernelCall(partial(row_copies.compiled_copy, "float32", "float32"), row_copies.NUM_COPY_PARAMETERS)
    with recording() as into:
        into(calls)
        for source, target in pairwise(tensors):
            _copy(one, source, target)
    assert len(calls) == NUM_COPIES - 1
    return tensors, calls


def test_each_call_sees_all_that_the_calls_before_it_wrote(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    tensors, calls = _copies()
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_TURNS):
        torch.randn(NUM_ROWS, SIZE, generator=generator, out=tensors[0])
        calls.run()
        assert torch.equal(tensors[-1], tensors[0])


def test_the_number_of_threads_may_change_between_runs() -> None:
    tensors, calls = _copies()
    for turn in range(NUM_TURNS):
        torch.set_num_threads(1 + turn % 3)
        tensors[0].fill_(turn)
        calls.run()
        assert bool((tensors[-1] == turn).all())


def test_without_a_team_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "team_function", lambda _: 0)
    torch.set_num_threads(2)
    tensors, calls = _copies()
    tensors[0].fill_(7.0)
    calls.run()
    assert bool((tensors[-1] == 7.0).all())


def test_calls_keep_their_arguments_and_only_those_of_this_thread_are_recorded() -> None:
    weights = torch.arange(40.0).view(10, 4)
    embeddings = [Embedding(weights, scale=scale) for scale in (1.0, 2.0)]
    ids, calls = torch.tensor([3, 9]), CallList()
    with recording() as into:
        into(calls)
        recorded = [embedding(ids) for embedding in embeddings]
        aside = threading.Thread(target=embeddings[0], args=(ids,))
        aside.start()
        aside.join()
    after = embeddings[0](torch.tensor([0, 0, 0]))
    assert len(calls) == len(recorded)
    ids.copy_(torch.tensor([1, 0]))
    calls.run()
    assert all(torch.equal(made, scale * weights[[1, 0]]) for made, scale in zip(recorded, (1.0, 2.0), strict=True))
    assert torch.equal(after, weights[[0, 0, 0]])


def test_large_and_small_kernels_in_turn(num_threads: int) -> None:
    """In a small one only the first threads take part, and the others wait for it."""
    torch.set_num_threads(num_threads)
    one = KernelCall(partial(row_copies.compiled_copy, "float32", "float32"), row_copies.NUM_COPY_PARAMETERS)
    wide, narrow = list(torch.zeros(6, NUM_ROWS, SIZE)), list(torch.zeros(6, NUM_ROWS, SIZE))
    assert threads_for(NUM_ROWS) == 1 < threads_for(NUM_ROWS * SIZE)
    calls = CallList()
    with recording() as into:
        into(calls)
        for index in range(5):
            _copy(one, wide[index], wide[index + 1])
            _copy(one, wide[index + 1][:1], narrow[index][:1])
            _copy(one, narrow[index][:1], wide[index + 1][-1:])
    for turn in range(1, NUM_TURNS):
        wide[0].copy_(torch.arange(NUM_ROWS * SIZE).view(NUM_ROWS, SIZE)).mul_(turn)
        calls.run()
        assert torch.equal(wide[5][:-1], wide[0][:-1])
        assert torch.equal(wide[5][-1], wide[0][0])


def test_a_kernel_whose_phases_have_counters_of_their_own(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(1)
    gate_up, down = torch.randn(6, 64, 64, generator=generator), torch.randn(6, 64, 32, generator=generator)
    experts = CompiledExperts((gate_up, None), (down, None), activation=Activation.SILU, clamp=None)
    x, chosen, weights = torch.randn(40, 64), torch.randint(6, (40, 2)), torch.rand(40, 2)
    calls = CallList()
    with recording() as into:
        into(calls)
        rooms = []  # the memory that the kernel uses besides its result must stay as well
        allocate = torch.empty
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *a, **k: rooms.append(allocate(*a, **k)) or rooms[-1])
            result = experts(x, chosen, weights)
    for seed in range(NUM_TURNS):
        x.copy_(torch.randn(x.shape, generator=generator.manual_seed(seed)))
        chosen.copy_(torch.randint(6, chosen.shape, generator=generator))
        calls.run()
        assert torch.equal(result, experts(x, chosen, weights))


FEWER_THREADS = """
import torch
from tests.engine.test_call_list import _copies
torch.set_num_threads(3)
tensors, calls = _copies()
tensors[0].fill_(5.0)
calls.run()
print(bool((tensors[-1] == 5.0).all()))
"""


def test_a_runtime_that_gives_fewer_threads_than_asked_for() -> None:
    environment = os.environ | {"OMP_THREAD_LIMIT": "2"}
    said = subprocess.run(
        [sys.executable, "-c", FEWER_THREADS], env=environment, capture_output=True, check=True, timeout=TIMEOUT_S
    )
    assert said.stdout.split() == [b"True"]


@pytest.mark.parametrize("recorded_rows", [1, 5, NUM_ROWS])
def test_a_list_for_other_numbers_of_rows(recorded_rows: int) -> None:
    """They run on as many threads as their own rows justify."""
    torch.set_num_threads(3)
    weights, calls = torch.randn(9, SIZE), CallList()
    ids, room = torch.zeros(NUM_ROWS, dtype=torch.int64), torch.zeros(NUM_ROWS, SIZE)
    embedding = Embedding(weights)
    with recording() as into, pytest.MonkeyPatch.context() as patch:
        into(calls)
        patch.setattr(torch, "empty", lambda num_rows, *_, **__: room[:num_rows])
        embedding(ids[:recorded_rows])
    assert calls.can_scale(recorded_rows)
    assert not calls.can_scale(recorded_rows + 1)
    for num_rows in (NUM_ROWS, 1, 40):
        ids.copy_(torch.randint(9, ids.shape))
        room.fill_(-1.0)
        calls.run(num_rows)
        assert torch.equal(room[:num_rows], weights[ids[:num_rows]])
        assert bool((room[num_rows:] == -1.0).all())
        assert calls._table[0, call_loop.MAX_THREADS] == threads_for(num_rows * SIZE)
    ids.fill_(3)
    calls.run()
    assert torch.equal(room[:40], weights[ids[:40]])


def test_a_call_without_a_number_of_rows_does_not_scale() -> None:
    _, calls = _copies()
    assert not calls.can_scale(NUM_ROWS)


def test_an_empty_list_does_nothing() -> None:
    CallList().run()
