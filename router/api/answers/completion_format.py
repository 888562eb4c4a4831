"""Answers of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.api.answers.answer_format import (
    AnswerHead,
    Collected,
    EventWriter,
    beam_fields,
    finish_fields,
    with_field,
)
from router.api.answers.logprobs_answer import PlacedToken, placed
from router.request.text_output import TextOutput, TextPiece


class CompletionFormat:
    """Writes text completions and their chunks. ``echoes`` are the prompts' texts, if they should be repeated."""

    def __init__(self, head: AnswerHead, *, echoes: Sequence[str] = ()) -> None:
        self.head = head
        self._echoes = echoes
        self._writer = EventWriter(head, kind="text_completion")
        self._has_ids: set[int] = set()
        self._told: dict[int, str] = {}
        self._placed: dict[int, list[PlacedToken]] = {}

    def opening(self, index: int, output: TextOutput) -> bytes:
        """The echo, if it is wanted."""
        if not self._echoes:
            return b""
        ids = self._prompt_ids(index, output)
        text, tokens = json.dumps(self._echo(index)), self._echoed_tokens(index, output)
        logprobs = self._logprobs_json(tokens) if tokens else "null"
        choice = f'{{"index":{index},"text":{text},"logprobs":{logprobs},"finish_reason":null{ids}}}'
        return self._writer.write(choice, output)

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:
        """One piece as an event; empty when it has nothing to say yet."""
        if self._writer.can_write_text(piece):
            if not piece.text:
                return b""
            return self._writer.write_text(
                f'{{"index":{index},"text":', piece.text, ',"logprobs":null,"finish_reason":null}'
            )
        wants_ids = self.head.return_token_ids
        if not piece.text and piece.finish_reason is None and not wants_ids and not piece.entries:
            return b""
        fields = finish_fields(piece, return_token_ids=wants_ids, output=output)
        fields += self._prompt_ids(index, output)
        logprobs = self._logprobs_json(placed(piece.entries, len(self._echo(index)))) if piece.entries else "null"
        choice = f'{{"index":{index},"text":{json.dumps(piece.text)},"logprobs":{logprobs},{fields}}}'
        return self._writer.write(choice, output, num_output_tokens=piece.num_output_tokens)

    def _prompt_ids(self, index: int, output: TextOutput) -> str:
        """The prompt's ids, if wanted, as a field of a choice's first event; empty for later events."""
        if not self.head.return_token_ids or index in self._has_ids:
            return ""
        self._has_ids.add(index)
        return f',"prompt_token_ids":{json.dumps(output.prompt_token_ids.tolist())}'

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
            "usage": head.usage(outputs),
        }
        written = ",".join(self._choice(index, choice) for index, choice in enumerate(choices))
        return with_field(json.dumps(body), "choices", f"[{written}]").encode()

    def _choice(self, index: int, choice: Collected) -> str:
        fields: dict[str, object] = {
            "index": index,
            "text": self._echo(index) + "".join(choice.text),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **beam_fields(choice.output),
        }
        if self.head.return_token_ids:
            fields["token_ids"] = choice.token_ids
            fields["prompt_token_ids"] = choice.output.prompt_token_ids.tolist()
        text = with_field(json.dumps(fields), "logprobs", self._logprobs(index, choice))
        return with_field(text, "prompt_logprobs", self._prompt_logprobs(index, choice.output))

    def _logprobs(self, index: int, choice: Collected) -> str:
        if not self.head.shows_logprobs:
            return "null"
        tokens = self._echoed_tokens(index, choice.output)
        return self._logprobs_json([*tokens, *placed(choice.entries, len(self._echo(index)))])

    def _logprobs_json(self, tokens: Sequence[PlacedToken]) -> str:
        return "null" if self.head.logprobs is None else self.head.logprobs.completion_json(tokens)

    def _prompt_logprobs(self, index: int, output: TextOutput) -> str:
        """The prompt's log-probabilities, which are written once for all choices of the prompt."""
        prompt = self._prompt(index)
        if prompt not in self._told:
            self._told[prompt] = self.head.prompt_logprobs_json(output)
        return self._told[prompt]

    def _echoed_tokens(self, index: int, output: TextOutput) -> list[PlacedToken]:
        """The prompt's tokens, if wanted; they are located once for all choices of the prompt."""
        table, head, prompt = output.prompt_logprobs, self.head, self._prompt(index)
        if not self._echoes or not head.shows_logprobs or head.logprobs is None or table is None:
            return []
        if prompt not in self._placed:
            self._placed[prompt] = head.logprobs.placed_prompt(output.prompt_token_ids, self._echo(index), table)
        return self._placed[prompt]

    def _echo(self, index: int) -> str:
        return self._echoes[self._prompt(index)] if self._echoes else ""

    def _prompt(self, index: int) -> int:
        return index // self.head.num_choices_per_prompt
