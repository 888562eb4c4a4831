"""What tools there are: how they are called and described, what is asked of them, and how their results are told."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .words import article

STRING, INTEGER = "string", "integer"


class Slot(Enum):
    """What stands in a request and becomes an argument; the values name the places in the patterns."""

    CITY = "city"
    NAME = "name"
    SUBJECT = "subject"
    ANYTHING = "anything"
    TEXT = "text"
    WORD = "word"
    DEVICE = "device"
    LANGUAGE = "language"
    FIRST = "first"
    SECOND = "second"
    MINUTES = "minutes"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKind:
    """One thing that tools do.

    ``words``: what requests for it contain, in lower case; the first names what it gives.
    ``parameters``: for each slot the names that a parameter may have.
    ``result``: the sort of its results; where ``compute`` is given they are made from the two numbers.
    ``choices``: an optional parameter and its values.
    """

    words: tuple[str, ...]
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    requests: tuple[str, ...]
    answer: str
    slots: tuple[Slot, ...] = ()
    parameters: tuple[tuple[str, ...], ...] = ()
    result: str = "value"
    compute: Callable[[int, int], int] | None = None
    choices: tuple[str, tuple[str, ...]] | None = None


_CITY_NAMES = ("city", "city", "location", "place", "town")
_NUMBERS = (("a", "x", "first", "left"), ("b", "y", "second", "right"))


def _sum_kind(verb: str, noun: str, sign: str, spoken: str, compute: Callable[[int, int], int]) -> ToolKind:
    return ToolKind(
        words=(noun, sign, spoken, verb),
        names=(verb, f"{verb}_numbers", noun, f"get_{noun}"),
        descriptions=(f"{verb.capitalize()} two numbers.", f"The {noun} of two numbers.", f"Get the {noun}."),
        requests=(
            f"What is {{first}} {sign} {{second}}?",
            f"What is {{first}} {spoken} {{second}}?",
            f"How much is {{first}} {sign} {{second}}?",
            f"Please {verb} {{first}} and {{second}}.",
            f"{verb.capitalize()} {{first}} and {{second}}.",
            f"What is the {noun} of {{first}} and {{second}}?",
        ),
        answer=f"{{first}} {sign} {{second}} = {{result}}.",
        slots=(Slot.FIRST, Slot.SECOND),
        parameters=_NUMBERS,
        compute=compute,
    )


def attribute_kind(attribute: str) -> ToolKind:
    """A tool that knows one attribute of things, which may be any word."""
    return ToolKind(
        words=(attribute,),
        names=(f"get_{attribute}", f"get_{attribute}", f"find_{attribute}", f"look_up_{attribute}", attribute),
        descriptions=(f"Get the {attribute} of something.", f"Find the {attribute}.", f"Look up {article(attribute)}."),
        requests=(
            f"What is the {attribute} of {{anything}}?",
            f"Tell me the {attribute} of {{anything}}.",
            f"Get the {attribute} of {{anything}}.",
            f"Please find the {attribute} of {{anything}}.",
        ),
        answer=f"The {attribute} of {{anything}} is {{result}}.",
        slots=(Slot.ANYTHING,),
        parameters=(("name", "name", "item", "thing", "subject", "key", "of"),),
    )


KINDS = (
    ToolKind(
        words=("weather", "rain"),
        names=("get_weather", "get_weather", "weather", "get_current_weather", "weather_report"),
        descriptions=("Get the weather in a city.", "Get the current weather.", "The weather in a place."),
        requests=(
            "What is the weather in {city}?",
            "What is the weather like in {city}?",
            "What's the weather in {city}?",
            "What's the weather like in {city}?",
            "What is the weather in {city} today?",
            "How is the weather in {city}?",
            "Tell me the weather in {city}.",
        ),
        answer="The weather in {city} is {result}.",
        slots=(Slot.CITY,),
        parameters=(_CITY_NAMES,),
        result="weather",
        choices=("unit", ("celsius", "fahrenheit")),
    ),
    ToolKind(
        words=("time",),
        names=("get_time", "current_time", "time_in", "clock"),
        descriptions=("Get the time in a city.", "Tell the time.", "What time it is in a place."),
        requests=(
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}.",
            "Do you know the time in {city}?",
        ),
        answer="The time in {city} is {result}.",
        slots=(Slot.CITY,),
        parameters=(_CITY_NAMES,),
        result="clock",
    ),
    ToolKind(
        words=("code",),
        names=("get_code", "get_code", "find_code", "look_up_code"),
        descriptions=("Get the code of something.", "Find a code.", "Look up the code of a subject."),
        requests=(
            "What is the code of {subject}?",
            "What is the code for {subject}?",
            "Tell me the code of {subject}.",
            "Which code does {subject} have?",
        ),
        answer="The code of {subject} is {result}.",
        slots=(Slot.SUBJECT,),
        parameters=(("subject", "subject", "name", "thing", "owner"),),
        result="code",
    ),
    _sum_kind("add", "sum", "+", "plus", operator.add),
    _sum_kind("multiply", "product", "*", "times", operator.mul),
    ToolKind(
        words=("timer", "alarm"),
        names=("set_timer", "start_timer", "timer", "set_alarm"),
        descriptions=("Set a timer.", "Start a timer of some minutes.", "Ring after some minutes."),
        requests=(
            "Set a timer for {minutes} minutes.",
            "Please set a timer for {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "Can you set a timer for {minutes} minutes?",
        ),
        answer="The timer is set for {minutes} minutes.",
        slots=(Slot.MINUTES,),
        parameters=(("minutes", "minutes", "duration", "time"),),
        result="done",
    ),
    ToolKind(
        words=("message", "email", "send"),
        names=("send_message", "send_email", "message", "write_message"),
        descriptions=("Send a message.", "Send a text to somebody.", "Write a message to a person."),
        requests=(
            "Send a message to {name}: {text}",
            "Send {name} the message: {text}",
            "Send the message {text} to {name}.",
            "Please send {name} a message: {text}",
        ),
        answer="The message to {name} is sent.",
        slots=(Slot.NAME, Slot.TEXT),
        parameters=(("to", "name", "recipient"), ("text", "message", "body")),
        result="done",
    ),
    ToolKind(
        words=("turn on", "switch on"),
        names=("turn_on", "switch_on", "turn_on_device"),
        descriptions=("Turn a device on.", "Turn something on.", "Switch a thing on."),
        requests=("Turn on {device}.", "Please turn on {device}.", "Switch on {device}.", "Can you turn on {device}?"),
        answer="{device} is on.",
        slots=(Slot.DEVICE,),
        parameters=(("device", "device", "name", "thing"),),
        result="done",
    ),
    ToolKind(
        words=("turn off", "switch off"),
        names=("turn_off", "switch_off", "turn_off_device"),
        descriptions=("Turn a device off.", "Turn something off.", "Switch a thing off."),
        requests=(
            "Turn off {device}.",
            "Please turn off {device}.",
            "Switch off {device}.",
            "Can you turn off {device}?",
        ),
        answer="{device} is off.",
        slots=(Slot.DEVICE,),
        parameters=(("device", "device", "name", "thing"),),
        result="done",
    ),
    ToolKind(
        words=("search", "look for"),
        names=("search", "search", "web_search", "find"),
        descriptions=("Search for something.", "Search the web.", "Find a text."),
        requests=("Search for {text}.", "Please search for {text}.", "Search the web for {text}.", "Look for {text}."),
        answer="I found this: {result}.",
        slots=(Slot.TEXT,),
        parameters=(("query", "query", "text", "words"),),
        result="text",
    ),
    ToolKind(
        words=("translation", "translate", "how do you say"),
        names=("translate", "translate", "translate_word", "get_translation"),
        descriptions=("Translate a word.", "Translate into a language.", "Get the translation of a word."),
        requests=(
            "Translate {word} into {language}.",
            "Translate the word {word} into {language}.",
            "Please translate {word} into {language}.",
            "How do you say {word} in {language}?",
        ),
        answer="In {language}, {word} is {result}.",
        slots=(Slot.WORD, Slot.LANGUAGE),
        parameters=(("word", "text"), ("language", "to", "target")),
        result="word",
    ),
    ToolKind(
        words=("day", "date"),
        names=("get_day", "today", "get_date", "current_date"),
        descriptions=("Get the day of the week.", "Get today's date.", "Tell which day it is."),
        requests=("What day is it today?", "What day is it?", "Which day is today?", "Tell me the day."),
        answer="Today is {result}.",
        result="day",
    ),
)
