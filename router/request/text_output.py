"""One sequence's tokens turned into text: detokenized, cut at stop strings, counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from engine.contract.messages import BeamResult, DeltaLogprobs, FinishReason, LogprobTable, TokenDelta
from engine.contract.prediction.follower import PredictionFollower
from engine.contract.token_ids import TokenIds
from router.errors import RequestCancelledError, RouterError, is_refusal
from router.report.metrics import RouterMetrics
from router.request.content_entries import ContentEntries
from router.request.generation import Generation
from router.text.detokenizer import Detokenizer
from router.text.logprob_trail import LogprobTrail, TokenEntry
from router.text.stop_strings import StopMatch, StopStrings
from router.tools.turn import TurnPart
from router.tools.turn_reader import TurnReader

FinishName: TypeAlias = Literal["stop", "length"]


class TextPiece(NamedTuple):
    """What one delta adds to the answer. ``text`` can be empty though ``token_ids`` are not: then it is held back.

    ``num_output_tokens`` counts all tokens generated up to here, including those of earlier pieces.
    ``stop_reason`` is the stop string or the stop token id that ended the text; None for the model's own end.
    ``entries`` are log-probabilities of the tokens whose text is complete with this piece, if they are to be shown.
    ``parts`` are what the text adds to the turn, if it may be more than content. ``content_entries`` are the entries,
    of this piece or of earlier ones, whose tokens are now known to be content.
    """

    text: str
    token_ids: tuple[int, ...]
    num_output_tokens: int
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None
    entries: tuple[TokenEntry, ...] = ()
    parts: tuple[TurnPart, ...] = ()
    content_entries: tuple[TokenEntry, ...] = ()


class TextOutput:
    """Turns a generation's tokens into text. Ends the generation when a stop string is complete.

    ``leader`` is the first output of the same prompt, which gets the prompt's data; None if this is the first.
    ``is_prompt_only`` leaves out all generated text. ``turn`` splits the text into parts; None if it is all content.
    ``beam`` says how a beam search ranked the output, once that is known; None without beam search.
    ``prediction`` compares the output with the caller's prediction, up to the last piece taken.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        detokenizer: Detokenizer,
        stops: StopStrings,
        metrics: RouterMetrics,
        skip_stop_token: bool = True,
        shows_logprobs: bool = False,
        is_prompt_only: bool = False,
        leader: TextOutput | None = None,
        turn: TurnReader | None = None,
    ) -> None:
        self._generation = generation
        if turn is not None and generation.trace is not None:
            generation.trace.await_reader()
        self._detokenizer = detokenizer
        self._stops = stops
        self._metrics = metrics
        self._skip_stop_token = skip_stop_token
        self._trail = LogprobTrail() if shows_logprobs else None
        self._content = ContentEntries() if shows_logprobs else None
        sampling = generation.request.sampling
        self.turn = turn
        counts_thinking = turn is not None and turn.has_reasoning
        self._shows_text_only = (
            not (stops.are_any or shows_logprobs or counts_thinking) and sampling.num_logprobs is None
        )
        predicted = generation.request.prediction_token_ids
        self.prediction = PredictionFollower(predicted) if predicted is not None else None
        self._is_prompt_only = is_prompt_only
        self._leader = leader
        self._prompt_logprobs: LogprobTable | None = None
        self._first_s = self._last_s = 0.0
        self._is_counted = False
        self.is_finished = False
        self.num_prompt_tokens = len(generation.request.prompt_token_ids)
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self._sum_logprob = 0.0
        self.beam: BeamResult | None = None

    @property
    def generation(self) -> Generation:
        """The generation that is consumed."""
        return self._generation

    @property
    def prompt_logprobs(self) -> LogprobTable | None:
        """The prompt's log-probabilities, if asked for; available from the first piece on."""
        return self._prompt_logprobs if self._leader is None else self._leader.prompt_logprobs

    @property
    def num_predicted(self) -> tuple[int, int] | None:
        """How many tokens of the caller's prediction were accepted, and how many rejected. Without a prediction, the
        same two numbers of the workers' draft tokens; None if there were none."""
        if self.prediction is not None:
            return self.prediction.num_accepted, self.prediction.num_rejected
        num_drafts, num_right = self._generation.num_draft_tokens, self._generation.num_accepted_drafts
        return (num_right, num_drafts - num_right) if num_drafts else None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens, if log-probabilities are computed; otherwise 0."""
        return self._sum_logprob / max(self.num_output_tokens, 1)

    @property
    def request_id(self) -> str:
        """The id that the workers know."""
        return self._generation.request_id

    @property
    def prompt_token_ids(self) -> TokenIds:
        """The prompt."""
        return self._generation.request.prompt_token_ids

    async def take(self) -> list[TextPiece]:
        """Wait for new pieces, and return them: at least one; an empty list after the finish.

        Raises:
            RouterError: The request failed.
        """
        if self.is_finished:
            return []
        try:
            return self._pieces(await self._generation.mailbox.take())
        except Exception as error:
            self._count_failure(error)
            raise

    def _pieces(self, deltas: list[TokenDelta]) -> list[TextPiece]:
        self._observe(deltas)
        self.beam = next((delta.beams[0] for delta in deltas if delta.beams), None)
        pieces: list[TextPiece] = []
        for delta in deltas if self._shows_text_only else chain.from_iterable(map(_one_by_one, deltas)):
            piece = self._piece(delta)
            if self.turn is not None:
                piece = self._taken_apart(piece, self.turn)
            pieces.append(piece)
            if piece.finish_reason is not None:
                self._count_end(piece.finish_reason)
                self._tell_trace(finish_name(piece.finish_reason, piece.stop_reason, self.turn) or "")
                break
        return pieces

    def _taken_apart(self, piece: TextPiece, turn: TurnReader) -> TextPiece:
        is_last = piece.finish_reason is not None
        parts = turn.read(piece.text, num_output_tokens=piece.num_output_tokens, is_last=is_last)
        if self._content is None:
            return piece._replace(parts=parts)
        entries = self._content.take(piece.text, piece.entries, parts, is_thinking=turn.is_thinking, is_last=is_last)
        return piece._replace(parts=parts, content_entries=entries)

    def _tell_trace(self, finish_reason: str = "") -> None:
        if self._generation.trace is not None:
            self._generation.trace.read(finish_reason)

    def cancel(self) -> None:
        """Cancel the request. Idempotent."""
        if not self.is_finished:
            self._count_end("abort")
            self._tell_trace()
            self._generation.cancel()

    def _count_failure(self, error: Exception) -> None:
        """Count an error; a request that was refused for lack of room never began, and is not counted as an end."""
        self._tell_trace()
        if isinstance(error, RouterError) and is_refusal(error, num_output_tokens=self.num_output_tokens):
            self._is_counted = True
        else:
            self._count_end("abort" if isinstance(error, RequestCancelledError) else "error")

    def _count_end(self, reason: str) -> None:
        """Count how the sequence ended; only the first reason counts."""
        if not self._is_counted:
            self._is_counted = True
            self._metrics.ended(reason)
            promise = self._generation.request.promise
            if reason == "error" and self.num_output_tokens == 0:
                self._metrics.first_token_of(promise, None)
            if reason in ("stop", "length"):
                if self.num_output_tokens > 1:
                    self._metrics.gaps_of(promise, (self._last_s - self._first_s) / (self.num_output_tokens - 1))
                self._metrics.finished(
                    self._generation.times,
                    num_prompt_tokens=self.num_prompt_tokens,
                    num_output_tokens=self.num_output_tokens,
                    max_tokens=self._generation.request.sampling.max_tokens,
                )

    def _piece(self, delta: TokenDelta) -> TextPiece:
        if delta.num_cached_tokens is not None and self.num_output_tokens == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.logprobs is not None and delta.logprobs.prompt is not None:
            self._prompt_logprobs = delta.logprobs.prompt
        if self._is_prompt_only:
            self.is_finished = True
            return TextPiece(text="", token_ids=(), num_output_tokens=0, finish_reason="length")
        self.num_output_tokens += len(delta.token_ids)
        if self.prediction is not None:
            self.prediction.follow(delta.token_ids)
        if self._shows_text_only and delta.finish_reason is None:
            return TextPiece(self._detokenizer.push(delta.token_ids), delta.token_ids, self.num_output_tokens)
        match = self._search(delta)
        if match.stop is not None:
            self._generation.finish_early()
            return self._last_piece(match.text, delta, "stop", match.stop)
        if delta.finish_reason is None:
            entries = self._trail.emit(len(match.text)) if self._trail is not None else ()
            return TextPiece(match.text, delta.token_ids, self.num_output_tokens, None, None, entries)
        reason: FinishName = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
        return self._last_piece(match.text + self._stops.finish(), delta, reason, self._stop_reason(delta))

    def _last_piece(self, text: str, delta: TokenDelta, reason: FinishName, stop: str | int | None) -> TextPiece:
        self.is_finished = True
        entries = self._trail.finish() if self._trail is not None else ()
        return TextPiece(text, delta.token_ids, self.num_output_tokens, reason, stop, entries)

    def _search(self, delta: TokenDelta) -> StopMatch:
        """Look for stop strings in a delta's text, except in that of the first ``min_tokens`` tokens."""
        min_tokens = self._generation.request.sampling.min_tokens
        num_before = self.num_output_tokens - len(delta.token_ids)
        text, searched = self._decode(delta, max(min_tokens - num_before, 0))
        if delta.finish_reason is not None:
            searched += self._detokenizer.finish()
        if self.num_output_tokens <= min_tokens:
            return StopMatch(text=self._stops.skip(text + searched))
        skipped = self._stops.skip(text) if text else ""
        match = self._stops.push(searched)
        return replace(match, text=skipped + match.text) if skipped else match

    def _decode(self, delta: TokenDelta, num_first: int) -> tuple[str, str]:
        """The text completed by the delta's first ``num_first`` tokens, and the text completed by the rest."""
        is_stop_token = delta.stop_token_id is not None and self._skip_stop_token
        visible = delta.token_ids[:-1] if is_stop_token else delta.token_ids
        if delta.logprobs is None or not delta.logprobs.tokens:
            first = self._detokenizer.push(visible[:num_first]) if num_first else ""
            return first, self._detokenizer.push(visible[num_first:])
        texts: list[str] = []
        for index, said in enumerate(delta.logprobs.tokens):
            self._sum_logprob += said.logprobs[0]
            text = self._detokenizer.push(visible[index : index + 1]) if index < len(visible) else ""
            texts.append(text)
            if self._trail is not None:
                is_incomplete = self._detokenizer.is_incomplete
                self._trail.push(said, num_characters=len(text), is_incomplete=is_incomplete)
        return "".join(texts[:num_first]), "".join(texts[num_first:])

    def _stop_reason(self, delta: TokenDelta) -> int | None:
        asked_for = self._generation.request.sampling.stop_token_ids
        return delta.stop_token_id if delta.stop_token_id in asked_for else None

    def _observe(self, deltas: list[TokenDelta]) -> None:
        now_s = time.perf_counter()
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        if num_tokens == 0:
            return
        if self.num_output_tokens == 0:
            seconds = now_s - self._generation.times.accepted_s
            self._metrics.first_tokens(seconds, num_prompt_tokens=self.num_prompt_tokens, num_tokens=num_tokens)
            self._metrics.first_token_of(self._generation.request.promise, seconds)
            self._first_s = now_s
        else:
            self._metrics.more_tokens(now_s - self._last_s, num_tokens=num_tokens)
        self._last_s = now_s


def finish_name(reason: str | None, stop_reason: str | int | None, turn: TurnReader | None) -> str | None:
    """How an output ended, in OpenAI's terms: a turn that ends after calls finishes with ``tool_calls``."""
    is_own_end = reason == "stop" and stop_reason is None
    return "tool_calls" if is_own_end and turn is not None and turn.num_calls else reason


def _one_by_one(delta: TokenDelta) -> Iterator[TokenDelta]:
    """Split a delta into one a token, because a stop string ends the output at the token that completes it."""
    num_tokens = len(delta.token_ids)
    if num_tokens <= 1:
        yield delta
        return
    said = delta.logprobs or DeltaLogprobs()
    for index, token_id in enumerate(delta.token_ids):
        is_first, is_last = index == 0, index == num_tokens - 1
        logprobs = DeltaLogprobs(said.tokens[index : index + 1], said.prompt if is_first else None)
        yield TokenDelta(
            delta.request_id,
            (token_id,),
            finish_reason=delta.finish_reason if is_last else None,
            stop_token_id=delta.stop_token_id if is_last else None,
            num_cached_tokens=delta.num_cached_tokens if is_first else None,
            logprobs=None if delta.logprobs is None else logprobs,
        )
