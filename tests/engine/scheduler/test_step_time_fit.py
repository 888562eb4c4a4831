"""The model of step times finds the prices of synthetic steps, noisy and delayed ones among them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.step_time import UNKNOWN_STEP_TIME, StepTimeModel, StepWork, prompt_reads
from engine.scheduler.policy.step_time_fit import (
    EARLY_FIT_STEPS,
    FIT_PERIOD_S,
    MOST_DELAY,
    StepTimeFit,
    robust_prices,
)

TRUE = StepTimeModel(
    base_s=0.008, row_s=0.0004, context_token_s=2e-7, prompt_token_s=0.0002, prompt_read_s=5e-9, num_steps=1
)
MACHINES = st.builds(
    StepTimeModel,
    base_s=st.floats(0.002, 0.05),
    row_s=st.floats(0.00002, 0.002),
    context_token_s=st.sampled_from([0.0, 2e-8, 5e-7]),
    prompt_token_s=st.floats(0.00005, 0.002),
    prompt_read_s=st.sampled_from([0.0, 1e-9, 2e-8]),
    num_steps=st.just(1),
)


def random_work(source: np.random.Generator, *, prompt_share: float) -> StepWork:
    has_prompt = source.random() < prompt_share
    num_rows = int(source.integers(0 if has_prompt else 1, 33))
    num_tokens = int(source.integers(2, 1024)) if has_prompt else 0
    num_cached = int(source.integers(0, 2000))
    return StepWork(
        num_rows=num_rows,
        num_context_tokens=num_rows * int(source.integers(50, 2000)),
        num_prompt_tokens=num_tokens,
        num_prompt_reads=prompt_reads(num_tokens, after=num_cached),
    )


class Machine:
    """Steps of a machine that knows its prices, with noise, some of them delayed by something else."""

    def __init__(
        self, model: StepTimeModel = TRUE, *, seed: int = 0, noise: float = 0.04, delayed_share: float = 0.1
    ) -> None:
        self.model = model
        self.speed = 1.0
        self._source = np.random.default_rng(seed)
        self._noise = noise
        self._delayed_share = delayed_share

    def run(self, fit: StepTimeFit, num_steps: int, *, prompt_share: float = 0.3) -> None:
        for _ in range(num_steps):
            work = random_work(self._source, prompt_share=prompt_share)
            seconds = self.seconds(work) * self.noise()
            if self._source.random() < self._delayed_share:
                seconds *= self._source.uniform(2.0, 10.0)
            fit.note(work, float(seconds))

    def noise(self) -> float:
        return float(np.exp(self._noise * self._source.standard_normal()))

    def seconds(self, work: StepWork) -> float:
        return self.model.seconds(work) / self.speed

    def error_of(self, model: StepTimeModel, *, prompt_share: float = 0.3) -> float:
        """The mean error of undisturbed steps, as a share of each."""
        works = [random_work(self._source, prompt_share=prompt_share) for _ in range(100)]
        return float(np.mean([abs(model.seconds(work) / self.seconds(work) - 1.0) for work in works]))


def note_step(machine: Machine, fit: StepTimeFit, work: StepWork) -> None:
    """Note a step with this work, with the machine's noise."""
    fit.note(work, machine.seconds(work) * machine.noise())


FIRST_FIT_STEPS = EARLY_FIT_STEPS[0]


def test_nothing_is_known_before_some_steps() -> None:
    fit = StepTimeFit()
    machine = Machine()

    machine.run(fit, FIRST_FIT_STEPS - 1)
    assert fit.model is UNKNOWN_STEP_TIME
    machine.run(fit, 1)

    assert fit.model.num_steps == FIRST_FIT_STEPS
    assert fit.model.error == 1.0


def test_the_most_prompt_tokens_of_a_step_are_kept() -> None:
    fit = StepTimeFit()
    for num_tokens in (0.0, 40.0, 300.0, 20.0):
        fit.note(StepWork(num_rows=1, num_context_tokens=10, num_prompt_tokens=num_tokens), 0.01)

    assert fit.most_prompt_tokens == 300.0


@pytest.mark.parametrize("num_steps", EARLY_FIT_STEPS)
def test_few_steps_of_prompts_are_enough_to_predict_others(num_steps: int) -> None:
    fit, source = StepTimeFit(), np.random.default_rng(num_steps)
    for _ in range(num_steps):
        num_tokens = float(source.integers(384, 1152))
        work = StepWork(num_prompt_tokens=num_tokens, num_prompt_reads=prompt_reads(num_tokens, after=0.0))
        fit.note(work, TRUE.seconds(work) * float(np.exp(0.12 * source.standard_normal())))

    for num_tokens in (700.0, 1000.0):
        work = StepWork(num_prompt_tokens=num_tokens, num_prompt_reads=prompt_reads(num_tokens, after=0.0))
        assert fit.model.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.4)


def test_first_prompts_are_priced_as_soon_as_they_were_seen() -> None:
    fit = StepTimeFit()
    answers = StepWork(num_rows=4, num_context_tokens=1000)
    prompt = StepWork(num_prompt_tokens=600, num_prompt_reads=prompt_reads(600, after=0.0))
    for _ in range(EARLY_FIT_STEPS[-1] + 10):
        fit.note(answers, TRUE.seconds(answers))

    fit.note(prompt, TRUE.seconds(prompt))

    assert fit.model.seconds(prompt) == pytest.approx(TRUE.seconds(prompt), rel=0.1)


@settings(max_examples=20, deadline=None)
@given(machine=st.builds(Machine, MACHINES, seed=st.integers(0, 999)))
def test_prices_are_found_though_some_steps_are_delayed(machine: Machine) -> None:
    fit = StepTimeFit()

    machine.run(fit, 600)

    assert machine.error_of(fit.model) < 0.06


@pytest.mark.parametrize("seed", range(4))
def test_a_first_prompt_in_small_steps_is_soon_predicted(seed: int) -> None:
    """Its first step may leave open whether its tokens cost the time or what they read, and a wrong answer makes later
    steps look ten times too long: then they are cut to the smallest, and the prompt takes many.
    """
    fit = StepTimeFit()
    machine = Machine(replace(TRUE, prompt_token_s=0.0004, prompt_read_s=0.0), seed=seed, delayed_share=0.0)
    for position in range(40):
        note_step(machine, fit, StepWork(num_rows=1, num_context_tokens=700 + position))
    num_missed, num_computed = 0, 0
    for num_tokens in (25, 52, 31, *[16] * 40):
        work = StepWork(num_prompt_tokens=num_tokens, num_prompt_reads=prompt_reads(num_tokens, after=num_computed))
        num_missed += not 0.5 < fit.model.seconds(work) / machine.seconds(work) < 2.0
        note_step(machine, fit, work)
        num_computed += num_tokens

    assert num_missed <= 5
    assert fit.model.error < 0.2


def test_each_price_is_found() -> None:
    fit, model = StepTimeFit(), replace(TRUE, prompt_read_s=1e-7)

    Machine(model, noise=0.01).run(fit, 2000)

    for price in ("base_s", "row_s", "context_token_s", "prompt_token_s", "prompt_read_s"):
        assert getattr(fit.model, price) == pytest.approx(getattr(model, price), rel=0.15), price


def test_model_says_how_many_rows_its_prices_come_from() -> None:
    fit = StepTimeFit()
    for num_rows in (1, 3, 7, 2, 1, 1):
        fit.note(StepWork(num_rows, 100.0 * num_rows), 0.01)

    assert fit.model.most_rows == 7


def test_error_is_that_of_predictions_made_before() -> None:
    fit = StepTimeFit()

    Machine(noise=0.1, delayed_share=0.0).run(fit, 2000)

    assert fit.model.error == pytest.approx(0.08, abs=0.03)


@pytest.mark.parametrize("delayed_share", [0.0, 0.05])
def test_delayed_steps_are_counted_but_not_those_of_a_new_worker(delayed_share: float) -> None:
    fit = StepTimeFit()
    Machine(delayed_share=1.0).run(fit, EARLY_FIT_STEPS[-1])
    Machine(delayed_share=delayed_share, seed=1).run(fit, 3000)

    assert fit.model.delayed == pytest.approx(delayed_share, rel=0.3, abs=0.002)
    if delayed_share:
        assert fit.model.delay == pytest.approx(MOST_DELAY, rel=0.15), "most are more than three times as long"


def test_error_is_bounded_where_steps_take_much_less_than_was_predicted() -> None:
    fit, work = StepTimeFit(), StepWork(num_rows=4, num_context_tokens=100)

    for _ in range(4):
        fit.note(work, seconds=1.0)
    for _ in range(20):
        fit.note(work, seconds=0.001)

    assert 0 < fit.model.error <= 1.0


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_change_of_speed_is_followed(speed: float) -> None:
    machine, fit = Machine(), StepTimeFit()
    machine.run(fit, 1000)

    machine.speed = speed
    machine.run(fit, 300)

    assert machine.error_of(fit.model) < 0.08


def test_prompts_are_not_forgotten_over_answers() -> None:
    machine, fit = Machine(), StepTimeFit()
    machine.run(fit, 500)

    machine.run(fit, 5000, prompt_share=0.0)

    assert machine.error_of(fit.model, prompt_share=1.0) < 0.1


@pytest.mark.parametrize(("seen", "unseen"), [(0.0, 1.0), (1.0, 0.0)])
def test_what_was_never_seen_is_priced_like_what_was(seen: float, unseen: float) -> None:
    machine, fit = Machine(), StepTimeFit()

    machine.run(fit, 500, prompt_share=seen)

    works = [random_work(np.random.default_rng(seed), prompt_share=unseen) for seed in range(50)]
    for work in works:
        assert machine.seconds(work) / 4 < fit.model.seconds(work) < machine.seconds(work) * 4


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.builds(
                StepWork,
                st.integers(0, 500),
                st.integers(0, 2**40),
                st.integers(0, 10**6),
                st.integers(0, 2**50),
            ),
            st.floats(0.0, 1e4),
            st.sampled_from([1.0, 1.0, 1.5, 2.0, 16.0]),
        ),
        min_size=FIRST_FIT_STEPS,
        max_size=60,
    )
)
def test_no_price_is_negative_and_all_are_numbers(steps: list[tuple[StepWork, float, float]]) -> None:
    fit = StepTimeFit()
    for work, seconds, cores in steps:
        fit.note(work, seconds, cores=cores)

    values = [getattr(fit.model, item.name) for item in fields(fit.model)]
    assert all(np.isfinite(value) and value >= 0 for value in values if value is not None)


def test_model_changes_once_a_second_of_steps() -> None:
    fit, work = StepTimeFit(), StepWork(num_rows=4, num_context_tokens=100)
    models = []
    for _ in range(FIRST_FIT_STEPS + round(10 * FIT_PERIOD_S / 0.01)):
        fit.note(work, 0.01)
        models.append(fit.model)

    assert len({id(model) for model in models}) <= 1 + len(EARLY_FIT_STEPS) + 10


def test_zero_work_is_priced_at_nothing() -> None:
    work = np.array([[1.0, 0.0, 0.0, 0.0, 0.0]] * 3)

    prices = robust_prices(work, np.full(3, 0.5), np.ones(3))

    assert prices == pytest.approx([0.5, 0.0, 0.0, 0.0, 0.0], rel=0.02, abs=1e-4)


def on_cores(fit: StepTimeFit, cores: float, *, gain: float, num_steps: int, seed: int) -> None:
    """Steps of a machine on so many times its own cores."""
    source = np.random.default_rng(seed)
    for _ in range(num_steps):
        work = random_work(source, prompt_share=0.3)
        noise = float(np.exp(0.03 * source.standard_normal()))
        fit.note(work, replace(TRUE, core_gain=gain).on(cores).seconds(work) * noise, cores=cores)


@pytest.mark.parametrize("gain", [0.1, 0.5, 0.9])
def test_what_more_cores_gain_is_learnt_from_steps_on_more_and_on_fewer(gain: float) -> None:
    fit = StepTimeFit()
    for turn in range(20):
        on_cores(fit, 1.0 + turn % 2, gain=gain, num_steps=20, seed=turn)

    assert fit.model.core_gain == pytest.approx(gain, abs=0.25)
    for cores in (1.0, 2.0):
        for work in (StepWork(num_rows=8, num_context_tokens=4000), StepWork(num_prompt_tokens=600)):
            expected = replace(TRUE, core_gain=gain).on(cores).seconds(work)
            assert fit.model.on(cores).seconds(work) == pytest.approx(expected, rel=0.15)


def test_a_worker_to_which_more_cores_are_worth_nothing_still_takes_them() -> None:
    """A gain of 0 is that of one that takes none."""
    fit = StepTimeFit()
    for _ in range(40):
        for cores in (1.0, 2.0):
            fit.note(StepWork(num_rows=1, num_context_tokens=100), 0.01, cores=cores)

    assert fit.model.core_gain is not None
    assert 0.0 < fit.model.core_gain < 0.2


def test_steps_that_were_all_on_borrowed_cores_are_predicted_on_as_many() -> None:
    fit = StepTimeFit()
    on_cores(fit, 2.0, gain=0.9, num_steps=200, seed=1)

    work = StepWork(num_rows=8, num_context_tokens=4000)
    assert fit.model.cores == 2.0
    assert fit.model.seconds(work) == pytest.approx(TRUE.seconds(work) / 1.9, rel=0.08)


def test_prices_are_those_of_the_cores_that_there_were_lately() -> None:
    fit = StepTimeFit()
    for turn in range(10):
        on_cores(fit, 1.0 + turn % 2, gain=0.8, num_steps=20, seed=turn)
    on_cores(fit, 2.0, gain=0.8, num_steps=300, seed=99)

    assert fit.model.cores == 2.0
    assert fit.model.base_s < fit.model.on(1.0).base_s


def test_worker_on_its_own_cores_says_nothing_of_others() -> None:
    fit = StepTimeFit()
    Machine().run(fit, 100)

    assert fit.model.core_gain is None
    assert fit.model.on(2.0) == fit.model
