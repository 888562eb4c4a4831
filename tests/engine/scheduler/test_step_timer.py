"""The measured times of a scheduler's steps, with the test's clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.step_time import StepWork
from engine.scheduler.policy.step_time_fit import FIT_PERIOD_S, STEPS_OF_KIND, StepTimeFit
from engine.scheduler.policy.step_timer import FIRST_PERIOD_S, NOTE_PERIOD_S, StepTimer, work_of
from tests.support.scheduler.scheduler_requests import make_config, make_request
from tests.support.scheduler.scheduler_world import SchedulerWorld, drafts_for_worlds


class Noted(StepTimeFit):
    """Keeps what it is told, and is new until that are ``num_new`` steps."""

    def __init__(self, num_new: float = math.inf) -> None:
        super().__init__()
        self.num_new = num_new
        self.steps: list[tuple[StepWork, float]] = []
        self.cores: list[float] = []
        self.is_new = num_new > 0

    def note(self, work: StepWork, seconds: float, *, cores: float = 1.0, passed_s: float = 0.0) -> None:
        self.cores.append(cores)
        self.steps.append((work, seconds))
        self.is_new = len(self.steps) < self.num_new


def watched(world: SchedulerWorld, fit: Noted | None = None) -> list[tuple[StepWork, float]]:
    """The steps of a world from now on, as they are learnt from."""
    fit = fit or Noted()
    world.scheduler._timer = StepTimer(clock=lambda: world.now_s, fit=fit)
    return fit.steps


def test_steps_are_timed_with_what_they_compute() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=32)
    steps = watched(world)
    world.add(make_request("a", 6))
    world.add(make_request("b", 9))

    for seconds in (0.5, 0.25, 0.125):
        world.schedule()
        world.now_s += seconds
        world.complete_step()

    assert steps == [
        (StepWork(0, 0, 6 + 2, 6 * 6 // 2 + 2), 0.5),
        (StepWork(1, 7, 7, 2 * 7 + 7 * 7 // 2), 0.25),
        (StepWork(2, 8 + 10, 0, 0), 0.125),
    ]


@pytest.mark.parametrize("rests", [True, False])
def test_what_the_engine_does_between_steps_is_part_of_the_next_one_unless_it_rested(rests: bool) -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    steps = watched(world)
    world.add(make_request("a", 6, max_tokens=9))

    for _ in range(3):
        world.schedule()
        world.now_s += 0.5
        world.complete_step()
        if rests:
            world.scheduler.rest()
        world.now_s += 0.25

    assert [seconds for _, seconds in steps] == ([0.5, 0.5, 0.5] if rests else [0.5, 0.75, 0.75])


def test_after_a_rest_the_first_of_two_steps_in_flight_begins_when_it_is_scheduled() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    steps = watched(world)
    world.add(make_request("a", 6, max_tokens=9))
    world.schedule()
    world.now_s += 0.5
    world.complete_step()
    world.scheduler.rest()
    world.now_s += 100.0

    world.schedule()
    world.now_s += 1.0
    world.schedule()
    for seconds in (2.0, 4.0):
        world.now_s += seconds
        world.complete_step()

    assert [seconds for _, seconds in steps] == [0.5, 3.0, 4.0]


def test_step_that_was_scheduled_behind_another_begins_when_that_returns() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    steps = watched(world)
    world.add(make_request("a", 6))
    world.schedule()
    world.now_s += 1.0
    world.schedule()
    world.now_s += 2.0
    world.complete_step()
    world.now_s += 4.0
    world.complete_step()

    assert [seconds for _, seconds in steps] == [3.0, 4.0]


def test_verified_drafts_count_as_rows_that_read_their_context_once() -> None:
    drafting = drafts_for_worlds(3, accuracy=1.0, proposes_all=True)
    world = SchedulerWorld(make_config(), num_blocks=32, drafting=drafting)
    world.add(make_request("a", 6, ignore_eos=True))
    world.step()
    world.schedule()

    assert work_of(world.scheduler._in_flight[0].batch) == StepWork(1 + 3, 7, 0, 0)
    world.complete_step()


@pytest.mark.parametrize(("fit", "period_s"), [(Noted(), FIRST_PERIOD_S), (Noted(num_new=0), NOTE_PERIOD_S)])
def test_of_short_steps_only_some_are_learnt_from(fit: Noted, period_s: float) -> None:
    world = SchedulerWorld(make_config(), num_blocks=64, max_model_len=200)
    steps = watched(world, fit)
    world.add(make_request("a", 6, max_tokens=150, ignore_eos=True))

    for _ in range(100):
        world.schedule()
        world.now_s += period_s / 10
        world.complete_step()
    world.scheduler._timer.take_in()

    assert len(steps) == pytest.approx(10, abs=1)


def test_steps_with_prompts_are_learnt_from_however_soon_they_come() -> None:
    world = SchedulerWorld(make_config(), num_blocks=64)
    steps = watched(world, Noted(num_new=0))

    for name in "abc":
        world.add(make_request(name, 6, max_tokens=1))
        world.schedule()
        world.now_s += NOTE_PERIOD_S / 10
        world.complete_step()

    assert [work.num_prompt_tokens for work, _ in steps] == [6, 6, 6]


def test_noted_steps_are_learnt_from_in_their_order_before_one_with_prompts() -> None:
    world = SchedulerWorld(make_config(), num_blocks=64)
    steps = watched(world, Noted(num_new=0))
    world.add(make_request("a", 6, max_tokens=50, ignore_eos=True))

    for seconds in (0.1, 0.2, 0.3):
        world.schedule()
        world.now_s += seconds
        world.complete_step()
    assert [seconds for _, seconds in steps] == [pytest.approx(0.1)], "the one with the prompt"
    world.add(make_request("b", 6))
    world.schedule()
    world.now_s += 0.4
    world.complete_step()

    assert [seconds for _, seconds in steps] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_noted_steps_are_learnt_from_when_prices_are_to_be_fitted() -> None:
    world = SchedulerWorld(make_config(), num_blocks=64)
    steps = watched(world, Noted(num_new=0))
    world.add(make_request("a", 6, max_tokens=50, ignore_eos=True))

    for _ in range(8):
        world.schedule()
        world.now_s += FIT_PERIOD_S / 4
        world.complete_step()

    assert len(steps) == 1 + 4, "not the last three"


def test_noted_steps_are_learnt_from_before_several_in_one() -> None:
    config = make_config(max_decode_steps=4, cuts_decode_steps=True, budget=64)
    world = SchedulerWorld(config, num_blocks=80, max_model_len=100)
    fit = Noted(num_new=0)
    timer = StepTimer(clock=lambda: world.now_s, fit=fit)
    world.add(make_request("a", 6, max_tokens=50, ignore_eos=True))
    world.step()
    world.schedule()
    several = world.scheduler._in_flight[0]
    world.complete_step()
    ones = np.ones(1, np.int32)
    batch = replace(several.batch, num_scheduled_tokens=ones, num_samples=ones, num_tokens=1, total_samples=1)
    one = replace(several, batch=batch)

    for _ in range(2):
        world.now_s += NOTE_PERIOD_S
        timer.step_returned(one)
    assert fit.steps == []
    ends_s = world.now_s + np.cumsum([0.06, 0.07, 0.08, 0.09])
    world.now_s = float(ends_s[-1])
    timer.step_returned(several, ends_s=ends_s.tolist())

    assert [seconds for _, seconds in fit.steps][-4:] == pytest.approx([0.06, 0.07, 0.08, 0.09])
    assert len(fit.steps) == 5, "of the first two, one is noted"


@given(
    # Of such times no sum is the period itself, where rounding would decide.
    seconds=st.lists(st.sampled_from([0.0021, 0.0113, 0.0307, 0.0611, 0.203]), min_size=2, max_size=80),
    num_new=st.sampled_from([0, 1, 24, 100]),
)
def test_several_decode_steps_in_one_are_learnt_from_as_if_they_came_one_by_one(
    seconds: Sequence[float], num_new: int
) -> None:
    """But for those that later ones of their kind would replace, when the worker is no longer new."""
    kinds = []
    for num_at_once in (1, len(seconds)):
        config = make_config(max_decode_steps=num_at_once, cuts_decode_steps=True, budget=2 * len(seconds) + 64)
        world = SchedulerWorld(config, num_blocks=80, max_model_len=100)
        for name in "ab":
            world.add(make_request(name, 6, max_tokens=len(seconds) + 1, ignore_eos=True))
        world.step()
        noted = Noted(num_new)
        timer = StepTimer(clock=lambda world=world: world.now_s, fit=noted)
        for at in range(0, len(seconds), num_at_once):
            world.schedule()
            step, ends_s = world.scheduler._in_flight[0], world.now_s + np.cumsum(seconds[at : at + num_at_once])
            world.now_s = float(ends_s[-1])
            timer.step_returned(step, ends_s=ends_s.tolist() if num_at_once > 1 else None)
            world.complete_step()
        timer.take_in()
        kinds.append([(*work, pytest.approx(step_s)) for work, step_s in noted.steps])

    single, at_once = kinds
    assert at_once == single[:num_new] + single[num_new:][-STEPS_OF_KIND:]


def test_a_load_report_tells_what_steps_take() -> None:
    world = SchedulerWorld(make_config(), num_blocks=32)
    world.add(make_request("a", 6, max_tokens=50, ignore_eos=True))
    for _ in range(40):
        world.schedule()
        world.now_s += 0.25
        world.complete_step()

    model = world.scheduler.step_time

    assert model.num_steps > 0
    assert model.seconds(StepWork(num_rows=1, num_context_tokens=20)) == pytest.approx(0.25, rel=0.05)


def test_steps_are_noted_with_the_cores_that_they_had() -> None:
    world = SchedulerWorld(make_config(budget=8), num_blocks=32)
    fit = Noted()
    world.scheduler._timer = StepTimer(clock=lambda: world.now_s, fit=fit)
    world.add(make_request("a", 6, ignore_eos=True))

    for cores in (1.0, 2.0, 1.5):
        world.schedule()
        world.now_s += 0.5
        world.complete_step(cores=cores)

    assert fit.cores == [1.0, 2.0, 1.5]


@pytest.mark.parametrize("step_s", [NOTE_PERIOD_S / 25, NOTE_PERIOD_S / 3, 2 * NOTE_PERIOD_S])
def test_prices_are_fitted_once_a_second_however_long_steps_are(step_s: float) -> None:
    world = SchedulerWorld(make_config(), num_blocks=2000, max_model_len=6000)
    world.scheduler._timer = StepTimer(clock=lambda: world.now_s)
    world.add(make_request("a", 6, max_tokens=5900, ignore_eos=True))
    models = []

    for _ in range(round(8 / step_s)):
        world.schedule()
        world.now_s += step_s
        world.complete_step()
        if world.now_s > 4.0:
            models.append(world.scheduler.step_time)

    assert len({id(model) for model in models}) == pytest.approx(5, abs=1)
