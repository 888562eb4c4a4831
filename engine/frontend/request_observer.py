"""Whoever follows single requests through an engine: worker spans do (``router.telemetry.worker_spans``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.contract.messages import GenerateRequest, TokenDelta
from engine.contract.tracing.request_timings import RequestTimings


class RequestObserver(Protocol):
    """Called on the engine's event loop, and never for a step that brought nothing but tokens of running requests."""

    def came(self, request: GenerateRequest) -> None:
        """A request was sent here, which may still be refused."""

    def refused(self, request_id: str) -> None:
        """It was."""

    def saw(self, timings: Sequence[RequestTimings], deltas: Iterable[Sequence[TokenDelta]]) -> None:
        """What a step brought that began or ended requests, and perhaps tokens of others: ``timings`` of traced ones
        that have their first token, and the deltas of each front end.
        """
