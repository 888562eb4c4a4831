"""What is set before Ray is imported, and the folder that is made for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cluster.config import BatonConfig
from cluster.serve_env import MAX_FOLDER_CHARACTERS, haproxy_environment, session_folder, shared_ray_environment
from cluster.signals import Stopped

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
        (folder / "log").touch()

    assert (folder / "log").is_file()
    (folder / "log").unlink()
    folder.rmdir()


def test_existing_ray_needs_no_folder() -> None:
    with session_folder(BatonConfig(address="auto")) as folder:
        assert folder is None


def test_paths_of_haproxys_sockets_fit_with_the_folder_that_serve_puts_between() -> None:
    folder = Path("/" + "f" * (MAX_FOLDER_CHARACTERS - 1))
    variables = haproxy_environment(folder)

    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(variables[name])
        assert len(str(path.parent / ("s" * 56) / path.name)) <= 97
