"""Which log-probabilities belong to an answer's content: those of its tokens, however the text is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.contract.messages import TokenLogprobs
from router.request.content_entries import ContentEntries
from router.text.logprob_trail import TokenEntry
from router.tools.reasoning import REASONING_FORMATS, Opening
from router.tools.registry import TOOL_FORMATS
from router.tools.turn import ContentText
from router.tools.turn_parser import PlainParser, TurnParser
from router.tools.turn_reader import TurnReader
from tests.support.router.turns import ANY, cut

CALL = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
TEXTS = [
    ("think", "hermes", "<think>\nI see.\n</think>\n\nI see."),
    ("think", "hermes", f"<think>Hm</think>Let me see. {CALL}\n{CALL}"),
    ("think", "hermes", f"{CALL} a < b, <tool"),
    ("think", "", "<think></think>\n\nYes"),
    ("think", "", "no thinking"),
    ("harmony", "harmony", "<|channel|>final<|message|>final<|return|>"),
    (
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Yes.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    ),
    ("", "llama3", '{"name": 5}'),
    ("", "llama3", '{"name": "stop", "parameters": {}}'),
]


def parser(reasoning: str, tools: str) -> TurnParser:
    inner = TOOL_FORMATS[tools].parser(ANY) if tools else PlainParser()
    return REASONING_FORMATS[reasoning].parser(inner, opening=Opening.FREE) if reasoning else inner


def told(reader: TurnReader, tokens: Sequence[str], *, num_in_a_piece: int = 1) -> tuple[str, list[str]]:
    """The content of an answer with these tokens, and the tokens reported with it; this many arrive at once."""
    entries, start = list[TokenEntry](), 0
    for number, token in enumerate(tokens):
        entries.append(TokenEntry(TokenLogprobs((number,), (0.0,), 1), start))
        start += len(token)
    content, numbers, trail = "", list[int](), ContentEntries()
    pieces = [range(at, min(at + num_in_a_piece, len(tokens))) for at in range(0, len(tokens), num_in_a_piece)]
    for piece in pieces:
        text, is_last = "".join(tokens[number] for number in piece), piece is pieces[-1]
        parts = reader.read(text, num_output_tokens=piece.stop, is_last=is_last)
        content += "".join(part.text for part in parts if isinstance(part, ContentText))
        given = [entries[number] for number in piece]
        found = trail.take(text, given, parts, is_thinking=reader.is_thinking, is_last=is_last)
        numbers += [entry.said.token_ids[0] for entry in found]
    assert numbers == sorted(set(numbers))
    return content, [tokens[number] for number in numbers]


@pytest.mark.parametrize(("reasoning", "tools", "text"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_tokens_told_are_those_of_the_content(reasoning: str, tools: str, text: str, size: int) -> None:
    tokens = [text[at : at + size] for at in range(0, len(text), size)]
    content, found = told(TurnReader(parser(reasoning, tools), has_reasoning=bool(reasoning)), tokens)

    assert content.strip() in "".join(found)
    assert content.strip() not in "".join(found[1:]) or not content.strip()
    assert len("".join(found)) <= len(content) + 2 * size or text.endswith("<|return|>")


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 90)), st.integers(1, 3))
@example(TEXTS[1], [1, 8, 16, 30], 2)
def test_all_of_the_content_is_told_whatever_way_it_is_cut(
    case: tuple[str, str, str], places: list[int], num_in_a_piece: int
) -> None:
    reasoning, tools, text = case
    tokens = [token for token in cut(text, places) if token]
    reader = TurnReader(parser(reasoning, tools), has_reasoning=bool(reasoning))
    content, found = told(reader, tokens, num_in_a_piece=num_in_a_piece)

    assert not content or content.strip() in "".join(found)


def test_end_of_an_answer_is_told_with_its_content_and_not_with_calls() -> None:
    content, with_end = told(TurnReader(parser("", "hermes"), has_reasoning=False), ["Yes", ".", ""])
    called, without = told(TurnReader(parser("", "hermes"), has_reasoning=False), [CALL, ""])

    assert (content, with_end) == ("Yes.", ["Yes", ".", ""])
    assert (called, without) == ("", [])
