"""The wire format of answers: the interface, and the parts that both endpoints share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.api.answers.logprobs_answer import LogprobsAnswer, prompt_logprobs_json
from router.request.text_output import FinishName, TextOutput, TextPiece, finish_name
from router.text.logprob_trail import TokenEntry
from router.tools.turn import Turn


@dataclass(slots=True)
class Collected:
    """One choice of an unstreamed answer, as far as it was generated."""

    output: TextOutput
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    turn: Turn = field(default_factory=Turn)
    content_entries: list[TokenEntry] = field(default_factory=list)

    def add(self, piece: TextPiece) -> None:
        """Add one piece."""
        self.text.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.entries.extend(piece.entries)
        self.turn.add(piece.parts)
        self.content_entries.extend(piece.content_entries)
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason

    def as_piece(self) -> TextPiece:
        """All of a finished choice as one piece."""
        return TextPiece(
            "".join(self.text),
            tuple(self.token_ids),
            len(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            tuple(self.entries),
            tuple(self.turn.parts()),
            tuple(self.content_entries),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every message of an answer repeats, and what the client asked to include.

    ``num_candidates_per_prompt`` outputs are generated for each prompt, and the best ``num_choices_per_prompt`` are
    returned. ``logprobs`` writes log-probabilities, if any are wanted: in the field ``logprobs`` if ``shows_logprobs``,
    in ``prompt_logprobs`` if their number is set. With ``tells_of_prompts`` writing an answer may take seconds.
    ``grammar_param`` is the parameter to blame if a worker cannot follow the answer's grammar.
    """

    answer_id: str
    created_s: int
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_choices_per_prompt: int = 1
    num_candidates_per_prompt: int = 1
    logprobs: LogprobsAnswer | None = None
    shows_logprobs: bool = False
    num_prompt_logprobs: int | None = None
    tells_of_prompts: bool = False
    grammar_param: str | None = None

    def usage(self, outputs: Sequence[TextOutput]) -> dict[str, object]:
        """The usage of everything that was generated."""
        return usage(outputs, num_choices_per_prompt=self.num_candidates_per_prompt)

    def chosen(self, candidates: Sequence[Collected]) -> list[Collected]:
        """The candidates to return: for each prompt those with the highest log-probability per token, best first."""
        size = self.num_candidates_per_prompt
        if size == self.num_choices_per_prompt:
            return list(candidates)
        groups = [candidates[start : start + size] for start in range(0, len(candidates), size)]
        ranked = [sorted(group, key=lambda item: -item.output.mean_logprob) for group in groups]
        return [item for group in ranked for item in group[: self.num_choices_per_prompt]]

    def prompt_logprobs_json(self, output: TextOutput) -> str:
        """The field ``prompt_logprobs`` for an output's prompt; null if it was not asked for."""
        if self.num_prompt_logprobs is None:
            return "null"
        table = output.prompt_logprobs
        assert table is not None
        assert self.logprobs is not None
        return prompt_logprobs_json(table, self.logprobs.speller, num_top=self.num_prompt_logprobs)


class AnswerFormat(Protocol):
    """Writes one endpoint's answers."""

    @property
    def head(self) -> AnswerHead:
        """What every message repeats."""

    def opening(self, index: int, output: TextOutput) -> bytes:
        """The event before a choice's first text; may be empty."""

    def event(self, index: int, piece: TextPiece, output: TextOutput) -> bytes:
        """One piece as an event; empty when it has nothing to say yet."""

    def usage_event(self, outputs: Sequence[TextOutput]) -> bytes:
        """The last event of a stream with usage."""

    def whole(self, choices: Sequence[Collected], outputs: Sequence[TextOutput]) -> bytes:
        """The answer in one piece."""


json_string = json.encoder.encode_basestring_ascii
"""A text as JSON, like ``json.dumps``, but without its handling of other types (0.2 of the time)."""


class EventWriter:
    """Writes the events of one stream. Repeated parts are encoded once, so each token costs one small string."""

    def __init__(self, head: AnswerHead, *, kind: str) -> None:
        self.head = head
        self._prefix = (
            f'data: {{"id":{json.dumps(head.answer_id)},"object":"{kind}","created":{head.created_s},'
            f'"model":{json.dumps(head.model)},"choices":['
        )
        self._suffix = '],"usage":null}\n\n' if head.include_usage else "]}\n\n"
        self._says_only_text = not head.continuous_usage and not head.return_token_ids and head.logprobs is None

    def can_write_text(self, piece: TextPiece) -> bool:
        """True if the piece's event only has text, as nearly all events do."""
        return self._says_only_text and piece.finish_reason is None and not piece.entries

    def write_text(self, begin: str, text: str, end: str) -> bytes:
        """An event with one choice: a text between constant parts."""
        return f"{self._prefix}{begin}{json_string(text)}{end}{self._suffix}".encode()

    def write(self, choice: str, output: TextOutput, *, num_output_tokens: int = 0, extra: str = "") -> bytes:
        """An event with one choice, given as JSON, and optional further fields.

        ``num_output_tokens`` counts the choice's tokens up to this event.
        """
        if self.head.continuous_usage:
            counts = json.dumps(running_usage(output, num_output_tokens))
            return f'{self._prefix}{choice}]{extra},"usage":{counts}}}\n\n'.encode()
        if extra:
            return f"{self._prefix}{choice}]{extra}{self._suffix[1:]}".encode()
        return f"{self._prefix}{choice}{self._suffix}".encode()

    def write_usage(self, outputs: Sequence[TextOutput]) -> bytes:
        """The event without choices that ends a stream with usage."""
        return f'{self._prefix}],"usage":{json.dumps(self.head.usage(outputs))}}}\n\n'.encode()


def with_field(text: str, name: str, value: str) -> str:
    """Add a field to a non-empty object; all as JSON."""
    return f"{text[:-1]},{json.dumps(name)}:{value}}}"


def beam_fields(output: TextOutput) -> dict[str, object]:
    """The fields of a choice with its rank in a beam search; empty without a search."""
    beam = output.beam
    return {} if beam is None else {"cumulative_logprob": beam.cumulative_logprob, "beam_score": beam.score}


def finish_fields(piece: TextPiece, *, return_token_ids: bool, output: TextOutput) -> str:
    """The fields of a choice that say how it ended, and its token ids if they are wanted, as JSON."""
    ids = f',"token_ids":[{",".join(map(str, piece.token_ids))}]' if return_token_ids else ""
    if piece.finish_reason is None:
        return f'"finish_reason":null{ids}'
    name = finish_name(piece.finish_reason, piece.stop_reason, output.turn)
    return f'"finish_reason":"{name}","stop_reason":{json.dumps(piece.stop_reason)}{ids}'


def usage(outputs: Sequence[TextOutput], *, num_choices_per_prompt: int = 1) -> dict[str, object]:
    """OpenAI's usage object. A prompt with several choices counts once."""
    prompts = outputs[::num_choices_per_prompt]
    return _usage(
        num_prompt_tokens=sum(output.num_prompt_tokens for output in prompts),
        num_output_tokens=sum(output.num_output_tokens for output in outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in prompts),
        details=_details(outputs),
    )


def running_usage(output: TextOutput, num_output_tokens: int) -> dict[str, object]:
    """The usage of one choice, up to ``num_output_tokens``."""
    return _usage(
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
        details=_details([output]),
    )


def _details(outputs: Sequence[TextOutput]) -> dict[str, int]:
    """Usage details. For a model that thinks: its thinking tokens, including markers. For predictions: the accepted and
    the rejected tokens. If an output has no prediction by the caller, the workers' draft tokens count as its
    prediction."""
    details: dict[str, int] = {}
    thinking = [output.turn.num_reasoning_tokens for output in outputs if output.turn and output.turn.has_reasoning]
    if thinking:
        details["reasoning_tokens"] = sum(thinking)
    predicted = [counts for output in outputs if (counts := output.num_predicted) is not None]
    if predicted:
        details["accepted_prediction_tokens"] = sum(num_accepted for num_accepted, _ in predicted)
        details["rejected_prediction_tokens"] = sum(num_rejected for _, num_rejected in predicted)
    return details


def _usage(
    *, num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int, details: dict[str, int]
) -> dict[str, object]:
    fields: dict[str, object] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if details:
        fields["completion_tokens_details"] = details
    return fields
