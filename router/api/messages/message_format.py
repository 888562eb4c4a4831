"""Answers of /v1/messages: the message, or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from router.api.answers.answer_format import AnswerHead, Collected, json_string, with_field
from router.api.answers.sse import StreamEnding
from router.api.answers.turn_blocks import Block, BlockStep, TurnBlocks
from router.api.errors import anthropic_error_body, status_of
from router.errors import RouterError
from router.request.text_output import TextOutput, TextPiece

_DELTAS = {
    "text": '{"type":"text_delta","text":',
    "reasoning": '{"type":"thinking_delta","thinking":',
    "call": '{"type":"input_json_delta","partial_json":',
}


class MessageFormat:
    """Writes one message."""

    def __init__(self, head: AnswerHead, blocks: TurnBlocks) -> None:
        self.head = head
        self._blocks = blocks

    @property
    def ending(self) -> StreamEnding:
        """Nothing follows the last event; an error has its own kind of event."""
        return StreamEnding(done=b"", error_event=_error_event)

    def opening(self, index: int, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """The events before any text."""
        message = self._message(None, None, usage=_usage(output, num_output_tokens=0))
        return _write("message_start", message={**message, "content": []}) + _write("ping")

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """One piece as events; empty if there is nothing to send yet. The last event ends the message."""
        events = b"".join([_step(step) for step in self._blocks.take(piece)])
        if piece.finish_reason is None:
            return events
        reason, sequence = self._stop_reason(piece.finish_reason, piece.stop_reason)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(output, num_output_tokens=output.num_output_tokens)
        return events + _write("message_delta", delta=delta, usage=usage) + _write("message_stop")

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:  # noqa: ARG002 (there is nothing to tell)
        """Nothing: the last events have the usage."""
        return b""

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:
        """The answer in one piece."""
        [choice], [output] = choices, outputs
        for _ in self._blocks.take(choice.as_piece()):
            pass
        reason, sequence = self._stop_reason(choice.finish_reason, choice.stop_reason)
        content = [_content(block) for block in self._blocks.blocks if block.texts or block.kind == "call"]
        usage = _usage(output, num_output_tokens=output.num_output_tokens)
        message = json.dumps(self._message(reason, sequence, usage=usage))
        return with_field(message, "content", f"[{', '.join(content)}]").encode()

    def _message(self, reason: str | None, sequence: str | None, *, usage: dict[str, int]) -> dict[str, Any]:
        """The fields of the message except its content."""
        return {
            "id": self.head.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }

    def _stop_reason(self, finish_reason: str | None, stop: str | int | None) -> tuple[str, str | None]:
        """Why the message ended, and the stop sequence that ended it."""
        if finish_reason == "length":
            return "max_tokens", None
        if isinstance(stop, str):
            return "stop_sequence", stop
        return ("tool_use" if self._blocks.calls_tools else "end_turn"), None


def _usage(output: TextOutput, *, num_output_tokens: int) -> dict[str, int]:
    """The usage; tokens read from the cache are counted separately from computed ones."""
    return {
        "input_tokens": output.num_prompt_tokens - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


def _content(block: Block) -> str:
    """A complete block as JSON."""
    match block.kind:
        case "text":
            return json.dumps({"type": "text", "text": block.text})
        case "reasoning":
            return json.dumps({"type": "thinking", "thinking": block.text, "signature": ""})
        case "call":
            call = json.dumps({"type": "tool_use", "id": block.call_id, "name": block.name})
            return with_field(call, "input", block.text if _is_object(block.text) else "{}")


def _is_object(text: str) -> bool:
    """True if a call's arguments are a JSON object, as clients expect it. They are not if the answer ended before they
    were complete.

    The numbers are not converted: they may be larger than a float, or longer than Python reads.
    """
    try:
        return isinstance(json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _step(step: BlockStep) -> bytes:
    block = step.block
    match step.kind:
        case "open":
            empty = {"text": _TEXT, "reasoning": _THINKING, "call": {"type": "tool_use", "input": {}}}[block.kind]
            if block.kind == "call":
                empty = {**empty, "id": block.call_id, "name": block.name}
            return _write("content_block_start", index=block.index, content_block=empty)
        case "more":
            if not step.text:
                return b""
            return (
                f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{block.index},'
                f'"delta":{_DELTAS[block.kind]}{json_string(step.text)}}}}}\n\n'
            ).encode()
        case "close":
            signature = b""
            if block.kind == "reasoning":
                delta = {"type": "signature_delta", "signature": ""}
                signature = _write("content_block_delta", index=block.index, delta=delta)
            return signature + _write("content_block_stop", index=block.index)


_TEXT: dict[str, Any] = {"type": "text", "text": ""}
_THINKING: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}


def _write(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _error_event(error: RouterError) -> bytes:
    status, _ = status_of(error)
    return b"event: error\ndata: " + json.dumps(anthropic_error_body(error.message, status=status)).encode() + b"\n\n"
