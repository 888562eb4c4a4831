"""Held-out questions with the one right answer, for measuring a model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from .facts import FactBook
from .fields import fields_exchange
from .messages import Message, Role
from .split import Split
from .stories import filler_sentences
from .tasks import add_exchange, count_exchange, list_exchange
from .tools import Tool, ToolUse, is_met_by, random_tools, random_use, tools_text

RECALL_DISTANCES = (100, 300, 500)
_PREFIX_SENTENCES = 4

CountTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A chat that ends with the user's turn, and the exact text that should follow."""

    task: str
    messages: tuple[Message, ...]
    answer: str


def _single_turn(task: str, user: str, answer: str) -> Probe:
    return Probe(task=task, messages=(Message(role=Role.USER, text=user),), answer=answer)


def recall_probe(rng: Random, distance: int, count_tokens: CountTokens) -> Probe:
    """Ask for a code told ``distance`` tokens before the question, or a sentence more.

    What lies between is other subjects' codes and story sentences, half and half.
    """
    book = FactBook(rng, Split.HELD_OUT)
    fact = book.tell_code()
    question = book.ask(unknown_share=0.0)
    before = [book.tell_code() for _ in range(rng.randint(0, _PREFIX_SENTENCES))]
    between: list[str] = []
    filler: list[str] = []
    while count_tokens(" ".join(between)) < distance:
        if rng.random() < 0.5:
            between.append(book.tell_code())
        else:
            filler = filler or filler_sentences(rng)
            between.append(filler.pop(0))
    text = " ".join((*before, fact, *between, question.user))
    return _single_turn(f"recall_{distance}", text, question.assistant)


def list_probe(rng: Random, num_words: int = 5) -> Probe:
    """Ask to repeat a list."""
    exchange = list_exchange(rng, Split.HELD_OUT, num_words=num_words)
    return _single_turn(f"list_{num_words}", exchange.user, exchange.assistant)


def count_probe(rng: Random) -> Probe:
    """Ask to count between two numbers."""
    exchange = count_exchange(rng, Split.HELD_OUT)
    return _single_turn("count", exchange.user, exchange.assistant)


def add_probe(rng: Random) -> Probe:
    """Ask for the sum of two two-digit numbers."""
    exchange = add_exchange(rng, Split.HELD_OUT, smallest=10)
    return _single_turn("add", exchange.user, exchange.assistant)


def tool_call_probe(rng: Random) -> Probe:
    """List tools and ask for what one of them does: the call is the answer."""
    use, messages = _listed_tool_use(rng)
    request, _ = use.exchanges
    return Probe(task="tool_call", messages=messages, answer=request.assistant)


def tool_result_probe(rng: Random) -> Probe:
    """List tools, ask, call and return the result: the answer tells it."""
    use, messages = _listed_tool_use(rng)
    request, result = use.exchanges
    called = (Message(role=Role.ASSISTANT, text=request.assistant), Message(role=Role.USER, text=result.user))
    return Probe(task="tool_result", messages=(*messages, *called), answer=result.assistant)


def tool_unneeded_probe(rng: Random) -> Probe:
    """List tools and ask for a list, a count or a sum, for which none of them is needed."""
    tools = random_tools(rng)
    while True:
        exchange = rng.choice((list_exchange, count_exchange, add_exchange))(rng, Split.HELD_OUT)
        if not is_met_by(tools, exchange.user):
            break
    messages = _with_tools(tools, exchange.user)
    return Probe(task="tool_unneeded", messages=messages, answer=exchange.assistant)


def _listed_tool_use(rng: Random) -> tuple[ToolUse, tuple[Message, ...]]:
    tools = random_tools(rng)
    use = random_use(rng, Split.HELD_OUT, tools)
    return use, _with_tools(tools, use.request)


def _with_tools(tools: Sequence[Tool], request: str) -> tuple[Message, ...]:
    return Message(role=Role.SYSTEM, text=tools_text(tools)), Message(role=Role.USER, text=request)


def fields_probe(rng: Random) -> Probe:
    """Ask for two or three things in a text as JSON."""
    exchange = fields_exchange(rng, Split.HELD_OUT)
    return _single_turn("fields", exchange.user, exchange.assistant)


_MAKERS: tuple[Callable[[Random], Probe], ...] = (
    list_probe,
    count_probe,
    add_probe,
    tool_call_probe,
    tool_result_probe,
    tool_unneeded_probe,
    fields_probe,
)


def probes(
    seed: int, num_per_task: int, count_tokens: CountTokens, distances: Iterable[int] = RECALL_DISTANCES
) -> list[Probe]:
    """``num_per_task`` questions of each task: recall at each distance, then each of the others."""
    rng = Random(f"probes/{seed}")
    made: list[Probe] = []
    for distance in distances:
        made += [recall_probe(rng, distance, count_tokens) for _ in range(num_per_task)]
    for make in _MAKERS:
        made += [make(rng) for _ in range(num_per_task)]
    return made
