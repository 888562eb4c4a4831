"""Whose a traced request is, and by which names it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.tracing.request_timings import TraceContext

NO_CONTEXT = TraceContext()
"""The caller sent no span of its own, or nobody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request's trace is kept under.

    ``request_id`` is the X-Request-Id of its answer, ``answer_id`` the id in the answer's body: either finds it.
    ``owner`` is the hash of the key that it was asked with; empty where no key was needed. ``received_s`` is when its
    first byte was read, by ``time.perf_counter``. ``context`` is the caller's span, where it sent one.
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
    """Who asks for traces. An admin sees all, anybody else what was asked with the same key."""

    owner: str
    is_admin: bool = False

    def may_see(self, origin: Origin) -> bool:
        """True for one's own requests; without keys all are everybody's."""
        return self.is_admin or self.owner == origin.owner
