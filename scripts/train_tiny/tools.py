"""Tools that a chat may list, requests that one of them meets, its calls, its results, and what is said of them.

A call is written as Hermes models write it; :data:`.tokenizer.CHAT_TEMPLATE` renders the same text from a request's
``tools``, ``tool_calls`` and messages with the role ``tool``.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .facts import random_pair
from .messages import Exchange
from .split import Split, split_of
from .tasks import nonce, random_city, random_name
from .tool_kinds import INTEGER, KINDS, STRING, Slot, ToolKind, attribute_kind
from .words import (
    ADJECTIVES,
    ATTRIBUTES,
    DAYS,
    FOODS,
    LANGUAGES,
    LIST_WORDS,
    NOUNS,
    THINGS,
    WEATHERS,
    capitalize,
)

MAX_TOOLS = 3
_ATTRIBUTE_SHARE = 0.4
_JSON_RESULT_SHARE = 0.25
_NO_DESCRIPTION_SHARE = 0.25

Argument = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a tool: what it is called in the request's schema, and which slot of the kind it fills."""

    name: str
    slot: Slot
    choices: tuple[str, ...] = ()
    is_required: bool = True

    def signature(self) -> str:
        """Its name and type, as the template lists them."""
        type_name = "|".join(self.choices) or (INTEGER if self.slot in _NUMBERS else STRING)
        return f"{self.name}{'' if self.is_required else '?'}: {type_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that a chat lists."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    kind: ToolKind

    def signature(self) -> str:
        """Its line in the list."""
        parameters = ", ".join(parameter.signature() for parameter in self.parameters)
        return f"{self.name}({parameters}){' ' if self.description else ''}{self.description}"

    def schema(self) -> dict[str, object]:
        """The tool as a request of OpenAI's API gives it."""
        properties = {
            item.name: {"type": "integer" if item.slot in _NUMBERS else "string"}
            | ({"enum": list(item.choices)} if item.choices else {})
            for item in self.parameters
        }
        required = [item.name for item in self.parameters if item.is_required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function: dict[str, object] = {"name": self.name, "parameters": parameters}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """A request that a tool meets, the call, what the tool returns, and the answer."""

    tool: Tool
    request: str
    arguments: dict[str, Argument]
    result: str
    answer: str

    @property
    def exchanges(self) -> tuple[Exchange, Exchange]:
        """The request with its call, and the result with its answer."""
        return (
            Exchange(user=self.request, assistant=call_text(self.tool.name, self.arguments)),
            Exchange(user=f"Result: {self.result}", assistant=self.answer),
        )


def tools_text(tools: Sequence[Tool]) -> str:
    """The list of tools, which is a system turn of its own."""
    return "\n".join(("Tools:", *(tool.signature() for tool in tools)))


def call_text(name: str, arguments: dict[str, Argument]) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def random_tools(rng: Random, *, num_tools: int | None = None, without: Sequence[str] = ()) -> list[Tool]:
    """One to three tools, no two of which meet the same request; ``without`` those that do one of these things."""
    wanted = num_tools or rng.randint(1, MAX_TOOLS)
    tools: list[Tool] = []
    known = set(without)
    while len(tools) < wanted:
        kind = _random_kind(rng)
        if known.isdisjoint(kind.words):
            known.update(kind.words)
            tools.append(_tool(rng, kind))
    return tools


def random_use(rng: Random, split: Split, tools: Sequence[Tool]) -> ToolUse:
    """A request for one of the tools."""
    tool = rng.choice(tools)
    while True:
        phrases = {slot: _PHRASES[slot](rng) for slot in tool.kind.slots}
        if not phrases or split_of("tool", tool.kind.words[0], *phrases.values()) is split:
            break
    request = rng.choice(tool.kind.requests)
    arguments: dict[str, Argument] = {}
    for parameter in tool.parameters:
        if parameter.slot in tool.kind.slots:
            arguments[parameter.name] = _argument(parameter.slot, phrases[parameter.slot])
        elif rng.random() < 0.5:
            choice = rng.choice(parameter.choices)
            request = f"{request[:-1]} in {choice}{request[-1]}"
            arguments[parameter.name] = choice
    result = _result(rng, tool.kind, phrases)
    slots: dict[str, str] = {slot.value: phrase for slot, phrase in phrases.items()}
    answer = capitalize(tool.kind.answer.format(result=result, **slots))
    if rng.random() < _JSON_RESULT_SHARE:
        value = int(result) if result.isdigit() and result[0] != "0" else result
        result = json.dumps({rng.choice((tool.kind.words[0], "result")): value})
    return ToolUse(tool=tool, request=request.format(**slots), arguments=arguments, result=result, answer=answer)


def is_met_by(tools: Sequence[Tool], request: str) -> bool:
    """Whether a request may be one for a tool."""
    return any(word in request.lower() for tool in tools for word in tool.kind.words)


def _random_kind(rng: Random) -> ToolKind:
    if rng.random() >= _ATTRIBUTE_SHARE:
        return rng.choice(KINDS)
    return attribute_kind(rng.choice(ATTRIBUTES if rng.random() < 0.5 else LIST_WORDS))


def _tool(rng: Random, kind: ToolKind) -> Tool:
    parameters = [
        Parameter(name=rng.choice(names), slot=slot) for slot, names in zip(kind.slots, kind.parameters, strict=True)
    ]
    if kind.choices and rng.random() < 0.3:
        name, choices = kind.choices
        parameters.append(Parameter(name=name, slot=Slot.CHOICE, choices=choices, is_required=False))
    description = "" if rng.random() < _NO_DESCRIPTION_SHARE else rng.choice(kind.descriptions)
    return Tool(name=rng.choice(kind.names), description=description, parameters=tuple(parameters), kind=kind)


def _subject(rng: Random) -> str:
    return f"the {random_pair(rng, Split.TRAIN)}"


def _anything(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return _subject(rng)
    if kind < 0.5:
        return f"the {rng.choice((*NOUNS, *FOODS))}"
    return random_name(rng) if kind < 0.8 else random_city(rng)


def _text(rng: Random) -> str:
    words = [rng.choice((*LIST_WORDS, *ADJECTIVES)) for _ in range(rng.randint(1, 3))]
    return " ".join(words)


_PHRASES: dict[Slot, Callable[[Random], str]] = {
    Slot.CITY: random_city,
    Slot.NAME: random_name,
    Slot.SUBJECT: _subject,
    Slot.ANYTHING: _anything,
    Slot.TEXT: _text,
    Slot.WORD: lambda rng: rng.choice(LIST_WORDS),
    Slot.DEVICE: lambda rng: f"the {rng.choice(THINGS)}",
    Slot.LANGUAGE: lambda rng: rng.choice(LANGUAGES),
    Slot.FIRST: lambda rng: str(rng.randint(0, 99)),
    Slot.SECOND: lambda rng: str(rng.randint(0, 99)),
    Slot.MINUTES: lambda rng: str(rng.randint(2, 90)),
}
_NUMBERS = frozenset({Slot.FIRST, Slot.SECOND, Slot.MINUTES})


def _argument(slot: Slot, phrase: str) -> Argument:
    return int(phrase) if slot in _NUMBERS else phrase.removeprefix("the ")


def _result(rng: Random, kind: ToolKind, phrases: dict[Slot, str]) -> str:
    """What a tool returns: of the sort that its kind says, or a number that its arguments make."""
    if kind.compute is not None:
        return str(kind.compute(int(phrases[Slot.FIRST]), int(phrases[Slot.SECOND])))
    return _RESULTS[kind.result](rng)


_RESULTS: dict[str, Callable[[Random], str]] = {
    "weather": lambda rng: rng.choice(
        (
            rng.choice(WEATHERS),
            f"{rng.randint(1, 39)} degrees",
            f"{rng.choice(WEATHERS)}, {rng.randint(1, 39)} degrees",
        )
    ),
    "clock": lambda rng: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
    "code": lambda rng: "".join(rng.choices("0123456789", k=4)),
    "day": lambda rng: rng.choice(DAYS),
    "done": lambda rng: rng.choice(("ok", "done", "true", "success")),
    "word": nonce,
    "text": _text,
    "value": lambda rng: rng.choice(
        (str(rng.randint(1, 9999)), rng.choice(LIST_WORDS), random_name(rng), random_city(rng))
    ),
}
