"""Translates the formats of a structural tag to rules in llguidance's dialect of Lark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from engine.contract.grammar import MAX_GRAMMAR_BYTES
from router.grammar.grammar_text import GrammarText, grammar_part, json_schema_grammar, regex_text
from router.grammar.lark import TEXT_RULE, literal

MAX_NUM_PARTS: Final = 256
"""Maximum length of one list of tags, triggers or elements."""

MAX_DEPTH: Final = 32
MAX_REPEATS: Final = 10_000

Ends = tuple[str, ...] | None
"""What follows a format: one of these texts; empty: the answer's end; None: some other format."""

T = TypeVar("T")


class StructuralTagError(ValueError):
    """A structural tag that is not supported; the message names the place."""


class Place(str):
    """A position in the tag, such as ``format.tags.0``."""

    __slots__ = ()

    def of(self, name: object) -> Place:
        """A place within it."""
        return Place(f"{self}.{name}" if self else str(name))


def field(item: Mapping[str, Any], name: str, kind: type[T], place: Place) -> T:
    """A field of type ``kind``; lists must not be empty, and are bounded."""
    value = item.get(name)
    if not isinstance(value, kind):
        raise StructuralTagError(f"{place.of(name)} must be a {kind.__name__}, got {value!r}")
    if isinstance(value, list) and not 1 <= len(value) <= MAX_NUM_PARTS:
        raise StructuralTagError(f"{place.of(name)} must be a list of 1 to {MAX_NUM_PARTS} entries")
    return value


def text_field(item: Mapping[str, Any], name: str, place: Place, *, may_be_empty: bool = True) -> str:
    """A field that is a text."""
    value = item.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise StructuralTagError(f"{place.of(name)} must be a text, got {value!r}")
    return value


class TagFormats:
    """Collects the rules of one grammar. Each format becomes a term, given what is known to follow it.

    Unbounded text ends at the first of the texts that follow it, or with the answer. If neither is known, for example
    in the middle of a sequence, such text is refused.
    """

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._parts: list[Mapping[str, object]] = []
        self._depth = 0
        self._terms: Final[dict[str, Callable[[Mapping[str, Any], Place, Ends], str]]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "grammar": self._grammar,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, term: str) -> GrammarText:
        """The grammar whose answers match this term."""
        return GrammarText(({"lark_grammar": "\n".join([f"start: {term}", *self._rules, TEXT_RULE])}, *self._parts))

    def term(self, item: object, place: Place, *, ends: Ends) -> str:
        """The term for a format followed by one of its ends.

        Raises:
            StructuralTagError: It is no format, or an unsupported one.
        """
        if not isinstance(item, Mapping):
            raise StructuralTagError(f"{place} must be an object, got {item!r}")
        kind = item.get("type")
        make = self._terms.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise StructuralTagError(f"{place}.type {kind!r} is not supported; supported: {', '.join(self._terms)}")
        if self._depth >= MAX_DEPTH:
            raise StructuralTagError(f"{place}: formats are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        made = make(item, place, ends)
        self._depth -= 1
        return made

    # ---- single texts

    def _const_string(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "value")
        return _followed(literal(text_field(item, "value", place, may_be_empty=False)), ends)

    def _json_schema(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "json_schema", style="json")
        schema = item.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise StructuralTagError(f"{place.of('json_schema')} must be a JSON schema, got {schema!r}")
        return _followed(self._part(json_schema_grammar(schema).parts[0]), ends)

    def _grammar(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "grammar")
        text, inside = text_field(item, "grammar", place, may_be_empty=False), place.of("grammar")
        if len(text) > MAX_GRAMMAR_BYTES:
            raise StructuralTagError(f"{inside} has {len(text)} characters, the limit is {MAX_GRAMMAR_BYTES}")
        return _followed(self._part(grammar_part(text, place=inside)), ends)

    def _regex(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "pattern")
        pattern = regex_text(text_field(item, "pattern", place, may_be_empty=False))
        return _followed(self._part({"lark_grammar": f"start: /{pattern}/"}), ends)

    def _any_text(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "excludes", "max_chars")
        text, max_chars = self._free_text(item, place), item.get("max_chars")
        if max_chars is not None:
            if isinstance(max_chars, bool) or not isinstance(max_chars, int) or not 0 <= max_chars <= MAX_REPEATS:
                raise StructuralTagError(f"{place.of('max_chars')} must be 0 to {MAX_REPEATS}, got {max_chars!r}")
            text = self._terminal(f"/(.|\\n){{0,{max_chars}}}/ & {text}")
        return self._rule(text) if ends == () else self._until(text, ends, place)

    # ---- formats of formats

    def _sequence(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "elements")
        elements = field(item, "elements", list, place)
        last = len(elements) - 1
        places = [place.of("elements").of(index) for index in range(len(elements))]
        terms = [
            self.term(element, places[index], ends=ends if index == last else None)
            for index, element in enumerate(elements)
        ]
        return self._rule(" ".join(terms))

    def _or(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "elements")
        elements = field(item, "elements", list, place)
        inside = place.of("elements")
        terms = [self.term(element, inside.of(index), ends=ends) for index, element in enumerate(elements)]
        return self._rule(" | ".join(terms))

    def _repeated(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        kind = item["type"]
        _know(item, place, "content", *(("min", "max") if kind == "repeat" else ()))
        content = self.term(item.get("content"), place.of("content"), ends=None)
        count = {"optional": "?", "star": "*", "plus": "+"}.get(kind) or _count(item, place)
        return _followed(f"({content}){count}", ends)

    def _tag(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        return f"{literal(_begin(item, place))} {self._tag_body(item, place, ends)}"

    def _tag_body(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        """The term for the part of a tag after its begin."""
        _know(item, place, "begin", "content", "end")
        end = item.get("end", "")
        own: list[Any] = end if isinstance(end, list) and end else [end]
        if not all(isinstance(text, str) for text in own) or (len(own) > 1 and "" in own):
            raise StructuralTagError(f"{place.of('end')} must be a text or texts, got {end!r}")
        content = item.get("content")
        if own == [""]:
            return self.term(content, place.of("content"), ends=ends)
        return _followed(self.term(content, place.of("content"), ends=tuple(own)), ends)

    def _tags_with_separator(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "tags", "separator", "at_least_one", "stop_after_first")
        separator = text_field(item, "separator", place)
        tags = self._rule(" | ".join(self._tag(tag, at, None) for tag, at in _tags(item, place)))
        more = "" if item.get("stop_after_first") else f"({literal(separator) if separator else ''} {tags})*"
        whole = f"({tags} {more})"
        return _followed(whole if item.get("at_least_one") else f"{whole}?", ends)

    def _triggered_tags(self, item: Mapping[str, Any], place: Place, ends: Ends) -> str:
        _know(item, place, "triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        triggers = field(item, "triggers", list, place)
        bodies: dict[str, list[str]] = {}
        whole: list[str] = []
        for tag, at in _tags(item, place):
            begin, body = _begin(tag, at), self._rule(self._tag_body(tag, at, None))
            trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), "")
            if not trigger:
                raise StructuralTagError(f"no trigger begins the tag {begin!r}: add one to 'triggers'")
            rest = begin[len(trigger) :]
            bodies.setdefault(trigger, []).append(f"{literal(rest) if rest else ''} {body}")
            whole.append(f"{literal(begin)} {body}")
        text = self._free_text(item, place)
        found = " | ".join(
            f"{self._until(text, (trigger,), place)} ({' | '.join(of)})" for trigger, of in bodies.items()
        )
        rest_of_text = self._rule(text) if ends == () else self._until(text, ends, place)
        first = self._rule(" | ".join(whole)) if item.get("at_least_one") else ""
        if item.get("stop_after_first"):
            found_one = first or self._rule(found)
            return _followed(found_one, ends) if first else f"({_followed(found_one, ends)} | {rest_of_text})"
        return f"{first} ({found})* {rest_of_text}"

    # ---- rules

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _free_text(self, item: Mapping[str, Any], place: Place) -> str:
        """The terminal for any text that contains none of the excluded texts."""
        excluded = item.get("excludes") or []
        if not isinstance(excluded, list) or not all(isinstance(text, str) and text for text in excluded):
            raise StructuralTagError(f"{place.of('excludes')} must be texts, got {excluded!r}")
        if len(excluded) > MAX_NUM_PARTS:
            raise StructuralTagError(f"{place.of('excludes')} must be at most {MAX_NUM_PARTS} texts")
        if not excluded:
            return "TEXT"
        words = "|".join("".join(map(_escaped, text)) for text in excluded)
        return self._terminal(f"/(.|\\n)*/ & ~/(.|\\n)*({words})(.|\\n)*/")

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _part(self, part: Mapping[str, object]) -> str:
        name = f"g{len(self._parts)}"
        self._parts.append({**part, "name": name})
        return f"@{name}"

    def _until(self, text: str, ends: Ends, place: Place) -> str:
        """The term for text up to the first of its ends, including that end."""
        if not ends:
            raise StructuralTagError(
                f"{place} has no recognizable end: put it last or into a tag with an end, or use a regex with an end"
            )
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {text} ({' | '.join(map(literal, ends))})")
        return name


def _followed(term: str, ends: Ends) -> str:
    return f"{term} ({' | '.join(map(literal, ends))})" if ends else term


def _escaped(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def _tags(item: Mapping[str, Any], place: Place) -> Sequence[tuple[Mapping[str, Any], Place]]:
    tags = [(tag, place.of("tags").of(index)) for index, tag in enumerate(field(item, "tags", list, place))]
    for tag, at in tags:
        if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
            raise StructuralTagError(f"{at} must be a tag, got {tag!r}")
    return tags


def _begin(tag: Mapping[str, Any], place: Place) -> str:
    return text_field(tag, "begin", place, may_be_empty=False)


def _count(item: Mapping[str, Any], place: Place) -> str:
    least, most = field(item, "min", int, place), field(item, "max", int, place)
    if not 0 <= least <= MAX_REPEATS or not (most == -1 or max(least, 1) <= most <= MAX_REPEATS):
        bounds = f"0 to {MAX_REPEATS}, or -1 for an unlimited max"
        raise StructuralTagError(f"{place}: min and max must be {bounds}, got {least} and {most}")
    return f"{{{least},{'' if most == -1 else most}}}"


def _know(item: Mapping[str, Any], place: Place, *names: str, **only: str) -> None:
    """Refuse unknown fields, unless their value means nothing."""
    for name, value in item.items():
        if name == "type" or name in names or not value or only.get(name) == value:
            continue
        raise StructuralTagError(f"{place.of(name)} is not supported: leave it out")
