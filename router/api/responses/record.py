"""One response from its first token to its end: how it is reported, and what is stored."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from router.api.answers.answer_format import AnswerHead, with_field
from router.api.answers.turn_blocks import Block, TurnBlocks
from router.api.responses.body import ResponsesBody
from router.request.text_output import TextOutput, TextPiece
from router.stored_responses.store import ResponseStore, StoredResponse

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseRecord:
    """The state of a running response; a ``router.stored_responses.store.RunningResponse``."""

    def __init__(
        self,
        *,
        body: ResponsesBody,
        head: AnswerHead,
        output: TextOutput,
        blocks: TurnBlocks,
        owner: str,
        items: Sequence[bytes],
        store: ResponseStore,
    ) -> None:
        """``items`` are the conversation so far, in the format of ``StoredResponse``."""
        self.head, self.blocks, self.output = head, blocks, output
        self._owner, self._items, self._store = owner, tuple(items), store
        self._stores = body.store is not False and store.keeps_any
        self._unique = head.answer_id.rpartition("_")[2]
        self.status: Status = "in_progress"
        self._error: dict[str, str] | None = None
        self._completed_s: int | None = None
        self._rows: dict[int, list[str]] = {}
        self._constant = self._constant_fields(body)

    @property
    def owner(self) -> str:
        """The hash of the request's API key."""
        return self._owner

    def begin(self) -> None:
        """Register the response as running."""
        self._store.begin(self.head.answer_id, self)

    def end(self) -> None:
        """Unregister the response; an unfinished one is not stored. Idempotent."""
        self._store.end(self.head.answer_id)

    def cancel(self, *, keeps: bool) -> None:
        """Cancel the response by order of its owner."""
        self.status = "cancelled"
        self._stores = self._stores and keeps
        self.output.cancel()
        self._keep()

    def finish(self, status: Status) -> None:
        """The response is complete: store it, if the body asked for that."""
        self.status = status
        self._completed_s = int(time.time()) if status == "completed" else None
        self._keep()

    def fail(self, message: str, *, keeps: bool) -> None:
        """The response failed; with ``keeps``, what was generated is stored, if the body asked for that."""
        self.status = "failed"
        self._error = {"code": "server_error", "message": message}
        self._stores = self._stores and keeps
        self._keep()

    def _keep(self) -> None:
        self.end()
        if self._stores:
            self._store.put(self.so_far())

    def take(self, piece: TextPiece) -> None:
        """Take a piece of an unstreamed answer; log-probabilities are written as they arrive, not all at the end."""
        for step in self.blocks.take(piece):
            if step.entries:
                self._rows_of(step.block)

    def so_far(self) -> StoredResponse:
        """The response with what was generated so far."""
        return StoredResponse(
            response_id=self.head.answer_id,
            owner=self._owner,
            body=self.as_json().encode(),
            # Log-probabilities are of no use for continuing a conversation, and many times as large as the text.
            items=(*self._items, self._items_json(has_logprobs=False).encode()),
            status=self.status,
        )

    def as_json(self) -> str:
        """The response object."""
        is_limited = self.status == "incomplete"
        fields = {
            **self._constant,
            "status": self.status,
            "completed_at": self._completed_s,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_limited else None,
            "usage": None if self.status == "in_progress" else self._usage(),
        }
        return with_field(json.dumps(fields), "output", self._items_json())

    def _items_json(self, *, has_logprobs: bool = True) -> str:
        """The model's output, as items."""
        items = (self.item_json(block, has_logprobs=has_logprobs) for block in self.blocks.blocks)
        return f"[{', '.join(items)}]"

    def item_id(self, block: Block) -> str:
        """The id of a block's item."""
        return f"{_ID_PREFIXES[block.kind]}_{self._unique}{block.index:02x}"

    def item_json(self, block: Block, *, is_closed: bool = False, has_logprobs: bool = True) -> str:
        """A block as an item, as far as it was generated; ``is_closed``: it is complete."""
        is_open = self.status == "in_progress" and not is_closed
        status = "completed" if block.is_complete else "in_progress" if is_open else "incomplete"
        item: dict[str, Any] = {"id": self.item_id(block), "status": status}
        has_part = block.texts and block.kind != "call"
        content = f"[{self.part_json(block, has_logprobs=has_logprobs)}]" if has_part else "[]"
        match block.kind:
            case "text":
                return with_field(json.dumps(item | {"type": "message", "role": "assistant"}), "content", content)
            case "reasoning":
                return with_field(json.dumps(item | {"type": "reasoning", "summary": []}), "content", content)
            case "call":
                called = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return json.dumps(item | {"type": "function_call", **called})

    def part_json(self, block: Block, *, is_empty: bool = False, has_logprobs: bool = True) -> str:
        """The single part of a text block; ``is_empty`` returns it as it was before its first text."""
        text = "" if is_empty else block.text
        if block.kind == "reasoning":
            return json.dumps({"type": "reasoning_text", "text": text})
        part = json.dumps({"type": "output_text", "text": text, "annotations": []})
        return with_field(part, "logprobs", self.logprobs_json(block) if has_logprobs and not is_empty else "[]")

    def logprobs_json(self, block: Block, *, first: int = 0) -> str:
        """Log-probabilities of a block's tokens, without the ``first`` ones."""
        return f"[{', '.join(self._rows_of(block)[first:])}]"

    def _rows_of(self, block: Block) -> list[str]:
        """The log-probabilities of each token, as JSON. They are sent several times, but written once, as each token
        arrives: to write all of them at the end would delay other streams."""
        rows = self._rows.setdefault(block.index, [])
        if self.head.logprobs is not None:
            rows += self.head.logprobs.chat_rows(block.entries[len(rows) :], has_bytes=True)
        return rows

    def _usage(self) -> dict[str, Any]:
        output = self.output
        return {
            "input_tokens": output.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.blocks.num_reasoning_tokens},
            "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
        }

    def _constant_fields(self, body: ResponsesBody) -> dict[str, Any]:
        sampling = self.output.generation.request.sampling
        text = {"format": {"type": "text"}}
        if body.text is not None:
            text |= body.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self.head.answer_id,
            "object": "response",
            "created_at": self.head.created_s,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.head.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning is not None else None,
                "summary": None,
            },
            "store": self._stores,
            "temperature": sampling.temperature,
            "text": text,
            "tool_choice": _plain(body.tool_choice) or "auto",
            "tools": [
                {"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in body.tools or ()
            ],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }


def _plain(choice: Any) -> Any:
    return choice if choice is None or isinstance(choice, str) else choice.model_dump(exclude_none=True)
