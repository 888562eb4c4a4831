"""Grammars between deciding and computing: the scheduler has them compiled, the sampler follows them. Free of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Nobody writes a larger one by hand, and what is larger keeps a thread busy for long."""

READING_STACK_BYTES: Final = 256 * 1024 * 1024
"""Of a thread that reads grammars. llguidance descends by one call for each reference of a schema, and for each rule
that another one names: 9 KB a reference, so that the 8 MiB that threads have elsewhere end after some 900 of them, and
the process with them. 64 MiB were enough for the worst of `MAX_GRAMMAR_BYTES` that was found; only what is used takes
memory.
"""

GRAMMAR_REFUSED = "grammar_refused"
"""The code of a request whose grammar could not be compiled, or costs too much from the start."""

GRAMMAR_FAILED = "grammar_failed"
"""The code of a request at whose next token nothing fits its grammar, or following it costs too much."""


class GrammarFailure(NamedTuple):
    """Why a grammar is of no use, for people to read."""

    message: str


class GrammarFollower(Protocol):
    """Follows one output through its grammar, to tell which guesses of what comes next can be right."""

    def num_fitting(self, output: IntArray, guesses: IntArray) -> int:
        """How many of the guesses, up to the first that cannot be, fit behind an output, which only grows from call to
        call.
        """


class CompiledGrammar(Protocol):
    """A grammar that sampling can follow. It stays compiled at least as long as somebody holds this."""

    @property
    def text(self) -> str:
        """The grammar as the request brings it."""

    def new_follower(self) -> GrammarFollower:
        """One for an output that begins."""


class GrammarCompiler(Protocol):
    """Compiles grammars in threads of its own. All but ``num_ended`` is asked by the engine's thread."""

    on_end: Callable[[], None] | None
    """Called whenever a compilation ended, in a thread of the compiler."""

    @property
    def num_ended(self) -> int:
        """How many compilations have ended so far. It grows before the engine's thread is woken."""

    def poll(self, grammar: str) -> CompiledGrammar | GrammarFailure | None:
        """What became of a grammar: it is compiled from now on where it was unknown; None while that goes on."""


class RowFailure(NamedTuple):
    """A row whose grammar cannot be followed any more: what was sampled for it counts for nothing."""

    row: int
    message: str


class ReadingThreads(ThreadPoolExecutor):
    """Threads that can read any grammar of `MAX_GRAMMAR_BYTES`, however far its references lead."""

    _starting = threading.Lock()
    """The size of stacks is a setting of the whole process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``ThreadPoolExecutor``, which starts its threads here."""
        with self._starting:
            before = threading.stack_size(READING_STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
