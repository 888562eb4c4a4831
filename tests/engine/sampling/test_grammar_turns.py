"""F1: owners share the threads that compile grammars, and what nobody waits for is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Semaphore

import pytest

from engine.sampling.grammar.compiler import NUM_THREADS, GrammarStore
from tests.support.cluster.served_checkpoint import byte_tokenizer

END = 2


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GrammarStore]:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    made = GrammarStore(tmp_path, vocab_size=300, eos_token_ids=(END,))
    yield made
    made.close()


def lark(name: str) -> str:
    return f'start: "{name}"'


@contextmanager
def threads_held(store: GrammarStore) -> Iterator[Semaphore]:
    """No thread compiles until the end of this; yields what is released at each end of a compilation."""
    ended, let_go = Semaphore(0), Event()

    def on_end() -> None:
        ended.release()
        assert let_go.wait(120)

    store.on_end = on_end
    for number in range(NUM_THREADS):
        assert store.poll(lark(f"first {number}"), owner="one") is None
    for _ in range(NUM_THREADS):
        assert ended.acquire(timeout=120)
    try:
        yield ended
    finally:
        let_go.set()


@pytest.mark.behaviour("F1")
def test_f1_grammars_of_one_owner_are_not_in_the_way_of_anothers(store: GrammarStore) -> None:
    """The threads compile a few of the pile that came before, and then wait for the other owner's grammar."""
    may_go_on, is_compiled = Semaphore(2 * NUM_THREADS - 1), Event()

    def on_end() -> None:
        if store.poll(lark("other"), owner="two") is not None:
            is_compiled.set()
        elif not may_go_on.acquire(blocking=False):
            assert is_compiled.wait(120)

    with threads_held(store):
        for number in range(20):
            assert store.poll(lark(f"pile {number}"), owner="one") is None
        assert store.poll(lark("other"), owner="two") is None
        store.on_end = on_end

    assert is_compiled.wait(120)


@pytest.mark.behaviour("F1")
def test_f1_what_waits_for_a_thread_and_is_given_up_is_not_compiled(store: GrammarStore) -> None:
    with threads_held(store) as ended:
        for number in range(6):
            assert store.poll(lark(f"pile {number}"), owner="one") is None
        for number in range(NUM_THREADS, 6):
            store.give_up(lark(f"pile {number}"))
        store.announce(lark("announced"), owner="one")
    for _ in range(NUM_THREADS):
        assert ended.acquire(timeout=120)

    assert store.poll(lark("pile 5"), owner="one") is None, "it begins anew"
    assert ended.acquire(timeout=120)
    assert store.num_ended == 2 * NUM_THREADS + 1


@pytest.mark.behaviour("F1")
def test_f1_an_announced_grammar_is_compiled_where_a_thread_is_free(store: GrammarStore) -> None:
    ended = Semaphore(0)
    store.on_end = ended.release
    store.announce(lark("announced"), owner="one")

    assert ended.acquire(timeout=120)
    assert store.poll(lark("announced"), owner="one") is not None
