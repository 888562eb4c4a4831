"""Writes docs/configuration.md from schema and flags: `python -m scripts.config_page > docs/configuration.md`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.cli import app
from cluster.commands.flags import commands_of, options_of, variables_of
from cluster.config.config import BatonConfig
from cluster.config.config_file import section_type
from router.roles import ROLES

HEADER = """# Configuration

`baton serve --config baton.yaml` reads a YAML file with the keys below; keys with a default are optional, and unknown
keys are refused. Each flag of `baton serve` sets the key of the same name (`--prefill-replicas` sets
`prefill_replicas`). Flags and their [environment variables](#environment-variables) override the file.

```yaml
model: /models/my-model
prefill_replicas: 1
decode_replicas: 2
cache:
  block_size: 32
decode:
  scheduler:
    max_num_seqs: 256
```

This page is generated from the schema and the flags by `python -m scripts.config_page > docs/configuration.md`.
"""

VARIABLES = """## Environment variables

Every flag of every command except `--help` and `--version` can also be set by an environment variable: `BATON_` and
the flag's name in capitals, with `_` for `-`. A flag on the command line overrides its variable, the variable overrides
the file, and the file overrides the default. An empty variable counts as not set. A switch takes `true` or `false`
(`1` or `0`, `yes` or `no`); the items of a list are separated by spaces. Invalid values are refused with an error that
names the variable.

The variables apply to the command only; processes that it starts do not inherit them. In a Kubernetes pod, values such
as `tcp://10.0.0.1:80` are ignored, because Kubernetes itself sets `BATON_PORT` to one when a service is named `baton`.

`--api-key` of `baton serve` and `baton deploy` adds the key's hash to `security.api_keys`, unless the configuration
already has it; the key itself is not stored. Prefer `BATON_API_KEY`: every user of the machine can read a command
line until the command has started and replaced it. `--api-key`, like `--served-model-name`, accepts several values.
"""

POOL_SECTIONS = tuple(ROLES)


def configuration_page() -> str:
    """The whole page."""
    lines = [HEADER, "## Top level", "", *table(BatonConfig)]
    for name, field in BatonConfig.model_fields.items():
        section = section_type(field.annotation)
        if section is None or name in POOL_SECTIONS[1:]:
            continue
        is_pool = name in POOL_SECTIONS
        title = listed(f"`{pool}`" for pool in POOL_SECTIONS) if is_pool else f"`{name}`"
        about = "Settings of a single pool; they override those for all workers." if is_pool else field.description
        lines += ["", f"## {title}", "", about or "", "", *table(section)]
        lines += nested_tables(section, POOL_SECTIONS if is_pool else (name,))
    lines += ["", VARIABLES, *variables_table()]
    return "\n".join(lines) + "\n"


def variables_table() -> Iterator[str]:
    """One row a flag, with its variables and the commands that take it."""
    commands: dict[tuple[str, str], list[str]] = {}
    for name, command in commands_of(typer.main.get_command(app)):
        for option in options_of(command):
            variables = ", ".join(f"`{variable}`" for variable in variables_of(option))
            commands.setdefault((option.opts[0], variables), []).append(f"`baton {name}`")
    yield "| flag | variable | commands |"
    yield "|---|---|---|"
    for (flag, variables), names in sorted(commands.items()):
        yield f"| `{flag}` | {variables} | {', '.join(names)} |"


def nested_tables(model: type[BaseModel], paths: Sequence[str]) -> Iterator[str]:
    """The sections within a section, but for those that override one of the top level."""
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        if section is not None and name not in BatonConfig.model_fields:
            title = listed(f"`{path}.{name}`" for path in paths)
            yield from ("", f"### {title}", "", field.description or "", "", *table(section))


def listed(names: Iterable[str]) -> str:
    """The names as a sentence has them."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def table(model: type[BaseModel]) -> Iterator[str]:
    """One row a key."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        section = section_type(field.annotation)
        kind = "section" if section else type_name(field.annotation)
        yield f"| `{name}` | {kind} | {default_cell(field, is_section=section is not None)} | {field.description} |"


def type_name(annotation: Any) -> str:
    """A type in the words of a YAML file."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(annotation))
    names = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Path: "path"}
    if annotation is type(None):
        return "`null`"
    return names.get(annotation, {dict: "mapping to numbers", tuple: "list"}.get(origin, str(annotation)))


def default_cell(field: FieldInfo, *, is_section: bool) -> str:
    """What stands under "default": nothing for a section that is always there."""
    if field.is_required():
        return "must be given"
    return "" if is_section and field.get_default() is not None else f"`{default_text(field)}`"


def default_text(field: FieldInfo) -> str:
    """A default as YAML writes it."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return "[]" if value == () else str(value)


if __name__ == "__main__":
    print(configuration_page(), end="")
