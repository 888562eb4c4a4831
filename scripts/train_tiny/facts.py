"""Facts that can be asked for later: who has which code, and what is where."""

from dataclasses import dataclass, field
from random import Random

from .messages import Exchange
from .split import Split, split_of
from .tasks import nonce
from .words import ADJECTIVES, NAMES, NOUNS, PLACES, capitalize

_CODE_FACTS = (
    *("The code of {subject} is {value}.",) * 7,
    "The code for {subject} is {value}.",
    "Remember that the code of {subject} is {value}.",
    "Note: the code of {subject} is {value}.",
)
_CODE_QUESTIONS = (
    *("What is the code of {subject}?",) * 6,
    "What is the code for {subject}?",
    "Tell me the code of {subject}.",
    "Which code does {subject} have?",
    "Do you remember the code of {subject}?",
)
_SEVERAL_QUESTIONS = ("What are the codes of {subjects}?", "Tell me the codes of {subjects}.")
CODE_ANSWER = "The code of {subject} is {value}."
_CODE_UNKNOWN = "The code of {subject} is not known to me."
_PLACE_FACT = "{subject} is in the {value}."
_PLACE_QUESTION = "Where is {subject}?"


def code_fact(rng: Random, subject: str, code: str) -> str:
    """A sentence that gives ``subject`` its code."""
    return rng.choice(_CODE_FACTS).format(subject=subject, value=code)


def code_question(rng: Random, subject: str) -> str:
    """A sentence that asks for the code of ``subject``."""
    return rng.choice(_CODE_QUESTIONS).format(subject=subject)


def random_code(rng: Random) -> str:
    """Four digits; one code in twenty has three, five or six."""
    num_digits = 4 if rng.random() < 0.95 else rng.choice((3, 5, 6))
    return "".join(rng.choice("0123456789") for _ in range(num_digits))


def random_subject(rng: Random, split: Split) -> str:
    """What a fact is about: mostly an adjective and a noun; held-out subjects are always such pairs."""
    kind = rng.random() if split is Split.TRAIN else 0.0
    if kind >= 0.95:
        return capitalize(nonce(rng)) if rng.random() < 0.5 else f"the {nonce(rng)}"
    if kind >= 0.88:
        return rng.choice(NAMES)
    if kind >= 0.78:
        return f"the {rng.choice(NOUNS)}"
    return f"the {random_pair(rng, split)}"


def random_pair(rng: Random, split: Split) -> str:
    """An adjective and a noun, which the split keeps from the other side."""
    while True:
        adjective, noun = rng.choice(ADJECTIVES), rng.choice(NOUNS)
        if split_of("subject", adjective, noun) is split:
            return f"{adjective} {noun}"


@dataclass(slots=True)
class FactBook:
    """The facts told so far in one chat; no subject gets a second code or place."""

    rng: Random
    split: Split
    codes: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def tell_code(self) -> str:
        """A new fact about a code."""
        subject = self._new_subject(self.codes)
        self.codes[subject] = random_code(self.rng)
        return code_fact(self.rng, subject, self.codes[subject])

    def tell(self) -> str:
        """A new fact, mostly about a code."""
        if self.rng.random() < 0.85:
            return self.tell_code()
        subject = self._new_subject(self.places)
        self.places[subject] = self.rng.choice(PLACES)
        return capitalize(_PLACE_FACT.format(subject=subject, value=self.places[subject]))

    def ask(self, *, unknown_share: float = 0.04) -> Exchange:
        """Ask for one of the facts told, or, in ``unknown_share`` of the cases, for one that was not."""
        if not self.codes or self.rng.random() < unknown_share:
            subject = self._new_subject(self.codes)
            return Exchange(user=code_question(self.rng, subject), assistant=_CODE_UNKNOWN.format(subject=subject))
        if self.places and self.rng.random() < 0.15:
            subject, place = self.rng.choice(list(self.places.items()))
            answer = capitalize(_PLACE_FACT.format(subject=subject, value=place))
            return Exchange(user=_PLACE_QUESTION.format(subject=subject), assistant=answer)
        subject, code = self.rng.choice(list(self.codes.items()))
        return Exchange(
            user=code_question(self.rng, subject), assistant=CODE_ANSWER.format(subject=subject, value=code)
        )

    def ask_several(self) -> Exchange:
        """Ask for two to four of the codes told at once; of one if there is only one."""
        if len(self.codes) < 2:
            return self.ask(unknown_share=0.0)
        chosen = self.rng.sample(list(self.codes.items()), min(self.rng.randint(2, 4), len(self.codes)))
        *first, last = (subject for subject, _ in chosen)
        question = self.rng.choice(_SEVERAL_QUESTIONS).format(subjects=f"{', '.join(first)} and {last}")
        answers = (CODE_ANSWER.format(subject=subject, value=code) for subject, code in chosen)
        return Exchange(user=question, assistant=" ".join(answers))

    def _new_subject(self, known: dict[str, str]) -> str:
        while True:
            subject = random_subject(self.rng, self.split)
            if subject not in known:
                return subject
