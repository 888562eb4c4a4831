"""Answers of /v1/responses: the response object, or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.api.answers.answer_format import AnswerHead, Collected, json_string, with_field
from router.api.answers.sse import StreamEnding
from router.api.answers.turn_blocks import Block, BlockStep
from router.api.responses.record import ResponseRecord, Status
from router.errors import RequestCancelledError, RouterError
from router.request.text_output import TextOutput, TextPiece

_DELTAS = {
    "text": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}


class ResponseFormat:
    """Writes one response. Events are numbered from 0."""

    def __init__(self, record: ResponseRecord) -> None:
        self._record = record
        self._num_events = 0

    @property
    def head(self) -> AnswerHead:
        """What every message repeats."""
        return self._record.head

    @property
    def ending(self) -> StreamEnding:
        """Nothing follows the last event; an error is an ordinary event."""
        return StreamEnding(done=b"", error_event=self.error_event)

    def opening(self, index: int, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """The events before any text."""
        return self._of_response("response.created") + self._of_response("response.in_progress")

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """One piece as events; empty if there is nothing to send yet. The last event has the whole response."""
        events = b"".join([self._step(step) for step in self._record.blocks.take(piece)])
        if piece.finish_reason is None:
            return events
        status = _status(piece.finish_reason)
        self._record.finish(status)
        return events + self._of_response(f"response.{status}")

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:  # noqa: ARG002 (there is nothing to tell)
        """Nothing: the last event has the usage."""
        return b""

    def error_event(self, error: RouterError) -> bytes:
        """The last event of a response that was cancelled or failed."""
        record = self._record
        if record.status == "cancelled":
            return self._of_response("response.incomplete")
        # not cancelled by an order: the client left
        has_left = isinstance(error, RequestCancelledError)
        record.fail(error.message, keeps=not has_left)
        return self._of_response("response.failed")

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:  # noqa: ARG002 (one output)
        """The unstreamed answer, from the pieces that the record took."""
        [choice] = choices
        self._record.finish(_status(choice.finish_reason))
        return self._record.as_json().encode()

    def _step(self, step: BlockStep) -> bytes:
        match step.kind:
            case "open":
                return self._opened(step.block)
            case "more":
                return self._grown(step)
            case "close":
                return self._closed(step.block)

    def _opened(self, block: Block) -> bytes:
        item = self._record.item_json(block)
        return self._write("response.output_item.added", {"item": item}, output_index=block.index)

    def _grown(self, step: BlockStep) -> bytes:
        block = step.block
        begin = b""
        if len(block.texts) == 1 and block.kind != "call":
            part = self._record.part_json(block, is_empty=True)
            begin = self._write("response.content_part.added", {"part": part}, **self._place(block))
        if not step.text and not step.entries:
            return begin
        kind = _DELTAS[block.kind]
        content = "" if block.kind == "call" else '"content_index":0,'
        logprobs = ""
        if block.kind == "text":
            num_before = len(block.entries) - len(step.entries)
            logprobs = f',"logprobs":{self._record.logprobs_json(block, first=num_before)}'
        return (
            begin
            + (
                f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._number()},'
                f'"item_id":"{self._record.item_id(block)}","output_index":{block.index},{content}'
                f'"delta":{json_string(step.text)}{logprobs}}}\n\n'
            ).encode()
        )

    def _closed(self, block: Block) -> bytes:
        record, place = self._record, self._place(block)
        events: list[bytes] = []
        if block.kind == "call":
            del place["content_index"]
            done = {"name": block.name, "arguments": block.text}
            events.append(self._write("response.function_call_arguments.done", {}, **place, **done))
        elif block.texts:
            is_content = block.kind == "text"
            told = {"logprobs": record.logprobs_json(block)} if is_content else {}
            kind = "output_text" if is_content else "reasoning_text"
            events.append(self._write(f"response.{kind}.done", told, **place, text=block.text))
            part = record.part_json(block)
            events.append(self._write("response.content_part.done", {"part": part}, **place))
        item = record.item_json(block, is_closed=True)
        events.append(self._write("response.output_item.done", {"item": item}, output_index=block.index))
        return b"".join(events)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._record.item_id(block), "output_index": block.index, "content_index": 0}

    def _of_response(self, kind: str) -> bytes:
        return self._write(kind, {"response": self._record.as_json()})

    def _write(self, kind: str, written: Mapping[str, str], **fields: Any) -> bytes:
        """Write an event; the fields in ``written`` are JSON already."""
        body = json.dumps({"type": kind, "sequence_number": self._number(), **fields})
        for name, value in written.items():
            body = with_field(body, name, value)
        return f"event: {kind}\ndata: {body}\n\n".encode()

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _status(finish_reason: str | None) -> Status:
    return "incomplete" if finish_reason == "length" else "completed"
