"""The interface to follow single requests through an engine, as ``router.telemetry.worker_spans`` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.contract.messages import GenerateRequest, TokenDelta
from engine.contract.tracing.request_timings import RequestTimings


class RequestObserver(Protocol):
    """Called on the engine's event loop, but not for steps that brought only tokens of running requests."""

    def came(self, request: GenerateRequest) -> None:
        """A request was sent to this engine, which may still refuse it."""

    def refused(self, request_id: str) -> None:
        """The engine refused a request."""

    def saw(self, timings: Sequence[RequestTimings], deltas: Iterable[Sequence[TokenDelta]]) -> None:
        """The result of a step that began or ended requests; it may also hold tokens of others.

        ``timings`` belong to traced requests that have their first token; ``deltas`` are those of each front end.
        """
