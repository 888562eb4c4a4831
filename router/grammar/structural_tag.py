"""``structural_tag``: free text in which whatever begins with a trigger is one of the tags, with content that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import StructTag

from router.grammar.grammar_text import GrammarText, lark_grammar

MAX_NUM_TAGS = 256


class StructuralTagError(ValueError):
    """A structural tag that is not understood; the text names the place."""


def structural_tag_grammar(tag: Mapping[str, Any]) -> GrammarText:
    """The grammar of a structural tag in either of the two forms that vLLM takes.

    The older has ``structures`` of begin, schema and end, and ``triggers``; the newer one a ``format`` of type
    ``triggered_tags`` with ``tags`` whose ``content`` is of type ``json_schema`` or ``grammar``.

    Raises:
        StructuralTagError: It is in neither form.
    """
    form = tag.get("format")
    if form is None:
        triggers, tags = _list(tag, "triggers", ""), _list(tag, "structures", "")
        return _grammar(triggers, [_older_tag(item, index) for index, item in enumerate(tags)])
    if not isinstance(form, Mapping) or form.get("type") != "triggered_tags":
        kind = form.get("type") if isinstance(form, Mapping) else form
        raise StructuralTagError(f"format.type {kind!r} is not supported, only 'triggered_tags' is")
    known = {"type", "triggers", "tags"}
    if others := sorted(name for name in form.keys() - known if form[name]):
        raise StructuralTagError(f"format.{others[0]} is not supported: leave it out")
    triggers, tags = _list(form, "triggers", "format."), _list(form, "tags", "format.")
    return _grammar(triggers, [_newer_tag(item, index) for index, item in enumerate(tags)])


_Tag = tuple[str, dict[str, Any] | str, str]


def _grammar(triggers: Sequence[Any], tags: Sequence[_Tag]) -> GrammarText:
    found: list[StructTag] = []
    for begin, content, end in tags:
        trigger = next((trigger for trigger in triggers if isinstance(trigger, str) and begin.startswith(trigger)), "")
        if not trigger:
            raise StructuralTagError(f"no trigger begins the tag {begin!r}: add one to 'triggers'")
        found.append(StructTag(trigger=trigger, begin=begin, grammar=content, end=end))
    return lark_grammar(StructTag.to_grammar(found, assume_special=False))


def _older_tag(item: Any, index: int) -> _Tag:
    place = f"structures.{index}"
    schema = item.get("schema") if isinstance(item, Mapping) else None
    if not isinstance(schema, Mapping):
        raise StructuralTagError(f"{place}.schema must be a JSON schema")
    return _text(item, "begin", place), dict(schema), _text(item, "end", place)


def _newer_tag(item: Any, index: int) -> _Tag:
    place = f"format.tags.{index}"
    content = item.get("content") if isinstance(item, Mapping) else None
    if not isinstance(content, Mapping):
        raise StructuralTagError(f"{place}.content must be an object")
    kind = content.get("type")
    inner = content.get(kind) if isinstance(kind, str) else None
    if kind == "json_schema" and isinstance(inner, Mapping):
        return _text(item, "begin", place), dict(inner), _text(item, "end", place)
    if kind == "grammar" and isinstance(inner, str):
        return _text(item, "begin", place), inner, _text(item, "end", place)
    raise StructuralTagError(f"{place}.content of type {kind!r} is not supported, only 'json_schema' and 'grammar' are")


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or (name == "begin" and not value):
        raise StructuralTagError(f"{place}.{name} must be a text, got {value!r}")
    return value


def _list(tag: Mapping[str, Any], name: str, place: str) -> list[Any]:
    value = tag.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_NUM_TAGS:
        raise StructuralTagError(f"{place}{name} must be a list of 1 to {MAX_NUM_TAGS} entries")
    return value
