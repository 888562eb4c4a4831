"""The fields of a body that logits processors declare."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from pydantic import BaseModel, create_model

from engine.contract.messages import SamplingParams
from engine.contract.request_fields import request_fields

BodyT = TypeVar("BodyT", bound=BaseModel)


def with_fields_of(params: type[SamplingParams], body: type[BodyT]) -> type[BodyT]:
    """The body class with all fields that ``params`` declare for requests; the class itself if it has them already.

    None is the same as not given, as in all bodies.
    """
    known: Any = params  # typed Any for the cache, whose types reject classes that define their own hash
    return cast("type[BodyT]", _extended(known, body))


@functools.cache
def _extended(params: Any, body: type[BaseModel]) -> type[BaseModel]:
    added: dict[str, Any] = {
        name: (field.schema | None, None)
        for name, field in request_fields(params).items()
        if name not in body.model_fields
    }
    if not added:
        return body
    extended = create_model(body.__name__, __base__=body, __module__=body.__module__, **added)
    extended.params = params  # type: ignore[attr-defined]
    return extended
