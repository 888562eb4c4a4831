"""F1: grammars are read in processes of their own, which end if a grammar costs too much."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from router.errors import InvalidRequestError
from router.grammar.checker import GrammarChecker
from router.grammar.grammar_text import GrammarText, json_schema_grammar, lark_grammar
from router.grammar.readers import GrammarReaders
from tests.support.grammar.costly import AT_ONCE, INTERSECTION, processes

HARMLESS = 'start: "a"'


@pytest.fixture
def readers() -> Iterator[GrammarReaders]:
    found = GrammarReaders(cpu_s=1)
    yield found
    found.close()


def open_files(wanted: int) -> list[int]:
    """So many; where no process may open them, no router does either, and these are all but a few."""
    taken: list[int] = []
    try:
        while len(taken) < wanted:
            taken.append(os.dup(0))
    except OSError:
        for _ in range(20):
            os.close(taken.pop())
    return taken


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize(
    ("grammar", "place"),
    [
        (json_schema_grammar({"type": "object", "properties": {"a": AT_ONCE}}), "x"),
        (lark_grammar(INTERSECTION), "x"),
    ],
)
async def test_f1_a_grammar_that_takes_for_ever_is_refused_and_the_next_one_is_read(
    readers: GrammarReaders, grammar: GrammarText, place: str
) -> None:
    """llguidance asks for each set of patterns whether any text fits, in time that doubles with each of them."""
    checker = GrammarChecker(readers)

    with pytest.raises(InvalidRequestError, match="reading it takes more than 1 s of CPU time; ask for a simpler"):
        await checker.check(grammar, param=place)

    assert await checker.check(lark_grammar(HARMLESS), param="x")
    checker.close()


def test_whoever_reads_ends_and_another_one_begins(readers: GrammarReaders) -> None:
    before = set(processes())
    assert not readers.problem_of(HARMLESS)
    (first,) = set(processes()) - before
    assert not readers.problem_of(HARMLESS), "the same one reads on"
    assert set(processes()) - before == {first}

    os.kill(first.pid, signal.SIGSEGV)
    first.wait(60)
    assert not readers.problem_of(HARMLESS)
    (second,) = set(processes()) - before
    assert second != first

    readers.close()
    assert set(processes()) - before == set()
    assert not readers.problem_of(HARMLESS), "it begins anew"


def test_a_router_with_many_connections_reads_grammars_too(readers: GrammarReaders) -> None:
    """Beyond the 1,024 files that ``select`` can wait for."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    taken = open_files(1100)
    try:
        assert not readers.problem_of(HARMLESS)
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_more_read_at_once_than_may(readers: GrammarReaders) -> None:
    before = set(processes())
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(readers.problem_of(f'start: "{"a" * 1000}"'))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [""] * 8
    assert 1 <= len(set(processes()) - before) <= 2


def test_a_process_that_dies_over_a_text_is_told_apart() -> None:
    readers = GrammarReaders(cpu_s=60)
    before = set(processes())
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(readers.problem_of(INTERSECTION)))
    asking.start()
    deadline_s = time.monotonic() + 60
    while not (begun := set(processes()) - before):
        assert time.monotonic() < deadline_s, "nobody reads"
        asking.join(0.01)
    (process,) = begun
    process.send_signal(signal.SIGSEGV)
    asking.join()

    assert answers == ["it crashed the process that reads grammars (signal 11); simplify it"]
