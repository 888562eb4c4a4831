"""Keys, their hashes, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.security import KeyRing, SecurityError, SecuritySettings, hash_key, new_key


def test_new_keys_differ_and_are_known_by_their_hash() -> None:
    keys = {new_key() for _ in range(50)}
    settings = SecuritySettings(api_keys=tuple(hash_key(key) for key in keys))

    assert len(keys) == 50
    assert not any(key in repr(settings) for key in keys)
    assert {KeyRing(settings).rank_of(key) for key in keys} == {"user"}


@pytest.mark.parametrize("key", ["", "baton-", "wrong", "é" * 40, "sha256:" + "0" * 64])
def test_unknown_key_has_no_rank(key: str) -> None:
    ring = KeyRing(SecuritySettings(api_keys=("sha256:" + "0" * 64,)))

    assert ring.rank_of(key) == "none"


def test_key_that_is_in_both_lists_is_an_admin_key() -> None:
    key = new_key()
    settings = SecuritySettings(api_keys=(hash_key(key),), admin_keys=(hash_key(key),))

    assert KeyRing(settings).rank_of(key) == "admin"


def test_files_add_to_the_keys_of_the_settings(tmp_path: Path) -> None:
    keys = [new_key() for _ in range(3)]
    file = tmp_path / "keys"
    file.write_text(f"# clients\n\n{hash_key(keys[1])}  # the web page\n  {hash_key(keys[2])}\n")

    settings = SecuritySettings(api_keys=(hash_key(keys[0]),), api_key_file=file)

    assert settings.has_keys
    assert [KeyRing(settings.loaded()).rank_of(key) for key in keys] == ["user"] * 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read the key file"), ("# nothing\n", "has no hash"), ("my-secret-key\n", "entry 1 is not")],
)
def test_unusable_key_file_is_refused_without_repeating_it(tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)

    with pytest.raises(SecurityError, match=reason) as caught:
        SecuritySettings(admin_key_file=file).loaded()

    assert "my-secret-key" not in str(caught.value)


def test_key_in_place_of_its_hash_is_refused_without_repeating_it() -> None:
    key = new_key()

    with pytest.raises(SecurityError, match="baton keys new") as caught:
        SecuritySettings(api_keys=(key,))

    assert key not in str(caught.value)


@pytest.mark.parametrize("origin", ["chat.example.org", "https://", "https://a.example/path", "a.example:80", ""])
def test_wrong_origin_is_refused(origin: str) -> None:
    with pytest.raises(SecurityError, match="is no origin"):
        SecuritySettings(cors_allow_origins=(origin,))
