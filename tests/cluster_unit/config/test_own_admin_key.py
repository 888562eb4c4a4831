"""The admin key that a cluster makes for itself, and how commands of the same user find it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.config import BatonConfig
from cluster.config.own_admin_key import key_file, own_admin_key, with_own_key
from router.security import hash_key, new_key

CONFIG = BatonConfig(port=8123)
URL = "http://127.0.0.1:8123"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def key_hash(told: list[str]) -> Iterator[str | None]:
    """The hash of the key of a cluster that runs."""
    with own_admin_key(CONFIG, told.append) as hashed:
        yield hashed


def test_commands_find_the_key_as_long_as_the_cluster_runs(told: list[str], home: Path) -> None:
    with own_admin_key(CONFIG, told.append) as hashed:
        url, key = with_own_key(URL, "")
        assert (url, hash_key(key)) == (URL, hashed)

    assert with_own_key(URL, "") == (URL, "")
    assert list(home.iterdir()) == []
    assert told == []


def test_nobody_else_can_read_it(key_hash: str, home: Path) -> None:
    file = key_file(URL)

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (file.parent, file.parent.parent)} == {0o700}


def test_every_start_makes_another_one(told: list[str]) -> None:
    hashes = set()
    for _ in range(3):
        with own_admin_key(CONFIG, told.append) as hashed:
            hashes.add(hashed)

    assert len(hashes) == 3


def test_key_that_is_given_is_sent(key_hash: str) -> None:
    assert with_own_key(URL, "given") == (URL, "given")


def test_own_key_is_sent_in_place_of_one_that_was_not_meant_for_orders(key_hash: str) -> None:
    """A user's key in BATON_API_KEY opens the API and no order; the cluster's own opens both."""
    _, key = with_own_key(URL, "exported", is_for_orders=False)

    assert hash_key(key) == key_hash
    assert with_own_key("http://127.0.0.1:8124", "exported", is_for_orders=False)[1] == "exported"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8124", "http://127.0.0.2:8123", "https://127.0.0.1:8123"])
def test_key_goes_to_no_other_place(key_hash: str, url: str) -> None:
    assert with_own_key(url, "") == (url, "")


def test_name_that_could_lead_to_somebody_elses_server_is_replaced_by_the_address(key_hash: str) -> None:
    url, key = with_own_key("http://localhost:8123", "")

    assert (url, hash_key(key)) == (URL, key_hash)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", URL),
        ("0.0.0.0", URL),
        ("::1", "http://[::1]:8123"),
        ("::", "http://[::1]:8123"),
        ("::1", "http://localhost:8123"),
        ("10.0.0.5", "http://10.0.0.5:8123"),
    ],
)
def test_key_is_found_by_the_address_that_is_listened_on(told: list[str], host: str, url: str) -> None:
    with own_admin_key(BatonConfig(host=host, port=8123), told.append) as hashed:
        assert hash_key(with_own_key(url, "")[1]) == hashed


def test_key_of_a_cluster_that_was_killed_is_replaced(told: list[str]) -> None:
    killed = own_admin_key(CONFIG, told.append)
    killed.__enter__()

    with own_admin_key(CONFIG, told.append) as hashed:
        assert hash_key(with_own_key(URL, "")[1]) == hashed

    killed.__exit__(None, None, None)


def test_no_key_is_made_where_admin_keys_are_configured(told: list[str], home: Path) -> None:
    config = BatonConfig.model_validate({"security": {"admin_keys": [hash_key(new_key())]}})

    with own_admin_key(config, told.append) as hashed:
        assert hashed is None
        assert list(home.iterdir()) == []


def test_home_that_cannot_be_written_is_named_and_orders_are_closed(told: list[str], home: Path) -> None:
    (home / ".baton").write_text("no folder")

    with own_admin_key(CONFIG, told.append) as hashed:
        assert hashed is None

    assert len(told) == 1
    assert "~/.baton/admin-keys" in told[0]
    assert "File exists" in told[0]


@pytest.fixture
def left_over() -> Iterator[socket.socket]:
    """The address of a cluster that was killed and left its key, bound and not listened on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        code = (
            "import os, signal\n"
            "from cluster.config.config import BatonConfig\n"
            "from cluster.config.own_admin_key import own_admin_key\n"
            f"killed = own_admin_key(BatonConfig(port={port}), print)\n"
            "killed.__enter__()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=120, check=False)
        yield bound


def _left_file(bound: socket.socket) -> Path:
    return key_file(f"http://127.0.0.1:{bound.getsockname()[1]}")


def test_key_that_a_killed_cluster_left_goes_with_the_next_command(key_hash: str, left_over: socket.socket) -> None:
    assert _left_file(left_over).exists()

    assert hash_key(with_own_key(URL, "")[1]) == key_hash, "of a cluster that runs, though it does not listen yet"

    assert not _left_file(left_over).exists()


def test_key_stays_while_something_listens_at_its_address(left_over: socket.socket) -> None:
    """What a killed `baton serve --address` deployed continues to run."""
    left_over.listen()

    with_own_key(URL, "")

    assert _left_file(left_over).exists()


def test_key_of_another_machine_that_shares_the_home_stays(left_over: socket.socket) -> None:
    name = _left_file(left_over).name.replace(socket.gethostname(), "elsewhere")
    other = _left_file(left_over).rename(_left_file(left_over).with_name(name))

    with_own_key(URL, "")

    assert other.exists()
