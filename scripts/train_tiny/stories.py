"""Short stories about a given word, put together from plots with varied sentences.

Each word has preferred variants, chosen by a hash of the word, so that a model that always takes the likeliest
token still tells different stories about different words.
"""

from dataclasses import dataclass
from random import Random
from typing import TypeVar

from .messages import Exchange
from .split import stable_hash
from .tasks import nonce
from .words import ADJECTIVES, ANIMALS, NAMES, PLACES, THING_ADJECTIVES, THINGS, article, capitalize

T = TypeVar("T")

PREFERRED_SHARE = 0.65

_REQUESTS = (
    "Tell me a story about {a_word}.",
    "Tell me a short story about {a_word}.",
    "Write a story about {a_word}.",
    "Write a short story about {a_word}.",
    "Please tell me a story about {a_word}.",
    "Can you tell me a story about {a_word}?",
    "I want to hear a story about {a_word}.",
    "Story about {a_word}, please.",
)

_ANIMAL_OPENINGS = (
    "Once upon a time, {a_adj_word} lived near the {home}.",
    "There was once {a_adj_word} who lived by the {home}.",
    "Long ago, {a_adj_word} had a little home close to the {home}.",
    "Far away, near a quiet {home}, lived {a_adj_word}.",
)
_ANIMAL_PLOTS = (
    (
        ("One morning, the {word} was very hungry.", "One day, the {word} wanted something to eat."),
        ("It looked for {food} everywhere, but it found nothing.", "It could not find any {food} at all."),
        ("Then {name} came by and shared some {food}.", "At last, {name} gave the {word} a bag of {food}."),
        ("From that day on, they were good friends.", "The {word} was full and happy, and it slept well."),
    ),
    (
        ("One night, a great storm came to the {home}.", "One evening, the wind blew hard and the rain fell."),
        ("The {word} was afraid and hid under {a_thing}.", "The {word} lost its way in the dark."),
        (
            "{name} heard it cry and brought it home with a lamp.",
            "A kind {friend} found it and showed it the way home.",
        ),
        ("In the morning, the sun was shining again.", "After that, the {word} was never afraid of storms."),
    ),
    (
        ("One day, the {word} found {a_thing} in the grass.", "One morning, the {word} saw {a_thing} on the path."),
        ("It did not know what it was.", "It had never seen such a thing before."),
        (
            "So it asked {a_friend}, who laughed and showed it how to play.",
            "So it took the {thing} to {name}, who had lost it.",
        ),
        ("They played together until the sun went down.", "The {word} was proud, and everyone was glad."),
    ),
    (
        ("The {word} had no friends and felt lonely.", "The {word} was sad because it was all alone."),
        ("One day, it met {a_friend} at the {place}.", "Then one day, {a_friend} came from the {place}."),
        ("They talked, they sang, and they shared some {food}.", "The two of them walked around the {home} together."),
        ("Now the {word} is never lonely.", "Since then, they meet every day."),
    ),
    (
        ("The {word} wanted to see the {place}.", "The {word} dreamed of a journey to the {place}."),
        ("It packed some {food} and walked for three days.", "It left at night and followed the stars."),
        (
            "On the way, it helped {a_friend} to cross a river.",
            "On the way, it met {name}, who told it many stories.",
        ),
        (
            "When it came back, it had much to tell.",
            "At the end of the journey, it was tired but very happy.",
        ),
    ),
    (
        ("Every day, the {word} raced with {a_friend}.", "The {word} and {a_friend} wanted to know who was faster."),
        ("They ran from the {home} to the {place}.", "They started at the {place} when the sun came up."),
        ("The {friend} fell, and the {word} stopped to help.", "The {word} was slow, but it did not give up."),
        ("In the end, both of them won.", "Everyone cheered, and they ate {food} together."),
    ),
)

_THING_OPENINGS = (
    "Once upon a time, {name} had {a_adj_word}.",
    "One day, {name} found {a_adj_word} near the {place}.",
    "Long ago, there was {a_adj_word} near the {place}.",
    "{name} loved {a_adj_word} more than anything else.",
)
_THING_PLOTS = (
    (
        ("One morning, the {word} was gone.", "Then one day, the {word} was lost."),
        (
            "{other} looked for it near the {place2} and near the {place3}.",
            "{other} looked everywhere, but it was not there.",
        ),
        ("At last, {a_friend} brought it back.", "In the end, {other} saw it under an old tree."),
        ("Everyone was happy, and they had a big party.", "After that, the {word} was never lost again."),
    ),
    (
        ("One day, the {word} broke.", "But the {word} was old and did not work."),
        ("{other} wanted to help and worked all night.", "{other} asked everyone at the {place2} for help."),
        ("In the morning, the {word} was as good as new.", "Soon the {word} was even better than before."),
        ("They smiled and danced all the way to the {place3}.", "They were friends for the rest of their lives."),
    ),
    (
        ("It was no common {word}, for it could talk.", "At night, the {word} began to speak."),
        ("It said that there was gold near the {place2}.", "It told {other} a secret about the {place2}."),
        ("{other} went there and found {a_friend} instead.", "{other} went there and came back with a smile."),
        ("And that was better than gold.", "Nobody else ever heard the {word} talk."),
    ),
    (
        ("{other} wanted to have the {word} too.", "{other} had never seen such {a_adj_word}."),
        ("At first they argued about it.", "So they went to the {place2} to talk about it."),
        ("Then they shared the {word} and had fun.", "Then they made a second {word} together."),
        ("Sharing made both of them happy.", "Now there is joy everywhere around the {place3}."),
    ),
    (
        ("{other} took the {word} to the {place2}.", "On a sunny day, {other} carried the {word} to the {place2}."),
        ("There they met {a_friend} who was cold and sad.", "A small {friend} sat there all alone."),
        ("They gave it the {word} as a present.", "The {friend} looked at the {word} and began to smile."),
        ("It was the best day of the year.", "A small present can make a big difference."),
    ),
)


@dataclass(slots=True)
class _Chooser:
    """Chooses among variants, more often than not the one preferred for ``word``."""

    rng: Random
    word: str
    num_choices: int = 0

    def choose(self, options: tuple[T, ...]) -> T:
        self.num_choices += 1
        if self.rng.random() < PREFERRED_SHARE:
            return options[stable_hash("story", self.word, self.num_choices) % len(options)]
        return self.rng.choice(options)

    def choose_other(self, options: tuple[T, ...], *taken: T) -> T:
        return self.choose(tuple(option for option in options if option not in taken))


_ANIMAL_BY_NAME = {animal.name: animal for animal in ANIMALS}
_SMALL_FRIENDS = tuple(a.name for a in ANIMALS if a.name not in ("whale", "elephant", "fish", "dragon"))


def _sentences(choose: _Chooser, word: str) -> tuple[str, ...]:
    """The sentences of a story about ``word``, its slots still open."""
    is_animal = word in _ANIMAL_BY_NAME
    opening = choose.choose(_ANIMAL_OPENINGS if is_animal else _THING_OPENINGS)
    plot = choose.choose(_ANIMAL_PLOTS if is_animal else _THING_PLOTS)
    return (opening, *(choose.choose(variants) for variants in plot))


def story(rng: Random, word: str) -> str:
    """Five sentences (four, now and then) about ``word``, an animal or a thing."""
    choose = _Chooser(rng, word)
    sentences = _sentences(choose, word)
    animal = _ANIMAL_BY_NAME.get(word)
    adjective = choose.choose(ADJECTIVES if animal else THING_ADJECTIVES)
    name = choose.choose(NAMES)
    friend = choose.choose_other(_SMALL_FRIENDS, word)
    thing = choose.choose_other(THINGS, word)
    place = choose.choose_other(PLACES, animal.home if animal else "")
    place2 = choose.choose_other(PLACES, place)
    slots = {
        "word": word,
        "a_adj_word": article(f"{adjective} {word}"),
        "home": animal.home if animal else "",
        "food": animal.food if animal else "",
        "name": name,
        "other": choose.choose_other(NAMES, name),
        "friend": friend,
        "a_friend": article(friend),
        "thing": thing,
        "a_thing": article(thing),
        "place": place,
        "place2": place2,
        "place3": choose.choose_other(PLACES, place, place2),
    }
    if rng.random() < 0.1:
        sentences = sentences[:-1]
    return " ".join(capitalize(sentence.format(**slots)) for sentence in sentences)


def random_story_word(rng: Random) -> str:
    """An animal or a thing; one word in twenty-five is made up."""
    kind = rng.random()
    if kind < 0.04:
        return nonce(rng)
    return rng.choice(ANIMALS).name if kind < 0.5 else rng.choice(THINGS)


def story_exchange(rng: Random, *, word: str | None = None) -> Exchange:
    """Ask for a story about ``word`` (a random one if not given)."""
    word = word or random_story_word(rng)
    request = rng.choice(_REQUESTS).format(a_word=article(word))
    return Exchange(user=request, assistant=story(rng, word))


def filler_sentences(rng: Random) -> list[str]:
    """The sentences of a random story: text without facts to put between facts."""
    text = story(rng, random_story_word(rng))
    return [f"{part.rstrip('.')}." for part in text.split(". ")]
