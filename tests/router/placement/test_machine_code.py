"""Choices among many replicas in machine code, whose results equal those of its Python source, to the bit."""

from __future__ import annotations

import math
from threading import Event
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.fleet import Column, Fleet, Standing
from router.placement.machine_code import MANY, PLAIN, Loops, MachineCode, compiled
from router.placement.planner import room_for_costs
from router.placement.prediction import Wish
from tests.support.router.standings import MODEL, WISHES, standing

pytestmark = pytest.mark.timeout(1800)  # it is compiled once, 10 s on an idle core

REPLICAS = st.lists(
    st.builds(
        standing,
        num_available_blocks=st.integers(0, 100).map(float),
        is_idle=st.sampled_from([0.0, 1.0]),
        queued_tokens=st.sampled_from([0.0, 0.0, 700.0, 20_000.0]),
        num_rows=st.sampled_from([0.0, 0.0, 3.0, 40.0]),
        num_context_tokens=st.integers(0, 100_000).map(float),
        prompt_share=st.floats(0, 1),
        leans_to_prompts=st.sampled_from([0.0, 0.5, 1.0]),
        prompt_token_s=st.floats(1e-6, 1e-3),
        is_known=st.sampled_from([1.0, 1.0, 0.0]),
        knows_prompts=st.sampled_from([1.0, 1.0, 0.0]),
        most_rows=st.sampled_from([0.0, 2.0, 40.0]),
        core_gain=st.sampled_from([math.nan, 0.0, 0.5, 0.8]),
        own_cores=st.sampled_from([1.0, 2.0]),
        host_cores=st.sampled_from([0.0, 2.0, 4.0]),
        host=st.integers(0, 2).map(float),
        max_rows=st.sampled_from([0.0, 16.0]),
        order=st.integers(0, 99).map(float),
        deferred_tokens=st.sampled_from([0.0, 5000.0]),
        keeps_to=st.sampled_from([0.0, 0.0, 1.0, -1.0]),
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def machine_code() -> Loops:
    return compiled()


def results(loops: Loops, replicas: list[Standing], wish: Wish, cached: list[float], *, as_arrays: bool) -> list[Any]:
    """All that the loops answer or write."""
    fleet = Fleet()
    slots = [fleet.take_slot() for _ in replicas]
    for slot, replica in zip(slots, replicas, strict=True):
        fleet.write(slot, replica)
    standings = fleet.standings_as_arrays(np.array(slots)) if as_arrays else fleet.standings(slots)
    tokens = cast("Column", np.array(cached) if as_arrays else cached)
    costs = room_for_costs(standings, len(cached))
    loops.prepare(standings, wish.num_prompt_tokens)
    way = loops.best_way(standings, wish, tokens, costs)
    prompt = loops.best_prompt(standings, wish, tokens, costs)
    split = loops.best_split(standings, wish, tokens, costs, way.prompt)
    return [way, prompt, split, *(list(map(float, column)) for column in (*standings, *costs))]


@given(replicas=REPLICAS, wish=WISHES, data=st.data())
def test_same_results_to_the_bit(
    replicas: list[Standing], wish: Wish, data: st.DataObject, machine_code: Loops
) -> None:
    num_candidates = data.draw(st.integers(1, len(replicas)))
    sizes = st.integers(0, int(wish.num_prompt_tokens) - 1).map(float)
    cached = data.draw(st.lists(sizes, min_size=num_candidates, max_size=num_candidates))
    wish = wish._replace(least_head_tokens=data.draw(st.sampled_from([0.0, 64.0])))

    in_python = results(PLAIN, replicas, wish, cached, as_arrays=False)

    assert results(machine_code, replicas, wish, cached, as_arrays=True) == in_python


def test_few_replicas_never_have_it_compiled() -> None:
    code = MachineCode()

    assert not code.is_for(MANY - 1)
    code.wait()
    assert not code.is_for(MANY - 1)


def test_many_use_it_once_it_is_there(machine_code: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = Event()
    monkeypatch.setattr("router.placement.machine_code.compiled", lambda: may_end.wait() and machine_code)
    code, fleet = MachineCode(), Fleet()
    slots = [fleet.take_slot() for _ in range(MANY)]
    for slot in slots:
        fleet.write(slot, standing())

    assert not code.is_for(MANY), "it is compiled beside the first choices"
    assert code.loops_of(fleet.standings(slots)) is PLAIN
    may_end.set()
    code.wait()

    assert code.is_for(MANY)
    assert code.loops_of(fleet.standings_as_arrays(np.array(slots))) is machine_code
    assert code.loops_of(fleet.standings(slots)) is PLAIN


@pytest.mark.parametrize("num_choices, is_compiled", [(10, False), (1_000_000, True)])
def test_before_many_choices_in_a_row_it_is_compiled_and_beside_them_never(
    num_choices: int, is_compiled: bool, machine_code: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.placement.machine_code.compiled", lambda: machine_code)
    code = MachineCode()

    with code.for_choices(num_choices, MANY):
        assert code.is_for(MANY) is is_compiled
        code.wait()
        assert code.is_for(MANY) is is_compiled

    code.is_for(MANY)
    code.wait()
    assert code.is_for(MANY), "who makes them one by one has it compiled beside them"


def test_where_it_cannot_be_compiled_python_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Loops:
        raise ImportError("no numba here")

    monkeypatch.setattr("router.placement.machine_code.compiled", fails)
    code = MachineCode()
    code.is_for(MANY)
    code.wait()

    assert not code.is_for(MANY)
    assert "was not compiled" in caplog.text


def test_arrays_follow_what_replicas_write() -> None:
    fleet = Fleet()
    slots = [fleet.take_slot() for _ in range(40)]
    for slot in slots:
        fleet.write(slot, standing())
    before = fleet.standings_as_arrays(np.array(slots))
    fleet.write(slots[3], standing(num_rows=7.0))

    after = fleet.standings_as_arrays(np.array(slots))

    assert (before.num_rows[3], after.num_rows[3], after.num_rows[2]) == (0.0, 7.0, 0.0)
    assert after.base_s[39] == MODEL.base_s
