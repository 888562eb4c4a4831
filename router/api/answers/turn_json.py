"""An assistant's turn as OpenAI's chat API writes it: messages, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable

from router.tools.turn import CallArguments, CallBegin, ContentText, ReasoningText, Turn, TurnPart


def turn_message(turn: Turn, *, has_reasoning: bool, echo: str = "") -> dict[str, object]:
    """The message of a whole answer. Thinking stands under both names that clients know."""
    content: str | None = echo + turn.content
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if has_reasoning:
        message["reasoning_content"] = message["reasoning"] = turn.reasoning or None
    if turn.calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.calls
        ]
    return message


def turn_delta(parts: Iterable[TurnPart]) -> dict[str, object]:
    """What a piece adds; of each call the id and the name come first, then its arguments, as far as they are there."""
    delta: dict[str, str] = {}
    calls: dict[int, dict[str, object]] = {}
    arguments: dict[int, dict[str, str]] = {}
    for part in parts:
        match part:
            case ContentText(text):
                delta["content"] = delta.get("content", "") + text
            case ReasoningText(text):
                for name in ("reasoning_content", "reasoning"):
                    delta[name] = delta.get(name, "") + text
            case CallBegin(number, call_id, name):
                function = arguments[number] = {"name": name, "arguments": ""}
                calls[number] = {"index": number, "id": call_id, "type": "function", "function": function}
            case CallArguments(number, text):
                if number not in calls:
                    function = arguments[number] = {"arguments": ""}
                    calls[number] = {"index": number, "function": function}
                arguments[number]["arguments"] += text
    return {**delta, "tool_calls": list(calls.values())} if calls else {**delta}
