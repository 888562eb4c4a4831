"""The grammars of each format, compared with answers by the library that engines use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.grammar.grammar_text import choice_grammar, json_schema_grammar
from router.grammar.lark import TEXT_RULE
from router.tools.formats import harmony
from router.tools.lark import calls_or_form
from router.tools.reasoning import REASONING_FORMATS, AnswerGrammar, BudgetError, Opening
from router.tools.registry import TOOL_FORMATS
from router.tools.tool import CallRules
from tests.support.router.turns import ANY, ONE, REQUIRED, STOP, WEATHER, GrammarRig

PARIS = '{"city": "Paris", "days": 2}'
CALLS = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": %s}]',
    "mistral_args": "[TOOL_CALLS]get_weather[ARGS]%s",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>%s",
}
TWO = {
    "hermes": f"{CALLS['hermes'] % PARIS}\n{CALLS['hermes'] % PARIS}",
    "llama3": f"{CALLS['llama3'] % PARIS}; {CALLS['llama3'] % PARIS}",
    "mistral": CALLS["mistral"][:-1] % PARIS + ', {"name": "stop", "arguments": {}}]',
    "mistral_args": CALLS["mistral_args"] % PARIS * 2,
}
SPECIAL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", *harmony.HarmonyFormat.markers)
ANSWERS = dict.fromkeys(CALLS, "It is 5 < 7.") | {"harmony": "<|channel|>final<|message|>It is 5 < 7."}

FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}

RIGS = {
    "special tokens": GrammarRig(special=SPECIAL),
    "added tokens": GrammarRig(added=SPECIAL),
    "plain text": GrammarRig(),
}
pytestmark = pytest.mark.parametrize("rig", RIGS.values(), ids=RIGS)


@pytest.mark.parametrize("name", CALLS)
def test_required_answers_are_calls_that_fit(rig: GrammarRig, name: str) -> None:
    grammar = TOOL_FORMATS[name].grammar(REQUIRED, rig.vocabulary)

    assert rig.allows(grammar, CALLS[name] % PARIS)
    assert not rig.allows(grammar, CALLS[name] % '{"city": 5}')
    assert not rig.allows(grammar, CALLS[name] % '{"days": 1}')
    assert not rig.allows(grammar, CALLS[name] % '{"city": "Paris", "more": 1}')
    assert not rig.allows(grammar, ANSWERS[name])
    assert not rig.allows(grammar, "")
    assert not rig.allows(grammar, (CALLS[name] % PARIS).replace("get_weather", "other"))


@pytest.mark.parametrize("name", CALLS)
def test_a_strict_tool_may_say_what_every_text_is(rig: GrammarRig, name: str) -> None:
    """The formats that pydantic writes for paths and secrets hold no text back."""
    parameters = {"properties": {"city": {"type": "string", "format": "path"}}, "required": ["city"]}
    rules = CallRules(tools=(replace(WEATHER, parameters=parameters, is_strict=True),), must_call=True)
    grammar = TOOL_FORMATS[name].grammar(rules, rig.vocabulary)

    assert rig.allows(grammar, CALLS[name] % '{"city": "/a b"}')
    assert not rig.allows(grammar, CALLS[name] % '{"city": 5}')


@pytest.mark.parametrize("name", CALLS)
def test_patterns_that_no_grammar_follows_are_left_out(rig: GrammarRig, name: str) -> None:
    """Patterns that pydantic writes for Decimal, and zod for mail addresses, must not make a tool useless."""
    parameters = {
        "properties": {
            "city": {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+$", "maxLength": 8},
            "days": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
            "more": {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}, "^y$": {"type": "null"}}},
        }
    }
    rules = CallRules(tools=(replace(WEATHER, parameters=parameters),), must_call=True)
    grammar = TOOL_FORMATS[name].grammar(rules, rig.vocabulary)

    assert rig.allows(grammar, CALLS[name] % '{"city": "Paris", "days": "1.5", "more": {"a": "b", "y": null}}')
    assert not rig.allows(grammar, CALLS[name] % '{"city": 5}')
    assert not rig.allows(grammar, CALLS[name] % '{"city": "Parisparis"}')
    assert not rig.allows(grammar, CALLS[name] % '{"more": {"y": 5}}')


@pytest.mark.parametrize("name", TWO)
def test_one_call_or_several(rig: GrammarRig, name: str) -> None:
    single = CallRules(tools=(WEATHER, STOP), must_call=True, may_call_many=False)
    at_most_one = CallRules(tools=(WEATHER, STOP), may_call_many=False)

    assert rig.allows(TOOL_FORMATS[name].grammar(REQUIRED, rig.vocabulary), TWO[name])
    assert rig.allows(TOOL_FORMATS[name].grammar(ANY, rig.vocabulary), TWO[name])
    assert not rig.allows(TOOL_FORMATS[name].grammar(single, rig.vocabulary), TWO[name])
    assert not rig.allows(TOOL_FORMATS[name].grammar(at_most_one, rig.vocabulary), TWO[name])


@pytest.mark.parametrize("name", CALLS)
def test_named_tools_alone_are_called(rig: GrammarRig, name: str) -> None:
    grammar = TOOL_FORMATS[name].grammar(ONE, rig.vocabulary)
    stop = (CALLS[name] % "{}").replace("get_weather", "stop")

    assert rig.allows(grammar, stop)
    assert not rig.allows(grammar, stop.replace("{}", '{"x": 1}'))
    assert not rig.allows(grammar, CALLS[name] % PARIS)


@pytest.mark.parametrize("name", CALLS)
def test_free_answers_say_anything_but_calls_that_do_not_fit(rig: GrammarRig, name: str) -> None:
    grammar = TOOL_FORMATS[name].grammar(ANY, rig.vocabulary)

    assert rig.allows(grammar, ANSWERS[name])
    assert rig.allows(grammar, CALLS[name] % PARIS)
    assert not rig.allows(grammar, CALLS[name] % '{"city": 5}')


def test_text_may_stand_before_calls(rig: GrammarRig) -> None:
    for name in ("hermes", "mistral", "mistral_args"):
        grammar = TOOL_FORMATS[name].grammar(ANY, rig.vocabulary)
        assert rig.allows(grammar, f"Let me see. {CALLS[name] % PARIS}"), name
        assert not rig.allows(grammar, "Let me see. " + CALLS[name] % '{"days": 1}'), name


@pytest.mark.parametrize("name", CALLS)
def test_answers_are_calls_or_have_their_form(rig: GrammarRig, name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    calls = tool_format.grammar(replace(ANY, has_form=True), rig.vocabulary)
    head = ANSWERS[name].removesuffix("It is 5 < 7.")
    grammars = {
        form: calls_or_form(calls, tool_format.answer_head, made.text, rig.vocabulary).text
        for form, made in (("schema", json_schema_grammar(FORM)), ("choice", choice_grammar(["yes", "no"])))
    }

    for grammar in grammars.values():
        assert rig.allows(grammar, CALLS[name] % PARIS)
        assert not rig.allows(grammar, CALLS[name] % '{"days": 1}')
        assert not rig.allows(grammar, f"{head}anything")
    assert rig.allows(grammars["choice"], f"{head}yes")
    for fit in ('{"name": "get_weather"}', '{"city":"Paris", "name": "x"}', '{ "name": "stop" }'):
        assert rig.allows(grammars["schema"], head + fit), fit
    assert not rig.allows(grammars["schema"], f'{head}{{"name": 5}}')


def test_a_form_is_behind_thinking_too(rig: GrammarRig) -> None:
    hermes, tags = TOOL_FORMATS["hermes"], GrammarRig(special=(*SPECIAL, "<think>", "</think>"))
    calls = hermes.grammar(replace(ANY, has_form=True), tags.vocabulary)
    mixed = calls_or_form(calls, hermes.answer_head, choice_grammar(["yes"]).text, tags.vocabulary).text
    answer = AnswerGrammar(text=mixed, names_channel=True)
    grammar = REASONING_FORMATS["think"].grammar(
        answer, tags.vocabulary, opening=Opening.FREE, max_thinking_tokens=None
    )

    assert tags.allows(grammar, "<think>So.</think>yes")
    assert tags.allows(grammar, f"<think>So.</think>{CALLS['hermes'] % PARIS}")
    assert not tags.allows(grammar, "<think>So.</think>no")


def test_answers_begin_behind_thinking(rig: GrammarRig) -> None:
    thinking = REASONING_FORMATS["think"]
    required = AnswerGrammar(text=TOOL_FORMATS["hermes"].grammar(REQUIRED, rig.vocabulary), names_channel=True)
    call = CALLS["hermes"] % PARIS
    tags = GrammarRig(special=(*SPECIAL, "<think>", "</think>")) if rig is RIGS["special tokens"] else rig
    if tags is not rig:
        required = AnswerGrammar(text=TOOL_FORMATS["hermes"].grammar(REQUIRED, tags.vocabulary))

    free = thinking.grammar(required, tags.vocabulary, opening=Opening.FREE, max_thinking_tokens=None)
    begun = thinking.grammar(required, tags.vocabulary, opening=Opening.OPEN, max_thinking_tokens=None)
    closed = thinking.grammar(required, tags.vocabulary, opening=Opening.CLOSED, max_thinking_tokens=None)

    assert tags.allows(free, call)
    assert tags.allows(free, f"<think>\nI may say anything.\n</think>\n\n{call}")
    assert not tags.allows(free, "<think>I may say anything.</think>No call.")
    assert tags.allows(begun, f"anything</think>{call}")
    assert not tags.allows(begun, call)
    assert tags.allows(closed, call)
    assert not tags.allows(closed, f"<think>x</think>{call}")


def test_thinking_ends_with_its_budget(rig: GrammarRig) -> None:
    answer = AnswerGrammar(text=f"start: TEXT\n{TEXT_RULE}")
    tags = GrammarRig(special=("<think>", "</think>"))
    think = REASONING_FORMATS["think"]

    grammar = think.grammar(answer, tags.vocabulary, opening=Opening.OPEN, max_thinking_tokens=4)
    assert tags.allows(grammar, "a</think>the answer is as long as it likes to be")
    assert not tags.allows(grammar, "1 2 3 4 5 6 7 8 9</think>")
    assert tags.forced(grammar, "1234").startswith("</think>")
    none_at_all = think.grammar(answer, tags.vocabulary, opening=Opening.OPEN, max_thinking_tokens=0)
    assert tags.forced(none_at_all, "").startswith("</think>")
    with pytest.raises(BudgetError, match="no token"):
        think.grammar(answer, GrammarRig().vocabulary, opening=Opening.OPEN, max_thinking_tokens=4)


def test_harmony_names_the_recipient_before_or_behind_the_channel(rig: GrammarRig) -> None:
    grammar = TOOL_FORMATS["harmony"].grammar(REQUIRED, rig.vocabulary)

    for head in ("<|channel|>commentary to=functions.%s ", " to=functions.%s<|channel|>commentary "):
        for constrain in ("<|constrain|>", ""):
            call = f"{head}{constrain}json<|message|>%s"
            assert rig.allows(grammar, call % ("get_weather", PARIS))
            assert not rig.allows(grammar, call % ("get_weather", '{"days": 1}'))
            assert not rig.allows(grammar, call % ("other", "{}"))


def test_harmony_answers_on_the_final_channel(rig: GrammarRig) -> None:
    answer = AnswerGrammar(text='start: "yes" | "no"')
    tags = GrammarRig(special=SPECIAL)
    grammar = REASONING_FORMATS["harmony"].grammar(answer, tags.vocabulary, opening=Opening.FREE, max_thinking_tokens=3)
    final = "<|channel|>final<|message|>"

    assert tags.allows(grammar, f"{final}yes")
    assert tags.allows(grammar, f"<|channel|>analysis<|message|>ab<|end|><|start|>assistant{final}no")
    assert not tags.allows(grammar, f"{final}maybe")
    assert not tags.allows(grammar, f"<|channel|>analysis<|message|>123456<|end|><|start|>assistant{final}no")
