"""`baton keys`, and keys in a configuration."""

from __future__ import annotations

import io
from pathlib import Path

import httpx
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.client import bearer
from cluster.commands.clients.chat import chat
from cluster.commands.clients.status import status
from cluster.commands.keys import with_api_keys
from cluster.config.config_file import ConfigFileError, load_config
from cluster.plan.preflight import PreflightError, check_keys
from router.security import KeyRing, SecuritySettings, hash_key, new_key


def test_new_key_comes_with_the_hash_that_lets_it_in() -> None:
    result = CliRunner().invoke(app, ["keys", "new"])
    fields = dict(line.split() for line in result.stdout.splitlines())

    assert KeyRing(SecuritySettings(api_keys=(fields["hash"],))).rank_of(fields["key"]) == "user"


def test_hash_of_a_key_made_elsewhere_is_read_from_standard_input() -> None:
    key = new_key()

    assert CliRunner().invoke(app, ["keys", "hash"], input=f"{key}\n").stdout.strip() == hash_key(key)


@pytest.mark.parametrize("key", ["", "hunter2", "a phrase of many words that is long enough"])
def test_weak_key_gets_no_hash(key: str) -> None:
    result = CliRunner().invoke(app, ["keys", "hash"], input=key)

    assert isinstance(result.exception, PreflightError)
    assert not result.stdout


def write(folder: Path, security: object) -> Path:
    path = folder / "baton.yaml"
    path.write_text(yaml.safe_dump({"security": security}))
    return path


def test_configuration_takes_hashes_and_files(tmp_path: Path) -> None:
    user, admin = new_key(), new_key()
    (tmp_path / "admins").write_text(hash_key(admin))
    section = {"api_keys": [hash_key(user)], "admin_key_file": str(tmp_path / "admins")}

    ring = KeyRing(load_config(write(tmp_path, section), {}).security_settings().loaded())

    assert (ring.rank_of(user), ring.rank_of(admin)) == ("user", "admin")


@pytest.mark.parametrize("section", [{"api_keys": ["KEY"]}, {"api_keys": "KEY"}, {"admin_keys": [["KEY"]]}])
def test_key_in_place_of_its_hash_is_not_repeated(tmp_path: Path, section: dict[str, object]) -> None:
    path = write(tmp_path, section)
    path.write_text(path.read_text().replace("KEY", "my-secret-key"))

    with pytest.raises(ConfigFileError) as caught:
        load_config(path, {})

    assert "my-secret-key" not in str(caught.value)


def test_missing_key_file_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"api_key_file": str(tmp_path / "nothing")}), {})

    with pytest.raises(PreflightError, match="cannot read the key file"):
        check_keys(config)


def test_key_of_a_flag_opens_the_api_besides_those_of_the_file(tmp_path: Path) -> None:
    known, new = new_key(), new_key()

    config = with_api_keys(load_config(write(tmp_path, {"api_keys": [hash_key(known)]}), {}), [new, new])

    assert config.security_settings().api_keys == (hash_key(known), hash_key(new))
    assert config.model_dump(exclude_unset=True)["security"]["api_keys"] == (hash_key(known), hash_key(new))
    assert new not in repr(config)


def test_key_of_a_flag_that_is_known_changes_nothing(tmp_path: Path) -> None:
    user, admin = new_key(), new_key()
    (tmp_path / "keys").write_text(hash_key(user))
    config = load_config(write(tmp_path, {"api_key_file": "keys", "admin_keys": [hash_key(admin)]}), {})

    assert with_api_keys(config, [user, admin]) is config
    assert with_api_keys(config, []) is config


@pytest.mark.parametrize("key", ["hunter2", "a phrase of many words that is long enough"])
@pytest.mark.parametrize("command", [["serve"], ["deploy", "--config", "/dev/null"]])
def test_weak_key_of_a_flag_is_refused_and_not_repeated(command: list[str], key: str) -> None:
    result = CliRunner().invoke(app, [*command, "--api-key", key])

    assert isinstance(result.exception, PreflightError)
    assert "BATON_API_KEY" in str(result.exception)
    assert key not in str(result.exception) + result.output


def test_commands_send_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json={"data": [{"id": "m"}], "model": "m", "pools": {}})

    transport = httpx.MockTransport(answer)
    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**{**options, "transport": transport}))
    monkeypatch.setattr(httpx, "get", lambda url, headers, **_: httpx.Client(headers=headers).get(url))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    status("http://cluster", Console(file=io.StringIO()), as_json=False, api_key="my-key")
    chat("http://cluster", Console(file=io.StringIO()), api_key="my-key")

    assert seen == ["Bearer my-key"] * 2


def test_key_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(PreflightError, match="characters"):
        bearer("key\r\nX-Other: 1")
