"""Stop strings against the naive definition, for any text in any pieces."""

from __future__ import annotations

from typing import SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], num_skipped: int = 0) -> tuple[str, str | None]:
    """Grow the text by one character at a time until it ends with a stop string; of several, the longest counts."""
    for end in range(num_skipped + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    checker = StopStrings(stops)
    emitted = ""
    for piece in pieces:
        match = checker.push(piece)
        emitted += match.text
        if match.stop is not None:
            return emitted, match.stop
    return emitted + checker.finish(), None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_cut_equals_the_naive_definition_however_the_text_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    assert run(stops, pieces_of(text, cuts)) == naive(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_no_emitted_text_is_ever_taken_back(text: str, stops: list[str]) -> None:
    checker = StopStrings(stops)
    expected, _ = naive(text, stops)
    emitted = ""
    for character in text:
        match = checker.push(character)
        emitted += match.text
        assert expected.startswith(emitted)
        if match.stop is not None:
            break


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8), num_skipped=st.integers(0, 30))
def test_no_stop_string_that_ends_in_skipped_text_counts(
    text: str, stops: list[str], cuts: list[int], num_skipped: int
) -> None:
    expected, stop = naive(text, stops, num_skipped)
    checker = StopStrings(stops)
    emitted = "".join(checker.skip(piece) for piece in pieces_of(text[:num_skipped], cuts))
    found = None
    for piece in pieces_of(text[num_skipped:], cuts):
        match = checker.push(piece)
        emitted += match.text
        assert expected.startswith(emitted)
        if (found := match.stop) is not None:
            break

    assert (emitted + ("" if found else checker.finish()), found) == (expected, stop)


def test_text_is_held_back_only_while_a_stop_string_can_begin_in_it() -> None:
    checker = StopStrings(["</end>"])

    assert checker.push("one </").text == "one "
    assert checker.push("two").text == "</two"


def test_stop_string_across_pieces_is_found_and_not_emitted() -> None:
    checker = StopStrings(["STOP"])

    first, second = checker.push("go ST"), checker.push("OP on")

    assert (first.text, first.stop) == ("go ", None)
    assert (second.text, second.stop) == ("", "STOP")


def test_stop_string_is_emitted_where_it_is_asked_for() -> None:
    match = StopStrings(["STOP"], include=True).push("go STOP on")

    assert (match.text, match.stop) == ("go STOP", "STOP")


def test_held_text_comes_at_the_end() -> None:
    checker = StopStrings(["abc"])

    assert checker.push("xab").text == "x"
    assert checker.finish() == "ab"


class CountedStop(str):
    """A stop string that counts the characters that were compared with it."""

    __slots__ = ("num_compared",)

    def __init__(self, text: str) -> None:
        self.num_compared = 0

    def startswith(self, prefix: str | tuple[str, ...], *places: SupportsIndex | None) -> bool:
        self.num_compared += len(prefix)
        return super().startswith(prefix, *places)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        self.num_compared += len(found)
        return found


def held_by_definition(text: str, stops: list[str]) -> str:
    """The longest end of a text, shorter than the longest stop string, with which some stop string begins."""
    longest = max(map(len, stops), default=1) - 1
    ends = (text[len(text) - size :] for size in range(min(longest, len(text)), 0, -1))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")


@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=12), min_size=1, max_size=4),
    pieces=st.lists(st.text(alphabet="ab", max_size=15), max_size=8),
    num_skipped=st.integers(0, 8),
)
def test_what_is_held_back_is_the_longest_end_with_which_a_stop_string_begins(
    stops: list[str], pieces: list[str], num_skipped: int
) -> None:
    checker = StopStrings(stops)
    text, emitted = "", ""
    for number, piece in enumerate(pieces):
        text += piece
        if number < num_skipped:
            emitted += checker.skip(piece)
        else:
            match = checker.push(piece)
            emitted += match.text
            if match.stop is not None:
                return
        assert text == emitted + held_by_definition(text, stops)


def test_holding_text_back_compares_each_character_a_few_times() -> None:
    stop = CountedStop("a" * 3_000 + "b")
    checker = StopStrings([stop])
    num_read = 0
    for piece in ("a" * 2_900, "c", "a" * 2_900, "ca", "a" * 2_800, "ac", *["a"] * 2_000):
        checker.push(piece)
        num_read += len(piece)

    assert stop.num_compared <= 4 * num_read
    assert checker.finish() == "a" * 2_000
