"""Derives from a chat's body how its answer is parsed, and the grammar that the answer must match."""

from __future__ import annotations

from dataclasses import replace

from router.api.bodies.chat_body import ChatBody
from router.api.bodies.tools_body import call_rules
from router.api.parameters.answer_grammar import grammar_names
from router.errors import InvalidRequestError
from router.grammar.checker import Asker, GrammarCostError
from router.grammar.grammar_text import GrammarText, lark_grammar
from router.grammar.lark import TEXT_RULE
from router.service import RouterService
from router.tools.lark import Vocabulary, arguments_schema, calls_or_form
from router.tools.reasoning import AnswerGrammar, BudgetError
from router.tools.tool import CallRules
from router.tools.tool_format import ToolFormat, ToolSchemaError
from router.tools.turn_reader import TurnRules

_ANY_ANSWER = f"start: TEXT\n{TEXT_RULE}"


def chosen_tools(service: RouterService, body: ChatBody) -> CallRules | None:
    """What the answer may do with the body's tools; None if it may call none.

    Raises:
        InvalidRequestError: The tools, or ``tool_choice``, cannot be followed.
    """
    rules = call_rules(body.tools or (), body.tool_choice, is_parallel=body.parallel_tool_calls)
    if rules is not None and service.tool_format is None:
        raise InvalidRequestError(
            "this model's chat template does not support tools; if the model itself knows a format of tool calls, the "
            "operator can set it as router.tool_format",
            code="unsupported_parameter",
            param="tools",
        )
    return rules


def turn_rules(service: RouterService, calls: CallRules | None, prompt: str) -> TurnRules | None:
    """How to parse answers to a rendered prompt; None if all their text is content."""
    reasoning = service.reasoning_format
    if calls is None and reasoning is None:
        return None
    rules = TurnRules(tools=service.tool_format, calls=calls)
    if reasoning is None:
        return rules
    return TurnRules(reasoning=reasoning, opening=reasoning.opening(prompt), tools=rules.tools, calls=calls)


async def turn_grammar(
    service: RouterService, body: ChatBody, rules: TurnRules | None, asker: Asker, *, answer: str | None = None
) -> str | None:
    """The grammar of a whole answer: thinking, then calls or a text of the grammar ``answer``; None for any text.

    If tools must be called, there is no other answer, and ``answer`` has no effect.

    Raises:
        InvalidRequestError: The tools cannot be followed, or the thinking cannot be bounded.
    """
    vocabulary = service.tokenizer
    budget = body.thinking_token_budget
    reasoning = None if rules is None else rules.reasoning
    if budget is not None and reasoning is None:
        raise _refusal("this model does not reason before it answers: leave it out", "thinking_token_budget")
    calls = None
    if rules is not None and rules.calls is not None and rules.tools is not None:
        has_form = answer is not None and not rules.calls.must_call
        written = _written(body, rules.tools, replace(rules.calls, has_form=has_form), vocabulary)
        calls = await _checked(service, body, rules.calls, written, asker)
        if answer is not None and has_form:
            mixed = calls_or_form(written, rules.tools.answer_head, answer, vocabulary)
            calls = await service.grammars.check(mixed, param="tools", asker=asker)
    text = calls or answer or (_ANY_ANSWER if budget is not None else None)
    if text is None or reasoning is None or rules is None:
        return text
    try:
        return reasoning.grammar(
            AnswerGrammar(text=text, names_channel=calls is not None),
            vocabulary,
            opening=rules.opening,
            max_thinking_tokens=budget,
        )
    except BudgetError as error:
        raise _refusal(f"{error}: leave it out", "thinking_token_budget") from error


def grammar_param(body: ChatBody, rules: TurnRules | None) -> str | None:
    """The parameter to blame if a worker cannot follow the whole answer's grammar; None if there is no grammar."""
    calls = None if rules is None else rules.calls
    names = [] if calls is not None and calls.must_call else grammar_names(body)
    if names or calls is not None:
        return next(iter(names), "tools")
    return None if body.thinking_token_budget is None else "thinking_token_budget"


def _written(body: ChatBody, tool_format: ToolFormat, rules: CallRules, vocabulary: Vocabulary) -> str:
    try:
        return tool_format.grammar(rules, vocabulary)
    except ToolSchemaError as error:
        param = f"{_place_of(body, error.tool)}{error.place}"
        raise _refusal(error.reason, param) from error


def _place_of(body: ChatBody, name: str) -> str:
    """The place in the body of the schema of a tool's arguments."""
    [index] = [index for index, tool in enumerate(body.tools or ()) if tool.function.name == name]
    return f"tools.{index}.function.parameters"


async def _checked(service: RouterService, body: ChatBody, rules: CallRules, written: str, asker: Asker) -> str:
    """Check the grammar of calls; an error in a tool's schema names its place."""
    try:
        return await service.grammars.check(lark_grammar(written), param="tools", asker=asker)
    except GrammarCostError:
        raise  # each tool could take as long
    except InvalidRequestError:
        for tool in rules.tools:
            schema = arguments_schema(tool)
            alone = GrammarText(({"json_schema": schema},), schema)
            await service.grammars.check(alone, param=_place_of(body, tool.name), asker=asker)
        raise


def _refusal(reason: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(f"the parameter '{param}' is invalid: {reason}", code="invalid_parameter", param=param)
