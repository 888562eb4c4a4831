"""One beam search by itself: what it needs to know of each beam's next tokens, and its scores (O5)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.messages import BeamParams
from engine.scheduler.beams.search import BeamSearch, FloatArray, IntArray

VOCAB_SIZE = 9

Candidates = tuple[list[IntArray], list[FloatArray]]


def candidates(rows: FloatArray, num: int) -> Candidates:
    """The ``num`` best next tokens of each beam. rows: [num_beams, vocab_size] log-probabilities."""
    order = np.argsort(-rows, axis=1, kind="stable")[:, :num].astype(np.int32)
    return list(order), list(np.take_along_axis(rows, order.astype(np.int64), axis=1))


@pytest.mark.behaviour("O5")
@given(
    width=st.integers(2, 4),
    stop_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=5),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 5),
    length_penalty=st.sampled_from([1.0, 0.0, -1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_o5_a_search_finds_the_same_when_it_sees_all_tokens(
    width: int, stop_ids: frozenset[int], min_tokens: int, max_tokens: int, length_penalty: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    params = BeamParams(width=width, num_results=width, length_penalty=length_penalty)
    searches = [BeamSearch(params, stop_ids=stop_ids, min_tokens=min_tokens, max_tokens=max_tokens) for _ in range(2)]
    narrow, wide = searches
    while not wide.is_over:
        rows = np.log(draw.dirichlet(np.full(VOCAB_SIZE, 0.3), len(wide.running)) + 1e-30).astype(np.float32)
        parents = narrow.advance(*candidates(rows, narrow.num_candidates))

        assert parents == wide.advance(*candidates(rows, VOCAB_SIZE))
        assert narrow.running == wide.running
        assert narrow.finished == wide.finished
        assert narrow.is_over == wide.is_over


@pytest.mark.behaviour("O5")
def test_o5_what_a_step_tells_of_a_beam_grows_with_beams_and_stop_tokens_not_with_their_product() -> None:
    """As many as a request may ask for would otherwise have each step tell and sort millions of candidates."""
    stop_ids = frozenset(range(1024))

    search = BeamSearch(BeamParams(width=128), stop_ids=stop_ids, min_tokens=0, max_tokens=9)

    assert search.num_candidates == 128 + 1024


@pytest.mark.behaviour("O5")
def test_o5_scores_are_numbers_however_unlikely_an_output_is() -> None:
    """Rules can make all tokens all but impossible, and a negative penalty multiplies: JSON knows no infinity."""
    length = 500
    search = BeamSearch(
        BeamParams(width=2, num_results=2, length_penalty=-5.0), stop_ids=frozenset(), min_tokens=0, max_tokens=length
    )
    while not search.is_over:
        rows = np.full((len(search.running), VOCAB_SIZE), -1e29, np.float32)
        search.advance(*candidates(rows, search.num_candidates))

    for result in search.results:
        assert len(result.token_ids) == length
        assert result.score < result.cumulative_logprob
        assert math.isfinite(json.loads(json.dumps(result.score)))
