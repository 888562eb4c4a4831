"""The types of grammars: the scheduler has grammars compiled, and the sampler follows them. Free of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

MAX_GRAMMAR_BYTES: Final = 256 * 1024
"""Larger grammars are not written by hand, and would keep a thread busy for long."""

READING_STACK_BYTES: Final = 256 * 1024 * 1024
"""Stack size of a thread that reads grammars. llguidance recurses once for each reference in a schema, and for each
rule that names another one, at 9 KB a reference. The usual stack of 8 MiB overflows after some 900 references, and ends
the process. 64 MiB were enough for the worst grammar of `MAX_GRAMMAR_BYTES` that was found; only the part in use takes
memory.
"""

GRAMMAR_REFUSED = "grammar_refused"
"""Error code of a request whose grammar cannot be compiled, or costs too much from the start."""

GRAMMAR_FAILED = "grammar_failed"
"""Error code of a request that has no next token that fits its grammar, or whose grammar costs too much to follow."""


class GrammarFailure(NamedTuple):
    """Why a grammar cannot be used, in words for people."""

    message: str


class GrammarFollower(Protocol):
    """Follows one output through its grammar, to tell which draft tokens can come next."""

    def num_fitting(self, output: IntArray, guesses: IntArray) -> int:
        """How many of the guesses, up to the first impossible one, fit after the output. The output only grows between
        calls.
        """


class CompiledGrammar(Protocol):
    """A grammar that sampling can follow. It stays compiled as long as a reference to this object is held."""

    @property
    def text(self) -> str:
        """The grammar as the request sent it."""

    def new_follower(self) -> GrammarFollower:
        """A follower for a new output."""


class GrammarCompiler(Protocol):
    """Compiles grammars in threads of its own. Only ``num_ended`` may be asked from other threads than the engine's."""

    on_end: Callable[[], None] | None
    """Called in a thread of the compiler whenever a compilation has ended."""

    @property
    def num_ended(self) -> int:
        """How many compilations have ended so far. It grows before the engine's thread is woken."""

    def poll(self, grammar: str, *, owner: str = "") -> CompiledGrammar | GrammarFailure | None:
        """The compiled grammar, or why it failed; None while it compiles, or waits for its owner's turn. An unknown
        grammar waits from now on."""

    def announce(self, grammar: str, *, owner: str) -> None:
        """Begin to compile a grammar that will be asked for, if nothing has to wait for that."""

    def give_up(self, grammar: str) -> None:
        """Nobody waits for a grammar any more: it is not compiled, unless that has begun."""


class RowFailure(NamedTuple):
    """A row whose grammar cannot be followed any more; what was sampled for it is dropped."""

    row: int
    message: str


class ReadingThreads(ThreadPoolExecutor):
    """A thread pool that can read any grammar of `MAX_GRAMMAR_BYTES`, however deep its references nest."""

    _starting = threading.Lock()
    """Held while threads start: the stack size of new threads is a setting of the whole process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See ``ThreadPoolExecutor``, which starts its threads in this method."""
        with self._starting:
            before = threading.stack_size(READING_STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
