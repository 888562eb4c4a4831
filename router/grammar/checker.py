"""Checks grammars before a worker sees them: off the event loop, within bounds of size, depth and time."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.errors import InvalidRequestError, RequestCancelledError
from router.grammar.gbnf import GbnfError
from router.grammar.grammar_text import GrammarText, json_schema_grammar
from router.grammar.readers import READERS, TOO_LONG, WAIT_S, GrammarReaders, Reading
from router.grammar.reading_turns import ReadingTurns, Turn
from router.grammar.schema_parts import DEFINITIONS, parts_of

T = TypeVar("T")

Problem: TypeAlias = tuple[str, str]
"""The place in a schema, and what is wrong there."""

MAX_NUM_THREADS: Final = 2
MAX_NUM_KNOWN: Final = 512
MAX_PLACE_TRIES: Final = 200
"""How many sub-schemas are tried to locate a fault in a schema."""

MAX_PLACE_BYTES: Final = 8 * MAX_GRAMMAR_BYTES
"""Bound on the text read for that: each sub-schema is read together with all definitions."""

MAX_MESSAGE_CHARACTERS: Final = 400

MAX_SHOWN_CHARACTERS: Final = 60
"""How many characters of a regex a message quotes."""

_IN_REGEX: Final = "(in regex): "
_REASON: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
"""Finds in llguidance's messages what is wrong with a regex."""

UNENFORCEABLE: Final = "Unimplemented keys:"
UNKNOWN_FORMAT: Final = "Unknown format:"
"""The beginnings of llguidance's messages that suggest no remedy."""


class Waits(Protocol):
    """The settings of a router that say how long grammars wait for each other."""

    @property
    def reading_wait_s(self) -> float:
        """How long a grammar waits for a thread until its request is refused."""

    @property
    def retry_after_s(self) -> float:
        """When a refused request should be tried again."""


class GrammarCostError(InvalidRequestError):
    """Reading a grammar was given up; its parts were not looked at."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks for a grammar: the ``owner``, among whom turns are shared, and what returns once the client has left."""

    owner: str = ""
    has_left: Callable[[], Awaitable[None]] | None = None


NOBODY: Final = Asker()
"""An asker that shares with nobody, and stays."""


class GrammarChecker:
    """Says what is wrong with a grammar. Used from one event loop.

    Valid grammars are cached for a while, by their digest, and so are those that took too long to read. The others wait
    for a turn, at most ``wait_s``, and API keys share the turns. A turn lasts until its reading has ended. If the
    client leaves, or the caller is cancelled, it waits no more, and a reading ends with its process.
    """

    def __init__(
        self, readers: GrammarReaders = READERS, *, wait_s: float = WAIT_S, retry_after_s: float = 1.0
    ) -> None:
        self._readers = readers
        self._turns = ReadingTurns(MAX_NUM_THREADS, wait_s=wait_s, retry_after_s=retry_after_s)
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()

    @classmethod
    def of(cls, settings: Waits) -> Self:
        """One that waits as long as a router's settings say."""
        return cls(wait_s=settings.reading_wait_s, retry_after_s=settings.retry_after_s)

    async def check(self, grammar: GrammarText, *, param: str, asker: Asker = NOBODY) -> str:
        """Check a grammar, and return its text, which a worker can compile.

        Args:
            grammar: The grammar that a caller asked for.
            param: The parameter of the body that holds it.
            asker: Who asks for it.

        Raises:
            InvalidRequestError: The grammar is too large, too costly, or cannot be followed. If it was made from a
                schema, the message names the place there.
            GrammarCostError: The grammar takes too long to read.
            QueueFullError: Other grammars took all turns for ``wait_s``, or too many wait.
            RequestCancelledError: The client left meanwhile.
        """
        if grammar.takes_long:
            text = await self._in_turn(partial(self._convert, grammar, param), asker)
        else:
            text = _text_of(grammar, param)
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in self._known:
            await self._in_turn(partial(self._read, grammar, text, digest, param), asker)
        self._known.move_to_end(digest)
        while len(self._known) > MAX_NUM_KNOWN:
            self._known.popitem(last=False)
        if problem := self._known[digest]:
            raise _refusal(problem, param, param, kind=GrammarCostError)
        return text

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def _convert(self, grammar: GrammarText, param: str, turn: Turn) -> str:
        return await self._in_thread(turn, lambda _: None, _text_of, grammar, param)

    async def _read(self, grammar: GrammarText, text: str, digest: bytes, param: str, turn: Turn) -> None:
        """Read a grammar, unless others that asked for the same one had the turn before."""
        if digest in self._known:
            turn.give_back()
            return
        reading = Reading()

        def note(found: Problem | None) -> None:
            if found is None or TOO_LONG in found[1]:
                self._known[digest] = "" if found is None else found[1]

        try:
            found = await self._in_thread(turn, note, find_problem, grammar, text, self._readers, reading)
        except asyncio.CancelledError:
            reading.give_up()
            raise
        if found is not None and digest not in self._known:
            place, problem = found
            raise _refusal(problem, f"{param}{place}", param)

    async def _in_turn(self, job: Callable[[Turn], Awaitable[T]], asker: Asker) -> T:
        """The result of a job that gives its turn back; it is given up when the client leaves."""

        async def run() -> T:
            return await job(await self._turns.take(owner=asker.owner))

        if asker.has_left is None:
            return await run()
        working, leaving = asyncio.ensure_future(run()), asyncio.ensure_future(asker.has_left())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RequestCancelledError
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _in_thread(
        self, turn: Turn, on_result: Callable[[T], None], job: Callable[..., T], *arguments: object
    ) -> T:
        """The result of ``job``. Whoever has the next turn knows what ``on_result`` noted, even if the caller left."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_NUM_THREADS, thread_name_prefix="baton-grammar-check")

        def on_end(working: asyncio.Future[T]) -> None:
            if not working.cancelled() and working.exception() is None:
                on_result(working.result())
            turn.give_back()

        working = asyncio.get_running_loop().run_in_executor(self._threads, job, *arguments)
        working.add_done_callback(on_end)
        return await asyncio.shield(working)


def find_problem(
    grammar: GrammarText, text: str, readers: GrammarReaders = READERS, reading: Reading | None = None
) -> Problem | None:
    """What is wrong with a grammar, and where, as ``.properties.a``; None if nothing is.

    Raises:
        ReadingGivenUpError: The reading was given up meanwhile.
    """
    reading = reading or Reading()
    problem = _problem_of(text, readers, reading)
    if not problem:
        return None
    if grammar.pattern is not None:
        return "", _regex_problem(grammar.pattern, problem)
    if isinstance(grammar.schema, Mapping):
        return _place_of(problem, grammar.schema, readers, reading), problem
    return "", problem


def _regex_problem(pattern: str, problem: str) -> str:
    """Why a regex cannot be read, without the text of the grammar around it."""
    shown = pattern if len(pattern) <= MAX_SHOWN_CHARACTERS else f"{pattern[:MAX_SHOWN_CHARACTERS]}..."
    found = _REASON.findall(problem)
    reason = found[-1] if found else problem.rpartition(_IN_REGEX)[2].partition("\n")[0].partition(";")[0]
    if "look" in reason:
        reason += r"; leave out (?=, (?!, (?<, \b and the like"
    return f"the regex {shown!r} cannot be read: {reason}"


def _text_of(grammar: GrammarText, param: str) -> str:
    try:
        text = grammar.text
        num_bytes = len(text.encode())
    except GbnfError as error:
        raise _refusal(str(error), param, param) from error
    except (ValueError, RecursionError) as error:
        raise _refusal("it has characters that cannot be encoded, or is nested too deeply", param, param) from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _refusal(
            f"it makes a grammar of {num_bytes} bytes, the limit is {MAX_GRAMMAR_BYTES}; simplify it", param, param
        )
    return text


def _refusal(
    problem: str, place: str, param: str, *, kind: type[InvalidRequestError] = InvalidRequestError
) -> InvalidRequestError:
    told = problem if len(problem) <= MAX_MESSAGE_CHARACTERS else f"{problem[:MAX_MESSAGE_CHARACTERS]}..."
    return kind(f"the parameter '{place}' is invalid: {told}", code="invalid_parameter", param=param)


def _problem_of(text: str, readers: GrammarReaders, reading: Reading) -> str:
    problem = readers.problem_of(text, reading)
    return f"{problem}; {remedy}" if (remedy := _remedy_for(problem)) else problem


def _remedy_for(problem: str) -> str:
    if problem.startswith(UNENFORCEABLE):
        remedy = "a grammar cannot enforce that: leave it out, and check the answer yourself"
        if '"uniqueItems"' in problem:
            remedy += "; or ask for an object with one boolean for each possible item, if these are few"
        return remedy
    if problem.startswith(UNKNOWN_FORMAT):
        return "leave it out, or use a `pattern` instead"
    return ""


def _place_of(problem: str, root: Mapping[str, Any], readers: GrammarReaders, reading: Reading) -> str:
    """The innermost sub-schema that has the same problem on its own, together with the schema's definitions.

    A grammar that takes too long is not searched: each try would take as long.
    """
    if problem.startswith(TOO_LONG):
        return ""
    shared = {name: root[name] for name in DEFINITIONS if isinstance(root.get(name), Mapping)}
    place, schema, num_tries, num_bytes = "", root, 0, 0
    while True:
        for name, part in parts_of(schema):
            text = json_schema_grammar({**_without(shared, name), **part}).text
            num_tries, num_bytes = num_tries + 1, num_bytes + len(text)
            if num_tries > MAX_PLACE_TRIES or num_bytes > MAX_PLACE_BYTES:
                return place
            if _problem_of(text, readers, reading) == problem:
                place, schema = f"{place}.{name}", part
                break
        else:
            return place


def _without(shared: dict[str, Any], name: str) -> dict[str, Any]:
    """The shared definitions for a sub-schema; none for a definition, so that it is not blamed for others' faults."""
    return {} if name.split(".")[0] in DEFINITIONS else shared
