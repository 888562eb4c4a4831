"""Answers in each format, read piece by piece: content, thinking and calls, whatever way the text is cut."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.tools.formats.mistral import mistral_call_id
from router.tools.reasoning import REASONING_FORMATS, Opening
from router.tools.registry import TOOL_FORMATS
from router.tools.turn_parser import PlainParser, TurnParser
from tests.support.router.turns import ANY, all_text, cut, plain, read

PARIS = '{"city": "Par{is\\"}", "days": 2}'
WEATHER = ("get_weather", PARIS)
STOP = ("stop", "{}")

HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
HERMES_STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
LISTED = f'{{"name": "get_weather", "arguments": {PARIS}}}'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}"

READ = [
    ("hermes", HERMES, "", "", [WEATHER]),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES_STOP}", "", "Let me see.", [WEATHER, STOP]),
    ("hermes", f"First:\n{HERMES}\nThen.", "", "First:\nThen.", [WEATHER]),
    ("hermes", f"{HERMES} That is all.", "", "That is all.", [WEATHER]),
    ("hermes", '<tool_call>{"name":"stop","arguments":{}}</tool_call>', "", "", [STOP]),
    ("llama3", LLAMA, "", "", [WEATHER]),
    ("llama3", f'<|python_tag|>{LLAMA}; {{"name": "stop", "parameters": {{}}}}', "", "", [WEATHER, STOP]),
    ("mistral", f"[TOOL_CALLS] [{LISTED}]", "", "", [WEATHER]),
    ("mistral", f'So: [TOOL_CALLS][{LISTED}, {{"name": "stop", "arguments": {{}}}}]', "", "So:", [WEATHER, STOP]),
    ("mistral_args", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]stop[ARGS]{{}}", "", "", [WEATHER, STOP]),
    ("harmony", f"{ANALYSIS}{HARMONY}", "Hm.", "", [WEATHER]),
    ("harmony", f"{ANALYSIS}{HARMONY}<|call|>", "Hm.", "", [WEATHER]),
    ("harmony", " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>", "", "", [STOP]),
    ("harmony", f"{ANALYSIS} to=functions.stop<|channel|>commentary json<|message|>{{}}", "Hm.", "", [STOP]),
    ("harmony", f"{PREAMBLE}{HARMONY}", "", "Let me see.", [WEATHER]),
    ("harmony", f"{HARMONY}<|call|><|start|>assistant{HARMONY}", "", "", [WEATHER, WEATHER]),
    ("harmony", f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.", []),
    ("harmony", f"{ANALYSIS}<|channel|>final<|message|>Yes.", "Hm.", "Yes.", []),
]

NO_CALLS = [
    ("hermes", "<tool_call> is a tag"),
    ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "stop"'),
    ("hermes", '<tool_call>\n{"name": "stop", "arguments": [1]}\n</tool_call>'),
    ("hermes", "a < b, <tool"),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"answer": 5}'),
    ("llama3", " a text  "),
    ("mistral", '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
    ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("harmony", "no channel at all"),
    ("harmony", " to the point"),
    ("harmony", " to=functions.stop"),
]

WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *('{"name": "stop", "parameters": {}}', '{"name": "stop", "arguments": {}}', "{", "}", "[", "]"),
        *(",", ";", '"', "\\", " ", "\n", "word", "<", "[", '"name"', ":", "{}", "stop", "get_weather"),
        *(" to=functions.stop", "<|channel|>commentary", "<|channel|>", "<|message|>", "<|start|>", "<|call|>"),
        *(HERMES, HERMES_STOP, LLAMA, LISTED, PARIS),
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)
PLACES = st.lists(st.integers(0, 300), max_size=12)
MARKED = ("hermes", "llama3", "mistral", "mistral_args")


def thinking_parser(name: str) -> TurnParser:
    inner = PlainParser() if name == "none" else TOOL_FORMATS[name].parser(ANY)
    return REASONING_FORMATS["think"].parser(inner, opening=Opening.FREE)


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), READ)
def test_each_character_alone_makes_the_same_turn(
    name: str, text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = (reasoning, content, calls)

    assert plain(read(TOOL_FORMATS[name].parser(ANY), [text])) == expected
    assert plain(read(TOOL_FORMATS[name].parser(ANY), text)) == expected


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert plain(read(TOOL_FORMATS[name].parser(ANY), text)) == ("", text, [])


@given(name=st.sampled_from(sorted(TOOL_FORMATS)), text=TEXTS, places=PLACES)
@example(name="harmony", text="<|call|>", places=[4])
def test_the_way_a_text_is_cut_changes_nothing(name: str, text: str, places: list[int]) -> None:
    pieces = cut(text, places)

    assert plain(read(TOOL_FORMATS[name].parser(ANY), pieces)) == plain(read(TOOL_FORMATS[name].parser(ANY), [text]))
    assert plain(read(thinking_parser(name), pieces)) == plain(read(thinking_parser(name), [text]))


@given(name=st.sampled_from(MARKED), text=TEXTS)
def test_no_letter_is_invented_and_none_is_lost_but_those_of_the_format(name: str, text: str) -> None:
    turn = read(TOOL_FORMATS[name].parser(ANY), [text])
    kept = Counter(all_text(turn).replace(" ", "").replace("\n", ""))
    given_ = Counter(text.replace(" ", "").replace("\n", ""))

    assert kept <= given_
    if not turn.calls:
        assert turn.content == text


@given(text=st.text(max_size=40), places=PLACES)
def test_text_without_markers_is_content_as_it_is(text: str, places: list[int]) -> None:
    for name in ("hermes", "mistral", "mistral_args"):
        assert plain(read(TOOL_FORMATS[name].parser(ANY), cut(text, places))) == ("", text, [])


def test_unfinished_arguments_stay_those_of_their_call() -> None:
    turn = read(TOOL_FORMATS["hermes"].parser(ANY), [HERMES[:60]])

    assert plain(turn) == ("", "", [("get_weather", PARIS[: len(turn.calls[0].arguments)])])


@pytest.mark.parametrize(
    ("text", "opening", "expected"),
    [
        ("<think>\nHm, so.\n</think>\n\nYes.", Opening.FREE, ("Hm, so.", "Yes.", [])),
        ("Hm, so.</think>Yes.", Opening.OPEN, ("Hm, so.", "Yes.", [])),
        ("Hm, so", Opening.OPEN, ("Hm, so", "", [])),
        ("Yes.", Opening.FREE, ("", "Yes.", [])),
        ("<thin", Opening.FREE, ("", "<thin", [])),
        ("<think>x", Opening.CLOSED, ("", "<think>x", [])),
    ],
)
def test_thinking_is_apart_from_content(
    text: str, opening: Opening, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    for pieces in ([text], list(text)):
        assert plain(read(REASONING_FORMATS["think"].parser(PlainParser(), opening=opening), pieces)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nHm, so.<channel|>Yes.", ("Hm, so.", "Yes.", [])),
        ("<|channel>thought\n<channel|>Yes.", ("", "Yes.", [])),
        ("<|channel>though", ("", "<|channel>though", [])),
        ("<|channel>other", ("", "<|channel>other", [])),
    ],
)
def test_first_marker_may_have_a_label(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    gemma = REASONING_FORMATS["gemma4"]

    assert gemma.opening("<|turn>model\n<|channel>thought\n<channel|>") is Opening.CLOSED
    assert gemma.opening("<|turn>model\n") is Opening.FREE
    for pieces in ([text], list(text)):
        assert plain(read(gemma.parser(PlainParser(), opening=Opening.FREE), pieces)) == expected


def test_calls_come_behind_thinking() -> None:
    assert plain(read(thinking_parser("hermes"), f"<think>a {HERMES} b</think>{HERMES}")) == (
        f"a {HERMES} b",
        "",
        [WEATHER],
    )


def test_ids_are_as_templates_want_them() -> None:
    ids = {mistral_call_id() for _ in range(20)}

    assert len(ids) == 20
    assert all(len(item) == 9 and item.isalnum() for item in ids)
    turn = read(TOOL_FORMATS["mistral"].parser(ANY), [f"[TOOL_CALLS] [{LISTED}]"])
    assert len(turn.calls[0].call_id) == 9
