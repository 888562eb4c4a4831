"""Answers of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from router.api.answers.answer_format import (
    AnswerHead,
    Collected,
    EventWriter,
    beam_fields,
    finish_fields,
    with_field,
)
from router.request.text_output import TextOutput, TextPiece, finish_name
from router.text.logprob_trail import TokenEntry
from router.tools.turn import CallArguments, CallBegin, ContentText, ReasoningText, Turn, TurnPart


class ChatFormat:
    """Writes chat completions and their chunks. ``echo`` is the message to repeat before the answer.

    Without ``shows_reasoning`` both leave out the thinking; its tokens are still counted.
    """

    def __init__(self, head: AnswerHead, *, echo: str = "", shows_reasoning: bool = True) -> None:
        self.head = head
        self._echo = echo
        self._shows_reasoning = shows_reasoning
        self._writer = EventWriter(head, kind="chat.completion.chunk")

    def opening(self, index: int, output: TextOutput) -> bytes:
        """The role, then the echo, before any text."""
        ids = (
            f',"prompt_token_ids":{json.dumps(output.prompt_token_ids.tolist())}' if self.head.return_token_ids else ""
        )
        role = '{"role":"assistant","content":""}'
        opening = self._writer.write(self._piece(index, role), output, extra=ids)
        if not self._echo:
            return opening
        return opening + self._writer.write(self._piece(index, f'{{"content":{json.dumps(self._echo)}}}'), output)

    @staticmethod
    def _piece(index: int, delta: str) -> str:
        return f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:
        """One piece as an event; empty when it has nothing to say yet."""
        if output.turn is not None:
            return self._turn_event(index, piece, output)
        if self._writer.can_write_text(piece):
            if not piece.text:
                return b""
            return self._writer.write_text(
                f'{{"index":{index},"delta":{{"content":', piece.text, '},"logprobs":null,"finish_reason":null}'
            )
        wants_ids = self.head.return_token_ids
        if not piece.text and piece.finish_reason is None and not wants_ids and not piece.entries:
            return b""
        delta = f'{{"content":{json.dumps(piece.text)}}}' if piece.text or piece.finish_reason is None else "{}"
        fields = finish_fields(piece, return_token_ids=wants_ids, output=output)
        logprobs = self._logprobs_json(piece.entries) if piece.entries else "null"
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},{fields}}}'
        return self._writer.write(choice, output, num_output_tokens=piece.num_output_tokens)

    def _turn_event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:
        """One piece of an answer that may be more than content."""
        parts = piece.parts
        if not self._shows_reasoning:
            parts = tuple(part for part in parts if not isinstance(part, ReasoningText))
        delta = turn_delta(parts)
        says_nothing = not delta and piece.finish_reason is None
        if says_nothing and not self.head.return_token_ids and not piece.entries:
            return b""
        calls = b""
        if piece.finish_reason is not None and "tool_calls" in delta:
            # The official client regards a call as complete only at the event after its last one.
            counted = piece.num_output_tokens
            calls = self._writer.write(self._piece(index, json.dumps(delta)), output, num_output_tokens=counted)
            delta = {}
        fields = finish_fields(piece, return_token_ids=self.head.return_token_ids, output=output)
        logprobs = self._logprobs_json(piece.entries) if piece.entries else "null"
        choice = f'{{"index":{index},"delta":{json.dumps(delta)},"logprobs":{logprobs},{fields}}}'
        return calls + self._writer.write(choice, output, num_output_tokens=piece.num_output_tokens)

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:
        """The last event of a stream with usage."""
        return self._writer.write_usage(outputs)

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:
        """The answer in one piece."""
        head = self.head
        body: dict[str, object] = {
            "id": head.answer_id,
            "object": "chat.completion",
            "created": head.created_s,
            "model": head.model,
            "usage": head.usage(outputs),
        }
        if head.return_token_ids:
            body["prompt_token_ids"] = outputs[0].prompt_token_ids.tolist()
        written = ",".join(self._choice(index, choice) for index, choice in enumerate(choices))
        text = with_field(json.dumps(body), "choices", f"[{written}]")
        return with_field(text, "prompt_logprobs", head.prompt_logprobs_json(outputs[0])).encode()

    def _logprobs_json(self, entries: Sequence[TokenEntry]) -> str:
        return "null" if self.head.logprobs is None else self.head.logprobs.chat_json(entries)

    def _choice(self, index: int, choice: Collected) -> str:
        head = self.head
        fields: dict[str, object] = {
            "index": index,
            "message": self._message(choice),
            "finish_reason": finish_name(choice.finish_reason, choice.stop_reason, choice.output.turn),
            "stop_reason": choice.stop_reason,
            **beam_fields(choice.output),
        }
        if head.return_token_ids:
            fields["token_ids"] = choice.token_ids
        logprobs = self._logprobs_json(choice.entries) if head.shows_logprobs else "null"
        return with_field(json.dumps(fields), "logprobs", logprobs)

    def _message(self, choice: Collected) -> dict[str, object]:
        reader = choice.output.turn
        if reader is None:
            return {"role": "assistant", "content": self._echo + "".join(choice.text), "refusal": None}
        has_reasoning = reader.has_reasoning and self._shows_reasoning
        return turn_message(choice.turn, has_reasoning=has_reasoning, echo=self._echo)


def turn_message(turn: Turn, *, has_reasoning: bool, echo: str = "") -> dict[str, object]:
    """The message of an unstreamed answer. Thinking is given under both names that clients use."""
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
    """The delta of a piece; a call begins with its id and name, and its arguments follow as they arrive."""
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
