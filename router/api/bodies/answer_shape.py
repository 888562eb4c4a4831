"""What a body says of the shape of its answers: ``response_format`` and ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from router.api.bodies.strict_body import JsonObject, StrictBody

MAX_NUM_CHOICES = 1024
MAX_PATTERN_CHARACTERS = 64 * 1024
MAX_LARK_CHARACTERS = 256 * 1024

Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_NUM_CHOICES, fail_fast=True)]
Lark = Annotated[str, Field(min_length=1, max_length=MAX_LARK_CHARACTERS)]
Schema = JsonObject | bool | str
"""A JSON schema, or its text."""


class JsonSchemaFormat(StrictBody):
    """A JSON schema with its name. Answers always follow it exactly, whatever ``strict`` is."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema")


class ResponseFormat(StrictBody):
    """The answer's format as in OpenAI's API, plus vLLM's type ``structural_tag``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[JsonObject] | None = None
    triggers: list[str] | None = None
    format: JsonObject | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type 'json_schema' and the field 'json_schema' belong together: give both or neither")
        if self.type != "structural_tag" and (self.structures or self.triggers or self.format):
            raise ValueError("'structures', 'triggers' and 'format' belong to the type 'structural_tag'")
        return self


class StructuredOutputs(StrictBody):
    """The answer's format as in vLLM's API: exactly one of these. vLLM's own class also sends other options, unset."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = dict.fromkeys(
        ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend_was_auto"),
        (None, False),
    )

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Lark | None = None
    structural_tag: JsonObject | str | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                "give exactly one of json, json_object, regex, choice, grammar and structural_tag, "
                f"got {len(given)}{': ' + ', '.join(name.rstrip('_') for name in given) if given else ''}"
            )
        return self
