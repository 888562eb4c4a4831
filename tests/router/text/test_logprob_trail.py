"""Entries come with the text that their token completes, whatever is held back."""

from __future__ import annotations

from engine.contract.messages import TokenLogprobs
from router.text.logprob_trail import LogprobTrail, TokenEntry


def said(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id,), (-1.0,), 1)


def named(entries: tuple[TokenEntry, ...]) -> list[tuple[int, int]]:
    return [(entry.said.token_ids[0], entry.start) for entry in entries]


def test_entry_comes_when_all_of_its_text_was_emitted() -> None:
    trail = LogprobTrail()
    trail.push(said(1), num_characters=3, is_incomplete=False)
    trail.push(said(2), num_characters=2, is_incomplete=False)

    assert named(trail.emit(2)) == []
    assert named(trail.emit(1)) == [(1, 0)]
    assert named(trail.emit(2)) == [(2, 3)]
    assert named(trail.finish()) == []


def test_half_a_character_waits_for_the_other_half() -> None:
    trail = LogprobTrail()
    trail.push(said(1), num_characters=0, is_incomplete=True)
    assert named(trail.emit(0)) == []
    trail.push(said(2), num_characters=1, is_incomplete=False)

    assert named(trail.emit(1)) == [(1, 0), (2, 0)]


def test_token_without_text_comes_as_soon_as_all_before_it_is_out() -> None:
    trail = LogprobTrail()
    trail.push(said(1), num_characters=2, is_incomplete=False)
    trail.push(said(2), num_characters=0, is_incomplete=False)

    assert named(trail.emit(1)) == []
    assert named(trail.emit(1)) == [(1, 0), (2, 2)]


def test_what_was_never_emitted_comes_at_the_end() -> None:
    trail = LogprobTrail()
    trail.push(said(1), num_characters=4, is_incomplete=False)
    trail.push(said(2), num_characters=4, is_incomplete=False)
    trail.emit(5)

    assert named(trail.finish()) == [(2, 4)]
