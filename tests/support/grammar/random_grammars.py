"""Random JSON schemas and regexes as people write them: satisfiable, and with finite answers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ["a", "b", "name", 'é "q"', "x-y"]
TEXTS = ["red", "green", 'a "quoted" one', "back\\slash", "", "naïve ☕"]
VALUES = [*TEXTS, 1, 2.5, -3, True, None, [1, "a"], {"k": []}]
PATTERNS = ["^[a-z]{1,4}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "^[A-F0-9]{2,6}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]

_SCALARS: st.SearchStrategy[Schema] = st.one_of(
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 6),
    ),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(FORMATS).map(lambda name: {"type": "string", "format": name}),
    st.builds(
        lambda kind, least, more: {"type": kind, "minimum": least, "maximum": least + more},
        st.sampled_from(["integer", "number"]),
        st.integers(-99, 99),
        st.integers(0, 5000),
    ),
    st.builds(
        lambda least, more: {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + more},
        st.integers(-9, 9),
        st.integers(2, 20),
    ),
    st.sampled_from([2, 5, 10]).map(lambda step: {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": step}),
    st.sampled_from(["integer", "number", "boolean", "null"]).map(lambda kind: {"type": kind}),
    st.lists(st.sampled_from(["null", "integer", "boolean"]), min_size=1, unique=True).map(
        lambda kinds: {"type": kinds}
    ),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if properties:
        schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
    if draw(st.booleans()):
        schema |= {"additionalProperties": draw(inner), "maxProperties": len(properties) + 1}
    return schema


def _containers(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    arrays = st.builds(
        lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": 1}
    )
    unions = st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    return st.one_of(_objects(inner), _objects(inner), arrays, tuples, unions)


@st.composite
def json_schemas(draw: st.DrawFn) -> Schema:
    """JSON schemas of a few levels, some of them with a reference to a definition."""
    schema = draw(st.recursive(_SCALARS, _containers, max_leaves=6))
    if draw(st.integers(0, 3)):
        return schema
    return {
        "$defs": {"item": schema},
        "type": "array",
        "items": {"$ref": "#/$defs/item"},
        "minItems": 1,
        "maxItems": draw(st.integers(1, 3)),
    }


_ATOMS = st.sampled_from(
    [
        "a",
        "Z",
        "7",
        " ",
        "é",
        "/",
        "\\.",
        "\\d",
        "\\w",
        "\\s",
        "[a-f]",
        "[^x-z]",
        "[0-9_]",
        ".",
        "\\+",
        '"',
        "\\\\",
        "-",
    ]
)
_COUNTS = st.sampled_from(["", "", "?", "*", "+", "{2}", "{0,3}", "{1,5}"])


def regexes() -> st.SearchStrategy[str]:
    """Patterns that both Python and llguidance support."""
    pieces = st.builds(lambda atom, count: atom + count, _ATOMS, _COUNTS)

    def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        joined = st.lists(inner, min_size=1, max_size=4).map("".join)
        either = st.lists(joined, min_size=2, max_size=3).map("|".join)
        grouped = st.builds(lambda body, count: f"({body}){count}", either | joined, _COUNTS)
        return joined | grouped | grouped.map(lambda group: f"x{group}")

    return st.recursive(pieces, longer, max_leaves=8).filter(bool)
