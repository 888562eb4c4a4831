"""The synthetic text: right answers, a clean split, the same text from the same seed."""

import re
from itertools import islice
from random import Random

import pytest

from scripts.train_tiny.conversation import Kind, conversation
from scripts.train_tiny.facts import FactBook
from scripts.train_tiny.messages import Message, Role
from scripts.train_tiny.probes import probes, recall_probe
from scripts.train_tiny.split import Split, split_of
from scripts.train_tiny.stories import story
from scripts.train_tiny.tasks import add_exchange, count_exchange, list_exchange, refusal_exchange
from scripts.train_tiny.words import ANIMALS, THINGS


def count_words(text: str) -> int:
    return len(text.split())


def messages_of(seed: int, kind: Kind, num_messages: int = 60) -> list[Message]:
    return list(islice(conversation(Random(seed), Split.TRAIN, kind, 300), num_messages))


def test_same_seed_gives_the_same_chat() -> None:
    assert messages_of(3, Kind.RECALL) == messages_of(3, Kind.RECALL)


def test_user_and_assistant_alternate_after_at_most_one_system_prompt() -> None:
    for seed in range(20):
        roles = [message.role for message in messages_of(seed, Kind.MIXED)]
        if roles[0] is Role.SYSTEM:
            roles = roles[1:]
        assert roles == [Role.USER, Role.ASSISTANT] * (len(roles) // 2) + [Role.USER] * (len(roles) % 2)


def test_every_sum_is_right() -> None:
    rng = Random(1)
    for _ in range(300):
        a, b, total = map(int, re.findall(r"\d+", add_exchange(rng, Split.TRAIN).assistant))
        assert a + b == total


def test_held_out_sums_never_appear_in_training_in_either_order() -> None:
    rng = Random(1)
    for _ in range(300):
        a, b, _total = map(int, re.findall(r"\d+", add_exchange(rng, Split.TRAIN).assistant))
        assert split_of("add", min(a, b), max(a, b)) is Split.TRAIN


def test_counts_are_consecutive_and_end_where_asked() -> None:
    rng = Random(1)
    for split in Split:
        for _ in range(100):
            exchange = count_exchange(rng, split)
            numbers = [int(number) for number in exchange.assistant.split(", ")]
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
            assert int(re.findall(r"\d+", exchange.user)[-1]) == numbers[-1]


def test_lists_are_repeated_word_for_word() -> None:
    rng = Random(1)
    for _ in range(100):
        exchange = list_exchange(rng, Split.TRAIN, num_words=5)
        assert exchange.assistant in exchange.user
        assert len(set(exchange.assistant.split(", "))) == 5


def test_a_fact_book_gives_each_subject_one_code_and_answers_with_it() -> None:
    book = FactBook(Random(1), Split.TRAIN)
    told = " ".join(book.tell_code() for _ in range(30))
    for _ in range(50):
        exchange = book.ask(unknown_share=0.0)
        match = re.fullmatch(r"The code of (.+) is (\d+)\.", exchange.assistant)
        assert match is not None
        subject, code = match.groups()
        assert book.codes[subject] == code
        assert code in told


def test_an_untold_fact_is_not_known() -> None:
    book = FactBook(Random(1), Split.TRAIN)
    book.tell_code()
    assert book.ask(unknown_share=1.0).assistant.endswith("is not known to me.")


@pytest.mark.parametrize("distance", [100, 300, 500])
def test_a_recall_question_comes_at_least_the_distance_after_its_fact(distance: int) -> None:
    rng = Random(distance)
    for _ in range(10):
        probe = recall_probe(rng, distance, count_words)
        text = probe.messages[-1].text
        code = probe.answer.rstrip(".").rsplit(" ", 1)[1]
        after = text.split(code, 1)[1]
        assert distance <= count_words(after) <= distance + 40


def test_probes_hold_as_many_questions_of_each_task() -> None:
    made = probes(1, 3, count_words, distances=(20, 40))
    tasks = [probe.task for probe in made]
    assert {task: tasks.count(task) for task in tasks} == dict.fromkeys(
        ("recall_20", "recall_40", "list_5", "count", "add", "tool_call", "tool_result", "tool_unneeded", "fields"), 3
    )


def test_stories_name_their_word_and_leave_no_slot_open() -> None:
    rng = Random(1)
    for word in (*(animal.name for animal in ANIMALS), *THINGS, "zorvel"):
        text = story(rng, word)
        assert word in text
        assert "{" not in text
        assert text.endswith(".")
        assert 3 <= len(re.findall(r"\.( |$)", text)) <= 5


def test_articles_fit_the_word_behind_them() -> None:
    rng = Random(2)
    text = " ".join(story(rng, rng.choice(THINGS)) for _ in range(2000))
    text += " ".join(refusal_exchange(rng).user for _ in range(2000))

    assert re.findall(r"\b[Aa] [aeiou]\w*|\b[Aa]n [^aeiou\W]\w*", text) == []
