"""Makes a checked grammar from a body's parameters about the shape of its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.api.bodies.answer_shape import ResponseFormat, StructuredOutputs
from router.api.bodies.generate_body import GenerateBody
from router.api.http.guard import owner_of
from router.errors import InvalidRequestError
from router.grammar.checker import Asker
from router.grammar.grammar_text import (
    GrammarText,
    choice_grammar,
    grammar_part,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from router.grammar.structural_tag import structural_tag_grammar
from router.grammar.tag_formats import StructuralTagError
from router.service import RouterService

Wish = tuple[str, GrammarText]
"""A grammar, and its place in the body."""


def asker_of(request: Request) -> Asker:
    """Who asks for the grammars of a request whose body has been read."""
    return Asker(owner_of(request.scope), partial(_has_left, request.receive))


async def _has_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_grammar(service: RouterService, body: GenerateBody, asker: Asker) -> str | None:
    """The checked grammar that a body asks for, as workers take it; None if it asks for none.

    Raises:
        InvalidRequestError: The body asks for several grammars, or for one that cannot be followed.
    """
    wish = grammar_wish(body)
    return None if wish is None else await service.grammars.check(wish[1], param=wish[0], asker=asker)


def grammar_names(body: GenerateBody) -> list[str]:
    """The parameters of a body that define the shape of its answers; more than one is refused later."""
    return [name for ask in (_by_format, _by_outputs, _by_older_names) for name, _ in ask(body)]


def grammar_wish(body: GenerateBody) -> Wish | None:
    """The grammar that a body asks for, not checked yet.

    Raises:
        InvalidRequestError: Several parameters ask for one, or one that makes no grammar.
    """
    wishes = [wish for ask in (_by_format, _by_outputs, _by_older_names) for wish in ask(body)]
    if len(wishes) > 1:
        names = ", ".join(name for name, _ in wishes)
        raise _refusal(wishes[1][0], f"several parameters give the answer's format: {names}; send only one of them")
    if not wishes:
        return None
    name, make = wishes[0]
    try:
        return name, make()
    except StructuralTagError as error:
        raise _refusal(name, f"the parameter '{name}' is invalid: {error}") from error


_Asked = list[tuple[str, Callable[[], GrammarText]]]


def _by_format(body: GenerateBody) -> _Asked:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_schema":
        return [("response_format.json_schema.schema", lambda: _named_schema(asked))]
    if asked.type == "json_object":
        return [("response_format", json_object_grammar)]
    return [("response_format", lambda: structural_tag_grammar(asked.model_dump(exclude_none=True)))]


def _named_schema(asked: ResponseFormat) -> GrammarText:
    assert asked.json_schema is not None
    schema = asked.json_schema.schema_
    return json_object_grammar() if schema is None else json_schema_grammar(schema)


def _by_outputs(body: GenerateBody) -> _Asked:
    asked = body.structured_outputs
    if asked is None:
        return []
    return [(f"structured_outputs.{name}", make) for name, make in _outputs(asked)]


def _outputs(asked: StructuredOutputs) -> _Asked:
    json_, regex, choice, lark, tag = asked.json_, asked.regex, asked.choice, asked.grammar, asked.structural_tag
    if json_ is not None:
        return [("json", lambda: _schema("structured_outputs.json", json_))]
    if asked.json_object:
        return [("json_object", json_object_grammar)]
    if regex is not None:
        return [("regex", lambda: regex_grammar(regex))]
    if choice is not None:
        return [("choice", lambda: choice_grammar(choice))]
    if lark is not None:
        return [("grammar", lambda: GrammarText((grammar_part(lark),)))]
    name = "structured_outputs.structural_tag"
    return [("structural_tag", lambda: structural_tag_grammar(_object(name, tag)))]


def _by_older_names(body: GenerateBody) -> _Asked:
    json_, regex, choice, lark = body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    asked: _Asked = []
    if json_ is not None:
        asked.append(("guided_json", lambda: _schema("guided_json", json_)))
    if regex is not None:
        asked.append(("guided_regex", lambda: regex_grammar(regex)))
    if choice is not None:
        asked.append(("guided_choice", lambda: choice_grammar(choice)))
    if lark is not None:
        asked.append(("guided_grammar", lambda: GrammarText((grammar_part(lark),))))
    return asked


def _schema(name: str, schema: Mapping[str, Any] | bool | str) -> GrammarText:
    if isinstance(schema, bool):
        return json_schema_grammar(schema)
    return json_schema_grammar(_object(name, schema))


def _object(name: str, value: object) -> Mapping[str, Any]:
    """An object, given as such or as JSON text."""
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            limit = f"it has {len(value)} characters, the limit is {MAX_GRAMMAR_BYTES}"
            raise _refusal(name, f"the parameter '{name}' is invalid: {limit}")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _refusal(name, f"the parameter '{name}' is invalid: the text is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise _refusal(name, f"the parameter '{name}' is invalid: it must be an object, got {type(value).__name__}")
    return value


def _refusal(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_parameter", param=name)
