"""Renames parameters in errors, for endpoints that translate their bodies into chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from engine.contract.messages import SamplingParams
from router.api.bodies.chat_body import ChatBody
from router.api.bodies.processor_fields import with_fields_of
from router.api.errors import invalid_body
from router.errors import RouterError


def valid_chat(fields: Mapping[str, Any], *, params: type[SamplingParams]) -> ChatBody:
    """A chat's body from the fields that have a value, including those that ``params`` declare.

    Raises:
        InvalidRequestError: A chat takes no such values.
    """
    try:
        body = with_fields_of(params, ChatBody)
        return body.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise invalid_body(error) from error


@contextmanager
def told_as(names: Mapping[str, str]) -> Iterator[None]:
    """A context in which errors name a chat's parameters as the endpoint calls them.

    Args:
        names: The endpoint's names, by the chat's names. ``function.x`` renames ``x`` of a tool, for endpoints whose
            tools have no ``function``.
    """
    try:
        yield
    except RouterError as error:
        param = (error.param or "").partition(".")[0]
        if param == "tools":
            error.message = _without_function(error.message, names)
            error.param = _without_function(error.param or "", names)
        elif param in names:
            error.message = re.sub(rf"(?<![\w.]){re.escape(param)}(\.[\w.]+)?(?!\w)", names[param], error.message)
            error.param = names[param]
        raise


def own_name(param: str | None, names: Mapping[str, str]) -> str | None:
    """The endpoint's name of a chat's parameter."""
    return None if param is None else names.get(param.partition(".")[0], param)


def _without_function(text: str, names: Mapping[str, str]) -> str:
    def told(match: re.Match[str]) -> str:
        return f"{match[1]}.{names.get(f'function.{match[2]}', match[2])}"

    return re.sub(r"(?<![\w.])(tools\.\d+)\.function\.(\w+)", told, text)
