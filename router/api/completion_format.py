"""Answers of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.api.answer_format import AnswerHead, Collected, EventWriter, finish_fields
from router.text_output import TextOutput, TextPiece


class CompletionFormat:
    """Writes text completions and their chunks. ``echoes`` are the prompts' texts where they are to be repeated."""

    def __init__(self, head: AnswerHead, *, echoes: Sequence[str] = ()) -> None:
        self.head = head
        self._echoes = echoes
        self._writer = EventWriter(head, kind="text_completion")

    def opening(self, index: int, output: TextOutput) -> bytes:
        """The echo and the prompt's ids, where one is wanted."""
        if not self._echoes and not self.head.return_token_ids:
            return b""
        ids = f',"prompt_token_ids":{json.dumps(output.prompt_token_ids)}' if self.head.return_token_ids else ""
        text = json.dumps(self._echo(index))
        choice = f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null{ids}}}'
        return self._writer.write(choice, output)

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:
        """One piece as an event; empty when it has nothing to say yet."""
        wants_ids = self.head.return_token_ids
        if not piece.text and piece.finish_reason is None and not wants_ids:
            return b""
        fields = finish_fields(piece, return_token_ids=wants_ids)
        choice = f'{{"index":{index},"text":{json.dumps(piece.text)},"logprobs":null,{fields}}}'
        return self._writer.write(choice, output)

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:
        """The last event of a stream with usage."""
        return self._writer.write_usage(outputs)

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:
        """The answer in one piece."""
        head = self.head
        body = {
            "id": head.answer_id,
            "object": "text_completion",
            "created": head.created_s,
            "model": head.model,
            "choices": [self._choice(index, choice, outputs[index]) for index, choice in enumerate(choices)],
            "usage": head.usage(outputs),
        }
        return json.dumps(body).encode()

    def _choice(self, index: int, choice: Collected, output: TextOutput) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": index,
            "text": self._echo(index) + "".join(choice.text),
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.head.return_token_ids:
            fields["token_ids"] = choice.token_ids
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _echo(self, index: int) -> str:
        return self._echoes[index // self.head.num_choices_per_prompt] if self._echoes else ""
