"""Checks the keywords of a JSON schema from a request: null counts as absent, values of a wrong type are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple

from router.tools.tool_format import ToolSchemaError


class _Form(NamedTuple):
    """The required type of a keyword's value, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_COUNT: Final = _Form("a whole number that is not negative", _is_count)
_NUMBER: Final = _Form("a number", _is_number)
_VALUES: Final = _Form("a list of at least one value", lambda value: isinstance(value, list) and bool(value))
_SCHEMAS: Final = _Form("a list of at least one schema", lambda value: isinstance(value, list) and bool(value))

_FORMS: Final[Mapping[str, _Form]] = {
    "type": _Form("a name or a list of names", lambda value: isinstance(value, str) or (_are_names(value) and value)),
    "enum": _VALUES,
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), _SCHEMAS),
    "properties": _Form("an object of schemas", lambda value: isinstance(value, Mapping)),
    "required": _Form("a list of names", _are_names),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    "pattern": _Form("a text", lambda value: isinstance(value, str)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
}

_MAX_TOLD_CHARACTERS: Final = 40


def checked_schema(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The keywords with a value, each of a valid type; counts are converted to integers.

    Raises:
        ToolSchemaError: A keyword has a wrong type; the error names its place.
    """
    said = {name: value for name, value in schema.items() if value is not None or name == "const"}
    for name, value in said.items():
        form = _FORMS.get(name)
        if form is not None and not form.fits(value):
            told = repr(value)[:_MAX_TOLD_CHARACTERS]
            raise ToolSchemaError(f"{name!r} must be {form.words}, got {told}", place=f"{place}.{name}")
        if form is _COUNT:
            said[name] = int(value)
    return said
