"""Makes sections of the configuration file from the settings classes of the other packages, and names their keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic.fields import FieldInfo

SettingsT = TypeVar("SettingsT")

_ALTERNATIVES = frozenset({"kv_cache_bytes", "num_blocks"})


class Section(BaseModel):
    """A part of the configuration file: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Treat a section whose keys are all commented out as empty, and refuse booleans for numbers."""
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if isinstance(value, bool) and _is_number(cls.model_fields.get(name)):
                raise ValueError(f"{name} is {str(value).lower()}: give a number")
        empty = [name for name, value in values.items() if value is None and _is_section(cls.model_fields.get(name))]
        return {**values, **{name: {} for name in empty}} if empty else values

    def explicit(self) -> dict[str, Any]:
        """The keys that the user wrote, with their values."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _is_section(field: FieldInfo | None) -> bool:
    """True for a section that always exists. For other sections null is a value with a meaning."""
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _is_number(field: FieldInfo | None) -> bool:
    kinds = {field.annotation, *get_args(field.annotation)} if field is not None else set()
    return bool(kinds & {int, float}) and bool not in kinds


def section_of(
    name: str,
    settings: type[Any],
    *,
    descriptions: Mapping[str, str],
    omit: Collection[str] = (),
    optional_sections: Mapping[str, type[Section]] = MappingProxyType({}),
) -> type[Section]:
    """Make a section with the fields, types and defaults of a settings dataclass.

    So the dataclass stays the only place with the defaults, and needs no pydantic. Fields that are not in
    ``descriptions`` carry their description in their metadata. ``optional_sections`` are the fields whose value is a
    settings class or None.
    """
    hints = get_type_hints(settings)
    fields: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        if item.name in omit:
            continue
        about = descriptions.get(item.name) or item.metadata.get("description", "")
        keywords: dict[str, Any] = {"description": about}
        if item.default is not dataclasses.MISSING:
            keywords["default"] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            keywords["default_factory"] = item.default_factory
        nested = optional_sections.get(item.name)
        fields[item.name] = (nested | None if nested is not None else hints[item.name], Field(**keywords))
    return create_model(name, __base__=Section, __doc__=settings.__doc__, **fields)


def settings_from(settings: type[SettingsT], *sections: Section, **fixed: object) -> SettingsT:
    """Build the settings from sections and from ``fixed`` values. Later sections override earlier ones.

    The ``_ALTERNATIVES`` are different ways to set the same thing: one of them in a later section replaces any of them
    in an earlier section.

    Raises:
        Exception: Whatever the settings class raises for values that contradict each other.
    """
    values: dict[str, object] = {}
    for section in sections:
        said = section.explicit()
        if any(said.get(name) is not None for name in _ALTERNATIVES):
            values = {name: value for name, value in values.items() if name not in _ALTERNATIVES}
        values.update(said)
    return settings(**{**values, **fixed})


def with_keys(message: str, *places: tuple[str, Section]) -> str:
    """The message with full keys: ``max_num_seqs`` becomes ``decode.scheduler.max_num_seqs`` if it was set there.

    ``places`` are sections with their keys, those that override others first. A setting that no section sets gets the
    key of the last section that has it. A name without an underscore may be an ordinary word, so it only counts as a
    key at the start of the message, as in ``chain: ...``.
    """
    everywhere = {name: f"{key}.{name}" for key, section in places for name in type(section).model_fields}
    given = {name: f"{key}.{name}" for key, section in reversed(places) for name in section.model_fields_set}
    keys = {**everywhere, **given}
    return re.sub(r"^\w+(?=[:.])|(?<![\w.])\w*_\w*", lambda found: keys.get(found[0], found[0]), message)
