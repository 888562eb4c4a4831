"""Requests whose grammar is being compiled wait here, out of the way of all others. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from engine.contract.grammar import GRAMMAR_REFUSED, CompiledGrammar, GrammarCompiler, GrammarFailure
from engine.contract.messages import FinishReason, RequestError
from engine.scheduler.live_requests import LiveRequests
from engine.scheduler.requests.request import Request

COMPILE_TIMEOUT_S: Final = 60.0


class GrammarGate:
    """Keeps a request out of the waiting queue until its grammar is compiled; if that fails, the request ends.

    A request holds its compiled grammar until it ends, through preemptions too: it waits for it only once. A grammar
    for which no request waits any more loses its turn.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        live_requests: LiveRequests,
        clock: Callable[[], float],
        timeout_s: float = COMPILE_TIMEOUT_S,
    ) -> None:
        self._compiler = compiler
        self._live_requests = live_requests
        self._clock = clock
        self._timeout_s = timeout_s
        self._num_seen = 0
        self._has_failed = False
        live_requests.on_compiling_left = self._on_left

    @property
    def is_due(self) -> bool:
        """True when a step should check the requests that wait here."""
        waits = bool(self._live_requests.compiling)
        return waits and (self._has_failed or self._compiler.num_ended != self._num_seen)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first request's wait times out."""
        first = next(iter(self._live_requests.compiling.values()), None)
        return None if first is None else first.queued_at_s + self._timeout_s

    def announce(self, request: Request, grammar: str) -> None:
        """Begin to compile the grammar of an announced request, if no other has to wait for that."""
        self._compiler.announce(grammar, owner=request.message.owner)

    def enter(self, request: Request, grammar: str) -> None:
        """Queue a new request; at once if its grammar is compiled already."""
        found = self._compiler.poll(grammar, owner=request.message.owner)
        if found is None or isinstance(found, GrammarFailure):
            self._has_failed |= found is not None
            self._live_requests.add_compiling(request)
        else:
            request.grammar = found
            self._live_requests.add(request)

    def let_in(self) -> None:
        """Queue requests whose grammar is compiled, and end those whose grammar failed or timed out, before a step."""
        deadline = self.next_deadline_s
        if deadline is None or not (self.is_due or self._clock() >= deadline):
            return
        self._num_seen, self._has_failed = self._compiler.num_ended, False
        for request in tuple(self._live_requests.compiling.values()):
            grammar = request.message.sampling.grammar
            assert grammar is not None
            self._take_in(request, self._compiler.poll(grammar, owner=request.message.owner))

    def _take_in(self, request: Request, found: CompiledGrammar | GrammarFailure | None) -> None:
        if found is None:
            if self._clock() >= request.queued_at_s + self._timeout_s:
                self._refuse(request, f"compiling the grammar takes longer than {self._timeout_s:g} s")
        elif isinstance(found, GrammarFailure):
            self._refuse(request, found.message)
        else:
            request.grammar = found
            self._live_requests.end_compiling(request)

    def _on_left(self, request: Request) -> None:
        """A request ended while its grammar was compiled, or waited for that."""
        grammar = request.message.sampling.grammar
        assert grammar is not None
        if all(other.message.sampling.grammar != grammar for other in self._live_requests.compiling.values()):
            self._compiler.give_up(grammar)

    def _refuse(self, request: Request, message: str) -> None:
        self._live_requests.finish(request)
        error = RequestError(code=GRAMMAR_REFUSED, message=message)
        self._live_requests.report(request, FinishReason.ERROR, error=error)
