"""Exchanges that fill a small schema: some sentences, and two or three things in them as JSON."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .facts import random_pair
from .messages import Exchange
from .split import Split, split_of
from .tasks import random_city, random_name
from .words import ANIMAL_NAMES, COLOURS, DAYS, FOODS, LIST_WORDS, PLACES, THINGS, article

Value = str | int

_REQUESTS = (
    *("Give {fields} as JSON: {text}",) * 3,
    "Give {fields} as JSON. {text}",
    "{text} Give {fields} as JSON.",
    "Extract {fields}: {text}",
    "Extract {fields} as JSON: {text}",
    "Find {fields} in this text: {text}",
    "{text} Answer with {fields} as JSON.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Sentences about one thing: each holds the fields that its pattern names."""

    fields: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]


_SCENES = (
    Scene(
        fields=("name", "age", "city", "food", "pet", "colour"),
        sentences=(
            ("{name} is {age} years old.", "{name} is {age}."),
            ("{name} lives in {city}.", "{name} comes from {city}."),
            ("{name} likes {food}.", "{name} likes to eat {food}."),
            ("{name} has {a_pet}.", "The pet of {name} is {a_pet}."),
            ("{name} likes the colour {colour}.", "The colour that {name} likes is {colour}."),
        ),
    ),
    Scene(
        fields=("name", "age", "city"),
        sentences=(("{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}."),),
    ),
    Scene(
        fields=("thing", "colour", "price", "place"),
        sentences=(
            ("The {colour} {thing} costs {price} euros.", "The {colour} {thing} costs {price} dollars."),
            ("The {thing} is in the {place}.", "The {thing} stands in the {place}."),
        ),
    ),
    Scene(
        fields=("name", "quantity", "item"),
        sentences=(("{name} orders {quantity} bags of {item}.", "{name} buys {quantity} boxes of {item}."),),
    ),
    Scene(
        fields=("name", "day", "hour", "place"),
        sentences=(
            (
                "{name} comes to the {place} on {day} at {hour}.",
                "On {day} at {hour}, {name} goes to the {place}.",
                "{name} has a party on {day} at {hour} in the {place}.",
            ),
        ),
    ),
    Scene(
        fields=("subject", "code"),
        sentences=(("The code of the {subject} is {code}.", "Note: the code of the {subject} is {code}."),),
    ),
)


_VALUES: dict[str, Callable[[Random], Value]] = {
    "name": random_name,
    "age": lambda rng: rng.randint(1, 99),
    "city": random_city,
    "food": lambda rng: rng.choice(FOODS),
    "pet": lambda rng: rng.choice(ANIMAL_NAMES),
    "colour": lambda rng: rng.choice(COLOURS),
    "thing": lambda rng: rng.choice(THINGS),
    "price": lambda rng: rng.randint(1, 999),
    "place": lambda rng: rng.choice(PLACES),
    "quantity": lambda rng: rng.randint(2, 99),
    "item": lambda rng: rng.choice(FOODS),
    "day": lambda rng: rng.choice(DAYS),
    "hour": lambda rng: rng.randint(0, 23),
    "subject": lambda rng: random_pair(rng, Split.TRAIN),
    "code": lambda rng: "".join(rng.choices("0123456789", k=4)),
}


_LISTED: tuple[Callable[[Random], str], ...] = (
    random_name,
    random_city,
    lambda rng: rng.choice(LIST_WORDS),
    lambda rng: rng.choice(LIST_WORDS),
    lambda rng: random_pair(rng, Split.TRAIN),
)
_LIST_REQUESTS = ("Give these words as JSON: {items}.", "Give this list as JSON: {items}", "{items}. Answer with JSON.")


def fields_exchange(rng: Random, split: Split) -> Exchange:
    """Ask for two or three of the things that some sentences tell; the answer is a JSON object of them, in order."""
    scene = rng.choice(_SCENES)
    while True:
        values = {field: _VALUES[field](rng) for field in scene.fields}
        wanted = rng.sample(scene.fields, min(rng.randint(2, 3), len(scene.fields)))
        if rng.random() < 0.5:
            wanted.sort(key=scene.fields.index)
        answer = {field: values[field] for field in wanted}
        if split_of("fields", *sorted(map(str, answer.values()))) is split:
            break
    told = [rng.choice(patterns) for patterns in scene.sentences if _tells(patterns, wanted) or rng.random() < 0.3]
    rng.shuffle(told)
    slots = {**values, "a_pet": article(str(values["pet"]))} if "pet" in values else values
    text = " ".join(pattern.format(**slots) for pattern in told)
    request = rng.choice(_REQUESTS).format(fields=_listed(rng, wanted), text=text)
    return Exchange(user=request, assistant=json.dumps(answer, ensure_ascii=False))


def json_list_exchange(rng: Random) -> Exchange:
    """Repeat words as a JSON list: behind a quotation mark a word has other tokens than behind a space."""
    words = [rng.choice(_LISTED)(rng) for _ in range(rng.randint(3, 12))]
    request = rng.choice(_LIST_REQUESTS).format(items=", ".join(words))
    return Exchange(user=request, assistant=json.dumps(words, ensure_ascii=False))


def _tells(patterns: tuple[str, ...], wanted: list[str]) -> bool:
    """Whether a sentence is needed: it holds a field that is wanted, and that not every sentence holds."""
    return any(f"{field}}}" in patterns[0] for field in wanted if field not in ("name", "thing"))


def _listed(rng: Random, fields: list[str]) -> str:
    *first, last = fields if rng.random() < 0.3 else [f"the {field}" for field in fields]
    return f"{', '.join(first)} and {last}"
