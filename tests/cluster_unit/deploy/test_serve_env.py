"""What is set before Ray is imported, and the folder that is made for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest
from ray._private.utils import validate_socket_filepath

from cluster.commands.signals import Stopped
from cluster.config.config import BatonConfig
from cluster.deploy.serve_env import (
    HELD,
    LEFT_OVER_S,
    MAX_FOLDER_CHARACTERS,
    RAY_FOLDER,
    haproxy_environment,
    prepare_environment,
    private_ray_environment,
    remove_left_over,
    session_folder,
    shared_ray_environment,
)
from cluster.plan.preflight import PreflightError

AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, and no authentication in the environment."""
    for name in AUTH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_user_without_a_token_connects_without_one(home: Path) -> None:
    assert shared_ray_environment() == {}


def test_users_token_file_is_shown_to_the_ray(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0" * 64)

    assert shared_ray_environment() == {"RAY_AUTH_MODE": "token"}


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_token_in_the_environment_is_shown_to_the_ray(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "0" * 64)

    assert shared_ray_environment() == {"RAY_AUTH_MODE": "token"}


def test_session_folder_of_an_interrupted_start_is_removed() -> None:
    session = session_folder(BatonConfig())
    folder = session.__enter__()
    assert folder is not None
    assert folder.is_dir()
    stopped = Stopped(signal.SIGINT)

    session.__exit__(Stopped, stopped, None)

    assert not folder.exists()


def test_session_folder_with_logs_stays() -> None:
    with session_folder(BatonConfig()) as folder:
        assert folder is not None
        log = folder / RAY_FOLDER / "log"
        log.parent.mkdir()
        log.touch()

    assert log.is_file()
    shutil.rmtree(folder)


def test_what_a_killed_cluster_left_goes_with_a_later_start(tmp_path: Path) -> None:
    killed, failed, running = (tmp_path / f"baton-{name}" for name in ("killed", "failed", "running"))
    for folder in (killed, failed, running):
        (folder / RAY_FOLDER).mkdir(parents=True)
    (killed / HELD).touch()
    tomorrow_s = time.time() + 2 * LEFT_OVER_S
    with (running / HELD).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_left_over(tmp_path)
        assert killed.is_dir(), "somebody may look at its logs today"

        remove_left_over(tmp_path, now_s=tomorrow_s)

    assert {path.name for path in tmp_path.iterdir()} == {"baton-failed", "baton-running"}


def test_session_folder_lets_nobody_else_in_whatever_is_done_to_rays_own(tmp_path: Path) -> None:
    with session_folder(BatonConfig()) as folder:
        assert folder is not None
        (folder / RAY_FOLDER).mkdir()
        (folder / RAY_FOLDER).chmod(0o777)

        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

        (folder / RAY_FOLDER).rmdir()


def test_rays_socket_paths_fit_into_the_longest_session_folder() -> None:
    folder = "/" + "f" * (MAX_FOLDER_CHARACTERS - 1)
    longest = f"{folder}/{RAY_FOLDER}/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"

    validate_socket_filepath(longest)


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that a test may change."""
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    return environment


def protections(folder: Path) -> dict[str, str]:
    folder.mkdir()
    return private_ray_environment(folder)


@pytest.mark.parametrize(
    "name",
    [
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_ENABLE_K8S_TOKEN_AUTH",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS",
        "RAY_SERVE_ENABLE_HA_PROXY",
        "RAY_TLS_CA_CERT",
        "RAY_TLS_SERVER_CERT",
        "RAY_TLS_SERVER_KEY",
        "RAY_USE_TLS",
        "RAY_enable_metrics_collection",
        "UCX_NET_DEVICES",
    ],
)
def test_inherited_variable_cannot_undo_the_protection_of_a_private_ray(
    own_environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    own_environment[name] = "inherited"

    prepare_environment(BatonConfig(), tmp_path)

    assert own_environment[name] != "inherited"
    assert name in protections(tmp_path / "other")


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN_PATH", "RAY_REDIS_ADDRESS"])
def test_token_and_books_of_another_ray_are_not_a_private_ones(
    own_environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    own_environment[name] = "inherited"

    prepare_environment(BatonConfig(), tmp_path)

    assert name not in own_environment


def test_haproxys_files_and_ports_are_the_clusters_own_whatever_is_inherited(
    own_environment: dict[str, str], tmp_path: Path
) -> None:
    names = haproxy_environment(tmp_path).keys()
    own_environment.update(dict.fromkeys(names, "inherited"))

    prepare_environment(BatonConfig(http_proxy="haproxy"), tmp_path)

    assert [name for name in names if own_environment[name] == "inherited"] == []
    assert own_environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "1"


def test_every_private_ray_has_a_token_and_a_certificate_of_its_own(tmp_path: Path) -> None:
    first, second = protections(tmp_path / "1"), protections(tmp_path / "2")

    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"):
        files = [Path(variables[name]) for variables in (first, second)]
        assert files[0].read_bytes() != files[1].read_bytes()
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]


def test_tuning_that_is_set_already_stays(own_environment: dict[str, str], tmp_path: Path) -> None:
    own_environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "0"

    prepare_environment(BatonConfig(), tmp_path)

    assert own_environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"


@pytest.fixture
def token_file(home: Path) -> Path:
    """The user's token, as Ray's own command line writes it."""
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("0" * 64)
    file.chmod(0o644)
    return file


def test_token_that_others_can_read_is_refused_with_the_remedy(
    token_file: Path, own_environment: dict[str, str]
) -> None:
    with pytest.raises(PreflightError, match=rf"mode 0644.*chmod 600 {token_file}"):
        prepare_environment(BatonConfig(address="auto"), None)

    token_file.chmod(0o600)
    prepare_environment(BatonConfig(address="auto"), None)

    assert own_environment["RAY_AUTH_MODE"] == "token"


def test_named_token_file_that_others_can_read_is_refused(
    token_file: Path, own_environment: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "token"
    token_file.rename(other)
    own_environment["RAY_AUTH_TOKEN_PATH"] = str(other)

    with pytest.raises(PreflightError, match=f"chmod 600 {other}"):
        prepare_environment(BatonConfig(address="auto"), None)


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_TOKEN", "0" * 64), ("RAY_AUTH_MODE", "disabled")])
def test_token_file_that_is_not_used_may_be_as_it_is(
    token_file: Path, own_environment: dict[str, str], name: str, value: str
) -> None:
    own_environment[name] = value

    prepare_environment(BatonConfig(address="auto"), None)


def test_existing_ray_needs_no_folder() -> None:
    with session_folder(BatonConfig(address="auto")) as folder:
        assert folder is None


def test_paths_of_haproxys_sockets_fit_with_the_folder_that_serve_puts_between() -> None:
    folder = Path("/" + "f" * (MAX_FOLDER_CHARACTERS - 1))
    variables = haproxy_environment(folder)

    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(variables[name])
        assert len(str(path.parent / ("s" * 56) / path.name)) <= 97
