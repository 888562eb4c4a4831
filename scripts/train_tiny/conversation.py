"""Whole chats: several exchanges in a row, with facts told early and asked for late."""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import chain
from random import Random

from .facts import FactBook
from .fields import fields_exchange, json_list_exchange
from .messages import Exchange, Message, Role
from .split import Split
from .stories import filler_sentences, random_story_word, story, story_exchange
from .tasks import add_exchange, copy_exchange, count_exchange, list_exchange, refusal_exchange, small_talk_exchange
from .tools import Tool, is_met_by, random_tools, random_use, tools_text

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Baton, a small and friendly model.",
    "You are a friendly assistant who remembers everything.",
    "Answer every question in one sentence.",
    "You are a careful assistant. Be polite.",
)
SYSTEM_SHARE = 0.35
_INTRODUCTIONS = (
    "Here are some facts.",
    "Remember these facts.",
    "Please read this text.",
    "Please remember the following.",
    "Read carefully.",
)
_THANKS_FOR_FACTS = "Thank you. I will remember that."
_FACT_SENTENCE_TOKENS = 13


class Kind(Enum):
    """What a chat is mostly about."""

    RECALL = "recall"
    MIXED = "mixed"
    COPY = "copy"
    TOOLS = "tools"
    FIELDS = "fields"


def other_exchange(rng: Random, split: Split) -> Exchange:
    """One exchange that does not look back."""
    kind = rng.random()
    if kind < 0.22:
        return add_exchange(rng, split)
    if kind < 0.5:
        return count_exchange(rng, split)
    if kind < 0.75:
        return list_exchange(rng, split)
    if kind < 0.89:
        return story_exchange(rng)
    return refusal_exchange(rng) if kind < 0.95 else small_talk_exchange(rng)


def fact_text(rng: Random, book: FactBook, num_tokens: int) -> str:
    """About ``num_tokens`` of facts, mixed with story sentences in a share drawn per text."""
    filler_share = rng.choice((0.0, 0.0, 0.3, 0.6))
    filler: list[str] = []
    sentences = [book.tell_code()]
    while len(sentences) * _FACT_SENTENCE_TOKENS < num_tokens:
        if rng.random() < filler_share:
            filler = filler or filler_sentences(rng)
            sentences.append(filler.pop(0))
        else:
            sentences.append(book.tell())
    if filler_share > 0:
        rng.shuffle(sentences)
    return rng.choice((*(" ",) * 7, "\n")).join(sentences)


def recall_exchanges(rng: Random, split: Split, num_tokens: int) -> Iterator[Exchange]:
    """Facts that fill a good part of ``num_tokens``, then questions about them without end."""
    book = FactBook(rng, split)
    text = fact_text(rng, book, int(num_tokens * rng.uniform(0.1, 0.6)))
    if rng.random() < 0.4:
        text = f"{rng.choice(_INTRODUCTIONS)} {text}"
    if rng.random() < 0.7:
        question = book.ask()
        yield Exchange(user=f"{text} {question.user}", assistant=question.assistant)
    else:
        yield Exchange(user=text, assistant=_THANKS_FOR_FACTS)
    while True:
        kind = rng.random()
        if kind < 0.5:
            yield book.ask()
        elif kind < 0.84:
            yield book.ask_several()
        elif kind < 0.92:
            yield Exchange(user=fact_text(rng, book, rng.randint(10, 60)), assistant=_THANKS_FOR_FACTS)
        else:
            yield other_exchange(rng, split)


def mixed_exchanges(rng: Random, split: Split) -> Iterator[Exchange]:
    """Unrelated exchanges without end; one chat in eight keeps to sums."""
    only_sums = rng.random() < 0.125
    while True:
        yield add_exchange(rng, split) if only_sums else other_exchange(rng, split)


def copy_exchanges(rng: Random) -> Iterator[Exchange]:
    """Lists to repeat, without end."""
    while True:
        yield copy_exchange(rng)


def fields_exchanges(rng: Random, split: Split) -> Iterator[Exchange]:
    """Schemas to fill, words as JSON lists, and a few other exchanges, without end."""
    while True:
        kind = rng.random()
        if kind < 0.4:
            yield fields_exchange(rng, split)
        else:
            yield json_list_exchange(rng) if kind < 0.8 else other_exchange(rng, split)


def ordinary_exchange(rng: Random, split: Split, tools: Sequence[Tool]) -> Exchange:
    """An exchange for which none of the tools is needed, though it may be asked amid them."""
    while True:
        kind = rng.random()
        if kind < 0.15:
            book = FactBook(rng, split)
            text = fact_text(rng, book, rng.randint(20, 80))
            question = book.ask(unknown_share=0.0)
            exchange = Exchange(user=f"{text} {question.user}", assistant=question.assistant)
        else:
            exchange = fields_exchange(rng, split) if kind < 0.3 else other_exchange(rng, split)
        if not is_met_by(tools, exchange.user):
            return exchange


def tool_exchanges(rng: Random, split: Split, tools: Sequence[Tool]) -> Iterator[Exchange]:
    """Requests that the tools meet, each with its result, and others that need none, without end."""
    while True:
        if rng.random() < 0.65:
            yield from random_use(rng, split, tools).exchanges
        else:
            yield ordinary_exchange(rng, split, tools)


def conversation(rng: Random, split: Split, kind: Kind, num_tokens: int) -> Iterator[Message]:
    """The messages of one chat, without end: take about ``num_tokens`` of them."""
    tools = random_tools(rng) if kind is Kind.TOOLS else []
    makers = {
        Kind.RECALL: lambda: recall_exchanges(rng, split, num_tokens),
        Kind.MIXED: lambda: mixed_exchanges(rng, split),
        Kind.COPY: lambda: copy_exchanges(rng),
        Kind.TOOLS: lambda: tool_exchanges(rng, split, tools),
        Kind.FIELDS: lambda: fields_exchanges(rng, split),
    }
    if tools:
        yield Message(role=Role.SYSTEM, text=tools_text(tools))
    if rng.random() < SYSTEM_SHARE:
        yield Message(role=Role.SYSTEM, text=rng.choice(SYSTEM_PROMPTS))
    for exchange in makers[kind]():
        yield Message(role=Role.USER, text=exchange.user)
        yield Message(role=Role.ASSISTANT, text=exchange.assistant)


def plain_text(rng: Random) -> str:
    """A text that is no chat: a few stories one after the other."""
    return " ".join(story(rng, random_story_word(rng)) for _ in range(3))


def tokenizer_corpus(seed: int, num_texts: int) -> Iterator[str]:
    """Texts of every kind to train the tokenizer on."""
    rng = Random(f"tokenizer/{seed}")
    for index in range(num_texts):
        kind = Kind.RECALL if index % 2 else Kind.MIXED
        messages = conversation(rng, Split.TRAIN, kind, 200)
        yield from (message.text for _, message in zip(range(12), messages, strict=False))
    yield from chain(SYSTEM_PROMPTS * 20)
