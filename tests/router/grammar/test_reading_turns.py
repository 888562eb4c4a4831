"""F1: few grammars are read at the same time, and no request waits for them forever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from router.errors import InvalidRequestError, QueueFullError, RequestCancelledError
from router.grammar.checker import MAX_NUM_THREADS, Asker, GrammarChecker, GrammarCostError
from router.grammar.grammar_text import GrammarText, lark_grammar
from router.grammar.readers import TOO_LONG, GrammarReaders, Reading
from router.grammar.reading_turns import MAX_NUM_WAITING
from tests.support.grammar.costly import INTERSECTION, processes
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

    def problem_of(self, text: str, reading: Reading | None = None) -> str:
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


ONE, TWO = Asker("one"), Asker("two")


def held(number: int) -> GrammarText:
    return lark_grammar(f'start: "wait{number}"')


@pytest.mark.behaviour("F1")
async def test_f1_key_with_many_costly_grammars_keeps_no_other_key_out() -> None:
    readers = HeldReaders()
    checker = GrammarChecker(readers, wait_s=60.0)
    await checker.check(KNOWN, param="x", asker=TWO)
    await checker.check(OTHER, param="x", asker=ONE)
    flood = [asyncio.create_task(checker.check(held(number), param="x", asker=ONE)) for number in range(20)]
    await until(lambda: sum("wait" in text for text in readers.texts) == 1)

    for number in range(3):
        await checker.check(lark_grammar(f'start: "quick{number}"'), param="x", asker=TWO)
    assert sum("wait" in text for text in readers.texts) == 1
    readers.let_go.set()
    await asyncio.gather(*flood)
    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_keys_share_the_waiting_places_and_who_leaves_gives_its_place_back() -> None:
    readers = HeldReaders()
    checker = GrammarChecker(readers, wait_s=60.0)
    await checker.check(KNOWN, param="x", asker=TWO)
    flood = [
        asyncio.create_task(checker.check(held(number), param="x", asker=ONE)) for number in range(MAX_NUM_WAITING + 5)
    ]
    await until(lambda: sum(task.done() for task in flood) > 5)
    assert all(isinstance(task.exception(), QueueFullError) for task in flood if task.done())
    waits = [asyncio.create_task(checker.check(held(100 + number), param="x", asker=TWO)) for number in range(3)]
    await until(lambda: sum("wait" in text for text in readers.texts) == 2)
    assert not any(task.done() for task in waits)

    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    again = asyncio.create_task(checker.check(held(200), param="x", asker=ONE))
    await asyncio.sleep(0)
    assert not again.done()
    readers.let_go.set()
    await asyncio.gather(again, *waits)
    checker.close()


@pytest.mark.behaviour("F1")
async def test_f1_same_new_grammar_of_many_requests_is_read_once_in_each_thread() -> None:
    readers = HeldReaders()
    checker = GrammarChecker(readers, wait_s=60.0)
    async with all_threads_taken(readers, checker):
        asked = [asyncio.create_task(checker.check(OTHER, param="x")) for _ in range(20)]
        await asyncio.sleep(0)
        readers.let_go.set()
        await asyncio.gather(*asked)

    assert readers.texts.count(OTHER.text) <= MAX_NUM_THREADS


@pytest.mark.behaviour("F1")
@pytest.mark.parametrize("leaves", [False, True])
async def test_f1_reading_that_nobody_waits_for_ends_with_its_process(leaves: bool) -> None:
    """Each of these grammars would take minutes."""
    readers = GrammarReaders(cpu_s=600)
    checker = GrammarChecker(readers, wait_s=60.0)
    gone = asyncio.Event()

    async def has_left() -> None:
        await gone.wait()

    asker = Asker("one", has_left) if leaves else ONE
    costly = [lark_grammar(f"{INTERSECTION}// {number}") for number in range(MAX_NUM_THREADS)]
    asked = [asyncio.create_task(checker.check(grammar, param="x", asker=asker)) for grammar in costly]
    await until(lambda: len(processes()) >= MAX_NUM_THREADS)
    if leaves:
        gone.set()
    else:
        for task in asked:
            task.cancel()
    ends = await asyncio.gather(*asked, return_exceptions=True)

    assert {type(end) for end in ends} == {RequestCancelledError if leaves else asyncio.CancelledError}
    assert await checker.check(KNOWN, param="x", asker=TWO) == KNOWN.text
    checker.close()
    readers.close()
