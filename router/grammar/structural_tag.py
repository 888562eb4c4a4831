"""Structural tags: answers composed of texts, documents and tags, some of which are triggered within free text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.grammar.grammar_text import GrammarText
from router.grammar.tag_formats import Place, StructuralTagError, TagFormats, field, text_field

_WRAPPERS: Final = frozenset({"type", "format"})
_OLDER: Final = frozenset({"type", "structures", "triggers"})


def structural_tag_grammar(tag: Mapping[str, Any]) -> GrammarText:
    """The grammar of a structural tag in either of the two forms that vLLM takes.

    The older form has ``structures`` of begin, schema and end, and ``triggers``. The newer one is XGrammar's: a
    ``format``, in which other formats can be nested.

    Source: the formats of XGrammar's structural tags (Dong et al., XGrammar, MLSys 2025), whose meaning is kept.

    Raises:
        StructuralTagError: The tag has neither form; the message names the place.
    """
    formats = TagFormats()
    if tag.get("format") is not None:
        _refuse_others(tag, _WRAPPERS)
        term = formats.term(tag["format"], Place("format"), ends=())
    else:
        _refuse_others(tag, _OLDER)
        term = formats.term(_newer(tag), Place(""), ends=())
    return formats.grammar(term)


def _refuse_others(tag: Mapping[str, Any], known: frozenset[str]) -> None:
    if others := sorted(name for name in tag.keys() - known if tag[name]):
        raise StructuralTagError(f"{others[0]} is not supported: leave it out")


def _newer(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older form to the newer one."""
    triggers: Sequence[Any] = field(tag, "triggers", list, Place(""))
    structures: Sequence[Any] = field(tag, "structures", list, Place(""))
    tags = []
    for index, item in enumerate(structures):
        place = Place("structures").of(index)
        schema = item.get("schema") if isinstance(item, Mapping) else None
        if not isinstance(schema, Mapping):
            raise StructuralTagError(f"{place}.schema must be a JSON schema")
        tags.append(
            {
                "begin": text_field(item, "begin", place),
                "content": {"type": "json_schema", "json_schema": schema},
                "end": text_field(item, "end", place),
            }
        )
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}
