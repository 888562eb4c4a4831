"""F3: what is proposed out of a request's own tokens, and out of earlier answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.config import SpeculativeConfig
from engine.contract.errors import ConfigError
from engine.drafting.prompt_lookup import PromptLookup, longest_match
from engine.drafting.proposer import DraftContext
from engine.drafting.registry import MAX_AUTO_TOKENS, make_drafting
from engine.drafting.suffix_lookup import MAX_PLACES, SuffixLookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def context(
    tokens: Sequence[int], *, name: str = "a", num_prompt_tokens: int = 0, max_tokens: int = 4, salt: str | None = None
) -> DraftContext:
    return DraftContext(name, np.array(tokens, np.int32), max_tokens, num_prompt_tokens, salt)


def plain_match(tokens: list[int], max_match: int, max_tokens: int) -> tuple[int, list[int]]:
    """The same by trying every place."""
    best, place = 0, 0
    for stop in range(1, len(tokens)):
        length = 0
        while length < min(stop, max_match) and tokens[stop - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best:
            best, place = length, stop
    if not best:
        return 0, []
    drafts = list(tokens)
    while len(drafts) < len(tokens) + max_tokens:
        drafts.append(drafts[place + len(drafts) - len(tokens)])
    return best, drafts[len(tokens) :]


@pytest.mark.behaviour("F3")
@given(TOKENS, st.integers(1, 6), st.integers(1, 9))
def test_f3_the_longest_match_is_found_and_goes_on_as_it_did(
    tokens: list[int], max_match: int, max_tokens: int
) -> None:
    match = longest_match(np.array(tokens, np.int32), max_match=max_match, max_tokens=max_tokens)

    assert (match.length, match.token_ids.tolist()) == plain_match(tokens, max_match, max_tokens)


@pytest.mark.behaviour("F3")
def test_f3_a_match_that_is_too_short_makes_no_drafts() -> None:
    lookup = PromptLookup(min_match=3, max_match=4)

    quoted, short, new = lookup.propose([context([1, 2, 3, 4, 5, 1, 2, 3]), context([2, 3, 4, 2, 3]), context([1, 2])])

    assert list(quoted.token_ids) == [4, 5, 1, 2]
    assert len(short.token_ids) == len(new.token_ids) == 0


@pytest.mark.behaviour("F3")
def test_f3_an_answer_follows_one_that_was_given_before() -> None:
    lookup = SuffixLookup()
    lookup.propose([context([9, 9, 1, 2, 3, 4, 5, 6, 7, 8], name="before", num_prompt_tokens=2)])

    (drafts,) = lookup.propose([context([7, 1, 2, 3], name="now", num_prompt_tokens=1, max_tokens=9)])

    assert list(drafts.token_ids) == [4, 5, 6], "as many as were found again"


@pytest.mark.behaviour("F3")
def test_f3_an_answer_learns_from_one_that_still_runs() -> None:
    lookup = SuffixLookup()
    first = [9, 9, 1, 2, 3]
    for token in (4, 5, 6, 7):
        first.append(token)
        drafts = lookup.propose(
            [context(first, name="first", num_prompt_tokens=2), context([8, 1, 2, 3], name="b", num_prompt_tokens=1)]
        )[1]

    assert list(drafts.token_ids) == [4, 5, 6]


@pytest.mark.behaviour("F3")
@pytest.mark.parametrize("salt", ["mine", None])
def test_f3_nobody_learns_of_an_answer_with_another_salt(salt: str | None) -> None:
    lookup = SuffixLookup()
    lookup.propose([context([1, 2, 3, 4, 5], name="before", salt="theirs")])

    (drafts,) = lookup.propose([context([1, 2, 3], name="now", salt=salt)])

    assert len(drafts.token_ids) == 0


@pytest.mark.behaviour("F3")
def test_f3_a_request_whose_id_comes_again_with_another_salt_is_another_one() -> None:
    lookup = SuffixLookup()
    lookup.propose([context([1, 2], name="a", salt="theirs")])
    lookup.propose([context([5, 6, 7, 8, 9, 4], name="a", salt="mine")])

    (drafts,) = lookup.propose([context([6, 7, 8], name="b", salt="theirs")])

    assert len(drafts.token_ids) == 0


@pytest.mark.behaviour("F3")
@given(st.lists(st.tuples(st.integers(0, 5), TOKENS), max_size=12), st.integers(0, 60))
def test_f3_what_is_kept_of_answers_is_bounded(steps: list[tuple[int, list[int]]], max_kept_tokens: int) -> None:
    """Requests that say more and more, also after they were forgotten: every draft stood somewhere behind its match."""
    lookup = SuffixLookup(max_kept_tokens=max_kept_tokens)
    said: dict[int, list[int]] = {}
    for number, tokens in steps:
        said.setdefault(number, [7]).extend(tokens)
        (drafts,) = lookup.propose([context(said[number], name=str(number), num_prompt_tokens=1)])

        assert lookup.num_kept_tokens <= max_kept_tokens
        assert set(drafts.token_ids) <= {token for tokens in said.values() for token in tokens}
    places = lookup._places.values()
    assert all(0 < len(kept) <= MAX_PLACES for kept in places)
    assert sum(map(len, places)) <= lookup.num_kept_tokens


@pytest.mark.behaviour("F3")
def test_f3_the_proposer_that_was_asked_for_is_made() -> None:
    fixed, adaptive = (
        make_drafting(SpeculativeConfig(method="ngram", num_tokens=3)),
        make_drafting(SpeculativeConfig(method="suffix")),
    )

    assert fixed is not None
    assert isinstance(fixed.proposer, PromptLookup)
    assert (fixed.max_draft_tokens, fixed.is_adaptive) == (3, False)
    assert adaptive is not None
    assert isinstance(adaptive.proposer, SuffixLookup)
    assert (adaptive.max_draft_tokens, adaptive.is_adaptive) == (MAX_AUTO_TOKENS, True)
    assert make_drafting(SpeculativeConfig()) is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"min_match": 5, "max_match": 4}, "min_match"),
        ({"max_kept_tokens": -1}, "-1"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig(method="suffix", **values)  # type: ignore[arg-type]
