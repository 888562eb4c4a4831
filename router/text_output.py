"""One sequence's tokens turned into text: detokenized, cut at stop strings, counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.messages import FinishReason, TokenDelta
from router.errors import RequestCancelledError, RouterError
from router.generation import Generation
from router.metrics import RouterMetrics
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings

FinishName: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """What one delta adds to the answer. ``text`` can be empty while ``token_ids`` are not: it is held back.

    ``stop_reason`` is the stop string or the stop token id that ended the text; None for the model's own end.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None


class TextOutput:
    """Consumes a generation. Ends it itself when a stop string is complete."""

    def __init__(
        self,
        generation: Generation,
        *,
        detokenizer: Detokenizer,
        stops: StopStrings,
        metrics: RouterMetrics,
        skip_stop_token: bool = True,
    ) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self._stops = stops
        self._metrics = metrics
        self._skip_stop_token = skip_stop_token
        self._last_s = 0.0
        self._is_counted = False
        self.is_finished = False
        self.num_prompt_tokens = len(generation.request.prompt_token_ids)
        self.num_output_tokens = 0
        self.num_cached_tokens = 0

    @property
    def request_id(self) -> str:
        """The id that the workers know."""
        return self._generation.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return self._generation.request.prompt_token_ids

    async def take(self) -> list[TextPiece]:
        """Everything that is new, at least one piece; an empty list after the finish.

        Raises:
            RouterError: The request failed.
        """
        if self.is_finished:
            return []
        try:
            deltas = await self._generation.take()
        except RouterError as error:
            self._count_end("abort" if isinstance(error, RequestCancelledError) else "error")
            raise
        self._observe(deltas)
        pieces: list[TextPiece] = []
        for delta in deltas:
            piece = self._piece(delta)
            pieces.append(piece)
            if piece.finish_reason is not None:
                self._count_end(piece.finish_reason)
                break
        return pieces

    def cancel(self) -> None:
        """Give the request up. Idempotent."""
        if not self.is_finished:
            self._count_end("abort")
            self._generation.cancel()

    def _count_end(self, reason: str) -> None:
        """Count how the sequence ended; the first reason is the one."""
        if not self._is_counted:
            self._is_counted = True
            self._metrics.ended(reason)
            if reason in ("stop", "length"):
                self._metrics.finished(
                    self._generation.times,
                    num_prompt_tokens=self.num_prompt_tokens,
                    num_output_tokens=self.num_output_tokens,
                    max_tokens=self._generation.request.sampling.max_tokens,
                )

    def _piece(self, delta: TokenDelta) -> TextPiece:
        if delta.num_cached_tokens is not None and self.num_output_tokens == 0:
            self.num_cached_tokens = delta.num_cached_tokens
        self.num_output_tokens += len(delta.token_ids)
        is_stop_token = delta.stop_token_id is not None and self._skip_stop_token
        visible = delta.token_ids[:-1] if is_stop_token else delta.token_ids
        text = self._detokenizer.push(visible)
        if delta.finish_reason is not None:
            text += self._detokenizer.finish()
        match = self._stops.push(text)
        if match.stop is not None:
            self.is_finished = True
            self._generation.finish_early()
            return TextPiece(text=match.text, token_ids=delta.token_ids, finish_reason="stop", stop_reason=match.stop)
        if delta.finish_reason is None:
            return TextPiece(text=match.text, token_ids=delta.token_ids)
        self.is_finished = True
        return TextPiece(
            text=match.text + self._stops.finish(),
            token_ids=delta.token_ids,
            finish_reason="length" if delta.finish_reason is FinishReason.LENGTH else "stop",
            stop_reason=self._stop_reason(delta),
        )

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
        else:
            self._metrics.more_tokens(now_s - self._last_s, num_tokens=num_tokens)
        self._last_s = now_s
