"""Chunks of a streamed chat whose tokens come several at a time."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.api.answers.answer_format import AnswerHead
from router.api.answers.chat_format import ChatFormat
from router.request.text_output import TextOutput, TextPiece
from router.tools.turn import CallArguments, CallBegin, ContentText, TurnPart

CALL = (CallBegin(0, "call-1", "f"), CallArguments(0, '{"a":1}'))
HEAD = AnswerHead(answer_id="id", created_s=0, model="model")


@pytest.mark.parametrize(
    ("parts", "deltas"), [(CALL, ["tool_calls", None]), ((ContentText("so"),), ["content"])], ids=["call", "text"]
)
def test_a_choice_ends_behind_its_calls_and_with_its_text(
    parts: tuple[TurnPart, ...], deltas: list[str | None]
) -> None:
    """The official client's stream helper closes a call by the event behind its last one."""
    output = cast(TextOutput, SimpleNamespace(turn=SimpleNamespace(num_calls=len(parts) - 1)))
    written = ChatFormat(HEAD).event(0, TextPiece("", (5,), 1, "stop", parts=parts), output)

    events = [json.loads(event.removeprefix("data: ")) for event in written.decode().split("\n\n") if event]
    choices: list[dict[str, Any]] = [event["choices"][0] for event in events]
    assert [next(iter(choice["delta"]), None) for choice in choices] == deltas
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
