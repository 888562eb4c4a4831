"""What is sampled, with which probability, and that other rows do not matter."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from engine.contract.messages import SamplingParams
from engine.sampling import filters
from engine.sampling.processors.penalties import Penalties
from tests.support.engine.sampler_rig import SamplerRig

NUM_DRAWS = 8000
CHI_SQUARE_LIMITS = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
"""99.9th percentiles by degrees of freedom; the draws are fixed by their seed, so a test either holds or not."""

LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0, 2.9, 1.5, -math.inf])


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, **changes)


def _allowed(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, spelt out: sort, cut after k, cut where the mass is reached, cut below a share of the best."""
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = order[:top_k] if top_k else order
    weights = {token: math.exp(scaled[token] - scaled[order[0]]) for token in kept}
    total, before, nucleus = sum(weights.values()), 0.0, set()
    for token in kept:
        if top_p < 1.0 and before >= top_p * total and nucleus:
            break
        nucleus.add(token)
        before += weights[token]
    return {token for token in nucleus if weights[token] >= min_p}


def _assert_distribution(draws: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    counts = torch.bincount(torch.from_numpy(draws), minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    means = expected[possible].double() * len(draws)
    chi_square = ((counts[possible] - means) ** 2 / means).sum().item()
    assert chi_square < CHI_SQUARE_LIMITS[int(possible.sum()) - 1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution_at_a_temperature(temperature: float) -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=temperature, seed=3))
    _assert_distribution(rig.sample_at(LOGITS, 0, range(NUM_DRAWS)), (LOGITS / temperature).softmax(dim=0))


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.6}, {1, 5}),
        ({"top_p": 0.9}, {1, 5, 3, 6}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.5}, {1, 3, 5}),
        ({"top_k": 4, "top_p": 0.8}, {1, 3, 5}),
        ({"top_k": 4, "min_p": 0.7}, {1, 5}),
    ],
)
def test_filters_leave_the_rest_in_proportion(changes: dict[str, Any], allowed: set[int]) -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, seed=11, **changes))
    mask = torch.tensor([token in allowed for token in range(len(LOGITS))])
    expected = LOGITS.masked_fill(~mask, -math.inf).softmax(dim=0)
    draws = rig.sample_at(LOGITS, 0, range(NUM_DRAWS))
    if len(allowed) == 1:
        assert set(draws.tolist()) == allowed
    else:
        _assert_distribution(draws, expected)


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-60, 60).map(lambda value: value / 7), min_size=1, max_size=40, unique=True),
    temperature=st.sampled_from((0.3, 1.0, 1.7)),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from((1.0, 0.99, 0.7, 0.31, 0.05)),
    min_p=st.sampled_from((0.0, 0.013, 0.37, 1.0)),
    width=st.sampled_from((3, 1024)),
)
@example(logits=[0.0, 1 / 7, -1 / 7, 2 / 7, -2 / 7], temperature=1.0, top_k=4, top_p=0.7, min_p=0.0, width=3)
def test_filters_keep_what_their_definition_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, width: int
) -> None:
    """``width`` 3 makes the first look at the most likely tokens too narrow most of the time."""
    scaled = (torch.tensor(logits) - max(logits)) / temperature
    lowest = filters.thresholds(
        scaled[None],
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
        num_candidates=width,
    )
    kept = set(torch.nonzero(scaled >= lowest).flatten().tolist())
    assert kept == _allowed(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_a_flat_distribution_wider_than_the_candidates() -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 0.01
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, top_p=0.9, seed=1))
    kept = torch.sort(logits, descending=True)
    nucleus = set(kept.indices[: int((kept.values.softmax(0).cumsum(0) < 0.9).sum()) + 1].tolist())
    draws = rig.sample_at(logits, 0, range(500))
    assert set(draws.tolist()) <= nucleus
    assert len(set(draws.tolist())) > 350


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, top_k=2, seed=1))
    draws = rig.sample_at(torch.tensor([1.0, 2.0, 1.0, 0.0]), 0, range(500))
    assert set(draws.tolist()) == {0, 1, 2}


def test_greedy_takes_the_first_of_the_most_likely_tokens() -> None:
    rig = SamplerRig()
    rig.set(0, _params(), prompt=(1,))
    logits = torch.zeros(3, 1000)
    logits[1, [7, 500]] = 5.0
    logits[2, 999] = 1.0
    assert rig.sample(logits, [0, 0, 0]).token_ids.tolist() == [0, 7, 999]


def test_a_tiny_temperature_is_greedy() -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1e-6, seed=1))
    assert set(rig.sample_at(LOGITS, 0, range(200)).tolist()) == {1}


MIXED = (
    _params(temperature=1.0, seed=1),
    _params(),
    _params(temperature=0.7, top_p=0.8, seed=2),
    _params(temperature=1.3, top_k=5, min_p=0.01, seed=3, frequency_penalty=0.5),
    _params(repetition_penalty=1.3),
    _params(temperature=1.0, seed=1, min_tokens=9, eos_token_ids=(1,), stop_token_ids=(2, 3)),
)


def _mixed_rig(*, may_wait: bool = True) -> SamplerRig:
    rig = SamplerRig(may_wait=may_wait)
    for row, params in enumerate(MIXED):
        rig.set(row, params, prompt=(1, 2, 3, row), output=(5, 5, 6))
    return rig


def test_a_row_gets_the_same_token_alone_in_a_batch_and_in_another_order() -> None:
    rig = _mixed_rig()
    logits = torch.randn(len(MIXED), 300, generator=torch.Generator().manual_seed(2)) * 3
    together = rig.sample(logits, list(range(len(MIXED)))).token_ids.tolist()
    alone = [rig.sample(logits[row : row + 1], [row]).token_ids[0] for row in range(len(MIXED))]
    order = [4, 0, 5, 2, 1, 3]
    shuffled = rig.sample(logits[order], order).token_ids.tolist()
    assert together == alone
    assert [together[row] for row in order] == shuffled


class _NoLooks(TorchDispatchMode):
    """Fails where the host looks at what the device computes, and would have to wait for it."""

    LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        assert func.overloadpacket.__name__ not in self.LOOKS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spread", [3.0, 0.001])
@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4, 5), (1, 1), (3,)])
def test_where_nobody_may_wait_for_the_device_the_tokens_are_the_same(spread: float, rows: tuple[int, ...]) -> None:
    """A flat distribution (``spread``) needs more than the most likely tokens, of which only the logits tell."""
    waiting, ahead = _mixed_rig(), _mixed_rig(may_wait=False)
    logits = torch.randn(len(rows), 3000, generator=torch.Generator().manual_seed(2)) * spread
    logits[-1, 7] = math.nan
    expected = waiting.sample(logits, list(rows))

    with _NoLooks():
        actual = ahead.sample(logits, list(rows))

    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.has_nan.tolist() == [False] * (len(rows) - 1) + [True]


def test_draws_change_with_the_seed_and_with_the_position() -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, seed=1))
    rig.set(1, _params(temperature=1.0, seed=2))
    logits = torch.zeros(1000)
    first, second = (rig.sample_at(logits, row, range(40)).tolist() for row in (0, 1))
    assert first != second
    assert len(set(first)) > 30


@pytest.mark.parametrize("seed", [-1, 1 << 64, (1 << 63) + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, seed=seed))
    assert len(rig.sample_at(LOGITS, 0, range(5))) == 5


def _penalised(
    logits: list[float], params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]
) -> list[float]:
    result = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt + output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token)
        value -= params.presence_penalty * (token in output)
        result.append(value)
    return result


tokens = st.lists(st.integers(0, 9), max_size=12).map(tuple)
halves = st.integers(-20, 20).map(lambda value: value / 8)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-5, 5, width=32), min_size=10, max_size=10),
    rows=st.lists(
        st.tuples(tokens, tokens, halves, halves, st.sampled_from((1.0, 1.25, 0.5, 2.0))), min_size=1, max_size=4
    ),
)
def test_penalties_follow_their_definition(logits: list[float], rows: list[Any]) -> None:
    rig = SamplerRig()
    expected = []
    for row, (prompt, output, presence, frequency, repetition) in enumerate(rows):
        params = _params(
            presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, temperature=0.0
        )
        rig.set(row, params, prompt=prompt, output=output)
        expected.append(_penalised(logits, params, prompt, output))
    drawn = rig.sample(torch.tensor(logits).repeat(len(rows), 1), list(range(len(rows)))).token_ids
    for row, values in enumerate(expected):
        assert values[drawn[row]] >= max(values) - 1e-5


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.05}, {"frequency_penalty": 0.5, "presence_penalty": 0.5}])
def test_host_lays_out_what_penalised_rows_hold_and_not_the_vocabulary(changes: dict[str, float]) -> None:
    """Checkpoints ask for a repetition penalty by default: then every row of every step is penalised."""
    rig, penalties = SamplerRig(), Penalties(8)
    for row in range(8):
        rig.set(row, _params(**changes), prompt=(1, 2, 3), output=(4, 4))
        penalties.set(row, _params(**changes), num_prompt_tokens=3)
    logits = torch.zeros(8, 100_000)
    rows, lengths = np.arange(8, dtype=np.int32), rig.lengths[:8]
    tracemalloc.start()
    try:
        penalties.apply(logits, rows, lengths, rig.history)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < logits.shape[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (2, True), (3, False)])
def test_tokens_that_end_the_output_wait_for_min_tokens(temperature: float, num_output: int, is_masked: bool) -> None:
    rig = SamplerRig()
    params = _params(temperature=temperature, min_tokens=3, eos_token_ids=(4,), stop_token_ids=(5,), seed=9)
    rig.set(0, params, prompt=(1, 2), output=(3,) * num_output)
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 90.0, 80.0]])
    token = int(rig.sample(logits, [0]).token_ids[0])
    assert (token not in (4, 5)) == is_masked


def test_an_ignored_eos_is_no_end() -> None:
    rig = SamplerRig()
    rig.set(0, _params(min_tokens=3, eos_token_ids=(4,), ignore_eos=True), prompt=(1,))
    assert rig.sample(torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0]]), [0]).token_ids.tolist() == [4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_reported_for_its_row_and_harms_no_other(dtype: torch.dtype, temperature: float) -> None:
    rig = SamplerRig()
    for row in range(3):
        rig.set(row, _params(temperature=temperature, seed=row, top_p=0.9))
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = rig.sample(logits, [0, 1, 2]).token_ids
    damaged = logits.clone()
    damaged[1] = math.nan
    damaged[2, expected[2] - 1] = math.nan
    result = rig.sample(damaged, [0, 1, 2])
    assert result.has_nan.tolist() == [False, True, True]
    assert result.token_ids[0] == expected[0]
    assert all(0 <= token < 50 for token in result.token_ids)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits_do_not_break_a_draw(value: float) -> None:
    rig = SamplerRig()
    rig.set(0, _params(temperature=1.0, seed=1, top_k=3))
    logits = torch.tensor([[0.0, value, 1.0, 2.0]])
    token = int(rig.sample(logits, [0]).token_ids[0])
    assert (token == 1) == (value > 0)


_LEAST = 5e-324
_ODD = st.sampled_from([_LEAST, 1e-45, 1e-40, 1e-38, 1e-6, 0.5, 1.0])


@given(
    temperature=st.one_of(_ODD, st.sampled_from([0.0, 100.0])),
    repetition=st.one_of(_ODD, st.just(100.0)),
    frequency=st.sampled_from([-2.0, 0.0, 2.0]),
    top_p=_ODD,
    min_p=st.one_of(_ODD, st.just(0.0)),
    logits=st.lists(
        st.sampled_from([-math.inf, math.nan, -3e38, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, math.inf]),
        min_size=4,
        max_size=4,
    ),
)
def test_whatever_is_asked_for_a_token_of_the_vocabulary_is_drawn(
    temperature: float, repetition: float, frequency: float, top_p: float, min_p: float, logits: list[float]
) -> None:
    """A token beyond it would end the engine of the next worker."""
    rig = SamplerRig()
    asked = _params(
        temperature=temperature,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        top_p=top_p,
        min_p=min_p,
        seed=1,
    )
    rig.set(0, asked, prompt=(0, 1, 2, 3))
    assert 0 <= int(rig.sample(torch.tensor([logits]), [0]).token_ids[0]) < 4
