"""F3: an answer is followed along its caller's prediction, and found again after it has left it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.config import SpeculativeConfig
from engine.contract.messages import GenerateRequest, SamplingParams
from engine.contract.prediction.follower import NEAR, PredictionFollower
from engine.contract.token_ids import TokenIds
from engine.drafting.proposer import Drafting
from engine.drafting.registry import make_drafting, with_predictions
from engine.frontend.engine_core import EngineCore
from engine.frontend.offline import generate, run_requests
from kv_transfer.connector import ConnectorBuilder
from tests.support.engine.chain_engine import DEFAULT_SCHEDULER, chain_engine
from tests.support.engine.chain_runner import expected_tokens
from tests.support.engine.disaggregated import generate_disaggregated, joined_cores
from tests.support.engine.proposers import RepeatLast

TOKENS = st.lists(st.integers(0, 5), max_size=40)
TEXT = list(range(100, 140))
"""No token occurs twice."""

PROMPT = (1, 2, 3)
NUM_TOKENS = 40


def followed(prediction: list[int], answer: list[int]) -> PredictionFollower:
    follower = PredictionFollower(TokenIds.of(prediction))
    follower.follow(answer)
    return follower


def num_foreseen(prediction: list[int], answer: list[int]) -> int:
    """Tokens of an answer that were expected where they came."""
    follower, num_right = PredictionFollower(TokenIds.of(prediction)), 0
    for token in answer:
        num_right += follower.expected(1).tolist() == [token]
        follower.follow([token])
    return num_right


@pytest.mark.behaviour("F3")
def test_f3_an_answer_that_is_its_prediction_is_foreseen_from_its_first_token_on() -> None:
    assert num_foreseen(TEXT, TEXT) == len(TEXT)
    whole = followed(TEXT, TEXT)
    assert (whole.num_accepted, whole.num_rejected, whole.expected(9).size) == (len(TEXT), 0, 0)


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize(
    ("answer", "num_missed"),
    [
        ([*TEXT[:9], 7, *TEXT[10:]], 2),
        ([*TEXT[:9], *TEXT[9 + NEAR - 1 :]], 1),
        ([*TEXT[:9], 7, 8, 9, *TEXT[9:]], 4),
        ([*TEXT[:4], *TEXT[30:], *TEXT[10:]], 6),
        ([7] * 30 + TEXT, 31),
    ],
    ids=["a token replaced", "some left out", "some put in", "a part moved to the front", "something said before"],
)
def test_f3_an_edited_answer_is_found_again_within_few_tokens(answer: list[int], num_missed: int) -> None:
    assert num_foreseen(TEXT, answer) == len(answer) - num_missed


@pytest.mark.behaviour("F3")
@given(prediction=TOKENS, answer=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_f3_what_came_true_does_not_depend_on_how_many_tokens_a_step_brought(
    prediction: list[int], answer: list[int], cuts: list[int]
) -> None:
    whole, parts = followed(prediction, answer), PredictionFollower(TokenIds.of(prediction))
    borders = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    for start, end in pairwise(borders):
        parts.follow(answer[start:end])

    assert (parts.num_accepted, parts.num_tokens, parts.num_followed) == (
        whole.num_accepted,
        whole.num_tokens,
        whole.num_followed,
    )
    assert parts.expected(5).tolist() == whole.expected(5).tolist()
    assert whole.num_accepted + whole.num_rejected == len(prediction)
    assert whole.num_accepted <= len(answer)


def request(name: str, prediction: list[int] | None) -> GenerateRequest:
    predicted = None if prediction is None else TokenIds.of(prediction)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    return GenerateRequest(
        request_id=name, prompt_token_ids=TokenIds.of(PROMPT), sampling=sampling, prediction_token_ids=predicted
    )


def predictions(num_tokens: int | None = None) -> Drafting:
    return with_predictions(None, SpeculativeConfig(num_tokens=num_tokens or "auto"))


@pytest.mark.behaviour("F3")
def test_f3_a_prediction_saves_steps_where_nobody_else_proposes() -> None:
    answer = expected_tokens(PROMPT, NUM_TOKENS)
    edited = [*answer[:20], 0, *answer[21:]]
    core = chain_engine(drafting=predictions(9))

    deltas = list(run_requests(core, [request("a", edited)]))

    assert [len(delta.token_ids) for delta in deltas] == [1, 10, 10, 1, 10, 8]
    assert [token for delta in deltas for token in delta.token_ids] == answer


@pytest.mark.behaviour("F3")
def test_f3_requests_without_a_prediction_have_no_drafts_beside_one_that_has() -> None:
    core = chain_engine(drafting=predictions(9))

    deltas = list(run_requests(core, [request("a", expected_tokens(PROMPT, NUM_TOKENS)), request("b", None)]))

    assert all(len(delta.token_ids) == 1 for delta in deltas if delta.request_id == "b")
    assert core.stats().scheduler.num_drafted_rows == sum(len(delta.token_ids) > 1 for delta in deltas)


@pytest.mark.behaviour("F3")
def test_f3_drafts_of_predictions_take_only_samples_that_nobody_needs() -> None:
    """The memory of a step is that of as many samples as there may be requests, and one request's drafts."""
    core = chain_engine(scheduler=replace(DEFAULT_SCHEDULER, max_num_seqs=4), drafting=predictions(9))
    answer = expected_tokens(PROMPT, NUM_TOKENS)
    requests = [request(name, answer) for name in "abcd"]
    for asked in requests:
        core.add_request(asked)

    found: dict[str, list[int]] = {asked.request_id: [] for asked in requests}
    most = 0
    while core.has_unfinished():
        deltas = core.step().deltas()
        most = max(most, sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            found[delta.request_id] += delta.token_ids

    assert most == 4 + 9
    assert set(map(tuple, found.values())) == {tuple(answer)}


@pytest.mark.behaviour("F3")
def test_f3_where_an_answer_has_left_its_prediction_others_propose() -> None:
    others = with_predictions(
        Drafting(proposer=RepeatLast(), max_draft_tokens=2), SpeculativeConfig(method="ngram", num_tokens=5)
    )
    core = chain_engine(drafting=others)

    outputs = generate(core, [request("a", [9] * 50), request("b", None)])

    assert outputs == {name: expected_tokens(PROMPT, NUM_TOKENS) for name in ("a", "b")}
    assert core.stats().scheduler.num_draft_tokens > 0
    assert with_predictions(make_drafting(SpeculativeConfig(method="ngram")), SpeculativeConfig()).serves_all


@pytest.mark.behaviour("F3")
@given(
    prediction=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=30),
    num_tokens=st.sampled_from([None, 1, 5]),
    num_sent=st.integers(0, 30),
)
def test_f3_a_prediction_changes_no_token_wherever_it_is_followed(
    prediction: list[int], num_tokens: int | None, num_sent: int
) -> None:
    """Pieces of the answer in any order; the request may have begun elsewhere."""
    answer = expected_tokens(PROMPT, NUM_TOKENS)
    predicted = [answer[place] for place in prediction]
    moved = replace(request("a", predicted), output_token_ids=tuple(answer[:num_sent]))

    def build(build_connector: ConnectorBuilder) -> EngineCore:
        return chain_engine(build_connector=build_connector, drafting=predictions(num_tokens))

    with joined_cores(build, build) as (prefill, decode):
        outputs = generate_disaggregated(prefill, decode, [request("a", predicted)])

    assert outputs == {"a": answer}
    assert generate(chain_engine(drafting=predictions(num_tokens)), [moved]) == {"a": answer}


@pytest.mark.behaviour("F3")
def test_f3_an_engine_that_runs_ahead_waits_for_tokens_while_a_prediction_can_be_followed() -> None:
    answer = expected_tokens(PROMPT, NUM_TOKENS)
    core = chain_engine(drafting=predictions(9), device="cuda")

    deltas = list(run_requests(core, [request("a", answer)]))
    plain = list(run_requests(core, [request("b", None)]))

    assert max(len(delta.token_ids) for delta in deltas) == 10
    assert [token for delta in deltas for token in delta.token_ids] == answer
    assert [token for delta in plain for token in delta.token_ids] == answer
