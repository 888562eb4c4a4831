"""Translates the JSON schema of a tool's arguments to a grammar of Gemma's notation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import llguidance

from router.grammar.lark import literal
from router.tools.formats.gemma_schema import checked_schema
from router.tools.lark import followed_parameters
from router.tools.tool import Tool
from router.tools.tool_format import ToolSchemaError

_SILENT: Final = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated"}
)
_KEYWORDS: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_KEY: Final = re.compile(r"[^\s:,{}\[\]<>\"]+")
_ANY_KEY: Final = r'/[^\s:,{}\[\]<>"]+/'


class GemmaGrammar:
    """The rules of one grammar. Properties are in the templates' order: sorted, ignoring case."""

    def __init__(self, quote: str, quoted: str) -> None:
        """``quote``: the term for the strings' marker. ``quoted``: the rule of that name, a string and its marker."""
        self._quote = quote
        self.rules: list[str] = [quoted]
        self._is_strict = False
        self._root: Mapping[str, Any] = {}
        self._known: dict[str, str] = {}
        self._any: str | None = None

    def arguments(self, tool: Tool) -> str:
        """The term for the arguments of a tool.

        Raises:
            ToolSchemaError: The schema has something that this notation, or a strict grammar, cannot follow.
        """
        self._root = {"type": "object", **followed_parameters(tool)}
        self._is_strict, self._known = tool.is_strict, {}
        try:
            return self._term(self._root, "")
        except ToolSchemaError as error:
            raise ToolSchemaError(error.reason, place=error.place, tool=tool.name) from None
        except RecursionError:
            raise ToolSchemaError("the schemas are nested too deeply", tool=tool.name) from None

    def _rule(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _term(self, schema: object, place: str) -> str:
        if schema is True:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ToolSchemaError(f"no value can match the schema {schema!r}", place=place)
        schema = checked_schema(schema, place)
        if not schema:
            return self._anything()
        if "$ref" in schema:
            return self._referred(schema["$ref"], place)
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(" | ".join(self._written(value) for value in values))
        for key in ("anyOf", "oneOf", "allOf"):
            if key in schema:
                return self._composed(schema[key], key, place)
        kinds = schema.get("type", self._implied(schema))
        names = [kinds] if isinstance(kinds, str) else list(kinds)
        self._check_keywords(schema, names, place)
        return self._rule(" | ".join(self._of_type(kind, schema, place) for kind in names))

    def _composed(self, parts: Sequence[object], key: str, place: str) -> str:
        if key == "allOf" and len(parts) > 1:
            raise ToolSchemaError("allOf of several schemas is not supported for this model", place=place)
        return self._rule(" | ".join(self._term(part, f"{place}.{key}.{index}") for index, part in enumerate(parts)))

    def _check_keywords(self, schema: Mapping[str, Any], kinds: Sequence[str], place: str) -> None:
        if unknown := [kind for kind in kinds if kind not in _KEYWORDS]:
            raise ToolSchemaError(f"there is no type {unknown[0]!r}", place=place)
        known = _SILENT.union({"type"}, *(_KEYWORDS[kind] for kind in kinds))
        if self._is_strict and (others := sorted(schema.keys() - known)):
            raise ToolSchemaError(f"{others[0]!r} cannot be followed for this model: leave strict out", place=place)

    @staticmethod
    def _implied(schema: Mapping[str, Any]) -> Sequence[str]:
        implied = [kind for kind in ("object", "array", "string", "number") if not _KEYWORDS[kind].isdisjoint(schema)]
        return implied or list(_KEYWORDS)

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: str) -> str:
        match kind:
            case "object":
                return self._object(schema, place)
            case "array":
                return self._array(schema, place)
            case "string":
                return self._text(schema)
            case "integer" | "number":
                bounds = {key: schema[key] for key in _KEYWORDS[kind] if key in schema}
                return f"%json {json.dumps({'type': kind, **bounds})}"
            case "boolean":
                return '"true" | "false"'
            case _:
                return '"null"'

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        if not properties:
            if others is False or "properties" in schema:
                return '"{" "}"'
            value = self._term(others, f"{place}.additionalProperties")
            return f'"{{" ({_ANY_KEY} ":" {value} ("," {_ANY_KEY} ":" {value})*)? "}}"'
        required = frozenset(schema.get("required", ()))
        names = sorted(properties, key=str.lower)
        pairs = [self._pair(name, properties[name], f"{place}.properties.{name}") for name in names]
        behind = '"}"'
        firsts: list[str] = []
        for name, pair in reversed(list(zip(names, pairs, strict=True))):
            if name in required:
                firsts = []
            firsts.append(f"{pair} {behind}")
            behind = self._rule(f'("," {pair}){"" if name in required else "?"} {behind}')
        if required.isdisjoint(names):
            firsts.append('"}"')
        return f'"{{" ({" | ".join(firsts)})'

    def _pair(self, name: str, schema: object, place: str) -> str:
        if not _KEY.fullmatch(name):
            raise ToolSchemaError(f"{name!r} cannot be written as a name of a parameter for this model", place=place)
        return self._rule(f"{literal(f'{name}:')} {self._term(schema, place)}")

    def _array(self, schema: Mapping[str, Any], place: str) -> str:
        item = self._term(schema.get("items", True), f"{place}.items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){bounds}'
        return f'"[" ({some}){"" if least else "?"} "]"'

    def _text(self, schema: Mapping[str, Any]) -> str:
        pattern = schema.get("pattern")
        if pattern is None and not {"minLength", "maxLength"} & schema.keys():
            return f"{self._quote} quoted"
        if pattern is None:
            bounds = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
            return f"{self._quote} /(.|\\n){bounds}/ {self._quote}"
        begin = "" if pattern.startswith("^") else "(.|\\n)*"
        end = "" if pattern.endswith("$") else "(.|\\n)*"
        inner = llguidance.regex_to_lark(pattern.removeprefix("^").removesuffix("$"), "dws")
        return f"{self._quote} /{begin}({inner}){end}/ {self._quote}"

    def _referred(self, pointer: object, place: str) -> str:
        """The rule for the target of a pointer, which may be recursive."""
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise ToolSchemaError(f"the reference {pointer!r} does not point into the schema", place=place)
        if pointer not in self._known:
            name = self._known[pointer] = f"ref{len(self.rules)}_{len(self._known)}"
            target: object = self._root
            for part in pointer.removeprefix("#").split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(target, Mapping) or key not in target:
                    raise ToolSchemaError(f"the reference {pointer!r} points to nothing", place=place)
                target = target[key]
            self.rules.append(f"{name}: {self._term(target, pointer.removeprefix('#').replace('/', '.'))}")
        return self._known[pointer]

    def _anything(self) -> str:
        if self._any is None:
            self._any = "anything"
            kinds = (self._of_type(kind, {}, "") for kind in ("string", "number", "boolean", "null", "array", "object"))
            self.rules.append(f"anything: {' | '.join(kinds)}")
        return self._any

    def _written(self, value: object) -> str:
        """The term for exactly this value."""
        match value:
            case str():
                return f"{self._quote} {literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
            case Mapping():
                names = sorted(value, key=str.lower)
                pairs = [f"{literal(f'{name}:')} {self._written(value[name])}" for name in names]
                return " ".join(['"{"', ' "," '.join(pairs), '"}"'])
            case list():
                return " ".join(['"["', ' "," '.join(map(self._written, value)), '"]"'])
            case _:
                return literal(json.dumps(value))
