"""Answers of /v1/responses: the response object, or the events by which it grows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from router.api.answers.answer_format import AnswerHead, Collected, json_string
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
        """What all answers have."""
        return self._record.head

    @property
    def ending(self) -> StreamEnding:
        """Nothing follows the last event, and an error is an event like the others."""
        return StreamEnding(done=b"", error_event=self.error_event)

    def opening(self, index: int, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """The events before any text."""
        return self._of_response("response.created") + self._of_response("response.in_progress")

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:  # noqa: ARG002 (there is one output)
        """One piece as events; empty when it has nothing to say yet. The last one tells the whole response."""
        events = b"".join([self._step(step) for step in self._record.blocks.take(piece)])
        if piece.finish_reason is None:
            return events
        status = _status(piece.finish_reason)
        self._record.finish(status)
        return events + self._of_response(f"response.{status}")

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:  # noqa: ARG002 (there is nothing to tell)
        """Nothing: the last event tells the usage."""
        return b""

    def error_event(self, error: RouterError) -> bytes:
        """The end of a response that was cancelled or failed."""
        record = self._record
        if record.status == "cancelled":
            return self._of_response("response.incomplete")
        # nobody ordered it to end: the client left
        has_left = isinstance(error, RequestCancelledError)
        record.fail(error.message, keeps=not has_left)
        return self._of_response("response.failed")

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:  # noqa: ARG002 (one output)
        """The answer in one piece."""
        [choice] = choices
        for _ in self._record.blocks.take(choice.as_piece()):
            pass
        self._record.finish(_status(choice.finish_reason))
        return json.dumps(self._record.as_json()).encode()

    def _step(self, step: BlockStep) -> bytes:
        match step.kind:
            case "open":
                return self._opened(step.block)
            case "more":
                return self._grown(step)
            case "close":
                return self._closed(step.block)

    def _opened(self, block: Block) -> bytes:
        return self._write("response.output_item.added", output_index=block.index, item=self._record.item(block))

    def _grown(self, step: BlockStep) -> bytes:
        block = step.block
        begin = b""
        if len(block.texts) == 1 and block.kind != "call":
            part = self._record.part(block) | {"text": ""}
            if "logprobs" in part:
                part["logprobs"] = []
            begin = self._write("response.content_part.added", **self._place(block), part=part)
        if not step.text and not step.entries:
            return begin
        kind = _DELTAS[block.kind]
        content = "" if block.kind == "call" else '"content_index":0,'
        logprobs = ""
        if block.kind == "text":
            logprobs = f',"logprobs":{json.dumps(self._record.logprobs(step.entries))}'
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
            events.append(self._write("response.function_call_arguments.done", **place, **done))
        elif block.texts:
            part = record.part(block)
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            kind = "output_text" if block.kind == "text" else "reasoning_text"
            events.append(self._write(f"response.{kind}.done", **place, **told))
            events.append(self._write("response.content_part.done", **place, part=part))
        item = record.item(block)
        if not block.is_complete:
            item["status"] = "incomplete"
        events.append(self._write("response.output_item.done", output_index=block.index, item=item))
        return b"".join(events)

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._record.item_id(block), "output_index": block.index, "content_index": 0}

    def _of_response(self, kind: str) -> bytes:
        return self._write(kind, response=self._record.as_json())

    def _write(self, kind: str, **fields: Any) -> bytes:
        body = json.dumps({"type": kind, "sequence_number": self._number(), **fields})
        return f"event: {kind}\ndata: {body}\n\n".encode()

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _status(finish_reason: str | None) -> Status:
    return "incomplete" if finish_reason == "length" else "completed"
