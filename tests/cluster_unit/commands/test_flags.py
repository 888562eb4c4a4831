"""Flags of the command line, and the variables by which they can be given."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.flags import commands_of, drop_service_links, one_by_one, options_of, variables_of, without_keys
from cluster.config.config_file import ConfigFileError

COMMANDS = dict(commands_of(typer.main.get_command(app)))


def plan(*arguments: str, **variables: str) -> str:
    """The first line of `baton plan`, which names the model."""
    result = CliRunner().invoke(app, ["plan", *arguments], env=variables)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()[0]


def problem(*arguments: str, **variables: str) -> str:
    """The error message of a command about its input."""
    result = CliRunner().invoke(app, list(arguments), env=variables)
    assert result.exit_code != 0
    return str(result.exception) if isinstance(result.exception, ConfigFileError) else result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_has_a_variable_that_its_help_names(name: str) -> None:
    options = options_of(COMMANDS[name])
    shown = " ".join(CliRunner().invoke(app, [*name.split(), "--help"]).output.split())

    for option in options:
        own = "BATON_" + option.opts[0].removeprefix("--").replace("-", "_").upper()
        assert own in variables_of(option), option.opts
        assert f"[env var: {', '.join(variables_of(option))}" in shown


def test_help_of_serve_says_where_all_settings_are_listed() -> None:
    assert "docs/configuration.md" in CliRunner().invoke(app, ["serve", "--help"]).output


def test_commands_mean_the_same_by_a_variable() -> None:
    kinds: dict[str, set[object]] = defaultdict(set)
    for command in COMMANDS.values():
        for option in options_of(command):
            for variable in variables_of(option):
                if option.opts[0] != "--api-key":  # a list where clusters start, one key where clients ask
                    kinds[variable].add((option.is_flag, option.multiple, str(option.type_descriptor.annotation)))

    assert len(kinds) > 20
    assert {variable for variable, found in kinds.items() if len(found) > 1} - {
        "BATON_DEVICE",
        "BATON_DTYPE",
        "BATON_MODEL_IMPL",
    } == set()


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text("served_model_name: of-file\ndevice: cpu\ndtype: float32\n")
    of_file = ("--config", str(file))

    assert plan(BATON_DEVICE="cpu").startswith("model baton-tiny:")
    assert plan(*of_file).startswith("model of-file:")
    assert plan(BATON_CONFIG=str(file)).startswith("model of-file:")
    assert plan(*of_file, BATON_SERVED_MODEL_NAME="of-variable other").startswith("model of-variable:")
    assert plan(*of_file, "--served-model-name", "mine", BATON_SERVED_MODEL_NAME="x").startswith("model mine:")
    assert plan(*of_file, BATON_SERVED_MODEL_NAME="").startswith("model of-file:")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["serve"], {"BATON_PORT": "abc"}, "the environment variable BATON_PORT ('abc'): "),
        (["serve"], {"BATON_PORT": "70000"}, "the environment variable BATON_PORT: port: "),
        (["serve"], {"BATON_DEVICE": "tpu"}, "the environment variable BATON_DEVICE: device: "),
        (["serve", "--port", "70000"], {"BATON_PORT": "9"}, "the command line: port: "),
        (["serve", "--port", "abc"], {"BATON_PORT": "9"}, "Invalid value for '--port': "),
        (["deploy", "--config", "/dev/null"], {"BATON_SERVED_MODEL_NAME": "a a"}, "BATON_SERVED_MODEL_NAME: "),
        (["status"], {"BATON_JSON": "maybe"}, "the environment variable BATON_JSON ('maybe'): "),
        (["drain", "x"], {"BATON_WAIT_S": "soon"}, "the environment variable BATON_WAIT_S ('soon'): "),
        (["generate", "--prompt", "x"], {"BATON_MAX_TOKENS": "0"}, "the environment variable BATON_MAX_TOKENS ('0'): "),
    ],
)
def test_wrong_value_is_told_with_where_it_comes_from(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    assert said in problem(*arguments, **variables)


@pytest.mark.parametrize(("text", "is_json"), [("true", True), ("1", True), ("no", False), ("", False)])
def test_variable_turns_a_switch_on_and_off(text: str, is_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr("cluster.commands.clients.status.status", lambda *_, as_json, **__: seen.append(as_json))

    for arguments in (["status"], ["status", "--json"], ["status", "--no-json"]):
        assert CliRunner().invoke(app, arguments, env={"BATON_JSON": text}).exit_code == 0

    assert seen == [is_json, True, False]


def test_processes_that_a_command_starts_inherit_none_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "cluster.commands.plan.plan", lambda *_: seen.extend(key for key in os.environ if key.startswith("BATON_"))
    )
    options = [option for command in COMMANDS.values() for option in options_of(command)]
    variables = {variable for option in options for variable in variables_of(option)}
    assert {"BATON_ADMIN_KEY", "BATON_API_KEY", "BATON_PORT"} <= variables

    CliRunner().invoke(app, ["plan"], env={**dict.fromkeys(variables - {"BATON_CONFIG", "BATON_MODEL"}, "1")})

    assert seen == []


def test_what_kubernetes_tells_of_a_service_is_no_flag() -> None:
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "BATON_PORT": "tcp://10.0.0.7:8000",
        "BATON_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "BATON_HOST": "0.0.0.0",
    }
    elsewhere = {"BATON_PORT": "tcp://10.0.0.7:8000"}

    drop_service_links(pod)
    drop_service_links(elsewhere)

    assert pod.keys() == {"KUBERNETES_SERVICE_HOST", "BATON_HOST"}
    assert elsewhere


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            ["--served-model-name", "a", "b", "--port", "1"],
            ["--served-model-name", "a", "--served-model-name", "b", "--port", "1"],
        ),
        (["--api-key", "k", "--api-key", "l", "m"], ["--api-key", "k", "--api-key", "l", "--api-key", "m"]),
        (["--served-model-name=a", "b"], ["--served-model-name=a", "b"]),
        (["--port", "1", "x"], ["--port", "1", "x"]),
    ],
)
def test_several_values_may_stand_behind_some_flags(given: list[str], meant: list[str]) -> None:
    assert one_by_one(given) == meant


@pytest.mark.parametrize(
    ("given", "rest", "keys"),
    [
        (["serve", "--api-key", "k", "l", "--port", "1"], ["serve", "--port", "1"], ["k", "l"]),
        (["serve", "--api-key=k", "--api-key", "l"], ["serve"], ["k", "l"]),
        (["serve", "--port", "1"], ["serve", "--port", "1"], []),
        (["serve", "--api-key"], ["serve", "--api-key"], []),
        (["serve", "--api-key", "a b"], ["serve", "--api-key", "a b"], []),
    ],
)
def test_keys_are_taken_off_the_command_line(given: list[str], rest: list[str], keys: list[str]) -> None:
    assert without_keys(given) == (rest, keys)


def test_command_with_a_key_begins_anew_without_it(tmp_path: Path) -> None:
    """The second beginning finds a command line without the key, and the key in its variable."""
    script = tmp_path / "command"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "from cluster.commands.flags import hide_keys\nhide_keys(('serve',))\n"
        "print(sys.argv[1:], os.environ['BATON_API_KEY'], 'the-key' in Path('/proc/self/cmdline').read_text())\n"
    )
    command = [sys.executable, str(script), "serve", "--api-key", "the-key", "--port", "1"]

    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "BATON_API_KEY": "other"}
    )

    assert done.stdout == "['serve', '--port', '1'] the-key False\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "is_for_orders"),
    [
        ([], {"BATON_API_KEY": "a"}, False),
        ([], {"BATON_ADMIN_KEY": "a"}, True),
        ([], {"BATON_ADMIN_KEY": "a", "BATON_API_KEY": "b"}, True),
        (["--api-key", "a"], {"BATON_API_KEY": "b"}, True),
    ],
)
def test_users_key_of_the_environment_does_not_hide_the_clusters_own_admin_key(
    arguments: list[str], variables: dict[str, str], is_for_orders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def with_own_key(url: str, api_key: str, *, is_for_orders: bool) -> tuple[str, str]:
        asked.append(is_for_orders)
        return url, api_key

    monkeypatch.setattr("cluster.config.own_admin_key.with_own_key", with_own_key)
    for command in (["status"], ["drain", "a"], ["chaos", "--scenario", "nothing.yaml"]):
        CliRunner().invoke(app, [*command, "--url", "http://127.0.0.1:1", *arguments], env=variables)

    assert asked == [is_for_orders] * 3
