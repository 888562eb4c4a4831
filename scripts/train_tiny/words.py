"""The words all synthetic text is made of, written by hand for this project."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """An animal with the place it lives in and what it likes to eat."""

    name: str
    home: str
    food: str


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


def _animals(table: str) -> tuple[Animal, ...]:
    rows = (line.split(",") for line in table.strip().splitlines())
    return tuple(Animal(name=name.strip(), home=home.strip(), food=food.strip()) for name, home, food in rows)


ANIMALS = _animals(
    """
    fox, forest, berries
    cat, house, fish
    dog, garden, bones
    owl, tree, seeds
    bear, mountain, honey
    frog, pond, flies
    duck, lake, bread
    horse, field, apples
    sheep, meadow, grass
    mouse, barn, cheese
    rabbit, garden, carrots
    wolf, forest, meat
    goat, hill, leaves
    pig, farm, corn
    cow, meadow, grass
    hen, farm, corn
    bee, garden, honey
    ant, field, sugar
    fish, river, bread
    whale, sea, fish
    turtle, beach, leaves
    snail, garden, salad
    deer, forest, leaves
    lion, desert, meat
    tiger, jungle, meat
    monkey, jungle, bananas
    parrot, jungle, nuts
    eagle, mountain, fish
    swan, lake, bread
    crow, tree, nuts
    bat, cave, flies
    spider, cave, flies
    snake, desert, eggs
    camel, desert, grass
    seal, beach, fish
    crab, beach, leaves
    otter, river, fish
    beaver, river, apples
    hedgehog, garden, apples
    squirrel, tree, nuts
    donkey, farm, carrots
    penguin, island, fish
    elephant, jungle, bananas
    dragon, cave, cakes
    kitten, house, milk
    puppy, house, bones
    """
)

THINGS = words_of(
    """
    ball bell boat book bottle box bridge brush bucket button cake candle car chair clock cloud coat coin cup
    drum engine flag flower flute glass guitar hammer hat jar kettle key kite knife ladder lamp lantern letter
    map mask mirror needle paper pencil piano picture pillow pipe plate pot ring robot rock rocket rope sail
    ship shoe spoon star stone table teapot tent tower toy train tree truck umbrella violin wagon wheel whistle
    window
    """
)

PLACES = words_of(
    """
    forest garden house barn field meadow river lake pond mountain hill beach island cave desert jungle farm
    village town market school kitchen park harbour station library castle museum
    """
)

COLOURS = words_of("red blue green yellow white black brown grey pink purple orange golden silver")

QUALITIES = words_of(
    """
    old young small big tall tiny round quiet loud brave clever happy sleepy hungry quick slow shiny soft warm
    cold gentle lucky proud wild lonely funny heavy light kind strange
    """
)

ADJECTIVES = COLOURS + QUALITIES
THING_ADJECTIVES = COLOURS + words_of("old small big tiny round shiny soft heavy light strange lucky funny")

NAMES = words_of(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Alice
    Bob Carol Dan Eva Frank Hugo Iris John Karl Lily Max Nina Oscar Peter Ruth Sofia Tom Vera Will
    """
)

FOODS = words_of(
    """
    apple banana bread butter cheese cherry corn egg fig grape honey jam lemon lime mango melon milk nut onion
    peach pear pepper pie plum potato rice salad salt soup sugar tea tomato water
    """
)

MORE_WORDS = words_of(
    """
    air arm autumn bird brother circle city corner day door dream ear earth evening eye face father fire floor
    foot friend game girl grass ground hair hand head heart hour ice idea island joy king leaf line metal minute
    moon morning mother mouth music name night noise north number ocean pain path person place plan queen
    question rain road roof room root sand sea season shadow shape sister sky sleep smile snow song sound south
    spring storm story street summer sun time tooth town voice wall war west wind winter wood word work world
    year
    """
)

CITIES = (
    *words_of(
        """
        Paris London Rome Berlin Madrid Vienna Tokyo Oslo Lisbon Dublin Athens Cairo Delhi Boston Chicago Prague Warsaw
        Zurich Munich Hamburg Lyon Milan Naples Geneva Sydney Toronto Seoul Lima Helsinki Stockholm Amsterdam Brussels
        Budapest Copenhagen Bern Moscow Nairobi Venice Dallas Miami
        """
    ),
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
)
LANGUAGES = words_of("French German Spanish Italian Dutch Greek Polish Swedish Japanese Chinese")
DAYS = words_of("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
WEATHERS = words_of("sunny cloudy rainy windy stormy foggy snowy warm cold hot dry wet mild")
ATTRIBUTES = words_of(
    """
    price age colour size weight owner address number height capital length speed value status score title author
    population temperature date
    """
)

ANIMAL_NAMES = tuple(animal.name for animal in ANIMALS)
NOUNS = ANIMAL_NAMES + tuple(thing for thing in THINGS if thing not in ANIMAL_NAMES)
LIST_WORDS = tuple(dict.fromkeys(NOUNS + FOODS + MORE_WORDS + COLOURS))

ONSETS = words_of("b d f g k l m n p r s t v w z bl br dr fl gr kr pl st tr")
VOWELS = words_of("a e i o u")
CODAS = words_of("b d f g k l m n p r s t x nd rk st")


def article(word: str) -> str:
    """The word with "a" or "an" before it."""
    return f"an {word}" if word[0].lower() in "aeiou" else f"a {word}"


def capitalize(sentence: str) -> str:
    """The text with its first letter in upper case, the rest unchanged."""
    return sentence[:1].upper() + sentence[1:]
