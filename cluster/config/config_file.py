"""Reads a configuration from a file and from flags. Every mistake becomes one line that names it."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError

from cluster.config.config import BatonConfig

MEANINGS = {
    "model_type": "it must be a mapping of keys to values",
    "model_attributes_type": "it must be a mapping of keys to values",
    "dict_type": "it must be a mapping of keys to values",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
    "path_type": "it must be a path",
    "too_short": "it must not be empty",
    "finite_number": "it must be a finite number",
}
"""Messages in terms of YAML for some of pydantic's error types."""


class ConfigFileError(Exception):
    """A configuration that cannot be used. The message is one line that says where and why."""


class UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that names a key twice; YAML itself would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Look for duplicates among the keys as written, before merges add keys that they may override."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str) -> Any:
    """The content of a YAML file.

    Raises:
        yaml.YAMLError: It is not YAML, a key is given twice, or a value is malformed: 2026-13-01 is not a date.
    """
    try:
        return yaml.load(text, Loader=UniqueKeyLoader)
    except (
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:  # raised by PyYAML's conversions
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


COMMAND_LINE = "the command line"
NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_config(
    path: Path | None,
    flags: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] = NOTHING,
    variables: Mapping[str, str] = NOTHING,
) -> BatonConfig:
    """Read the file at ``path``, if there is one. Flags that are not None override its keys.

    Paths in the file are relative to its folder. ``defaults`` apply to keys that are missing or null. ``variables``
    names the environment variable that each flag came from.

    Raises:
        ConfigFileError: The file is missing or not a YAML mapping, a key is unknown, or a value is invalid.
    """
    values = beside(read_mapping(path), path.absolute().parent) if path is not None else {}
    values.update({key: value for key, value in defaults.items() if values.get(key) is None})
    where = str(path) if path is not None else COMMAND_LINE
    given = {key: value for key, value in flags.items() if value is not None}
    return config_of(values, where=where, flags=given, variables=variables)


def config_of(
    values: Mapping[str, Any],
    *,
    where: str,
    flags: Mapping[str, Any] = NOTHING,
    variables: Mapping[str, str] = NOTHING,
) -> BatonConfig:
    """The configuration with these keys, which ``flags`` override. ``where`` says where the keys were written.

    Raises:
        ConfigFileError: A key is unknown, or a value is invalid.
    """
    try:
        return BatonConfig.model_validate({**values, **flags})
    except ValidationError as error:
        origins = {key: f"the environment variable {variables[key]}" for key in flags if key in variables}
        problems = describe_problems(error, where=where, flags={**dict.fromkeys(flags, COMMAND_LINE), **origins})
        raise ConfigFileError("; ".join(problems)) from error


def beside(values: Mapping[str, Any], folder: Path, model: type[BaseModel] = BatonConfig) -> dict[str, Any]:
    """The keys of a file in ``folder``, with relative paths made absolute."""
    found = dict(values)
    for name, field in model.model_fields.items():
        value, section = found.get(name), section_type(field.annotation)
        if section is not None and isinstance(value, dict):
            found[name] = beside(value, folder, section)
        elif is_path(field.annotation) and isinstance(value, str) and value and not value.startswith("~"):
            found[name] = str(folder / value)
    return found


def is_path(annotation: Any) -> bool:
    """True for the type of a path, or of a path that may be null."""
    return annotation is Path or Path in typing.get_args(annotation)


def read_mapping(
    path: Path, schema: type[BaseModel] = BatonConfig, *, kind: str = "configuration file"
) -> dict[str, Any]:
    """The top-level mapping of a YAML file; empty for an empty file. ``kind`` is the file's name in messages.

    Raises:
        ConfigFileError: The file is missing, or is not a YAML mapping whose keys are text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigFileError(f"cannot read the {kind} {path}: {reason}") from error
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigFileError(f"{path} must hold a mapping of keys to values, not a {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):
            raise ConfigFileError(f"{path}: unknown key {key!r}; known keys: {', '.join(schema.model_fields)}")
    return content


def describe_problems(
    error: ValidationError, *, where: str, flags: Mapping[str, str], schema: type[BaseModel] = BatonConfig
) -> Iterable[str]:
    """One phrase per mistake, naming the key as the user would write it.

    ``flags`` are the keys that do not come from ``where``, each with its origin.
    """
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"]]
        source = flags.get(path[0], where) if path else where
        key = ".".join(path)
        if problem["type"] == "extra_forbidden":
            yield f"{source}: unknown key '{key}'{suggestion(path, schema)}"
        elif problem["type"] == "missing":
            yield f"{source}: {key} is missing"
        elif key:
            value = "" if path[0] == "security" else f", got {_shown(problem)}"  # it may be an API key
            yield f"{source}: {key}: {MEANINGS.get(problem['type']) or reason(problem['msg'])}{value}"
        else:
            yield f"{source}: {reason(problem['msg'])}"


def _shown(problem: ErrorDetails) -> str:
    value = problem["input"]
    return repr(str(value) if isinstance(value, Path) else value)


def reason(message: str) -> str:
    """Pydantic's message without its prefix, to be used within a sentence."""
    message = message.removeprefix("Value error, ")
    return message if message[1:2].isupper() else message[:1].lower() + message[1:]


def suggestion(path: list[str], schema: type[BaseModel]) -> str:
    """A hint with the known key that is most similar to the last one of ``path``."""
    model: type[BaseModel] | None = schema
    for part in path[:-1]:
        if part.isdecimal():  # an item of a list: ``schema`` is already the section of its items
            continue
        model = section_type(model.model_fields[part].annotation) if model and part in model.model_fields else None
    if model is None:
        return ""
    known = keys_of(model)
    nearest = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
    if nearest:
        return f"; did you mean '{'.'.join([*path[:-1], nearest[0]])}'?"
    elsewhere = [name for name in nested_keys(schema) if name.split(".")[-1] == path[-1]]
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; known keys: {', '.join(known)}"


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a section as they are written."""
    return [field.alias or name for name, field in model.model_fields.items()]


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section class in a field's annotation: of a section, or of a list of sections; else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        return next((found for part in typing.get_args(annotation) if (found := section_type(part))), None)
    return None


def nested_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All keys with their sections, such as ``cache.block_size``."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        keys.extend(nested_keys(section, f"{prefix}{name}.") if section else [prefix + name])
    return keys
