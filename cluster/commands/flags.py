"""Flags that commands share, and the environment variables for flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

PREFIX = "BATON_"
API_KEY_FLAG = "--api-key"
API_KEY_VARIABLE = "BATON_API_KEY"
ADMIN_KEY_VARIABLES = ["BATON_ADMIN_KEY", API_KEY_VARIABLE]
DEFAULT_URL = "http://127.0.0.1:8000"

SEVERAL = ("--served-model-name", API_KEY_FLAG)
"""Flags that may be followed by several values, like vLLM's flags of the same names."""

SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
"""How the values of Kubernetes' service variables begin. For a service named `baton`, pods get a BATON_PORT."""

Model = Annotated[
    Path | None, typer.Option(help="Hugging Face directory of the model. Without it, a small built-in model.")
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        help="Name of the model in the API. If several are given, all are accepted and answers show the first."
    ),
]
NewKeys = Annotated[
    list[str] | None,
    typer.Option(
        help="API key to accept besides those of the file; several may follow. Only its hash is kept. Other users of "
        "this machine can briefly see a key on the command line, so prefer the variable.",
    ),
]
Url = Annotated[str, typer.Option(help="URL of the cluster, with or without /v1.")]
Key = Annotated[str, typer.Option(help="API key, if the cluster requires one.", envvar=API_KEY_VARIABLE)]
AdminKey = Annotated[str, typer.Option(help="Admin key, if the cluster requires one.", envvar=ADMIN_KEY_VARIABLES)]


class Command(TyperCommand):
    """A command whose flags can also be given by variables: ``--max-model-len`` by ``BATON_MAX_MODEL_LEN``.

    The command line overrides variables. The variables of all commands are removed from the environment, whether they
    were used or not, so that no child process inherits them, above all no keys.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        for option in options_of(self):
            option.envvar = option.envvar or PREFIX + option.opts[0].lstrip("-").replace("-", "_").upper()
            option.show_envvar = True

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # its base is private
        """Read the command line and the variables.

        Raises:
            typer.BadParameter: A value is invalid. The message names the flag or the variable that it came from.
        """
        drop_service_links(os.environ)
        try:
            rest: list[str] = super().parse_args(ctx, one_by_one(args))
        except typer.BadParameter as error:
            _name_source(error, ctx)
            raise
        ctx.meta[PREFIX] = dict(_variables_used(self, ctx))
        for _, command in commands_of(ctx.find_root().command):
            for variable in (variable for option in options_of(command) for variable in variables_of(option)):
                os.environ.pop(variable, None)
        return rest


def commands_of(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """A command, or all those of a group, each with its name."""
    subcommands: Mapping[str, Any] = getattr(command, "commands", {})
    if not subcommands:
        yield name, command
    for part, subcommand in subcommands.items():
        yield from commands_of(subcommand, f"{name} {part}".strip())


def options_of(command: Any) -> list[TyperOption]:
    """The flags of a command."""
    return [option for option in command.params if isinstance(option, TyperOption)]


def variables_of(option: TyperOption) -> list[str]:
    """The variables for a flag; the first one that is set counts."""
    return [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())


def variables_used(ctx: typer.Context) -> Mapping[str, str]:
    """The parameters of the command that were given by variables, with the variable of each."""
    return dict(ctx.meta.get(PREFIX, {}))


def is_for_orders(ctx: typer.Context) -> bool:
    """True unless the key comes from a variable that users export for API clients: such a key does not allow orders."""
    return variables_used(ctx).get("api_key") != API_KEY_VARIABLE


def one_by_one(args: Sequence[str]) -> list[str]:
    """The arguments, with the flags of ``SEVERAL`` repeated before each of their values."""
    found: list[str] = []
    flag = ""
    has_value = False
    for argument in args:
        if argument.startswith("-"):
            flag, has_value = (argument if argument in SEVERAL else ""), False
        elif flag and has_value:
            found.append(flag)
        else:
            has_value = bool(flag)
        found.append(argument)
    return found


def drop_service_links(environment: MutableMapping[str, str]) -> None:
    """Remove Kubernetes' variables for a service whose name begins with `baton`: they are not meant as flags."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        for name in [name for name in environment if name.startswith(PREFIX)]:
            if environment[name].startswith(SERVICE_LINKS):
                del environment[name]


def without_keys(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those without keys, and the keys.

    Invalid arguments, such as a flag without its key, stay as they are.
    """
    rest: list[str] = []
    keys: list[str] = []
    waiting = iter(one_by_one(args))
    for argument in waiting:
        name, has_value, value = argument.partition("=")
        if name != API_KEY_FLAG:
            rest.append(argument)
            continue
        key = value if has_value else next(waiting, "")
        if not key or key.split() != [key]:
            return list(args), []
        keys.append(key)
    return rest, keys


def hide_keys(commands: Collection[str]) -> None:
    """Restart one of these commands with its keys in a variable, if it has keys on its command line.

    Every user of the machine can read a process's command line, and Ray stores the command line of each driver. Only
    the same user can read a process's variables.
    """
    args = sys.argv[1:]
    rest, keys = without_keys(args)
    if keys and args[0] in commands:
        os.environ[API_KEY_VARIABLE] = " ".join(keys)
        _become([sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(args)], *rest])


def _become(command: list[str]) -> NoReturn:
    os.execv(command[0], command)


def _name_source(error: typer.BadParameter, ctx: typer.Context) -> None:
    """Let the error name the actual source of the value, and not all possible ones."""
    option = error.param
    if not isinstance(option, TyperOption) or (source := ctx.get_parameter_source(option.name)) is None:
        return
    if source.name == "ENVIRONMENT":
        variable = _variable_set(option)
        error.param_hint = f"the environment variable {variable} ({os.environ[variable]!r})"
    elif source.name == "COMMANDLINE":
        error.param_hint = f"'{option.opts[0]}'"


def _variables_used(command: Command, ctx: typer.Context) -> Iterator[tuple[str, str]]:
    for option in options_of(command):
        source = ctx.get_parameter_source(option.name)
        if source is not None and source.name == "ENVIRONMENT":
            yield option.name, _variable_set(option)


def _variable_set(option: TyperOption) -> str:
    return next(variable for variable in variables_of(option) if os.environ.get(variable))
