"""F1: few grammars are read at the same time, and no request waits for them forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.errors import InvalidRequestError, QueueFullError
from router.grammar.checker import MAX_NUM_THREADS, GrammarChecker, GrammarCostError
from router.grammar.grammar_text import lark_grammar
from router.grammar.readers import TOO_LONG, GrammarReaders
from tests.support.router.router_rig import until

KNOWN, OTHER = lark_grammar('start: "known"'), lark_grammar('start: "other"')
COSTLY = f"{TOO_LONG} 5 s of CPU time"


class HeldReaders(GrammarReaders):
    """Finds the same in all texts. Those that hold ``wait`` take until the test lets them go."""

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self.problem = problem
        self.texts: list[str] = []
        self.let_go = threading.Event()

    def problem_of(self, text: str) -> str:
        self.texts.append(text)
        if "wait" in text:
            assert self.let_go.wait(120)
        return self.problem


@asynccontextmanager
async def all_threads_taken(readers: HeldReaders, checker: GrammarChecker) -> AsyncIterator[list[asyncio.Task[str]]]:
    waits = [lark_grammar(f'start: "wait{number}"') for number in range(MAX_NUM_THREADS)]
    tasks = [asyncio.create_task(checker.check(grammar, param="x")) for grammar in waits]
    await until(lambda: sum("wait" in text for text in readers.texts) == MAX_NUM_THREADS)
    try:
        yield tasks
    finally:
        readers.let_go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_grammar_that_finds_no_thread_is_refused_and_a_known_one_is_not() -> None:
    readers = HeldReaders()
    checker = GrammarChecker(readers, wait_s=0.0, retry_after_s=2.0)
    await checker.check(KNOWN, param="x")
    async with all_threads_taken(readers, checker):
        with pytest.raises(QueueFullError) as refused:
            await checker.check(OTHER, param="x")

        assert refused.value.retry_after_s == 2.0
        assert await checker.check(KNOWN, param="x") == KNOWN.text
    assert OTHER.text not in readers.texts


@pytest.mark.behaviour("F1")
async def test_f1_thread_is_taken_until_its_reading_ended_whoever_left() -> None:
    readers = HeldReaders()
    checker = GrammarChecker(readers, wait_s=0.0)
    async with all_threads_taken(readers, checker) as tasks:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        with pytest.raises(QueueFullError):
            await checker.check(OTHER, param="x")


@pytest.mark.behaviour("F1")
async def test_f1_grammar_that_took_too_long_is_read_once() -> None:
    readers = HeldReaders(COSTLY)
    checker = GrammarChecker(readers)
    for param in ("x", "y"):
        with pytest.raises(GrammarCostError, match=f"'{param}' is invalid: {COSTLY}"):
            await checker.check(OTHER, param=param)

    assert readers.texts == [OTHER.text]
    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_other_problems_are_looked_for_again() -> None:
    readers = HeldReaders("wrong")
    checker = GrammarChecker(readers)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="wrong"):
            await checker.check(OTHER, param="x")

    assert len(readers.texts) == 2
    checker.close()
