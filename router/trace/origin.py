"""Who owns a traced request, and by which ids its trace is found."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.tracing.request_timings import TraceContext

NO_CONTEXT = TraceContext()
"""The caller sent no span of its own, or no collector uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The ids and the owner under which a request's trace is kept.

    ``request_id`` is the answer's X-Request-Id, ``answer_id`` the id in the answer's body: either finds the trace.
    ``owner`` is the hash of the request's API key; empty where no key was needed. ``received_s`` is when the request's
    first byte was read, by ``time.perf_counter``. ``context`` is the caller's span, if it sent one.
    """

    request_id: str
    answer_id: str
    owner: str
    endpoint: str
    received_s: float
    num_choices: int = 1
    context: TraceContext = NO_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who asks for traces. An admin sees all traces, others see those of requests with their own API key."""

    owner: str
    is_admin: bool = False

    def may_see(self, origin: Origin) -> bool:
        """True for the viewer's own requests; without API keys, for every request."""
        return self.is_admin or self.owner == origin.owner
