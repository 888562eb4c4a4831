"""Compiles grammars on threads beside the engine, and caches the most recently used ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.contract.grammar import GrammarFailure, ReadingThreads
from engine.contract.step import IntArray
from engine.device.cores import run_anywhere, step_back
from engine.fair_turns import FairTurns

logger = logging.getLogger(f"baton.{__name__}")

NUM_THREADS: Final = 2
"""So one slow grammar does not block the others, and most cores remain for the engine."""

THREAD_NICENESS: Final = 15
"""Above that of compute threads (`engine/runner/cpu_threads.py`), so compiling yields to them."""

MAX_NUM_KEPT: Final = 512
MAX_KEPT_BYTES: Final = 16 * 1024 * 1024
"""Limit for the texts of cached grammars; their compiled forms take several times as much."""

MAX_MESSAGE_CHARACTERS: Final = 400

REMEDY: Final = "ask for a simpler one, with smaller counts of repetitions"
"""What to do about a grammar that costs too much."""

_MARKER: Final = "<non-verbose/>"
"""What the library's messages contain in place of details that they omit."""


class Grammar:
    """A compiled grammar. Implements ``CompiledGrammar``."""

    def __init__(self, text: str, matcher: LLMatcher) -> None:
        self.text = text
        self._matcher = matcher

    def new_matcher(self) -> LLMatcher:
        """A new matcher for one output, at its beginning."""
        return self._matcher.deep_copy()

    def new_follower(self) -> Follower:
        """See ``CompiledGrammar``."""
        return Follower(self.new_matcher())


class Follower:
    """Implements ``GrammarFollower``, with its own matcher: the sampler's matcher belongs to another thread."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_consumed = 0

    def num_fitting(self, output: IntArray, guesses: IntArray) -> int:
        """See ``GrammarFollower``; 0 if the output itself does not fit."""
        new = output[self._num_consumed :].tolist()
        self._num_consumed = output.size
        if self._matcher.is_error() or (new and not self._matcher.consume_tokens(new)):
            return 0
        num_fitting: int = self._matcher.validate_tokens(guesses.tolist())
        return max(num_fitting, 0)


class GrammarStore:
    """The grammars of an engine. Implements ``GrammarCompiler``.

    Grammars are compiled for the checkpoint's tokenizer.json, which the first compilation reads. A compiled grammar is
    cached while a request holds it. After that it stays in an LRU cache of ``max_num_kept`` grammars and
    ``max_kept_bytes`` of grammar text. ``on_end`` is called at the end of every compilation, on a thread of the store.
    The threads are shared by owners, by the CPU time that their grammars have taken (``FairTurns``).
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_num_kept: int = MAX_NUM_KEPT,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        limits: LLParserLimits | None = None,
    ) -> None:
        self._tokenizer_path = model_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._max_num_kept = max_num_kept
        self._max_kept_bytes = max_kept_bytes
        self._limits = limits or LLParserLimits(verbose_errors=False)
        self._threads: ReadingThreads | None = None
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._turns: FairTurns[str] = FairTurns(NUM_THREADS)
        self._turns_lock = threading.RLock()
        self._compiling: dict[str, Future[Grammar | GrammarFailure]] = {}
        """Grammars whose compilation has begun. This and the turns change under the lock, on any thread."""
        self._ended: deque[tuple[str, Future[Grammar | GrammarFailure]]] = deque()
        self._unasked: OrderedDict[str, Future[Grammar | GrammarFailure]] = OrderedDict()
        self._num_unasked_bytes = 0
        self._kept: OrderedDict[str, Grammar | GrammarFailure] = OrderedDict()
        self._num_kept_bytes = 0
        self._held: WeakValueDictionary[str, Grammar] = WeakValueDictionary()
        self._count_lock = threading.Lock()
        self.num_ended = 0
        self.on_end: Callable[[], None] | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that a mask allows where the grammar may end."""
        return self._eos_token_ids

    @property
    def mask_words(self) -> int:
        """How many 32-bit words a mask of this vocabulary has. Known once a grammar was compiled."""
        assert self._tokenizer is not None, "no grammar was compiled"
        return (self._tokenizer.vocab_size + 31) // 32

    def poll(self, grammar: str, *, owner: str = "") -> Grammar | GrammarFailure | None:
        """See ``GrammarCompiler``."""
        self._bound_unasked()
        held = self._held.get(grammar)
        if held is not None:
            return held
        if (kept := self._kept.get(grammar)) is not None:
            self._kept.move_to_end(grammar)
            return kept
        with self._turns_lock:
            future = self._compiling.get(grammar)
            if future is None:
                if grammar not in self._turns:
                    self._turns.join(grammar, owner=owner)
                    self._begin()
                return None
            if not future.done():
                return None
            return self._take(grammar, future)

    def announce(self, grammar: str, *, owner: str) -> None:
        """See ``GrammarCompiler``."""
        with self._turns_lock:
            if not len(self._turns) and self.poll(grammar, owner=owner) is None:
                self._turns.leave(grammar)

    def give_up(self, grammar: str) -> None:
        """See ``GrammarCompiler``."""
        with self._turns_lock:
            self._turns.leave(grammar)

    def new_matcher(self, grammar: str) -> LLMatcher:
        """A matcher for one output. Callers normally hold the compiled grammar; otherwise it is compiled now."""
        found = self._held.get(grammar) or self._pool().submit(self._compile, grammar).result()
        if isinstance(found, GrammarFailure):
            raise ValueError(found.message)
        return found.new_matcher()

    def close(self) -> None:
        """Finish running compilations and end the threads. Idempotent."""
        with self._turns_lock:
            self._turns.drop_all()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _pool(self) -> ReadingThreads:
        if self._threads is None:
            self._threads = ReadingThreads(NUM_THREADS, thread_name_prefix="baton-grammar", initializer=_stand_back)
        return self._threads

    def _begin(self) -> None:
        """Have the threads compile the grammars whose turn it is; call it under the lock."""
        while (grammar := self._turns.begin()) is not None:
            future = self._compiling[grammar] = self._pool().submit(self._compile_in_turn, grammar)
            # Not called from ``_compile``: the callee of ``on_end`` expects to find the result.
            future.add_done_callback(partial(self._tell_end, grammar))

    def _bound_unasked(self) -> None:
        """Apply the cache's limits to results that nobody has asked for, since their requests may have left."""
        while self._ended:
            grammar, future = self._ended.popleft()
            if self._compiling.get(grammar) is future:
                self._unasked[grammar] = future
                self._num_unasked_bytes += _num_bytes(grammar)
        while len(self._unasked) > self._max_num_kept or (
            len(self._unasked) > 1 and self._num_unasked_bytes > self._max_kept_bytes
        ):
            self._take(*next(iter(self._unasked.items())))

    def _take(self, grammar: str, future: Future[Grammar | GrammarFailure]) -> Grammar | GrammarFailure:
        del self._compiling[grammar]
        if self._unasked.pop(grammar, None) is not None:
            self._num_unasked_bytes -= _num_bytes(grammar)
        found = future.result()
        self._keep(grammar, found)
        return found

    def _keep(self, grammar: str, found: Grammar | GrammarFailure) -> None:
        if isinstance(found, Grammar):
            self._held[grammar] = found
        self._kept[grammar] = found
        self._num_kept_bytes += _num_bytes(grammar)
        while len(self._kept) > self._max_num_kept or self._num_kept_bytes > self._max_kept_bytes:
            oldest, _ = self._kept.popitem(last=False)
            self._num_kept_bytes -= _num_bytes(oldest)

    # ---- the threads' side

    def _compile_in_turn(self, grammar: str) -> Grammar | GrammarFailure:
        begun_s = time.thread_time()
        found = self._compile(grammar)
        with self._turns_lock:
            self._turns.end(grammar, used_s=time.thread_time() - begun_s)
            self._begin()
        return found

    def _compile(self, grammar: str) -> Grammar | GrammarFailure:
        try:
            return self._compiled(grammar)
        except Exception as error:  # any error concerns only this grammar, and its request is told
            logger.warning("a grammar could not be compiled: %r", error)
            return GrammarFailure(f"the grammar could not be compiled: {error}")

    def _tell_end(self, grammar: str, ended: Future[Grammar | GrammarFailure]) -> None:
        if not ended.cancelled():
            self._ended.append((grammar, ended))
        with self._count_lock:
            self.num_ended += 1
        if self.on_end is not None:
            self.on_end()

    def _compiled(self, grammar: str) -> Grammar | GrammarFailure:
        if not self._eos_token_ids:
            return GrammarFailure("this model has no end-of-sequence token, which grammars need to end an output")
        matcher = LLMatcher(self._find_tokenizer(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            return GrammarFailure(f"the grammar cannot be compiled: {told_error(matcher)}")
        if reason := _first_mask_problem(matcher, self.mask_words):
            return GrammarFailure(f"the grammar is too costly to follow ({reason}): {REMEDY}")
        return Grammar(grammar, matcher)

    def _find_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        path, eos = str(self._tokenizer_path), list(self._eos_token_ids)
        if not self._tokenizer_path.is_file():
            raise FileNotFoundError(f"there is no {path}")
        with suppress(ValueError):
            # Models pad their vocabulary. Ids beyond the tokenizer's are no tokens, and never allowed.
            return LLTokenizer(path, n_vocab=self._vocab_size, eos_token=eos)
        return LLTokenizer(path, eos_token=eos)


def told_error(matcher: LLMatcher) -> str:
    """The matcher's own error message, without the library's markers."""
    text: str = matcher.get_error()
    return text.replace(_MARKER, "").strip()[:MAX_MESSAGE_CHARACTERS]


def _first_mask_problem(matcher: LLMatcher, mask_words: int) -> str:
    """Why the first mask cannot be computed; empty if it can.

    All copies of a matcher share lazily built state and its size limit. A mask that exceeds the limit is still
    computed, and only the next copy fails. So this tries two copies: a row would get the second.
    """
    mask: IntArray = np.zeros(mask_words, np.int32)
    for _ in range(2):
        begun = matcher.deep_copy()
        begun.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if begun.is_error():
            return told_error(begun)
    return ""


def _num_bytes(grammar: str) -> int:
    return len(grammar.encode(errors="surrogatepass"))


def _stand_back() -> None:
    """Leave the engine's core, and lower the priority. Where the system forbids the latter, the number of threads is
    still bounded."""
    run_anywhere()
    with suppress(OSError):
        step_back(THREAD_NICENESS)
