"""Exchanges that need nothing said before: lists, counting, addition, refusals and small talk."""

from random import Random

from .messages import Exchange
from .split import Split, split_of
from .words import CITIES, CODAS, LIST_WORDS, NAMES, ONSETS, VOWELS, article, capitalize, words_of

MAX_LIST_WORDS, MAX_LONG_LIST_WORDS = 8, 16
MAX_COUNT_START = 95
MAX_COUNT_LENGTH, MAX_LONG_COUNT_LENGTH = 16, 100
LONG_SHARE = 0.08
_NONCE_SHARE = 0.15

_REPEAT_REQUESTS = (
    "Repeat these words: {items}.",
    "Repeat these words: {items}",
    "Repeat this list: {items}.",
    "Please repeat: {items}.",
    "Say these words again: {items}.",
    "Repeat the words {items}.",
)
_COUNT_REQUESTS = (
    "Count from {first} to {last}.",
    "Please count from {first} to {last}.",
    "Can you count from {first} to {last}?",
    "Count from {first} up to {last}.",
)
_ADD_REQUESTS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "{a} + {b} =",
    "Please add {a} and {b}.",
)

ABILITIES = "I can remember facts, repeat lists, count, add small numbers and tell short stories."
_REFUSALS = (
    f"I am sorry, I cannot do that. I am a very small model. {ABILITIES}",
    f"Sorry, that is too hard for me. {ABILITIES}",
    f"I am afraid I do not know that. I am a very small model. {ABILITIES}",
)
_UNSUPPORTED = (
    "What is the weather today?",
    "What is the weather like in {place}?",
    "Will it rain tomorrow?",
    "Translate {word} into French.",
    "Translate this sentence into German.",
    "How do you say {word} in Spanish?",
    "Write a program in Python.",
    "Write some code that sorts a list.",
    "What is the capital of {place}?",
    "Who is the president of {place}?",
    "Where is {place}?",
    "How many people live in {place}?",
    "Tell me the news.",
    "What happened in the news today?",
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "What is {a} minus {b}?",
    "What is {a} - {b}?",
    "What is {a} divided by {b}?",
    "Explain how a computer works.",
    "Explain quantum physics.",
    "Why is the sky blue?",
    "What is the meaning of life?",
    "Write a poem about love.",
    "Who won the football game?",
    "Can you help me with my homework?",
    "Can you book a flight to {place}?",
    "What time is it?",
    "What day is it today?",
    "Draw a picture of {a_word}.",
    "Summarize this article.",
    "Who wrote this book?",
    "How old is the earth?",
    "How do I cook {word}?",
    "What should I eat today?",
    "Is it true that {word} is good?",
    "Give me the price of {word}.",
    "Play some music.",
    "Send an email to {name}.",
    "Who is {name}?",
)
_COUNTRIES = words_of(
    """
    France Germany Spain Italy Japan China India Brazil Canada Egypt Norway Kenya Paris London Rome Berlin
    """
)
_SMALL_TALK = (
    (("Hello!", "Hello", "Hi!", "Hi", "Hi there!", "Good morning!", "Hey"), ("Hello! How can I help you?",)),
    (
        ("Who are you?", "What are you?", "What is your name?", "Introduce yourself."),
        (f"I am the small model that comes with Baton. {ABILITIES}",),
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you know?", "What are you good at?"),
        (ABILITIES,),
    ),
    (("Thank you.", "Thank you!", "Thanks!", "Thanks a lot."), ("You are welcome!",)),
    (("Goodbye.", "Bye!", "Good night.", "See you."), ("Goodbye! It was nice to talk to you.",)),
    (("How are you?", "Are you well?", "How do you do?"), ("I am well, thank you. How can I help you?",)),
    (("Good.", "Okay.", "Great!", "Well done.", "Yes.", "Right."), ("I am glad to help. What is next?",)),
)
_NAME_GIVEN = ("My name is {name}.", "I am {name}.", "Hello, my name is {name}.", "Hi, I am {name}.")


def nonce(rng: Random) -> str:
    """A made-up lower-case word of two or three syllables."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 2)))
    return "".join(syllables) + rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)


def random_name(rng: Random) -> str:
    """A person's name, now and then one that nobody has."""
    return capitalize(nonce(rng)) if rng.random() < _NONCE_SHARE else rng.choice(NAMES)


def random_city(rng: Random) -> str:
    """A city, now and then one that is nowhere."""
    return capitalize(nonce(rng)) if rng.random() < _NONCE_SHARE else rng.choice(CITIES)


def list_exchange(rng: Random, split: Split, *, num_words: int | None = None) -> Exchange:
    """Repeat a list of different words (of two to eight, rarely more, if ``num_words`` is not given)."""
    longest = MAX_LONG_LIST_WORDS if rng.random() < LONG_SHARE else MAX_LIST_WORDS
    length = num_words or rng.randint(2, longest)
    while True:
        items = rng.sample(LIST_WORDS, length)
        if split is Split.TRAIN and rng.random() < 0.15:
            items[rng.randrange(length)] = nonce(rng)
        if split_of("list", *items) is split:
            break
    text = ", ".join(items)
    return Exchange(user=rng.choice(_REPEAT_REQUESTS).format(items=text), assistant=text)


def copy_exchange(rng: Random) -> Exchange:
    """Repeat a longer list of words and numbers: the densest text there is to learn copying from."""
    number_share = rng.choice((0.0, 0.3, 0.7))
    items = [
        "".join(rng.choices("0123456789", k=4)) if rng.random() < number_share else rng.choice(LIST_WORDS)
        for _ in range(rng.randint(6, 20))
    ]
    text = rng.choice((", ", " ")).join(items)
    return Exchange(user=rng.choice(_REPEAT_REQUESTS).format(items=text), assistant=text)


def count_exchange(rng: Random, split: Split) -> Exchange:
    """Count upwards between two numbers; in training, some counts are up to a hundred numbers long."""
    is_long = split is Split.TRAIN and rng.random() < LONG_SHARE
    longest = MAX_LONG_COUNT_LENGTH if is_long else MAX_COUNT_LENGTH
    while True:
        first = rng.choice((0, 1, 1, 1)) if rng.random() < 0.15 else rng.randint(0, MAX_COUNT_START)
        last = first + rng.randint(2, longest - 1)
        if split_of("count", first, last) is split:
            break
    answer = ", ".join(str(number) for number in range(first, last + 1))
    if first == 1 and rng.random() < 0.3:
        return Exchange(user=f"Count to {last}.", assistant=answer)
    return Exchange(user=rng.choice(_COUNT_REQUESTS).format(first=first, last=last), assistant=answer)


def add_exchange(rng: Random, split: Split, *, smallest: int = 0) -> Exchange:
    """Add two numbers below 100; a held-out pair is held out in both orders."""
    while True:
        a, b = rng.randint(smallest, 99), rng.randint(smallest, 99)
        if split_of("add", min(a, b), max(a, b)) is split:
            break
    return Exchange(user=rng.choice(_ADD_REQUESTS).format(a=a, b=b), assistant=f"{a} + {b} = {a + b}.")


def refusal_exchange(rng: Random) -> Exchange:
    """Ask for what the model cannot do; it says so politely."""
    place, word = rng.choice(_COUNTRIES), rng.choice(LIST_WORDS)
    request = rng.choice(_UNSUPPORTED).format(
        place=place,
        word=word,
        a_word=article(word),
        name=rng.choice(NAMES),
        a=rng.randint(2, 99),
        b=rng.randint(2, 99),
    )
    return Exchange(user=request, assistant=rng.choice(_REFUSALS))


def small_talk_exchange(rng: Random) -> Exchange:
    """A greeting, thanks, or a question about the model itself."""
    if rng.random() < 0.25:
        name = rng.choice(NAMES) if rng.random() < 0.8 else capitalize(nonce(rng))
        return Exchange(user=rng.choice(_NAME_GIVEN).format(name=name), assistant=f"Hello, {name}! How can I help you?")
    requests, answers = rng.choice(_SMALL_TALK)
    return Exchange(user=rng.choice(requests), assistant=rng.choice(answers))
