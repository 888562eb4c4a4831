"""The predicted results of a number of workers under a load, and the number that a load needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.step_time import StepTimeModel
from router.placement.prediction import NEVER
from router.scaling.demand import Demand, Prompt
from router.scaling.prediction import SAFE, Predictor
from router.scaling.sizing import fewest_workers, workers_for_streams, workers_to_catch_up

MODEL = StepTimeModel(base_s=0.01, row_s=1e-4, context_token_s=1e-6, prompt_token_s=1e-3, num_steps=100)
TTFT_S = 2.0
GAPS_S = ((0.1, 1.0),)
PREDICTOR = Predictor(step_time=MODEL)


def steady(
    rate: float,
    *,
    num_new_tokens: float = 300.0,
    tokens: float = 20.0,
    window_s: float = 60.0,
    ttfts_s: Sequence[float] = (TTFT_S,),
) -> Demand:
    """Prompts at equal distances, and what is generated behind them."""
    number = round(rate * window_s)
    return Demand(
        prompts=[
            Prompt(index / rate, num_new_tokens, 0.0, ttft_s)
            for index, ttft_s in zip(range(number), cycle(ttfts_s), strict=False)
        ],
        window_s=window_s,
        tokens_per_s=rate * tokens,
        num_context_tokens=num_new_tokens,
        gaps_s=GAPS_S,
    )


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    times_s = sorted(draw(st.lists(st.floats(0, 60), min_size=1, max_size=60)))
    ttfts_s = st.sampled_from((0.5, TTFT_S, 60.0, NEVER))
    prompts = [Prompt(at_s, draw(st.floats(1, 4000)), draw(st.floats(0, 2000)), draw(ttfts_s)) for at_s in times_s]
    return Demand(
        prompts=prompts,
        window_s=60.0,
        tokens_per_s=draw(st.floats(0, 2000)),
        num_context_tokens=draw(st.floats(1, 4000)),
        pace=draw(st.floats(1, 3)),
        gaps_s=draw(st.sampled_from((GAPS_S, ((0.04, 0.25), (0.1, 0.5), (NEVER, 0.25)), ((NEVER, 1.0),)))),
    )


@given(demands(), st.integers(1, 8))
def test_another_worker_never_makes_it_worse(demand: Demand, number: int) -> None:
    fewer, more = PREDICTOR.predict(demand, number), PREDICTOR.predict(demand, number + 1)

    assert more.attainment >= fewer.attainment
    assert more.busy <= fewer.busy


@given(demands(), st.floats(1.0, 3.0))
def test_more_load_never_needs_fewer_workers(demand: Demand, factor: float) -> None:
    now = fewest_workers(PREDICTOR, demand, target=0.99, least=1, most=12)
    later = fewest_workers(PREDICTOR, demand.times(factor), target=0.99, least=1, most=12)

    if all(item.predicted.attainment >= 0.99 * item.predicted.possible for item in (now, later)):
        assert later.num_workers >= now.num_workers


def test_a_load_needs_what_its_prompts_and_streams_keep_busy() -> None:
    """0.31 s of prompt each, at 3 per second: 0.93 of a worker, and the streams in addition."""
    sizing = fewest_workers(PREDICTOR, steady(3.0), target=0.99, least=1, most=8)

    assert sizing.num_workers == 2
    assert sizing.with_fewer is not None
    assert sizing.with_fewer.attainment < 0.99 <= sizing.predicted.attainment


def test_requests_that_can_wait_need_fewer_workers_and_hasty_ones_more() -> None:
    """A prompt takes 0.31 s: with a promise of 0.5 s, of which 0.4 count, it cannot wait for another one."""

    def needed(*ttfts_s: float) -> int:
        demand = steady(2.5, ttfts_s=ttfts_s)
        return fewest_workers(PREDICTOR, demand, target=0.99, least=1, most=20).num_workers

    assert needed(60.0) < needed(TTFT_S) < needed(0.5)
    assert needed(60.0, TTFT_S) <= needed(TTFT_S)
    assert needed(TTFT_S) < needed(TTFT_S, 0.5) <= needed(0.5)
    assert needed(NEVER) == needed(60.0)


def test_few_streams_with_short_gaps_are_late_and_no_more() -> None:
    """A step takes more than 40 ms: of a load of which a share is promised that, this share is late."""
    demand = replace(steady(1.0, num_new_tokens=10.0, tokens=600.0), num_context_tokens=1000.0)
    mixed = replace(demand, gaps_s=((0.04, 0.25), (0.1, 0.75)))

    prediction = PREDICTOR.predict(mixed, 1)

    assert 0.04 < prediction.gap_s < 0.1
    assert prediction.attainment == pytest.approx(0.75)
    assert fewest_workers(PREDICTOR, mixed, target=0.99, least=1, most=20).predicted.attainment == 1.0


def test_prompts_that_nobody_could_compute_in_time_ask_for_no_workers() -> None:
    demand = steady(0.05, num_new_tokens=5000.0)

    sizing = fewest_workers(PREDICTOR, demand, target=0.99, least=1, most=8)

    assert sizing.num_workers == 1
    assert sizing.predicted.possible == 0.0


@pytest.mark.parametrize("tokens", [20.0, 200.0])
def test_a_prompt_that_barely_could_be_in_time_asks_for_few_more_workers(tokens: float) -> None:
    """In time on a worker without streams only: there is one, long before workers have almost none on average."""
    usual = steady(4.0, tokens=tokens)
    num_barely = 0.9995 * (SAFE * TTFT_S - MODEL.base_s) / MODEL.prompt_token_s
    barely = usual.prompts[100]._replace(num_new_tokens=num_barely)
    demand = usual.only([*usual.prompts[:100], barely, *usual.prompts[101:]])

    needed = fewest_workers(PREDICTOR, demand, target=0.998, least=1, most=32)

    usually = fewest_workers(PREDICTOR, usual, target=0.998, least=1, most=32)
    assert needed.predicted.attainment >= 0.998
    assert needed.num_workers <= usually.num_workers + 3


def test_many_prompts_that_barely_could_be_in_time_ask_for_workers_without_streams() -> None:
    """Beside streams all of them would be late. One worker can take all streams, and another one not all prompts."""
    alone_s = 0.8 * SAFE * TTFT_S
    demand = steady(1.0, tokens=200.0, num_new_tokens=(alone_s - MODEL.base_s) / MODEL.prompt_token_s)

    assert PREDICTOR.predict(demand, 2).attainment < 0.5
    assert PREDICTOR.predict(demand, 6).attainment > 0.95


def test_gaps_bound_how_many_streams_a_worker_has() -> None:
    demand = replace(steady(0.1, num_new_tokens=10.0), tokens_per_s=6000.0, num_context_tokens=1000.0)
    sizing = fewest_workers(PREDICTOR, demand, target=0.99, least=1, most=20)

    assert sizing.with_fewer is not None
    assert sizing.with_fewer.attainment == 0.0
    assert sizing.predicted.gap_s <= 0.1


def test_gaps_that_no_worker_could_keep_ask_for_none() -> None:
    slow = replace(PREDICTOR, step_time=replace(MODEL, base_s=0.2))
    demand = replace(steady(0.1, num_new_tokens=10.0), tokens_per_s=1.0)

    assert fewest_workers(slow, demand, target=0.99, least=1, most=20).num_workers == 1
    assert workers_for_streams(slow, demand, 1000) == 0


def test_streams_that_are_there_need_their_workers() -> None:
    demand = steady(1.0, num_new_tokens=900.0)

    assert workers_for_streams(PREDICTOR, demand, 0) == 0
    most = PREDICTOR.most_streams(demand)
    assert workers_for_streams(PREDICTOR, demand, int(most)) == 1
    assert workers_for_streams(PREDICTOR, demand, int(most) + 1) == 2


def test_kv_that_finds_no_room_asks_for_another_worker() -> None:
    demand = steady(1.0, num_new_tokens=10.0, tokens=400.0)
    small = replace(PREDICTOR, num_kv_tokens=20.0)

    assert PREDICTOR.predict(demand, 1).attainment == 1.0
    assert small.predict(demand, 1).attainment == 0.0


@pytest.mark.parametrize(
    ("queued_s", "number"),
    [
        (0.0, 0),
        (2.0, 0),  # the two that are there do in time
        (4.0, 0),  # done before others could be there
        (15.0, 6),  # of which 10 s are left by then, and go in 2
    ],
)
def test_what_waits_is_to_be_made_up_for(queued_s: float, number: int) -> None:
    """One of two workers is busy with new requests; more workers need 5 s to start."""
    found = workers_to_catch_up(queued_s=queued_s, num_workers=2, busy_workers=1.0, promise_s=2.0, start_s=5.0)

    assert found == number
