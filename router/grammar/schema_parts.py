"""Walks the sub-schemas of a JSON schema, and removes keywords that a grammar cannot or need not enforce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from router.grammar.pattern_reach import can_follow

DEFINITIONS: Final = ("$defs", "definitions")
_BY_NAME: Final = (*DEFINITIONS, "properties", "patternProperties")
_IN_LIST: Final = ("prefixItems", "anyOf", "oneOf", "allOf")
_ALONE: Final = ("items", "additionalProperties", "additionalItems")

FORMATS_OF_ANY_TEXT: Final = frozenset({"binary", "directory-path", "file-path", "password", "path"})
"""Formats that every text satisfies: they only tell programs what the text is for. Pydantic writes them for bytes,
paths and secrets."""


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The direct sub-schemas of a schema, each with its place: ``properties.a``, ``anyOf.0``, ``items``."""
    for key in _BY_NAME:
        if isinstance(group := schema.get(key), Mapping):
            yield from ((f"{key}.{name}", part) for name, part in group.items() if isinstance(part, Mapping))
    for key in _IN_LIST:
        if isinstance(parts := schema.get(key), list):
            yield from ((f"{key}.{index}", part) for index, part in enumerate(parts) if isinstance(part, Mapping))
    for key in _ALONE:
        if isinstance(part := schema.get(key), Mapping):
            yield key, part


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema without the keywords that every document satisfies, but that llguidance refuses.

    These are the formats in :data:`FORMATS_OF_ANY_TEXT`, and ``uniqueItems`` if it is false or an array has at most
    one item. It does not recurse, however deeply schemas are nested.
    """
    whole = dict(schema)
    for copy in _copied_schemas(whole):
        if _is_note_of_format(copy):
            del copy["format"]
        if _is_note_of_uniqueness(copy):
            del copy["uniqueItems"]
    return whole


def without_patterns_beyond_grammars(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema without the regexes that no grammar can follow. It accepts all documents that the schema
    accepts, and more.

    If such a regex restricts an object's property names, the copy allows any names.
    """
    whole = dict(schema)
    for copy in _copied_schemas(whole):
        pattern, by_name = copy.get("pattern"), copy.get("patternProperties")
        if isinstance(pattern, str) and not can_follow(pattern):
            del copy["pattern"]
        if isinstance(by_name, Mapping) and not all(map(can_follow, by_name)):
            copy["patternProperties"] = {name: part for name, part in by_name.items() if can_follow(name)}
            copy["additionalProperties"] = True
    return whole


def _copied_schemas(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all its sub-schemas, replaced in place by copies; the caller may change each one once yielded."""
    waiting = [whole]
    while waiting:
        copy = waiting.pop()
        yield copy
        waiting.extend(_copy_parts(copy))


def _is_note_of_format(schema: Mapping[str, Any]) -> bool:
    said = schema.get("format")
    return isinstance(said, str) and said in FORMATS_OF_ANY_TEXT


def _is_note_of_uniqueness(schema: Mapping[str, Any]) -> bool:
    if schema.get("uniqueItems") is True:
        return schema.get("maxItems") in (0, 1)
    return schema.get("uniqueItems") is False


def _copy_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replace the direct sub-schemas of a schema by copies, and yield these."""
    for key in _BY_NAME:
        if isinstance(group := schema.get(key), Mapping):
            copies = schema[key] = {name: _copied(part) for name, part in group.items()}
            yield from (part for part in copies.values() if isinstance(part, dict))
    for key in _IN_LIST:
        if isinstance(parts := schema.get(key), list):
            schema[key] = [_copied(part) for part in parts]
            yield from (part for part in schema[key] if isinstance(part, dict))
    for key in _ALONE:
        if isinstance(part := schema.get(key), Mapping):
            schema[key] = dict(part)
            yield schema[key]


def _copied(part: object) -> object:
    return dict(part) if isinstance(part, Mapping) else part
